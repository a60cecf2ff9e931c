"""What a step may be told to do otherwise than its config says. Everything else about a step is the config's."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Steering:
    """The default changes nothing, bit for bit.

    sign_strength: share of the configured weight of sign(M), 0 to 1. lr_scale: factor on `optimizer.lr`.
    dense: all passes run through dense boundaries. probe: read the dense view at this step, due or not.
    """

    sign_strength: float = 1.0
    lr_scale: float = 1.0
    dense: bool = False
    probe: bool = False

    def blend(self, configured: float) -> float:
        """The share of the step's own gradient in the correction, `anchor.blend` being the configured one."""
        return configured if self.sign_strength == 1.0 else 1.0 - (1.0 - configured) * self.sign_strength

    def as_dict(self) -> dict[str, Any]:
        """JSON that `Steering(**...)` takes back unchanged."""
        return asdict(self)


AS_CONFIGURED = Steering()
