"""The beginning and the recent end of a run, and numbers with intervals over them. No torch, no I/O.

Groups are the unit: siblings are not independent, so a share of responses is measured as the mean over groups.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gropius.doctor.finding import Interval
from gropius.records.intervals import Z95, wilson

FEWEST_STEPS = 5
FEWEST_GROUPS = 24
DRAWS = 400


def width(steps: int) -> int:
    """Steps in a window: a quarter of the run, at least five.

    >>> width(8), width(100)
    (5, 25)
    """
    return max(FEWEST_STEPS, math.ceil(steps / 4))


def ends(steps: Sequence[int]) -> tuple[list[int], list[int]] | None:
    """The first and the last window, or None while they would overlap."""
    size = width(len(steps))
    if len(steps) < 2 * size:
        return None
    return list(steps[:size]), list(steps[-size:])


@dataclass(frozen=True)
class Held:
    """A share of groups over the last window, and the step since which it has been above the limit."""

    share: Interval
    onset: int
    from_the_start: bool


def held_above(by_step: Mapping[int, Sequence[float]], limit: float, of: str) -> Held | None:
    """A value of each group, by step: is its recent mean above `limit` with 95 % confidence?

    The last window, widened until 24 groups have a value. None when it is not, or the run has fewer.
    Onset: every trailing window from there on is above.
    """
    steps = sorted(by_step)
    size = width(len(steps))
    if len(steps) < FEWEST_STEPS:
        return None
    while size < len(steps) and sum(len(by_step[step]) for step in steps[-size:]) < FEWEST_GROUPS:
        size += 1
    last = [value for step in steps[-size:] for value in by_step[step]]
    if len(last) < FEWEST_GROUPS:
        return None
    mean = float(np.mean(last))
    low, high = wilson(mean, len(last))
    if low <= limit:
        return None
    first = 0
    for index in range(len(steps)):
        values = [value for step in steps[max(0, index - size + 1) : index + 1] for value in by_step[step]]
        if values and float(np.mean(values)) <= limit:
            first = index + 1
    onset = steps[min(first, len(steps) - 1)]
    return Held(Interval(of, mean, min(low, mean), max(high, mean)), onset, first == 0)


def mean_of(values: Iterable[float], of: str) -> Interval:
    """The mean with its normal 95 % interval (Student's for few values). One value: an endless interval."""
    array = np.array(list(values), np.float64)
    mean = float(array.mean()) if len(array) else 0.0
    if len(array) < 2:
        return Interval(of, mean, -math.inf, math.inf)
    half = _quantile(len(array) - 1) * float(array.std(ddof=1)) / math.sqrt(len(array))
    return Interval(of, mean, mean - half, mean + half)


def rise(before: Iterable[float], after: Iterable[float], of: str) -> Interval:
    """mean(after) − mean(before) with Welch's 95 % interval."""
    a, b = np.array(list(before), np.float64), np.array(list(after), np.float64)
    value = float(b.mean() - a.mean()) if len(a) and len(b) else 0.0
    if len(a) < 2 or len(b) < 2:
        return Interval(of, value, -math.inf, math.inf)
    error = math.sqrt(float(a.var(ddof=1)) / len(a) + float(b.var(ddof=1)) / len(b))
    half = _quantile(min(len(a), len(b)) - 1) * error
    return Interval(of, value, value - half, value + half)


def drawn_again(
    blocks: Sequence[NDArray[np.float64]], statistic: Callable[[NDArray[np.float64]], float], of: str
) -> Interval:
    """A statistic of stacked blocks with its bootstrap interval over blocks (400 draws, fixed seed)."""
    value = statistic(np.concatenate(blocks))
    random = np.random.default_rng(0)
    found = []
    for _ in range(DRAWS):
        chosen = random.integers(0, len(blocks), len(blocks))
        found.append(statistic(np.concatenate([blocks[i] for i in chosen])))
    low, high = np.quantile(found, [0.025, 0.975])
    return Interval(of, value, min(float(low), value), max(float(high), value))


def _quantile(freedom: int) -> float:
    """97.5 % quantile of Student's t, by Cornish and Fisher's expansion in 1/freedom; tabled below 3."""
    if freedom < 3:
        return (math.inf, 12.71, 4.30)[max(freedom, 0)]
    z = Z95
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
