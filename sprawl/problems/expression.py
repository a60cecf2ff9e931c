"""The calculator: whole numbers, + - *, parentheses. What is no expression has no value; nothing is ever executed."""

from __future__ import annotations

import re

MAX_LENGTH = 200
MAX_DEPTH = 20
_TOKEN = re.compile(r"\s*(\d+|[-+*()])")


def evaluate(text: str) -> int | None:
    """The value of an expression, exactly; None when it is none, or too long or deep for anybody to have meant it."""
    if len(text) > MAX_LENGTH:
        return None
    tokens: list[str] = []
    position, end = 0, len(text.rstrip())
    while position < end:
        match = _TOKEN.match(text, position)
        if match is None:
            return None
        tokens.append(match[1])
        position = match.end()
    try:
        value, rest = _sum(tokens, 0, 0)
    except _Malformed:
        return None
    return value if rest == len(tokens) else None


class _Malformed(Exception):
    pass


def _sum(tokens: list[str], at: int, depth: int) -> tuple[int, int]:
    value, at = _product(tokens, at, depth)
    while at < len(tokens) and tokens[at] in "+-":
        sign = 1 if tokens[at] == "+" else -1
        term, at = _product(tokens, at + 1, depth)
        value += sign * term
    return value, at


def _product(tokens: list[str], at: int, depth: int) -> tuple[int, int]:
    value, at = _atom(tokens, at, depth)
    while at < len(tokens) and tokens[at] == "*":
        factor, at = _atom(tokens, at + 1, depth)
        value *= factor
    return value, at


def _atom(tokens: list[str], at: int, depth: int) -> tuple[int, int]:
    if at >= len(tokens) or depth > MAX_DEPTH:
        raise _Malformed
    token = tokens[at]
    if token == "-":
        value, at = _atom(tokens, at + 1, depth + 1)
        return -value, at
    if token == "(":
        value, at = _sum(tokens, at + 1, depth + 1)
        if at >= len(tokens) or tokens[at] != ")":
            raise _Malformed
        return value, at + 1
    if not token.isdigit():
        raise _Malformed
    return int(token), at + 1
