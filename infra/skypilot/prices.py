"""What a machine costs, from SkyPilot's catalogs: the only check of a price that holds on every cloud.

SkyPilot's own `max_hourly_cost` is a filter of instance types while it places. In 0.14.1 GCP ignores it for
accelerators, and elsewhere it looks at the cheapest region of a type, not at the one that is taken.
"""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import Any

log = logging.getLogger(__name__)


def instance_type(resources: str | None) -> str | None:
    """The instance type in what a queue says of a machine: `1x(gpus=L4:1, cpus=4, mem=16, g2-standard-4, disk=256)`.
    None where there is none (Kubernetes, Slurm)."""
    if not resources or "(" not in resources:
        return None
    inside = resources[resources.index("(") + 1 : resources.rindex(")")]
    names = [part.strip() for part in inside.split(",")]
    return next((name for name in names if name and "=" not in name and name != "..."), None)


@lru_cache(maxsize=256)
def hourly_price(infra: str, instance: str, gpus: tuple[str, float] | None, spot: bool) -> float | None:
    """Dollars an hour of one machine at `cloud/region`; None where the catalog does not know."""
    import sky

    options: dict[str, Any] = {"infra": infra, "instance_type": instance, "use_spot": spot}
    if gpus is not None:
        options["accelerators"] = {gpus[0]: gpus[1]}
    try:
        return float(sky.Resources(**options).get_cost(3600))
    except Exception as error:  # catalogs raise what they like; a price that is not known stops nothing
        log.debug("price of %s at %s: %s", instance, infra, error)
        return None
