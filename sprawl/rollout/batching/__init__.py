"""Continuous batching for the embedded engine: pages of keys and values, attention row by row, blocks of rows whose
arithmetic does not depend on their neighbours, and who takes part in the next block."""
