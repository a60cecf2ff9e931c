"""Numbers that flows and what starts them agree on."""

from __future__ import annotations

SEGMENT = 1000  # steps: the timeline of a flow run with more task runs cannot be read, and its memory grows
MAX_ATTEMPTS = 100  # automatic starts in a row, however far each came; the schema of the parameter enforces it
FUTILE_ATTEMPTS = 6  # of those in a row, without one new step
