"""Group size against number of prompts at a fixed budget: what each choice buys, and which one to take. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gropius.errors import UsageError
from gropius.plan.beta import BetaMixture, Fit, fit
from gropius.plan.counts import PassCounts
from gropius.plan.signal import estimator, signal

Array = NDArray[np.float64]
GROUP_SIZES = (2, 4, 8, 16, 32, 64)
ENOUGH_LIVE = 0.5
ENOUGH_SIGNAL = 0.7


@dataclass(frozen=True)
class Interval:
    """A number with the 95 % interval that the measured prompts leave open."""

    value: float
    low: float
    high: float

    def as_dict(self) -> dict[str, float]:
        """For JSON."""
        return {"value": self.value, "low": self.low, "high": self.high}


@dataclass(frozen=True)
class Budget:
    """What a step may spend: responses, or sampled tokens at a mean response length."""

    amount: int
    unit: str = "responses"
    response_tokens: float = 0.0
    grow_limit: int = 64

    @property
    def responses(self) -> int:
        """Responses a step. Errors: UsageError when the budget cannot be counted in responses."""
        if self.unit == "responses":
            return self.amount
        if self.unit != "tokens":
            raise UsageError(f'a budget is counted in "responses" or "tokens", not {self.unit!r}')
        if self.response_tokens <= 0:
            raise UsageError("a budget of tokens needs the mean length of a response; give --response-tokens")
        return int(self.amount / self.response_tokens)


@dataclass(frozen=True)
class Row:
    """One group size at the budget.

    dead = all_failed + all_solved, shares of groups. live_prompts: a step, with the uncertainty of the fit;
    live_spread: the further standard deviation from step to step. signal, variance: of the step's mean gradient in the
    prompts' logits, exact for binary rewards. efficiency: squared signal-to-noise a response, relative to the best row.
    refill_factor: prompts sampled for one live prompt. refill_responses: a step with every group live. grow_responses:
    a step where all-failed groups are grown to the limit; grow_live: their live share then.
    """

    group_size: int
    prompts: int
    dead: Interval
    all_failed: Interval
    all_solved: Interval
    live_prompts: Interval
    live_spread: float
    signal: Interval
    variance: float
    efficiency: float
    refill_factor: Interval
    refill_responses: float
    grow_responses: float
    grow_live: float

    def as_dict(self) -> dict[str, Any]:
        """For JSON; an infinite factor is null."""
        out: dict[str, Any] = {}
        for name, value in vars(self).items():
            plain = value.as_dict() if isinstance(value, Interval) else value
            out[name] = _strict(plain)
        return out


@dataclass(frozen=True)
class Plan:
    """Every row, the group size recommended, and why. pass_rate: of the fitted population."""

    rows: tuple[Row, ...]
    recommended: int
    reasons: tuple[str, ...]
    pass_rate: Interval
    fit: Fit
    budget: Budget
    scale: str

    @property
    def row(self) -> Row:
        """The recommended row."""
        return next(row for row in self.rows if row.group_size == self.recommended)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        m = self.fit.mixture
        return {
            "budget": {"amount": self.budget.amount, "unit": self.budget.unit, "responses": self.budget.responses},
            "scale": self.scale,
            "measured_prompts": self.fit.prompts,
            "measured_rate": self.fit.rate,
            "pass_rate": self.pass_rate.as_dict(),
            "mixture": [
                {"weight": float(w), "a": float(a), "b": float(b)} for w, a, b in zip(m.weight, m.a, m.b, strict=True)
            ],
            "rows": [row.as_dict() for row in self.rows],
            "recommended": {"group_size": self.recommended, "prompts": self.row.prompts, "reasons": list(self.reasons)},
        }


def plan_split(
    measured: PassCounts | Fit,
    budget: Budget,
    group_sizes: Sequence[int] = GROUP_SIZES,
    scale: str = "group_std",
    seed: int = 0,
) -> Plan:
    """Weigh group size against number of prompts at a fixed budget of responses or tokens.

    scale: what divides the advantage (`signal.ESTIMATORS`). Recommended is the smallest group size that brings at
    least half as many groups to life as the largest one tried, and at least 70 % of the best signal-to-noise ratio a
    response buys: beyond that, more prompts are worth more than more siblings.
    Errors: UsageError for a budget that does not pay for two groups of two.
    """
    estimator(scale)
    fitted = measured if isinstance(measured, Fit) else fit(measured, seed=seed)
    sizes = sorted({g for g in group_sizes if g >= 2 and budget.responses // g >= 1})
    if not sizes:
        raise UsageError(
            f"a budget of {budget.responses} responses does not pay for one group of {min(group_sizes, default=2)}; "
            "raise it, or name smaller group sizes (at least 2)"
        )
    raw = {g: float(signal(fitted.mixture, g, scale).efficiency) for g in sizes}
    best = max(raw.values()) or 1.0
    rows = tuple(_row(fitted, g, budget, scale, raw[g] / best) for g in sizes)
    recommended = _choose(rows)
    rate = _interval(fitted.mixture.mean, fitted.samples.mean)
    return Plan(rows, recommended, _reasons(rows, recommended, fitted, budget), rate, fitted, budget, scale)


def _row(fitted: Fit, group: int, budget: Budget, scale: str, efficiency: float) -> Row:
    one, many = fitted.mixture, fitted.samples
    prompts = budget.responses // group
    dead, deads = float(one.dead(group)), many.dead(group)
    live = 1 - dead
    step = signal(one, group, scale)
    grown, extra = _grow(one, group, max(budget.grow_limit, group))
    factor = 1 / live if live > 1e-12 else np.inf
    return Row(
        group_size=group,
        prompts=prompts,
        dead=_interval(dead, deads),
        all_failed=_interval(one.all_failed(group), many.all_failed(group)),
        all_solved=_interval(one.all_solved(group), many.all_solved(group)),
        live_prompts=_interval(prompts * live, prompts * (1 - deads)),
        live_spread=float(np.sqrt(prompts * live * dead)),
        signal=_interval(step.mean, signal(many, group, scale).mean),
        variance=float(step.variance) / prompts,
        efficiency=efficiency,
        refill_factor=_interval(factor, 1 / np.maximum(1 - deads, 1e-12)),
        refill_responses=factor * prompts * group,
        grow_responses=prompts * (group + extra),
        grow_live=grown,
    )


def _grow(mixture: BetaMixture, group: int, limit: int) -> tuple[float, float]:
    """Live share and expected extra responses a group when all-failed groups are grown by G at a time to `limit`."""
    sizes = list(range(group, limit, group))
    extra = sum(min(group, limit - size) * float(mixture.all_failed(size)) for size in sizes)
    return float(1 - mixture.all_solved(group) - mixture.all_failed(limit)), extra


def _interval(value: Array | float, samples: Array) -> Interval:
    low, high = np.quantile(samples, [0.025, 0.975])
    return Interval(float(value), min(float(low), float(value)), max(float(high), float(value)))


def _choose(rows: Sequence[Row]) -> int:
    most = max(1 - row.dead.value for row in rows)
    for row in rows:
        if 1 - row.dead.value >= ENOUGH_LIVE * most and row.efficiency >= ENOUGH_SIGNAL:
            return row.group_size
    return max(rows, key=lambda row: (row.efficiency, -row.group_size)).group_size


def _reasons(rows: Sequence[Row], recommended: int, fitted: Fit, budget: Budget) -> tuple[str, ...]:
    """Why this size, what the neighbours cost, and what to do about the dead groups that remain."""
    row = next(r for r in rows if r.group_size == recommended)
    largest = rows[-1]
    out = [
        f"{row.prompts} prompts x {row.group_size}: {1 - row.dead.value:.0%} of groups are live "
        f"({row.live_prompts.value:.1f} prompts a step, {row.live_prompts.low:.1f} to {row.live_prompts.high:.1f}); "
        f"the largest size tried, {largest.group_size}, would reach {1 - largest.dead.value:.0%} "
        f"but only {largest.live_prompts.value:.1f} prompts"
    ]
    smaller = [r for r in rows if r.group_size < recommended]
    if smaller:
        s = smaller[-1]
        out.append(
            f"{s.group_size} is too small: {s.dead.value:.0%} of its groups are dead and a response buys "
            f"{s.efficiency:.0%} of the best signal-to-noise ratio"
        )
    if row.dead.value > 0.25:
        failed, solved = row.all_failed.value, row.all_solved.value
        out.append(_dead_advice(row, failed, solved))
    if fitted.prompts < 50:
        out.append(
            f"only {fitted.prompts} prompts were measured: the intervals are wide, measure more before a long run"
        )
    return tuple(out)


def _dead_advice(row: Row, failed: float, solved: float) -> str:
    if row.refill_factor.value > 20:
        factor = row.refill_factor.value
        return f"{row.dead.value:.0%} of groups stay dead: refilling would sample {factor:.0f}x; change the tasks"
    text = (
        f"{failed:.0%} all-failed, {solved:.0%} all-solved: refill samples {row.refill_factor.value:.2f}x the responses"
    )
    if failed > solved:
        extra = row.grow_responses / (row.prompts * row.group_size)
        return text + f", grow {extra:.2f}x and lifts the live share to {row.grow_live:.0%}"
    return text + "; all-solved groups cannot be grown, retire those prompts"


def _strict(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _strict(v) for k, v in value.items()}
    return None if isinstance(value, float) and not np.isfinite(value) else value


@dataclass(frozen=True)
class Phase:
    """From `step` on: this group size and number of prompts. pass_rate: of the fitted population, 95 % interval of the
    prompts measured. measured: False for an extrapolated phase.
    """

    step: int
    pass_rate: Interval
    group_size: int
    prompts: int
    measured: bool

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**vars(self), "pass_rate": self.pass_rate.as_dict()}


def schedule(
    measured: PassCounts, budget: Budget, group_sizes: Sequence[int] = GROUP_SIZES, windows: int = 4, seed: int = 0
) -> tuple[Phase, ...]:
    """A group size for each stretch of training, from the trend of pass rates.

    The recorded steps are cut into windows, each fitted and planned on its own; two further windows are extrapolated
    by a straight line through the logit of the mean pass rate, which moves every component's mean and keeps its
    concentration.
    Phases that keep the group size stay in the answer; `changes` leaves them out. Without at least two different steps
    there is no trend and the answer is one phase.
    """
    order = np.unique(measured.step)
    parts = np.array_split(order, min(windows, len(order)))
    fits = [fit(measured.of(np.isin(measured.step, part)), draws=20, seed=seed) for part in parts]
    phases = [_phase(int(part[0]), f, budget, group_sizes, True) for part, f in zip(parts, fits, strict=True)]
    if len(parts) >= 2:
        middle = np.array([float(part.mean()) for part in parts])
        rates = np.clip([float(f.mixture.mean) for f in fits], 1e-3, 1 - 1e-3)
        slope = float(np.polyfit(middle, np.log(rates / (1 - rates)), 1)[0])
        width = float(middle[-1] - middle[0]) / (len(parts) - 1)
        for ahead in (1, 2):
            moved = _shift(fits[-1], slope * width * ahead)
            phases.append(_phase(int(order[-1]) + 1 + int(width * (ahead - 1)), moved, budget, group_sizes, False))
    return tuple(phases)


def changes(phases: Sequence[Phase]) -> tuple[Phase, ...]:
    """The phases at which the group size changes, the first one always."""
    return tuple(p for i, p in enumerate(phases) if i == 0 or p.group_size != phases[i - 1].group_size)


def _phase(step: int, fitted: Fit, budget: Budget, group_sizes: Sequence[int], measured: bool) -> Phase:
    chosen = plan_split(fitted, budget, group_sizes)
    return Phase(step, chosen.pass_rate, chosen.recommended, chosen.row.prompts, measured)


def _shift(fitted: Fit, logits: float) -> Fit:
    """The fit with every component's mean moved in logit space."""

    def move(m: BetaMixture) -> BetaMixture:
        total = m.a + m.b
        mean = 1 / (1 + np.exp(-(np.log(m.a / m.b) + logits)))
        return BetaMixture(m.weight, mean * total, (1 - mean) * total)

    return Fit(move(fitted.mixture), move(fitted.samples), fitted.bic, fitted.prompts, fitted.rate)
