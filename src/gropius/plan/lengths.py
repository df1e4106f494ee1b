"""How long responses are: constant, lognormal with a cap, or as recorded. No torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from gropius.errors import UsageError

Ints = NDArray[np.int64]
GRID = 5_001  # points of the normal quantiles on which a capped mean is computed


class Lengths(Protocol):
    """Tokens of a response."""

    @property
    def mean(self) -> float: ...

    def draw(self, rng: np.random.Generator, count: int) -> Ints:
        """`count` lengths of at least 1. Drawing n and then m gives the same numbers as drawing n + m."""
        ...


@dataclass(frozen=True)
class Constant:
    """Every response has `tokens` tokens."""

    tokens: int

    @property
    def mean(self) -> float:
        return float(self.tokens)

    def draw(self, rng: np.random.Generator, count: int) -> Ints:
        return np.full(count, self.tokens, np.int64)


@dataclass(frozen=True)
class Lognormal:
    """exp(log(median) + spread · normal), rounded up, cut at `cap` (0: no limit). spread: of the logarithm."""

    median: float
    spread: float
    cap: int = 0

    @property
    def mean(self) -> float:
        """After the cap."""
        return float(np.mean(self._of(_normal())))

    def draw(self, rng: np.random.Generator, count: int) -> Ints:
        return self._of(rng.standard_normal(count))

    def _of(self, normal: NDArray[np.float64]) -> Ints:
        tokens = np.ceil(self.median * np.exp(np.minimum(self.spread * normal, 50.0)))
        return np.clip(tokens, 1, self.cap or 2**40).astype(np.int64)


@dataclass(frozen=True)
class Recorded:
    """Lengths of a run, drawn anew with replacement."""

    tokens: tuple[int, ...]

    @property
    def mean(self) -> float:
        return float(np.mean(self.tokens))

    def draw(self, rng: np.random.Generator, count: int) -> Ints:
        table = np.asarray(self.tokens, np.int64)
        return table[(rng.random(count) * len(table)).astype(np.int64)]


def lognormal(mean: float, spread: float, cap: int = 0) -> Lengths:
    """The lognormal of this mean after the cap; constant for spread 0.

    Errors: UsageError for a mean below 1 or not below the cap, or a spread below 0.

    >>> round(lognormal(1000.0, 1.0, 8192).mean)
    1000
    >>> lognormal(64.0, 0.0)
    Constant(tokens=64)
    """
    if not 1 <= mean < math.inf or not 0 <= spread < math.inf:
        raise UsageError(f"lengths of mean {mean:g} and spread {spread:g}: write a mean of 1 or more and a spread >= 0")
    if cap and mean > cap:
        raise UsageError(f"a mean length of {mean:g} does not stay under the limit of {cap} tokens; lower it")
    if spread == 0 or (cap and mean > 0.98 * cap):
        return Constant(round(mean))
    low, high = 0.1, max(mean, 1.0) * (math.exp(6 * spread) if cap else 2.0)
    for _ in range(60):
        median = math.sqrt(low * high)
        low, high = (median, high) if Lognormal(median, spread, cap).mean < mean else (low, median)
    return Lognormal(math.sqrt(low * high), spread, cap)


def recorded(tokens: Sequence[int], where: str) -> Recorded:
    """The lengths of a run's responses. Errors: UsageError when there is none."""
    kept = tuple(int(t) for t in tokens if t >= 1)
    if not kept:
        raise UsageError(f"{where}: records no response with a token, so there are no lengths to draw from")
    return Recorded(kept)


@cache
def _normal() -> NDArray[np.float64]:
    """Quantiles of the normal distribution, evenly spaced in probability."""
    inverse = NormalDist().inv_cdf
    return np.asarray([inverse((i + 0.5) / GRID) for i in range(GRID)])
