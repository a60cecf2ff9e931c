"""Evaluation of published versions."""

from sprawl.evaluate.harness import evaluate_version

__all__ = ["evaluate_version"]
