"""Metrics for other tools: rows of a run's ledger as a parquet file and as TensorBoard events."""
