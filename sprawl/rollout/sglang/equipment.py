"""An island's SGLang: the engine, and the checkpoint on disk that it reads."""

from __future__ import annotations

from sprawl.rollout.engines import CHECKPOINT, EngineContext, Equipment
from sprawl.rollout.host_copy import DiskCopy
from sprawl.rollout.sglang.engine import SglangEngine
from sprawl.rollout.sglang.server import parse_arguments, require_sglang
from sprawl.rollout.vllm.server import ServerOptions


def sglang(context: EngineContext) -> Equipment:
    """Raises SprawlError when SGLang is not installed or `arguments` are not for it."""
    require_sglang()
    checkpoint = context.work_dir / CHECKPOINT
    engine = SglangEngine.from_files(
        context.files,
        checkpoint,
        eos_ids=context.tokenizer.eos_ids,
        options=ServerOptions(context.compute_dtype, context.threads, parse_arguments(context.arguments)),
        log_file=context.work_dir / "sglang.log",
    )
    return Equipment(engine, DiskCopy(checkpoint, context.run_id, context.files))
