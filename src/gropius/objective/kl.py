"""KL estimators on one sampled token, x = log π − log π_ref, and the ways to differentiate them. Torch.

As a loss, on-policy: k1 has expected gradient 0; k2 that of the reverse KL(π‖ref); k3 that of the forward KL(ref‖π);
k3 times the ratio, differentiated through it, that of the reverse KL under any sampler.
Sources: Schulman 2020; DeepSeekMath eq. 4; DeepSeek-V3.2; 2510.01555; 2512.21852.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gropius.objective.spec import Kl

ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda x: x,
    "k2": lambda x: 0.5 * x * x,
    "k3": lambda x: torch.expm1(-x) + x,
    "abs": lambda x: x.abs(),
}


def _direct(value: Tensor, x: Tensor, token_log_ratio: Tensor) -> Tensor:
    return value


def _score(value: Tensor, x: Tensor, token_log_ratio: Tensor) -> Tensor:
    return token_log_ratio.exp() * value


def _weighted(value: Tensor, x: Tensor, token_log_ratio: Tensor) -> Tensor:
    return token_log_ratio.detach().exp() * value


def _straight_through(value: Tensor, x: Tensor, token_log_ratio: Tensor) -> Tensor:
    k2 = 0.5 * x * x
    return value.detach() + k2 - k2.detach()


GRADIENTS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "direct": _direct,
    "score": _score,
    "weighted": _weighted,
    "straight_through": _straight_through,
}


def kl_term(axis: Kl, logprobs: Tensor, reference: Tensor, anchor: Tensor) -> Tensor:
    """[_L] the KL term of every token, before its coefficient; inputs already selected at loss tokens.

    direct: the estimator itself; score: r·k, differentiated through r = π/π_anchor; weighted: sg(r)·k;
    straight_through: the estimator's value, k2's gradient. clamp bounds |x| before any exponential.
    """
    x = logprobs - reference
    if axis.clamp:
        x = x.clamp(-axis.clamp, axis.clamp)
    return GRADIENTS[axis.gradient](ESTIMATORS[axis.estimator](x), x, logprobs - anchor)
