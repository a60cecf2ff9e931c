"""What tests of several packages share."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator

import pytest

PATIENCE = float(os.environ.get("SPRAWL_TEST_PATIENCE", "1"))
"""Multiplies waiting times, on a machine that is busy with other things."""


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """Commands and flows set up logging for their terminal; called in this process, they leave it to the next test.

    Among the handlers they silence is the one behind `caplog`, which all tests share: without this a test that reads
    log lines fails by what ran before it.
    """
    levels = [(handler, handler.level) for handler in logging.root.handlers]
    loggers = {name: logging.getLogger(name) for name in _our_loggers()}
    before = {name: (list(log.handlers), log.level, log.propagate, log.disabled) for name, log in loggers.items()}
    yield
    for handler, level in levels:
        handler.setLevel(level)
    for name in _our_loggers():
        log = logging.getLogger(name)
        log.handlers, level, log.propagate, log.disabled = before.get(name, ([], logging.NOTSET, True, False))
        log.setLevel(level)


def _our_loggers() -> list[str]:
    return ["sprawl", *(name for name in list(logging.root.manager.loggerDict) if name.startswith("sprawl."))]


@pytest.fixture(scope="session")
def prefect_server() -> Iterator[None]:
    """A Prefect server of its own for the rest of the session: it takes 14 s to start."""
    from prefect.testing.utilities import prefect_test_harness

    with prefect_test_harness(server_startup_timeout=600):
        yield
