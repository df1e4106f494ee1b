"""The critic's loss: how far the values are from the returns. Torch.

    ½ · mean_t ℓ(V_t − R_t)        clipped: ½ · mean_t max(ℓ(V_t − R_t), ℓ(clip(V_t, V_old ± c) − R_t))

ℓ(x) = x², or Huber's 2(½x² inside δ, δ(|x| − ½δ) outside). ½ and the clip are conventions of code, not of a paper.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class ValueLoss:
    """clip: bound on |V − V_old|, 0 is off. huber: δ, 0 is off (the square)."""

    clip: float = 0.0
    huber: float = 0.0


def value_terms(spec: ValueLoss, values: Tensor, old: Tensor, returns: Tensor) -> tuple[Tensor, Tensor]:
    """([_L] ½ ℓ of every token, to be weighted and summed; [_L] bool where the clipped branch was chosen).

    values: differentiable. old: the values that the advantages were made from. returns: constants.
    """
    error = _error(spec, values - returns)
    if spec.clip <= 0:
        return 0.5 * error, torch.zeros_like(values, dtype=torch.bool)
    bounded = old + (values - old).clamp(-spec.clip, spec.clip)
    clipped = _error(spec, bounded - returns)
    return 0.5 * torch.maximum(error, clipped), (clipped > error).detach()


def _error(spec: ValueLoss, x: Tensor) -> Tensor:
    if spec.huber <= 0:
        return x.square()
    size = x.abs()
    return torch.where(size <= spec.huber, x.square(), 2 * spec.huber * (size - 0.5 * spec.huber))
