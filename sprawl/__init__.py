"""Sprawl: RL post-training on compute that is not one cluster."""

__version__ = "0.1.0"
