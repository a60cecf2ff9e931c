"""These tests start real vLLM servers; `make test-vllm` makes an environment that has them."""

from __future__ import annotations

import importlib.util

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if importlib.util.find_spec("vllm") is None:
        skip = pytest.mark.skip(reason="vLLM is not installed here: make test-vllm")
        for item in items:
            if "tests/vllm" in item.path.as_posix():
                item.add_marker(skip)
