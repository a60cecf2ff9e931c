"""GRPO's parts: pure functions on tensors, one question a module; `objective` puts them together."""
