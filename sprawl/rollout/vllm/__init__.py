"""vLLM behind the engine port."""

BACKEND = "sprawl_local_copy"
"""Name of the weight-transfer backend that `transfer` registers inside vLLM's worker."""
