"""A real S3 server for tests (see benchmarks/seaweed.py)."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.seaweed import find_weed, serving


@contextlib.contextmanager
def running(folder: Path, bucket: str) -> Iterator[str]:
    """Start a server with an empty bucket and point this process's AWS_* variables at it; yields the endpoint URL.

    Skips the test when s3fs or `weed` is missing.
    """
    pytest.importorskip("s3fs")
    if find_weed() is None:
        pytest.skip("no `weed` on PATH")
    with serving(folder, bucket) as variables, pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        yield variables["AWS_ENDPOINT_URL"]
