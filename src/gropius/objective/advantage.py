"""Per-group arithmetic: rewards → baseline → scale → whitening. NumPy float64, no torch.

Sums are exactly rounded (`math.fsum`), so the order of siblings and groups cannot change a bit of the result.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from gropius.errors import ObjectiveError
from gropius.objective.spec import Advantage
from gropius.objective.subsets import FACTORS, TRANSFORMS, best_without, runner_up, subset_std

Array = NDArray[np.float64]
Indices = NDArray[np.int64]
Members = list[Indices]
BaselineRule = Callable[[Array, Members, "RewardTable"], Array]
ROUNDING = 1e-12
SQUARABLE = 1e140
LARGEST = sys.float_info.max


@dataclass(frozen=True, eq=False)
class RewardTable:
    """The rewards of one batch, with everything a baseline may look at.

    rewards [n, parts]: one column for `sum_then_normalise` (already weighted and summed), one a part otherwise; NaN
    where a part does not apply to a response: it then takes no part in that part's statistics and gets 0 from it.
    part_weights [parts]. group [n]: index of the response's group. length_tokens [n]: loss tokens. valid [n]:
    takes part in the statistics; the others get 0. greedy [groups]: the greedy response's reward, for that baseline.
    names [groups]: group ids, for messages. original [n]: the rewards before the transform, where there is one.
    axis: of the objective.
    """

    rewards: Array
    part_weights: Array
    group: Indices
    length_tokens: Indices
    valid: NDArray[np.bool_]
    names: Sequence[str]
    greedy: Array | None = None
    original: Array | None = None
    axis: Advantage = field(default_factory=Advantage)

    @property
    def totals(self) -> Array:
        """[n] Σ weight · part over the parts that apply."""
        return np.array([math.fsum(row[~np.isnan(row)]) for row in self.rewards * self.part_weights], np.float64)

    def part(self, p: int) -> RewardTable:
        """The table of one part alone: responses it does not apply to are not valid."""
        column = self.rewards[:, p]
        absent = np.isnan(column)
        values = np.where(absent, 0.0, column)[:, None]
        return replace(self, rewards=values, part_weights=np.ones(1), valid=self.valid & ~absent)


@dataclass(frozen=True, eq=False)
class Credit:
    """Advantages with the intermediate values that made them; all float64.

    advantage, baseline, centred, scale [n]. With several parts normalised apart, baseline and scale are those of the
    weighted sum, for information only.
    """

    advantage: Array
    baseline: Array
    centred: Array
    scale: Array


def mean(values: Sequence[float] | Array) -> float:
    """Σ v / n from an exactly rounded sum; the value itself when all are equal. Errors: ObjectiveError when empty.

    >>> mean([0.1, 0.1, 0.1]) == 0.1
    True
    """
    if len(values) == 0:
        raise ObjectiveError("an empty group has no mean; a group needs at least one response")
    if max(values) == min(values):
        return float(values[0])
    if max(abs(float(v)) for v in values) > LARGEST / len(values):
        return math.fsum(float(v) / len(values) for v in values)
    return math.fsum(values) / len(values)


def std(values: Sequence[float] | Array, ddof: int) -> float:
    """√(Σ (v − mean)² / (n − ddof)); exactly 0 when all values are equal or when n ≤ ddof.

    >>> std([1, 1, 0, 0], ddof=0)
    0.5
    >>> std([0.7] * 7, ddof=1)
    0.0
    """
    if len(values) <= ddof or max(values) == min(values):
        return 0.0
    size = max(abs(float(v)) for v in values)
    if not 1.0 / SQUARABLE < size < SQUARABLE:  # squares would leave the range of a float
        return size * std([float(v) / size for v in values], ddof)
    centre = mean(values)
    return math.sqrt(math.fsum((float(v) - centre) ** 2 for v in values) / (len(values) - ddof))


def _no_baseline(rewards: Array, members: Members, table: RewardTable) -> Array:
    return np.zeros_like(rewards)


def _batch_mean(rewards: Array, members: Members, table: RewardTable) -> Array:
    valid = rewards[table.valid]
    return np.full_like(rewards, mean(valid) if len(valid) else 0.0)


def _per_group(rule: Callable[[Array], Array]) -> BaselineRule:
    def _apply(rewards: Array, members: Members, table: RewardTable) -> Array:
        out = np.zeros_like(rewards)
        for index in members:
            values = rewards[index]
            out[index] = values if values.max() == values.min() else rule(values)
        return out

    return _apply


def _leave_one_out(values: Array) -> Array:
    total = math.fsum(values)
    return np.array([(total - v) / (len(values) - 1) for v in values])


def _length_weighted(rewards: Array, members: Members, table: RewardTable) -> Array:
    out = np.zeros_like(rewards)
    for index in members:
        lengths = table.length_tokens[index].astype(np.float64)
        total = math.fsum(lengths)
        if total == 0 or rewards[index].max() == rewards[index].min():
            out[index] = mean(rewards[index])
        else:
            out[index] = math.fsum(lengths * rewards[index]) / total
    return out


def _greedy(rewards: Array, members: Members, table: RewardTable) -> Array:
    if table.greedy is None or not np.all(np.isfinite(table.greedy)):
        raise ObjectiveError('advantage.baseline = "greedy" needs the reward of a greedy response for every group')
    return table.greedy[table.group]


def _subset(rewards: Array, members: Members, table: RewardTable) -> Array:
    """The best of k − 1 others, in the units of the transform."""
    assert table.original is not None
    out, axis = np.zeros_like(rewards), table.axis
    for index in members:
        values = table.original[index]
        equal = values.max() == values.min()
        factor = FACTORS[axis.transform](len(index), axis.k)
        out[index] = rewards[index] if equal else factor * best_without(values, axis.k)
    return out


BASELINES: dict[str, BaselineRule] = {
    "none": _no_baseline,
    "batch_mean": _batch_mean,
    "group_mean": _per_group(lambda values: np.full_like(values, mean(values))),
    "leave_one_out": _per_group(_leave_one_out),
    "length_weighted": _length_weighted,
    "greedy": _greedy,
    "critic": _no_baseline,
    "optimal_token": _no_baseline,
    "runner_up": _per_group(runner_up),
    "subset": _subset,
}
TOKEN_BASELINES = ("critic", "optimal_token")  # subtracted token by token, in `steps` and `gae`
GROUP_SCALES = ("group_std", "group_mean", "subset_std")
GROUP_RELATIVE = ("group_mean", "leave_one_out", "length_weighted", "runner_up", "subset")


def _scale(axis: Advantage, rewards: Array, centred: Array, members: Members, table: RewardTable) -> Array:
    """[n] the divisor of each response, epsilon included; 1 without a scale."""
    out = np.ones_like(rewards)
    if axis.scale == "batch_std":
        of = rewards if axis.scale_of == "rewards" else centred
        out[:] = std(of[table.valid], axis.ddof) + axis.epsilon
    elif axis.scale == "group_std":
        for index in members:
            out[index] = std(rewards[index], axis.ddof) + axis.epsilon
    elif axis.scale == "subset_std":
        values = rewards if table.original is None else table.original
        for index in members:
            out[index] = subset_std(values[index], axis.k) + axis.epsilon
    elif axis.scale == "group_mean":
        for index in members:
            out[index] = mean(rewards[index]) + axis.epsilon
            if out[index[0]] <= 0 and np.ptp(rewards[index]) > 0:
                name = table.names[table.group[index[0]]]
                raise ObjectiveError(
                    f'group {name}: advantage.scale = "group_mean" divides by a mean of {out[index[0]]:g}; '
                    "it needs rewards that are never negative"
                )
    return out


def _one_reward(axis: Advantage, table: RewardTable) -> Credit:
    """Baseline and scale of a table with one column, its rewards transformed group by group first."""
    rewards, members = table.rewards[:, 0], group_members(table)
    if axis.transform != "none":
        original, rewards = rewards, rewards.copy()
        for index in members:
            rewards[index] = TRANSFORMS[axis.transform](original[index], axis.k)
        table = replace(table, original=original, axis=axis)
    baseline = BASELINES[axis.baseline](rewards, members, table)
    centred = np.where(table.valid, rewards - baseline, 0.0)
    equal = np.zeros(len(rewards), np.bool_)
    for index in members:
        equal[index] = rewards[index].max() == rewards[index].min()
    if axis.baseline in GROUP_RELATIVE:
        centred[equal] = 0.0
    scale = _scale(axis, rewards, centred, members, table)
    dead = (scale == 0.0) | (equal if axis.scale in GROUP_SCALES else False)
    advantage = np.where(dead, 0.0, centred / np.where(dead, 1.0, scale))
    return Credit(advantage, baseline, centred, scale)


def group_members(table: RewardTable) -> Members:
    """Indices of the valid responses of every group that has some."""
    order = [np.flatnonzero((table.group == g) & table.valid) for g in range(len(table.names))]
    return [index for index in order if len(index)]


def advantages(axis: Advantage, table: RewardTable) -> Credit:
    """A_i = (R_i − b_i) / (s_i + ε) for every valid response; 0 for the others.

    A group whose valid rewards are all equal (max == min) gets exactly 0 under a group baseline or a group scale; a
    singleton gets 0 there. With `normalise_then_sum` each part is treated so, then summed by weight. `rescale_live`
    multiplies by B/(B − M). Whitening is a later step (`whiten`), after a KL in the reward.
    Errors: ObjectiveError for leave_one_out with a singleton, a missing greedy reward, a non-positive group mean scale.
    A baseline that differs from token to token (critic, optimal_token) is 0 here and subtracted in `steps` and `gae`.
    Sources: DeepSeekMath 4.1.2; RLOO 2.3; OPO; ReMax; Lite PPO; MaxRL; GDPO; 2508.10751; PKPO; 2503.19595.
    """
    members = group_members(table)
    if axis.baseline == "leave_one_out":
        for index in members:
            if len(index) == 1:
                raise ObjectiveError(
                    f"group {table.names[table.group[index[0]]]}: leave_one_out has no other response to compare with; "
                    'sample at least two, or write advantage.baseline = "group_mean"'
                )
    columns = [_one_reward(axis, table.part(p)) for p in range(table.rewards.shape[1])]
    if len(columns) == 1:
        credit = columns[0]
        if table.part_weights[0] != 1.0:
            credit = Credit(credit.advantage * table.part_weights[0], credit.baseline, credit.centred, credit.scale)
    else:
        summed = [
            sum(w * getattr(c, name) for w, c in zip(table.part_weights, columns, strict=True))
            for name in ("advantage", "baseline", "centred", "scale")
        ]
        credit = Credit(*(np.asarray(s, np.float64) for s in summed))
    if axis.rescale_live:
        credit = Credit(credit.advantage * _live_factor(members, table), credit.baseline, credit.centred, credit.scale)
    return credit


def _live_factor(members: Members, table: RewardTable) -> float:
    """α = B/(B − M), M responses in groups of equal rewards; 1 when no group is live. Source: GPG 2504.02546."""
    total = sum(len(index) for index in members)
    live = sum(len(index) for index in members if _differs(table.rewards[index]))
    return total / live if live else 1.0


def _differs(rewards: Array) -> bool:
    """Does any part tell the group's responses apart? rewards [m, parts], NaN where a part does not apply."""
    present = [column[~np.isnan(column)] for column in rewards.T]
    return any(len(column) > 0 and column.max() > column.min() for column in present)


