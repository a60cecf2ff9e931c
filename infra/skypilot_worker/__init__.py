"""Prefect worker type `skypilot`: flow runs as SkyPilot tasks. See README.md in this folder.

Registered as entry point of `prefect.collections`; the folder needs Prefect and SkyPilot and nothing else of this
project.
"""

from .variables import SkyJobConfiguration, SkyVariables
from .worker import SkyWorker, SkyWorkerResult

__all__ = ["SkyJobConfiguration", "SkyVariables", "SkyWorker", "SkyWorkerResult"]
