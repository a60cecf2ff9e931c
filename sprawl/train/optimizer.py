"""The optimizer of a run: AdamW, or Muon for the hidden matrices with AdamW for everything else.

Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon) replaces the momentum of a matrix by its nearest
semi-orthogonal matrix. It is meant for hidden layers: embeddings, the output head, norms and biases stay with AdamW.
With `match_rms_adamw` (Liu et al. 2025, arXiv 2502.16982) a step has 0.2 * lr as root mean square whatever the
matrix's shape, which is what AdamW's steps have, so one learning rate serves both. The algorithm is `torch.optim.Muon`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from sprawl.config import OptimizerConfig
from sprawl.errors import IntegrityError, SprawlError

# Hugging Face names of the matrices that are not hidden layers.
_NOT_HIDDEN = re.compile(r"(^|\.)(embed_tokens|wte|wpe|lm_head|embed_out|router|gate)\.weight$")


class MuonAdamW:
    """Two optimizers over disjoint parameters that step as one: `muon` on hidden matrices, `adamw` on the rest."""

    def __init__(self, muon: torch.optim.Optimizer, adamw: torch.optim.AdamW) -> None:
        self.parts: tuple[torch.optim.Optimizer, ...] = (muon, adamw)

    def step(self) -> None:
        for part in self.parts:
            part.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none=set_to_none)


RunOptimizer = torch.optim.AdamW | MuonAdamW


def is_hidden_matrix(name: str, parameter: Tensor) -> bool:
    """Whether Muon is meant for this parameter: a matrix that is no embedding, output head or router."""
    return parameter.ndim == 2 and _NOT_HIDDEN.search(name) is None


def build_optimizer(model: nn.Module, settings: OptimizerConfig) -> RunOptimizer:
    """The optimizer that `settings` describe, over the fp32 parameters of `model`.

    Raises SprawlError when Muon is asked for and this torch does not have it, or the model has no hidden matrix.
    """
    if settings.kind == "adamw":
        return _adamw(model.parameters(), settings)
    if not hasattr(torch.optim, "Muon"):
        raise SprawlError(f"optimizer.kind=muon needs torch 2.9 or newer, this is {torch.__version__}", "upgrade torch")
    hidden = {name: p for name, p in model.named_parameters() if is_hidden_matrix(name, p)}
    others = [p for name, p in model.named_parameters() if name not in hidden]
    if not hidden or not others:
        raise SprawlError("optimizer.kind=muon needs hidden matrices and other parameters", "use optimizer.kind=adamw")
    muon = torch.optim.Muon(
        hidden.values(),
        lr=settings.lr,
        weight_decay=settings.weight_decay,
        momentum=settings.muon.momentum,
        nesterov=settings.muon.nesterov,
        ns_steps=settings.muon.ns_steps,
        adjust_lr_fn=settings.muon.adjust_lr,
    )
    return MuonAdamW(muon, _adamw(others, settings))


def _adamw(parameters: object, settings: OptimizerConfig) -> torch.optim.AdamW:
    return torch.optim.AdamW(
        parameters,  # type: ignore[arg-type]
        lr=settings.lr,
        betas=settings.betas,
        eps=settings.eps,
        weight_decay=settings.weight_decay,
    )


def scale_learning_rate(optimizer: RunOptimizer, lr: float, factor: float) -> None:
    """From the next step on every part steps at `lr` x `factor`; a factor of 1 is `lr` bit for bit."""
    for part in optimizer.parts if isinstance(optimizer, MuonAdamW) else (optimizer,):
        for group in part.param_groups:
            group["lr"] = lr * factor


def optimizer_tensors(model: nn.Module, optimizer: RunOptimizer) -> dict[str, Tensor]:
    """All of the optimizer's state as `<key>:<parameter name>` -> tensor; empty before the first step.

    AdamW holds `exp_avg`, `exp_avg_sq` and `step`, Muon `momentum_buffer`.
    """
    tensors = {}
    for name, parameter in model.named_parameters():
        for key, value in _owner(optimizer, parameter).state.get(parameter, {}).items():
            tensors[f"{key}:{name}"] = value
    return tensors


def load_optimizer_tensors(model: nn.Module, optimizer: RunOptimizer, tensors: Mapping[str, Tensor]) -> None:
    """Inverse of `optimizer_tensors`: an optimizer of the same kind continues bit for bit.

    Raises IntegrityError naming the first tensor when the state belongs to another optimizer or another model.
    """
    parameters = dict(model.named_parameters())
    loaded: dict[str, dict[str, Tensor]] = {}
    for full_name, tensor in tensors.items():
        key, _, name = full_name.partition(":")
        if name not in parameters:
            raise IntegrityError(f"optimizer state {full_name!r} belongs to no parameter of this model")
        if key not in _keys(_owner(optimizer, parameters[name])):
            raise IntegrityError(
                f"optimizer state {full_name!r} was made by another optimizer", "resume with the run's optimizer.kind"
            )
        loaded.setdefault(name, {})[key] = tensor.clone()
    for name, parameter in parameters.items():
        owner = _owner(optimizer, parameter)
        if name in loaded and loaded[name].keys() != _keys(owner):
            missing = sorted(_keys(owner) - loaded[name].keys())[0]
            raise IntegrityError(f"optimizer state {missing + ':' + name!r} is missing")
        owner.state.pop(parameter, None)
        if name in loaded:
            owner.state[parameter] = loaded[name]


def _owner(optimizer: RunOptimizer, parameter: Tensor) -> torch.optim.Optimizer:
    """The part that steps this parameter."""
    if not isinstance(optimizer, MuonAdamW):
        return optimizer
    return next(
        part
        for part in optimizer.parts
        if any(parameter is member for group in part.param_groups for member in group["params"])
    )


def _keys(part: torch.optim.Optimizer) -> set[str]:
    return {"exp_avg", "exp_avg_sq", "step"} if isinstance(part, torch.optim.AdamW) else {"momentum_buffer"}
