"""Which difference between recipes is distinguishable at equal tokens, and how many seeds would settle the others.

Runs of one seed share tasks, their order, held-out tasks and random streams, so differences are taken seed by seed.
No torch.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np

from gropius.compare.curves import Curve
from gropius.errors import UsageError
from gropius.records.intervals import Z95

LEVEL = 0.05
LEAST_SEEDS = 3  # two cannot show their own spread
MOST_SEEDS = 1000


@dataclass(frozen=True)
class Standing:
    """One recipe at the common budget: held-out mean over seeds with its 95 % interval, gain since the start, steps.

    low, high: None with one seed.
    """

    name: str
    mean: float
    low: float | None
    high: float | None
    gain: float
    steps: float
    by_seed: dict[int, float]


@dataclass(frozen=True)
class Difference:
    """first − second, seed by seed. p: two-sided, paired t; p_adjusted: Holm's, over all pairs.

    more_seeds: seeds beyond those run until an interval of this mean and spread leaves 0 out; None: more than 1000, or
    unknown (one seed). distinguishable: p_adjusted < 0.05, from three seeds or more.
    """

    first: str
    second: str
    mean: float
    low: float | None
    high: float | None
    p: float | None
    p_adjusted: float | None
    distinguishable: bool
    more_seeds: int | None

    def sentence(self, seeds: int) -> str:
        """The difference in words."""
        pair = f"{self.first} − {self.second}: {self.mean:+.3f}"
        if self.low is None:
            return f"{pair}, from one seed, which tells nothing about others; run at least two"
        interval = f"{pair} [{self.low:+.3f}, {self.high:+.3f}]"
        if self.distinguishable:
            return f"{interval}: distinguishable (p {self.p_adjusted:.2g} after Holm)"
        if seeds < LEAST_SEEDS:
            return f"{interval}: two seeds cannot show their own spread; run at least {LEAST_SEEDS}"
        more = f"about {self.more_seeds} more seeds" if self.more_seeds else f"more than {MOST_SEEDS} seeds"
        if self.more_seeds == 0:
            more = "a few more seeds (the pair alone would do, the number of comparisons asks for more)"
        return f"{interval}: not distinguishable with {seeds} seeds; {more} would settle a difference of this size"


@dataclass(frozen=True)
class Comparison:
    """Everything that was found. budget: sampled tokens at which the recipes are compared."""

    budget: int
    seeds: tuple[int, ...]
    standings: tuple[Standing, ...]
    differences: tuple[Difference, ...]

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "budget_tokens": self.budget,
            "seeds": list(self.seeds),
            "standings": [vars(s) | {"by_seed": {str(k): v for k, v in s.by_seed.items()}} for s in self.standings],
            "differences": [vars(d) for d in self.differences],
        }


def compare(curves: Mapping[str, Sequence[Curve]], budget: int | None = None) -> Comparison:
    """Recipes by name, each with its curves of the same seeds.

    budget: sampled tokens; None: what the shortest run sampled. Best recipe first.
    Errors: UsageError for fewer than two recipes, other seeds, or a budget that a run did not reach.
    """
    if len(curves) < 2:
        raise UsageError("a comparison needs two recipes or more")
    seeds = tuple(sorted(c.seed for c in next(iter(curves.values()))))
    for name, own in curves.items():
        if tuple(sorted(c.seed for c in own)) != seeds:
            raise UsageError(f"{name} was run with seeds {sorted(c.seed for c in own)}, the first with {list(seeds)}")
    reached = min((c.total, name) for name, own in curves.items() for c in own)
    if budget is not None and budget > reached[0]:
        raise UsageError(f"--tokens {budget}: {reached[1]} sampled {reached[0]}; ask for less, or train longer")
    at = budget if budget is not None else reached[0]
    standings = sorted((_standing(name, own, at) for name, own in curves.items()), key=lambda s: -s.mean)
    resolution = max(c.resolution for own in curves.values() for c in own)
    pairs = [_difference(a, b, resolution) for a, b in combinations(standings, 2)]
    return Comparison(at, seeds, tuple(standings), tuple(_holm(pairs, len(seeds))))


def _standing(name: str, curves: Sequence[Curve], budget: int) -> Standing:
    values = {c.seed: c.at(budget) for c in curves}
    mean, low, high = _interval(list(values.values()))
    gain = float(np.mean([c.at(budget) - c.values[0] for c in curves]))
    return Standing(name, mean, low, high, gain, float(np.mean([c.step_at(budget) for c in curves])), values)


def _difference(a: Standing, b: Standing, resolution: float) -> Difference:
    """The paired difference; its spread counts as one held-out response at least, so that ties do not decide."""
    gaps = [a.by_seed[seed] - b.by_seed[seed] for seed in a.by_seed]
    mean, n = float(np.mean(gaps)), len(gaps)
    if n < 2:
        return Difference(a.name, b.name, mean, None, None, None, None, False, None)
    spread = max(float(np.std(gaps, ddof=1)), resolution, 1e-12)
    error = spread / math.sqrt(n)
    half = quantile(n - 1) * error
    p, more = two_sided(abs(mean) / error, n - 1), seeds_to_settle(mean, spread, n)
    return Difference(a.name, b.name, mean, mean - half, mean + half, p, None, False, more)


def _holm(pairs: Sequence[Difference], seeds: int) -> list[Difference]:
    """Adjusted p-values: sorted ascending, times the number still to test, never falling. Two seeds claim nothing."""
    known = sorted((i for i, pair in enumerate(pairs) if pair.p is not None), key=lambda i: pairs[i].p or 0.0)
    adjusted: dict[int, float] = {}
    running = 0.0
    for rank, i in enumerate(known):
        running = max(running, min(1.0, (pairs[i].p or 0.0) * (len(known) - rank)))
        adjusted[i] = running
    out = []
    for i, pair in enumerate(pairs):
        p = adjusted.get(i)
        out.append(
            Difference(
                **(
                    vars(pair)
                    | {"p_adjusted": p, "distinguishable": p is not None and p < LEVEL and seeds >= LEAST_SEEDS}
                )
            )
        )
    return out


def _interval(values: Sequence[float]) -> tuple[float, float | None, float | None]:
    mean = float(np.mean(values))
    if len(values) < 2:
        return mean, None, None
    half = quantile(len(values) - 1) * float(np.std(values, ddof=1)) / math.sqrt(len(values))
    return mean, mean - half, mean + half


def seeds_to_settle(mean: float, spread: float, have: int) -> int | None:
    """Seeds beyond `have` until t·spread/√n ≤ |mean|, mean and spread staying as they are; None above 1000.

    >>> seeds_to_settle(0.1, 0.1, 3), seeds_to_settle(0.0, 0.1, 3), seeds_to_settle(0.5, 0.1, 5)
    (4, None, 0)
    """
    for n in range(have, MOST_SEEDS + 1):
        if n > 1 and quantile(n - 1) * spread / math.sqrt(n) <= abs(mean) and mean != 0:
            return n - have
    return None


def two_sided(t: float, freedom: int) -> float:
    """P(|T| ≥ t) of Student's t, for whole degrees of freedom. Source: Abramowitz and Stegun 26.7.3-4.

    >>> round(two_sided(2.776, 4), 3), round(two_sided(12.706, 1), 3), round(two_sided(0.0, 9), 3)
    (0.05, 0.05, 1.0)
    """
    angle = math.atan2(t, math.sqrt(freedom))
    cosine = math.cos(angle)
    term, total = 1.0, 0.0
    if freedom % 2:
        term = cosine
        for k in range(1, freedom, 2):
            total += term
            term *= cosine**2 * (k + 1) / (k + 2)
        inside = 2 / math.pi * (angle + math.sin(angle) * total)
    else:
        for k in range(0, freedom, 2):
            total += term
            term *= cosine**2 * (k + 1) / (k + 2)
        inside = math.sin(angle) * total
    return max(0.0, min(1.0, 1 - inside))


@functools.cache
def quantile(freedom: int) -> float:
    """The 97.5 % quantile of Student's t: by bisection, above 30 degrees by Cornish and Fisher's expansion.

    >>> round(quantile(4), 3), round(quantile(1), 3), round(quantile(200), 3)
    (2.776, 12.706, 1.972)
    """
    if freedom > 30:
        z = Z95
        return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
    low, high = 1.9, 13.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if two_sided(middle, freedom) > LEVEL else (low, middle)
    return (low + high) / 2
