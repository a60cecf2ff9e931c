"""KL divergence to the reference and entropy: estimates for the loss, exact values for the reader.

k1, k2, k3 are Schulman's estimators of KL(policy || reference) from tokens the policy took
(http://joschu.net/blog/kl-approx.html), all in nats a token.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor


def kl_k1(logprobs: Tensor, reference: Tensor) -> Tensor:
    """log policy - log reference, [m]: unbiased, of either sign. Its gradient alone is zero on average on-policy."""
    return logprobs - reference


def kl_k2(logprobs: Tensor, reference: Tensor) -> Tensor:
    """Half the squared log-ratio, [m]: biased, non-negative; its gradient is the KL's on-policy."""
    return (logprobs - reference).square() / 2


def kl_k3(logprobs: Tensor, reference: Tensor) -> Tensor:
    """e^d - d - 1 with d = reference - logprobs, [m]: unbiased on-policy, non-negative (DeepSeekMath)."""
    delta = reference - logprobs
    return delta.exp() - delta - 1


def kl_estimate(logprobs: Tensor, reference: Tensor, kind: Literal["k1", "k2", "k3"]) -> Tensor:
    """Differentiable per-token estimate, [m]."""
    return {"k1": kl_k1, "k2": kl_k2, "k3": kl_k3}[kind](logprobs, reference)


def entropy(logprobs: Tensor) -> Tensor:
    """Entropy of distributions given as log-probs, [m, V] -> [m], nats."""
    return -(logprobs.exp() * logprobs).sum(-1)


def kl_exact(logprobs: Tensor, reference: Tensor) -> Tensor:
    """KL(policy || reference) summed over the vocabulary, [m, V] each -> [m], nats.

    For reading, not for the loss: through a boundary codec log-probs differ by tens of nats, where an estimate from
    the token taken (k3) is dominated by single tokens or overflows.
    """
    return (logprobs.exp() * (logprobs - reference)).sum(-1)
