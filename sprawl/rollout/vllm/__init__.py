"""vLLM behind the engine port."""

BACKEND = "sprawl_local_copy"
"""Name of the weight-transfer backend that `transfer` registers inside vLLM's worker."""

KEEP_PLAIN = "SPRAWL_VLLM_PLAIN_WEIGHTS"
"""Environment variable: 1 lets vLLM on CPU multiply with the weights as they are, so that swaps write in place."""
