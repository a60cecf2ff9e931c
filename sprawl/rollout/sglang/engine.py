"""SGLang as an engine: a server process of ours on the checkpoint on local disk, whose weights are exchanged.

The life of the server (start, canary, watchdog, replacement after a failed update) is that of `sprawl.rollout.vllm`.
What differs: a swap reads the whole checkpoint, because `/update_weights_from_disk` knows no less; what runs is
retracted by the pause, so that its KV is computed again with the new weights.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING

from sprawl.rollout.engine import EngineError
from sprawl.rollout.sglang.api import SglangApi
from sprawl.rollout.sglang.server import SglangServer
from sprawl.rollout.vllm.engine import VllmEngine
from sprawl.rollout.vllm.server import Server
from sprawl.rollout.vllm.supervisor import CONTROL_TIMEOUT_S, UPDATE_TIMEOUT_S, Supervisor

if TYPE_CHECKING:
    from sprawl.board.reader import Served


class SglangSupervisor(Supervisor):
    """Keeps one SGLang server up."""

    product = "SGLang"

    async def pause(self, server: Server) -> None:
        """`retract` puts what runs back into the queue; flushing the cache, which an update does, then makes it compute
        its KV anew. The answer comes before the scheduler has stopped: a question that the scheduler answers itself,
        and gets after the pause, says when it has."""
        await server.api.command("/pause_generation", CONTROL_TIMEOUT_S, {"mode": "retract"})
        await _api(server).ask("/server_info", CONTROL_TIMEOUT_S)

    async def resume(self, server: Server) -> None:
        await server.api.command("/continue_generation", CONTROL_TIMEOUT_S, {})

    async def stage(self, server: Server, root_digest: str) -> str:
        return "SGLang reads its checkpoint whole"

    async def update(self, server: Server, served: Served, changed: AbstractSet[str]) -> None:
        update = {
            "model_path": str(self._checkpoint),
            "weight_version": str(served.version),
            "flush_cache": True,
            "abort_all_requests": False,
        }
        await server.api.command("/update_weights_from_disk", UPDATE_TIMEOUT_S, update)
        await self._introduce(server, served.version)

    async def _launch(self, version: int) -> Server:
        return await SglangServer.start_at(self._checkpoint, version, self._options, self._log_file)

    async def _introduce(self, server: Server, version: int) -> None:
        """It says itself what it serves. Raises EngineError when that is not `version`."""
        said = (await _api(server).ask("/model_info", CONTROL_TIMEOUT_S)).get("weight_version")
        if said != str(version):
            raise EngineError(f"SGLang says that it serves version {said}, not {version}")


class SglangEngine(VllmEngine):
    """See `sprawl.rollout.engine.Engine`. `load` and `swap` take a state that is on disk in `checkpoint`."""

    kind = "sglang"
    supervisor = SglangSupervisor


def _api(server: Server) -> SglangApi:
    assert isinstance(server.api, SglangApi)
    return server.api
