"""Problem sets: prompts plus rule-based verifiers."""

from sprawl.problems.base import Problem, ProblemSet, ToolProblemSet, response_text
from sprawl.problems.registry import load_problem_set

__all__ = ["Problem", "ProblemSet", "ToolProblemSet", "load_problem_set", "response_text"]
