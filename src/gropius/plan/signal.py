"""The expected gradient of a group of binary rewards, exactly, and its variance. NumPy float64, no torch.

One prompt with success probability p is one logit: a right answer has score 1 − p, a wrong one −p, and dp/dlogit is
p (1 − p). A group with k right answers of G then has the gradient f(k), whatever the members' order, so that its
expectation and variance are finite sums over k. For the population std f(k) = √(k (G − k)) / G: the group's own std.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gropius.errors import UsageError, did_you_mean
from gropius.plan.beta import BetaMixture

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Estimator:
    """gradient(k, G): the group's gradient in its logit. energy(k, G): the mean of A² over the group."""

    name: str
    gradient: Callable[[Array, int], Array]
    energy: Callable[[Array, int], Array]


def _live(k: Array, g: int) -> Array:
    return np.asarray((k > 0) & (k < g), np.float64)


def _share(k: Array, g: int) -> Array:
    """k (G − k) / G²: the population variance of the group's rewards."""
    return np.asarray(k * (g - k) / g**2)


def _by_mean(value: Array, k: Array) -> Array:
    return np.where(k > 0, value / np.where(k > 0, k, 1.0), 0.0)


ESTIMATORS: dict[str, Estimator] = {
    row.name: row
    for row in (
        Estimator("group_std", lambda k, g: np.sqrt(_share(k, g)), _live),
        Estimator(
            "group_std_sample",
            lambda k, g: np.sqrt(_share(k, g) * (g - 1) / g),
            lambda k, g: _live(k, g) * (g - 1) / g,
        ),
        Estimator("none", _share, _share),
        Estimator(
            "leave_one_out",
            lambda k, g: _share(k, g) * g / max(g - 1, 1),
            lambda k, g: _share(k, g) * (g / max(g - 1, 1)) ** 2,
        ),
        Estimator(
            "group_mean", lambda k, g: _live(k, g) * (g - k) / g, lambda k, g: _by_mean((g - k) * _live(k, g), k)
        ),
    )
}


def estimator(name: str) -> Estimator:
    """The estimator of that name. Errors: UsageError for an unknown one."""
    if name not in ESTIMATORS:
        raise UsageError(f"advantage scale {name!r} is unknown; {did_you_mean(name, ESTIMATORS)}")
    return ESTIMATORS[name]


def binary_weight(p: float, group: int, scale: str = "group_std") -> float:
    """Expected gradient divided by the true gradient of the success probability: what a scale does to a prompt.

    1 for leave_one_out, (G − 1)/G for none, Σ_{j<G} (1 − p)^{j−1} for group_mean, in between for the stds.

    >>> round(binary_weight(0.05, 4), 4), round(binary_weight(0.05, 16), 4)
    (1.71, 3.2671)
    """
    k = np.arange(group + 1, dtype=np.float64)
    log = np.zeros(group + 1)
    log[1:] = np.cumsum(np.log((group - k[1:] + 1) / k[1:]))
    pmf = np.exp(log + k * np.log(p) + (group - k) * np.log1p(-p))
    return float((pmf * estimator(scale).gradient(k, group)).sum() / (p * (1 - p)))


@dataclass(frozen=True, eq=False)
class Signal:
    """Of one group of a random prompt. Each array has the mixture's leading axes.

    mean: expected gradient in the prompt's logit. variance: of that gradient over prompts and answers. energy: E[A²],
    what scores that have nothing to do with being right are multiplied by. efficiency: mean² / energy, the squared
    signal-to-noise ratio that one response buys where such scores dominate (long responses).
    """

    mean: Array
    variance: Array
    energy: Array

    @property
    def efficiency(self) -> Array:
        """mean² / energy; 0 without any energy."""
        return np.asarray(np.where(self.energy > 0, self.mean**2 / np.where(self.energy > 0, self.energy, 1.0), 0.0))


def signal(mixture: BetaMixture, group: int, scale: str = "group_std") -> Signal:
    """Exact for binary rewards: sums over k = 0..G of the Beta-binomial probability times f, f² and the energy."""
    chosen = estimator(scale)
    k = np.arange(group + 1, dtype=np.float64)
    pmf = mixture.solved_pmf(group)
    gradient = chosen.gradient(k, group)
    mean = np.asarray((pmf * gradient).sum(-1))
    return Signal(
        mean, np.asarray((pmf * gradient**2).sum(-1)) - mean**2, np.asarray((pmf * chosen.energy(k, group)).sum(-1))
    )
