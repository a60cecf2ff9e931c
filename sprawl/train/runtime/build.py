"""The trainer of one stage, put together."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from sprawl.config import RunConfig
from sprawl.policy.architecture import Architecture
from sprawl.policy.stage import load_stage, stage_decoder
from sprawl.train.passes import Passes
from sprawl.train.runtime.mesh import Mesh
from sprawl.train.runtime.pipelined import PipelinedPasses
from sprawl.train.trainer import Trainer, local_passes


def stage_trainer(
    mesh: Mesh, arch: Architecture, masters: Mapping[str, Tensor], reference: Mapping[str, Tensor], config: RunConfig
) -> Trainer:
    """This process's share of the trainer. `masters` and `reference` hold at least its tensors, which are copied.

    Raises IntegrityError when they do not.
    """
    policy_part, reference_part = stage_decoder(arch, mesh.place), stage_decoder(arch, mesh.place)
    load_stage(policy_part, masters, torch.float32)
    compute = getattr(torch, config.policy.compute_dtype)
    # The reference is never trained, so it needs no fp32 copy under autocast.
    load_stage(reference_part, reference, compute)
    reference_part.requires_grad_(False)
    recompute = config.policy.gradient_checkpointing
    passes: Passes
    if mesh.stages == 1:
        passes = local_passes(policy_part, reference_part, config)
    else:
        passes = PipelinedPasses(mesh.place, policy_part, reference_part, mesh.pipeline, compute, recompute=recompute)
    return Trainer(policy_part, reference_part, config, passes=passes, fabric=mesh)
