"""Sampler against trainer: the same token, the same weights, two log-probabilities. How far apart, and why."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gropius.errors import MismatchError
from gropius.types import Episode, Sampling

Arrays = Sequence[NDArray[np.floating]]
DTYPE_NOISE = 0.5
CAUSE_GAIN = 10.0
MEAN_SHARE = 0.1  # of the bound: rounding is wide in one token of thousands, a wrong sampler in all of them


@dataclass(frozen=True)
class Mismatch:
    """|log π_trainer − log π_sampler| over the model's own tokens, in nats. worst: (episode, token) of the largest."""

    mean: float
    largest: float
    worst: tuple[int, int]
    tokens: int


def compare(episodes: Sequence[Episode], trainer: Arrays) -> Mismatch:
    """Compare what the sampler reported with what the trainer computes; trainer: one [T] array an episode.

    A value that is not finite counts as infinitely far. Without a token the mismatch is 0.
    """
    total, count, largest, worst = 0.0, 0, 0.0, (0, 0)
    for index, (episode, values) in enumerate(zip(episodes, trainer, strict=True)):
        drawn = episode.loss_mask & (not episode.demonstration)
        gap = np.where(drawn, np.abs(np.asarray(values, np.float64) - episode.sampler_logprobs), 0.0)
        gap[~np.isfinite(gap)] = np.inf
        total, count = total + float(gap.sum()), count + int(drawn.sum())
        if len(gap) and gap.max() > largest:
            largest, worst = float(gap.max()), (index, int(gap.argmax()))
    return Mismatch(total / count if count else 0.0, largest, worst, count)


@dataclass(frozen=True)
class Expected:
    """bound: nats allowed on any token, and a tenth of it on the mean.

    sampling: how tokens were drawn. digest: of the trainer's weights.
    """

    bound: float
    sampling: Sampling
    digest: str


def require_agreement(
    episodes: Sequence[Episode], trainer: Arrays, expected: Expected, rescore: Callable[[float], Arrays]
) -> Mismatch:
    """Compare, and stop the run when the largest difference is beyond the bound, or the mean beyond a tenth of it.

    rescore: temperature → the trainer's log-probabilities at it, for finding the cause.
    Errors: MismatchError with the place, both numbers, and the likely cause.
    """
    found = compare(episodes, trainer)
    if found.largest <= expected.bound and found.mean <= MEAN_SHARE * expected.bound:
        return found
    index, token = found.worst
    episode = episodes[index]
    cause = likely_cause(episodes, found, expected, rescore)
    raise MismatchError(
        f"sampler and trainer disagree: group {episode.group_id}, member {episode.member}, token {token}: "
        f"{episode.sampler_logprobs[token]:.4f} when it was drawn, {float(trainer[index][token]):.4f} now; the largest "
        f"difference is {found.largest:.4f} nats (mean {found.mean:.4f} over {found.tokens} tokens) and "
        f"train.mismatch_bound is {expected.bound:g} (a tenth for the mean). Likely cause: {cause}"
    )


def likely_cause(
    episodes: Sequence[Episode], found: Mismatch, expected: Expected, rescore: Callable[[float], Arrays]
) -> str:
    """Name the cause by testing each on the tokens at hand, the certain ones first."""
    sampling, digest = expected.sampling, expected.digest
    stale = sorted({e.weight_digest for e in episodes if e.weight_digest} - {digest})
    if stale:
        return f"stale weights: tokens were drawn from weights {stale[0][:12]}, the trainer holds {digest[:12]}"
    for temperature in sorted({1.0, sampling.temperature**2, 2 * sampling.temperature} - {sampling.temperature}):
        if compare(episodes, rescore(temperature)).mean * CAUSE_GAIN < found.mean:
            return (
                f"temperature: the sampler's numbers fit temperature {temperature:g}, the recipe says "
                f"{sampling.temperature:g}"
            )
    if sampling.truncates and _always_above(episodes, rescore(sampling.temperature)):
        return (
            "truncated sampling: the sampler reports log-probabilities after top-k, top-p or min-p, the trainer "
            "before; the engine must report those of the whole distribution"
        )
    if found.largest <= DTYPE_NOISE:
        return (
            "dtype: the difference is spread thinly, as rounding is; compute in float32 (model.dtype), or raise "
            "train.mismatch_bound and declare a correction (objective.ratio.correction)"
        )
    if _begins_late(episodes, rescore(sampling.temperature)):
        return "template or re-tokenised text: the first tokens agree and later ones do not, so the ids differ"
    return "the sampler's model is another one: other weights, another template, or another position layout"


def _always_above(episodes: Sequence[Episode], trainer: Arrays) -> bool:
    gaps = [(e.sampler_logprobs - values)[e.loss_mask] for e, values in zip(episodes, trainer, strict=True)]
    pool = np.concatenate([*gaps, np.zeros(0)])
    return len(pool) > 0 and float((pool > -1e-3).mean()) > 0.99


def _begins_late(episodes: Sequence[Episode], trainer: Arrays) -> bool:
    first = [
        float(abs(e.sampler_logprobs[0] - values[0]))
        for e, values in zip(episodes, trainer, strict=True)
        if len(values) and e.loss_mask[0]
    ]
    return bool(first) and max(first) < 1e-2
