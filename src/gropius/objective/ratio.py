"""Probability ratios: of the policy to the anchor (differentiable), of the anchor to the sampler (detached). Torch.

Every function works on a flat, ragged batch: `_L` token positions of `_N` sequences, `sequence[_L]` saying whose
token it is. Masked positions are replaced before anything is exponentiated, so what they hold can never matter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gropius.objective.spec import Ratio

Array = NDArray[np.floating]


@dataclass(frozen=True, eq=False)
class Segments:
    """Which token belongs to which sequence, and which tokens count.

    sequence [_L]: index in 0..sequences−1. mask [_L]: True at loss tokens.
    """

    sequence: Tensor
    mask: Tensor
    sequences: int

    def select(self, values: Tensor, fill: float = 0.0) -> Tensor:
        """[_L] the values at loss tokens, `fill` elsewhere; no gradient and no NaN passes from a masked position."""
        return torch.where(self.mask, values, torch.full_like(values, fill))

    def sum(self, values: Tensor) -> Tensor:
        """[_N] sum over each sequence's loss tokens; `values` must already be selected."""
        out = torch.zeros(self.sequences, dtype=values.dtype, device=values.device)
        return out.index_add(0, self.sequence, values)

    def average(self, values: Tensor) -> Tensor:
        """[_N] Σ/L over each sequence's loss tokens; 0 for a sequence without any."""
        count = self.sum(self.mask.to(values.dtype)).clamp(min=1.0)
        return self.sum(values) / count

    def spread(self, per_sequence: Tensor) -> Tensor:
        """[_L] each sequence's value at its loss tokens, 0 elsewhere."""
        return self.select(per_sequence[self.sequence])


def _token(logprobs: Tensor, difference: Tensor, segments: Segments) -> Tensor:
    return difference


def _sequence(logprobs: Tensor, difference: Tensor, segments: Segments) -> Tensor:
    return segments.spread(segments.average(difference))


def _sequence_token(logprobs: Tensor, difference: Tensor, segments: Segments) -> Tensor:
    return _sequence(logprobs, difference, segments).detach() + (logprobs - logprobs.detach())


def _sequence_product(logprobs: Tensor, difference: Tensor, segments: Segments) -> Tensor:
    return segments.spread(segments.sum(difference))


def _none(logprobs: Tensor, difference: Tensor, segments: Segments) -> Tensor:
    return torch.zeros_like(logprobs)


LEVELS: dict[str, Callable[[Tensor, Tensor, Segments], Tensor]] = {
    "none": _none,
    "token": _token,
    "sequence": _sequence,
    "sequence_token": _sequence_token,
    "sequence_product": _sequence_product,
}


def log_ratio(axis: Ratio, logprobs: Tensor, anchor: Tensor, segments: Segments) -> Tensor:
    """[_L] log of the ratio at the declared level; 0 at masked positions.

    token: log π − log π_anchor; sequence: its mean over the response (geometric mean of the ratios), on every token;
    sequence_token: the value of `sequence`, the gradient of log π; sequence_product: its sum.
    logprobs, anchor [_L]: already selected. Sources: PPO eq. 6; GSPO eqs. 7 and 14.
    """
    return LEVELS[axis.level](logprobs, logprobs - anchor, segments)


def _band(axis: Ratio, weight: Tensor) -> Tensor:
    return (weight >= axis.correction_low) & (weight <= axis.correction_high)


def _truncate(axis: Ratio, difference: Tensor, segments: Segments) -> Tensor:
    return difference.exp().clamp(axis.correction_low, axis.correction_high)


def _mask(axis: Ratio, difference: Tensor, segments: Segments) -> Tensor:
    weight = difference.exp()
    return torch.where(_band(axis, weight), weight, torch.zeros_like(weight))


def _sequence_truncate(axis: Ratio, difference: Tensor, segments: Segments) -> Tensor:
    return _truncate(axis, segments.spread(segments.sum(difference)), segments)


def _sequence_mask(axis: Ratio, difference: Tensor, segments: Segments) -> Tensor:
    return _mask(axis, segments.spread(segments.sum(difference)), segments)


def _geometric_mask(axis: Ratio, difference: Tensor, segments: Segments) -> Tensor:
    weight = segments.spread(segments.average(difference)).exp()
    return _band(axis, weight).to(weight.dtype)


CORRECTIONS: dict[str, Callable[[Ratio, Tensor, Segments], Tensor]] = {
    "none": lambda axis, difference, segments: torch.ones_like(difference),
    "truncate": _truncate,
    "mask": _mask,
    "sequence_truncate": _sequence_truncate,
    "sequence_mask": _sequence_mask,
    "geometric_mask": _geometric_mask,
}


def correction(axis: Ratio, anchor: Tensor, sampler: Tensor, segments: Segments) -> Tensor:
    """[_L] the detached weight of the policy term for a sampler that is not the anchor; w = π_anchor / π_sampler.

    truncate: w clamped to [low, high]; mask: w inside the band, else 0 (IcePop, MIS); sequence_*: the same on the
    product over the response; geometric_mask: 1 or 0 by the geometric mean, no reweighting.
    anchor, sampler [_L]: already selected at loss tokens.
    """
    return CORRECTIONS[axis.correction](axis, (anchor - sampler).detach(), segments)


def kept_by_correction(axis: Ratio, anchor: Array, sampler: Array, mask: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """[T] of one response: False where the correction masks a token, for `aggregate.count_corrected = false`.

    anchor, sampler, mask [T]: log-probabilities and loss tokens; what stands at masked positions does not matter.
    """
    own = torch.from_numpy(mask)
    segments = Segments(torch.zeros(len(mask), dtype=torch.int64), own, 1)
    own_anchor = segments.select(torch.from_numpy(np.asarray(anchor, np.float64)))
    drawn = segments.select(torch.from_numpy(np.asarray(sampler, np.float64)))
    kept: NDArray[np.bool_] = (correction(axis, own_anchor, drawn, segments) != 0).numpy()
    return kept
