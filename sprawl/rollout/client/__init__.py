"""The versioned client: groups in, groups out, over whatever islands are ready right now."""

from sprawl.rollout.client.calls import Completion
from sprawl.rollout.client.client import RolloutClient
from sprawl.rollout.client.discovery import listed
from sprawl.rollout.client.metrics import ClientMetrics

__all__ = ["ClientMetrics", "Completion", "RolloutClient", "listed"]
