"""These tests start real vLLM servers; `make test-vllm` makes an environment that has them."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A start takes half a minute on an idle machine of two cores, and several on a busy one."""
    missing = importlib.util.find_spec("vllm") is None
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.timeout(2400))
            if missing:
                item.add_marker(pytest.mark.skip(reason="vLLM is not installed here: make test-vllm"))
