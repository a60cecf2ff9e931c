"""Episodes: several turns of a policy with a tool's answers in between, over a sidecar's OpenAI routes."""

from sprawl.episodes.record import Episode, Turn, record_turn, trajectory
from sprawl.episodes.runner import EpisodeRunner

__all__ = ["Episode", "EpisodeRunner", "Turn", "record_turn", "trajectory"]
