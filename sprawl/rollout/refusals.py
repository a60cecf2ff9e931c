"""Why a request is not answered: exceptions of the service that the sidecar turns into HTTP answers.

`Refused` (409) and `GateClosed` (503) come from the gate and `EngineError` (503) from the engine.
"""

from __future__ import annotations


class BadRequest(Exception):
    """400: the request cannot be served by any island. Names the field."""

    def __init__(self, field: str, message: str) -> None:
        self.field = field
        self.message = message
        super().__init__(f"{field}: {message}")


class Busy(Exception):
    """503: too many requests already wait here."""
