"""Types of flow parameters: what the UI's form and the server refuse before a flow run exists."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

Positive = Annotated[int, Field(ge=1)]
Version = Annotated[int, Field(ge=0)]
NewRunId = Annotated[str, Field(max_length=200, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
"""Part of every key of the run on its board, and of file names."""