def whiten(axis: Advantage, per_token: Sequence[Array], valid: NDArray[np.bool_]) -> list[Array]:
    """Second, batch-level centring and scaling: (A − mean) / (std + ε) over responses or over loss tokens.

    per_token: one [L_i] array a response, its loss tokens only. "sequences" takes one value a response (the tokens of a
    response share it). All values equal give exactly 0. A mean that is rounding residue (below 1e-12 of the largest
    value) counts as 0, so that a dead group stays exactly 0 when group centring made the batch mean 0 already.
    Source: REINFORCE++ 2501.03262 eqs. 5 and 7.
    """
    if axis.whiten == "none":
        return list(per_token)
    chosen = [a for a, ok in zip(per_token, valid, strict=True) if ok and len(a)]
    pool = np.array([a[0] for a in chosen]) if axis.whiten == "sequences" else np.concatenate([*chosen, np.zeros(0)])
    if len(pool) == 0 or pool.max() == pool.min():
        return [np.zeros_like(a) for a in per_token]
    centre = mean(pool)
    if abs(centre) <= ROUNDING * np.abs(pool).max():
        centre = 0.0
    spread = std(pool, axis.ddof) + axis.epsilon
    return [(a - centre) / spread if ok else np.zeros_like(a) for a, ok in zip(per_token, valid, strict=True)]
