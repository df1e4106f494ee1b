"""Which tokens keep their policy term: by entropy, and by the covariance of log-probability and advantage. No torch."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from gropius.objective.response import Response
from gropius.objective.spec import Selection

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]


def entropy_threshold(entropies: Sequence[Array], top: float) -> float:
    """The (1 − top) quantile, linear interpolation, of all loss tokens' entropies. Source: 2506.01939."""
    pool = np.concatenate(list(entropies)) if entropies else np.zeros(0)
    return float(np.quantile(pool, 1.0 - top)) if len(pool) else -math.inf


def entropy_keep(axis: Selection, responses: Sequence[Response], trained: Sequence[Mask]) -> list[Mask]:
    """[T_i] True where the policy term stays: the top share by anchor entropy, of the batch or of each response."""
    every = [np.ones(len(r.mask), np.bool_) for r in responses]
    if axis.entropy_top >= 1:
        return every
    pools = [None if r.entropy is None else r.entropy[t] for r, t in zip(responses, trained, strict=True)]
    whole = entropy_threshold([pool for pool in pools if pool is not None], axis.entropy_top)
    keep = []
    for r, pool, all_kept in zip(responses, pools, every, strict=True):
        if r.entropy is None or pool is None:
            keep.append(all_kept)
            continue
        threshold = whole if axis.entropy_over == "batch" else entropy_threshold([pool], axis.entropy_top)
        keep.append(np.asarray(r.entropy >= threshold))
    return keep


def covariances(logprobs: Sequence[Array], advantages: Sequence[Array], trained: Sequence[Mask]) -> list[Array]:
    """[T_i] (log π − mean)(A − mean) with the means over all trained tokens; 0 elsewhere. Source: 2505.22617 eq. 9."""
    chosen = [(lp[m], a[m]) for lp, a, m in zip(logprobs, advantages, trained, strict=True)]
    lp_mean = _mean([lp for lp, _ in chosen])
    a_mean = _mean([a for _, a in chosen])
    out = []
    for lp, a, m in zip(logprobs, advantages, trained, strict=True):
        row = np.zeros(len(m))
        row[m] = (lp[m] - lp_mean) * (a[m] - a_mean)
        out.append(row)
    return out


def covariance_marks(
    axis: Selection, logprobs: Sequence[Array], advantages: Sequence[Array], trained: Sequence[Mask]
) -> list[Mask]:
    """[T_i] True at the tokens that `selection.covariance` picks, at least one of those that may be picked.

    kl: the share with the highest covariance. clip: a share of the batch's tokens, among those with a covariance in
    [covariance_low, covariance_high]; which of them, a hash of the token's log-probability decides, so that order,
    packs and ranks cannot change it. Source: 2505.22617 eqs. 10-13.
    """
    values = covariances(logprobs, advantages, trained)
    flat = np.concatenate([*values, np.zeros(0)])
    may = np.concatenate([*trained, np.zeros(0, np.bool_)])
    wanted = max(1, math.floor(axis.covariance_share * int(may.sum()) + 1e-9))
    draw = _hash(np.concatenate([*logprobs, np.zeros(0)]))
    first, second = -flat, draw
    if axis.covariance == "clip":
        may = may & (flat >= axis.covariance_low) & (flat <= axis.covariance_high)
        first, second = draw, flat
    candidates = np.flatnonzero(may)
    chosen = candidates[np.lexsort((second[candidates], first[candidates]))][:wanted]
    marks = np.zeros(len(flat), np.bool_)
    marks[chosen] = True
    ends = np.cumsum([len(row) for row in values])
    return [np.asarray(row) for row in np.split(marks, ends[:-1])] if len(values) else []


def _mean(arrays: Sequence[Array]) -> float:
    pool = np.concatenate([*arrays, np.zeros(0)])
    return math.fsum(pool) / len(pool) if len(pool) else 0.0


def _hash(values: Array) -> Array:
    """[n] numbers in [0, 1) that depend on the bits of each value alone (the finaliser of splitmix64)."""
    z = np.ascontiguousarray(values, np.float64).view(np.uint64).copy()
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        z = (z ^ (z >> np.uint64(shift))) * np.uint64(factor)
    z = z ^ (z >> np.uint64(31))
    return np.asarray(z >> np.uint64(11), np.float64) / float(1 << 53)
