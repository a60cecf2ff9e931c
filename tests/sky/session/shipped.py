"""The shipped task files, with their `resources` replaced and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml


def on_slurm(source: Path, target: Path, resources: Mapping[str, Any]) -> Path:
    """Write a copy of a task file, or of every task of a job group, to `target`."""
    documents = list(yaml.safe_load_all(source.read_text()))
    for document in documents:
        if "resources" in document:
            document["resources"] = dict(resources)
    target.write_text(yaml.safe_dump_all(documents, sort_keys=False))
    return target
