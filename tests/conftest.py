"""What tests of several packages share."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

PATIENCE = float(os.environ.get("SPRAWL_TEST_PATIENCE", "1"))
"""Multiplies waiting times, on a machine that is busy with other things."""


@pytest.fixture(scope="session")
def prefect_server() -> Iterator[None]:
    """A Prefect server of its own for the rest of the session: it takes 14 s to start."""
    from prefect.testing.utilities import prefect_test_harness

    with prefect_test_harness(server_startup_timeout=600):
        yield
