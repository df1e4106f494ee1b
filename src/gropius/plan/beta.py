"""A mixture of Beta distributions for the pass rates of prompts, fitted by EM to counts. NumPy float64, no torch.

Every sum over a count is a finite sum of 1/(a + j) or log(a + j), so no special function is needed and the fit of many
bootstrap samples is one array operation: [samples, components, distinct counts].
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gropius.plan.counts import PassCounts

Array = NDArray[np.float64]
Ints = NDArray[np.int64]
SMALLEST, LARGEST = 0.02, 2000.0


@dataclass(frozen=True, eq=False)
class BetaMixture:
    """p ~ Σ_k weight_k · Beta(a_k, b_k). Each array [..., components]; leading axes are independent mixtures."""

    weight: Array
    a: Array
    b: Array

    @property
    def mean(self) -> Array:
        """E[p]."""
        return np.asarray((self.weight * self.a / (self.a + self.b)).sum(-1))

    def all_solved(self, group: int) -> Array:
        """E[p^G]: the share of groups in which every response is right. Beta moments: Π_{j<G} (a + j)/(a + b + j)."""
        return self._moment(self.a, group)

    def all_failed(self, group: int) -> Array:
        """E[(1 − p)^G]: the share of groups in which every response is wrong."""
        return self._moment(self.b, group)

    def dead(self, group: int) -> Array:
        """E[p^G + (1 − p)^G]: the share of groups whose rewards are all equal. A group of one is always dead.

        >>> round(float(point_mass([0.02]).dead(8)), 3)
        0.851
        """
        return self.all_solved(group) + self.all_failed(group) if group > 1 else np.ones(self.a.shape[:-1])

    def solved_pmf(self, group: int) -> Array:
        """[..., G + 1] the probability of k right answers of G: a mixture of Beta-binomials."""
        k = np.arange(group + 1)
        log = _log_beta_binomial(self.a, self.b, k, np.full(group + 1, group))
        choose = np.array([_log_choose(group, int(i)) for i in k])
        return np.asarray((self.weight[..., None] * np.exp(log + choose)).sum(-2))

    def _moment(self, shape: Array, group: int) -> Array:
        j = np.arange(group, dtype=np.float64)
        factors = (shape[..., None] + j) / ((self.a + self.b)[..., None] + j)
        return np.asarray((self.weight * factors.prod(-1)).sum(-1))

    def draw(self, prompts: int, random: np.random.Generator) -> Array:
        """[prompts] pass rates, of a single mixture."""
        which = random.choice(len(self.weight), size=prompts, p=self.weight)
        return random.beta(self.a[which], self.b[which])


def point_mass(rates: list[float], weights: list[float] | None = None, spread: float = 1e14) -> BetaMixture:
    """A mixture concentrated at given pass rates, for worked numbers: Beta(p·s, (1 − p)·s) with a huge s."""
    p = np.asarray(rates, np.float64)
    w = np.full(len(p), 1 / len(p)) if weights is None else np.asarray(weights, np.float64)
    return BetaMixture(w / w.sum(), np.maximum(p * spread, 1e-9), np.maximum((1 - p) * spread, 1e-9))


@dataclass(frozen=True, eq=False)
class Fit:
    """The fitted mixture, the same fitted to bootstrap samples of the prompts, and how it was chosen.

    samples: leading axis [draws]. bic: of every number of components tried. prompts: how many were measured.
    """

    mixture: BetaMixture
    samples: BetaMixture
    bic: dict[int, float]
    prompts: int
    rate: float

    @property
    def components(self) -> int:
        """Number of components chosen."""
        return len(self.mixture.weight)


def fit(measured: PassCounts, *, components: int = 0, draws: int = 200, seed: int = 0) -> Fit:
    """Fit p ~ Σ_k w_k Beta(a_k, b_k), c_i | p_i ~ Binomial(n_i, p_i), by EM; uncertainty by bootstrap over prompts.

    components: 0 = chosen among 1 to 3 by BIC. draws: bootstrap samples. The M-step is the fixed point
    a ← a · Σ r_i Σ_{j<c_i} 1/(a + j) / Σ r_i Σ_{j<n_i} 1/(a + b + j), which never lowers the likelihood; a and b
    stay in [0.02, 2000]. Two prompts or one count repeated are enough to run; the intervals then say how little is
    known.
    Source: Minka 2000, Estimating a Dirichlet distribution, eq. 55.
    """
    table, index = np.unique(np.stack([measured.solved, measured.sampled], 1), axis=0, return_inverse=True)
    weight = np.bincount(index.reshape(-1), minlength=len(table)).astype(np.float64)
    solved, sampled = table[:, 0], table[:, 1]
    tried: dict[int, tuple[BetaMixture, float]] = {}
    for k in [components] if components else (1, 2, 3):
        found = _em(_start(measured, k), solved, sampled, weight[None], 400)
        likelihood = float(_log_likelihood(found, solved, sampled, weight[None])[0])
        tried[k] = found, (3 * k - 1) * np.log(weight.sum()) - 2 * likelihood
    best = min(tried, key=lambda k: tried[k][1])
    single = tried[best][0]
    random = np.random.default_rng(seed)
    resampled = random.multinomial(int(weight.sum()), weight / weight.sum(), size=draws).astype(np.float64)
    wide = BetaMixture(*(np.repeat(x, draws, 0) for x in (single.weight, single.a, single.b)))
    samples = _em(wide, solved, sampled, resampled, 60)
    chosen = BetaMixture(single.weight[0], single.a[0], single.b[0])
    return Fit(chosen, samples, {k: value for k, (_, value) in tried.items()}, len(measured.solved), measured.rate)


def _start(measured: PassCounts, components: int) -> BetaMixture:
    """Components spread over the quantiles of smoothed rates, each moderately concentrated."""
    rates = (measured.solved + 0.5) / (measured.sampled + 1.0)
    centre = np.quantile(rates, (np.arange(components) + 0.5) / components)
    centre = np.clip(centre + np.linspace(-1e-3, 1e-3, components), 0.02, 0.98)
    return BetaMixture(np.full((1, components), 1 / components), 2.0 * centre[None], 2.0 * (1 - centre)[None])


def _cumulative(values: Array, count: Ints) -> Array:
    """[..., U] Σ_{j<count} values[..., j], for values [..., J]."""
    padded = np.concatenate([np.zeros((*values.shape[:-1], 1)), values.cumsum(-1)], -1)
    return np.asarray(padded[..., count])


def _log_beta_binomial(a: Array, b: Array, solved: Ints, sampled: Ints) -> Array:
    """[..., K, U] log of the Beta-binomial without the binomial coefficient, which EM does not need."""
    j = np.arange(int(sampled.max()), dtype=np.float64)
    right = _cumulative(np.log(a[..., None] + j), solved)
    wrong = _cumulative(np.log(b[..., None] + j), sampled - solved)
    return np.asarray(right + wrong - _cumulative(np.log((a + b)[..., None] + j), sampled))


def _log_choose(n: int, k: int) -> float:
    k = min(k, n - k)
    return float(np.log(np.arange(n - k + 1, n + 1)).sum() - np.log(np.arange(1, k + 1)).sum())


def _log_likelihood(mixture: BetaMixture, solved: Ints, sampled: Ints, weight: Array) -> Array:
    joint = np.log(mixture.weight)[..., None] + _log_beta_binomial(mixture.a, mixture.b, solved, sampled)
    return np.asarray((weight * np.logaddexp.reduce(joint, axis=-2)).sum(-1))


def _em(start: BetaMixture, solved: Ints, sampled: Ints, weight: Array, steps: int) -> BetaMixture:
    """EM on [samples, components] mixtures at once; weight [samples, distinct counts]."""
    w, a, b = start.weight, start.a, start.b
    j = np.arange(int(sampled.max()), dtype=np.float64)
    for _ in range(steps):
        joint = np.log(w)[..., None] + _log_beta_binomial(a, b, solved, sampled)
        share = np.exp(joint - np.logaddexp.reduce(joint, axis=-2)[..., None, :]) * weight[..., None, :]
        total = share.sum(-1)
        w = np.maximum(total / total.sum(-1, keepdims=True), 1e-9)
        w = w / w.sum(-1, keepdims=True)
        for _ in range(3):
            below = (share * _cumulative(1 / ((a + b)[..., None] + j), sampled)).sum(-1)
            right = (share * _cumulative(1 / (a[..., None] + j), solved)).sum(-1)
            wrong = (share * _cumulative(1 / (b[..., None] + j), sampled - solved)).sum(-1)
            below = np.maximum(below, 1e-300)
            a, b = np.clip(a * right / below, SMALLEST, LARGEST), np.clip(b * wrong / below, SMALLEST, LARGEST)
    return BetaMixture(w, a, b)
