"""An island's vLLM: the engine, and the checkpoint on disk that it reads."""

from __future__ import annotations

from sprawl.rollout.engines import CHECKPOINT, EngineContext, Equipment
from sprawl.rollout.host_copy import DiskCopy
from sprawl.rollout.vllm.engine import VllmEngine
from sprawl.rollout.vllm.server import ServerOptions, parse_arguments, require_vllm


def vllm(context: EngineContext) -> Equipment:
    """Raises SprawlError when vLLM is not installed or `arguments` are not for it."""
    require_vllm()
    checkpoint = context.work_dir / CHECKPOINT
    engine = VllmEngine.from_files(
        context.files,
        checkpoint,
        eos_ids=context.tokenizer.eos_ids,
        options=ServerOptions(context.compute_dtype, context.threads, parse_arguments(context.arguments)),
        log_file=context.work_dir / "vllm.log",
    )
    return Equipment(engine, DiskCopy(checkpoint, context.run_id, context.files))
