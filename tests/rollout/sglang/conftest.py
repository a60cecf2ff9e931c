"""The fake SGLang is what `import sglang` finds in these tests."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from tests.rollout.sglang.bench import FAKE


@pytest.fixture(autouse=True, scope="package")
def fake_sglang() -> Iterator[None]:
    sys.path.insert(0, FAKE)
    yield
    sys.path.remove(FAKE)
