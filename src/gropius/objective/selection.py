"""From scored responses to advantages and weights: who takes part, what it is worth, what each token weighs.

`assign` is the one place where the torch-free axes meet. Training, `explain` and the audit all go through it. No torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from gropius.errors import ObjectiveError
from gropius.objective.advantage import Credit, RewardTable, advantages, mean, std, whiten
from gropius.objective.aggregate import Layout, token_weights
from gropius.objective.spec import Kl, Objective, Selection
from gropius.types import Status

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]
GroupState = Literal["informative", "all_failed", "all_solved", "all_equal", "singleton", "too_few_valid"]
DEAD: tuple[GroupState, ...] = ("all_failed", "all_solved", "all_equal")


@dataclass(frozen=True, eq=False)
class Response:
    """One response as the objective sees it. Every per-token array has length T (environment tokens included).

    group: explicit id. reward: a number, named parts, or None when void. mask: True at the model's own tokens.
    raw: the unshaped task metric that selection looks at; None means the reward. advantage: overrides the computed one,
    a number or one per token. anchor, reference: log-probabilities, for a KL in the reward. entropy: of the anchor, for
    `entropy_top`. kept: False where the sampler correction masked the token, for `count_corrected = false`.
    """

    group: str
    reward: float | Mapping[str, float] | None
    mask: Mask
    status: Status = "scored"
    truncated: bool = False
    raw: float | None = None
    advantage: float | Array | None = None
    anchor: Array | None = None
    reference: Array | None = None
    entropy: Array | None = None
    kept: Mask | None = None
    greedy_reward: float | None = None


@dataclass(frozen=True, eq=False)
class Assigned:
    """What one response brings to the loss. advantage, weight, keep [T]; value: the response's advantage before any
    per-token part; skipped: adds nothing to the gradient and need not be run."""

    advantage: Array
    weight: Array
    keep: Mask
    value: float
    skipped: bool
    reward: float | None


@dataclass(frozen=True, eq=False)
class GroupSummary:
    """One group: its id, its statistics over valid shaped rewards, its state, and whether selection dropped it."""

    id: str
    mean: float | None
    std: float | None
    state: GroupState
    dropped: bool


@dataclass(frozen=True, eq=False)
class Assignment:
    """Responses in the order given, groups in order of first appearance, and the denominators."""

    responses: list[Assigned]
    groups: list[GroupSummary]
    layout: Layout
    credit: Credit


def group_state(raw: Sequence[float], siblings: int) -> GroupState:
    """Name the group by the raw metric of its valid siblings.

    all_failed: equal and not above 0; all_solved: equal to 1; all_equal: equal to anything else; singleton: one sibling
    by design; too_few_valid: fewer than two valid of several.

    >>> group_state([0, 0], 2), group_state([1, 1], 2), group_state([0.5, 0.5], 2), group_state([1], 4)
    ('all_failed', 'all_solved', 'all_equal', 'too_few_valid')
    """
    if siblings == 1 and len(raw) == 1:
        return "singleton"
    if len(raw) < 2:
        return "too_few_valid"
    if max(raw) != min(raw):
        return "informative"
    if raw[0] <= 0:
        return "all_failed"
    return "all_solved" if raw[0] == 1 else "all_equal"


def overlong_penalty(length_tokens: int, axis: Selection) -> float:
    """DAPO eq. 13: 0 up to max − cache, then linear to −1 at max, −1 beyond. length: generated tokens.

    >>> overlong_penalty(18432, Selection(truncated="soft_penalty", overlong_max=20480, overlong_cache=4096))
    -0.5
    """
    start = axis.overlong_max - axis.overlong_cache
    if length_tokens <= start:
        return 0.0
    return max((start - length_tokens) / axis.overlong_cache, -1.0)


def sampled_kl(axis: Kl, log_ratio: Array) -> Array:
    """The estimator's value per token, x = log π_anchor − log π_ref, a constant (for a KL in the reward)."""
    x = np.clip(log_ratio, -axis.clamp, axis.clamp) if axis.clamp else log_ratio
    return np.asarray(SAMPLED[axis.estimator](x), np.float64)


SAMPLED: dict[str, Callable[[Array], Array]] = {
    "k1": lambda x: x,
    "k2": lambda x: 0.5 * x * x,
    "k3": lambda x: np.expm1(-x) + x,
    "abs": lambda x: np.abs(x),
}


def entropy_threshold(entropies: Sequence[Array], top: float) -> float:
    """The (1 − top) quantile, linear interpolation, of all loss tokens' entropies. Source: 2506.01939."""
    pool = np.concatenate(list(entropies)) if entropies else np.zeros(0)
    return float(np.quantile(pool, 1.0 - top)) if len(pool) else -math.inf


def assign(
    objective: Objective, responses: Sequence[Response], part_weights: Mapping[str, float] | None = None
) -> Assignment:
    """Advantages, weights and skips of one optimiser batch.

    Order: void and excluded rows leave; soft penalty and in-reward KL shape the rewards; dead groups are found on the
    raw metric and dropped as declared; baseline and scale; KL to go; whitening; weights; skips.
    A group with fewer than two valid siblings is dropped. Errors: ObjectiveError naming group and response.
    """
    names = list(dict.fromkeys(r.group for r in responses))
    group = _index(responses, names)
    valid = np.array([r.status != "void" for r in responses], np.bool_)
    _check(objective, responses)
    if objective.selection.truncated == "exclude_from_baseline":
        valid &= np.array([not r.truncated for r in responses], np.bool_)
    states = _states(responses, (group, names, valid), part_weights or {})
    drops = objective.selection.dead != "keep"
    dead = np.array([drops and s in DEAD for s in states], np.bool_)
    dropped = dead | np.array([s == "too_few_valid" for s in states], np.bool_)
    live = valid & np.logical_not(dropped[group])
    table = _rewards(objective, responses, part_weights or {}, (group, names, live))
    credit = advantages(objective.advantage, table)
    per_token = _per_token(objective, responses, credit, live)
    countable = live | (valid & dead[group]) if objective.aggregate.count_dead else live
    layout = _layout(objective, responses, (live, countable, group))
    weights = token_weights(objective.aggregate, layout)
    keep = _entropy_keep(objective, responses, layout)
    totals = table.totals
    assigned = []
    for i, response in enumerate(responses):
        advantage = np.zeros(len(response.mask))
        advantage[response.mask] = per_token[i]
        idle = not np.any(weights[i] * advantage * keep[i])
        skipped = idle and not (objective.kl_in_loss and np.any(weights[i]))
        reward = float(totals[i]) if response.status != "void" else None
        value = float(per_token[i][0]) if len(per_token[i]) else float(credit.advantage[i])
        assigned.append(Assigned(advantage, weights[i], keep[i], value, skipped, reward))
    summaries = _summaries(objective.advantage.ddof, table, valid, zip(states, dropped.tolist(), strict=True))
    return Assignment(assigned, summaries, layout, credit)


def _index(responses: Sequence[Response], names: Sequence[str]) -> NDArray[np.int64]:
    where = {name: i for i, name in enumerate(names)}
    return np.array([where[r.group] for r in responses], np.int64)


def _check(objective: Objective, responses: Sequence[Response]) -> None:
    """Refuse non-finite rewards and missing arrays, naming the group and the response's place in it."""
    seen: dict[str, int] = {}
    for r in responses:
        seen[r.group] = seen.get(r.group, -1) + 1
        where = f"group {r.group}, response {seen[r.group]}"
        if r.status == "void":
            continue
        if r.reward is None:
            raise ObjectiveError(f'{where}: reward is null but status is "{r.status}"; write a number or status "void"')
        for name, value in _parts(r.reward).items():
            if not math.isfinite(value):
                raise ObjectiveError(f"{where}: reward {name or 'value'} is {value}; write a finite number")
        if objective.kl.estimator != "none" and objective.kl.place == "reward":
            for name in ("anchor", "reference"):
                if getattr(r, name) is None:
                    raise ObjectiveError(f'{where}: kl.place = "reward" needs the {name} log-probabilities')
        if objective.selection.entropy_top < 1 and r.entropy is None:
            raise ObjectiveError(f"{where}: selection.entropy_top needs the anchor's entropy of every token")


def _parts(reward: float | Mapping[str, float] | None) -> dict[str, float]:
    if reward is None:
        return {}
    return {k: float(v) for k, v in reward.items()} if isinstance(reward, Mapping) else {"": float(reward)}


def _total(response: Response, part_weights: Mapping[str, float]) -> float:
    """The weighted sum of the reward's parts, exactly rounded: equal parts give equal rewards in any order."""
    try:
        total = math.fsum(part_weights.get(name, 1.0) * value for name, value in _parts(response.reward).items())
    except OverflowError:
        total = math.inf
    if not math.isfinite(total):
        raise ObjectiveError(
            f"group {response.group}: the weighted sum of a reward's parts overflows; write smaller ones"
        )
    return total


def _states(
    responses: Sequence[Response],
    where: tuple[NDArray[np.int64], list[str], Mask],
    part_weights: Mapping[str, float],
) -> list[GroupState]:
    group, names, valid = where
    raws: list[list[float]] = [[] for _ in names]
    siblings = [0] * len(names)
    for r, g, ok in zip(responses, group.tolist(), valid.tolist(), strict=True):
        siblings[g] += 1
        if ok:
            raws[g].append(r.raw if r.raw is not None else _total(r, part_weights))
    return [group_state(raw, count) for raw, count in zip(raws, siblings, strict=True)]


def _rewards(
    objective: Objective,
    responses: Sequence[Response],
    part_weights: Mapping[str, float],
    where: tuple[NDArray[np.int64], list[str], Mask],
) -> RewardTable:
    """The shaped rewards: one column, or one a part when parts are normalised apart."""
    group, names, live = where
    if objective.advantage.combine == "sum_then_normalise":
        weights = np.ones(1)
        table = np.array([[_total(r, part_weights)] for r in responses], np.float64).reshape(len(responses), 1)
    else:
        parts = list(dict.fromkeys(name for r in responses for name in _parts(r.reward))) or [""]
        weights = np.array([part_weights.get(name, 1.0) for name in parts], np.float64)
        rows = [[_parts(r.reward).get(name, math.nan) for name in parts] for r in responses]
        table = np.array(rows, np.float64).reshape(len(responses), len(parts))
    for i, r in enumerate(responses):
        if r.status == "void":
            continue
        if objective.selection.truncated == "soft_penalty":
            table[i, 0] += overlong_penalty(int(r.mask.sum()), objective.selection)
        if (
            objective.kl.place == "reward"
            and objective.kl.estimator != "none"
            and objective.kl.reward_form == "sequence"
        ):
            table[i, 0] -= objective.kl.coefficient * math.fsum(_reward_kl(objective, r))
    lengths = np.array([int(r.mask.sum()) for r in responses], np.int64)
    greedy = np.full(len(names), np.nan)
    for r, g in zip(responses, group.tolist(), strict=True):
        if r.greedy_reward is not None:
            greedy[g] = r.greedy_reward
    return RewardTable(table, weights, group, lengths, live, names, greedy)


def _reward_kl(objective: Objective, response: Response) -> Array:
    """[L] the KL estimate at the response's own tokens, anchor against reference."""
    assert response.anchor is not None and response.reference is not None
    return sampled_kl(objective.kl, response.anchor[response.mask] - response.reference[response.mask])


def _per_token(objective: Objective, responses: Sequence[Response], credit: Credit, live: Mask) -> list[Array]:
    """[L_i] advantages at the response's own tokens: broadcast, minus KL to go, whitened, then overrides."""
    to_go = objective.kl.place == "reward" and objective.kl.estimator != "none" and objective.kl.reward_form == "to_go"
    out = []
    for r, value, ok in zip(responses, credit.advantage, live, strict=True):
        tokens = np.full(int(r.mask.sum()), value)
        if to_go and ok:
            tokens = tokens - objective.kl.coefficient * np.cumsum(_reward_kl(objective, r)[::-1])[::-1]
        out.append(tokens)
    out = whiten(objective.advantage, out, live)
    for i, r in enumerate(responses):
        if r.advantage is not None and live[i]:
            given = np.asarray(r.advantage, np.float64)
            out[i] = np.full(int(r.mask.sum()), float(given)) if given.ndim == 0 else given[r.mask]
    return out


def _layout(objective: Objective, responses: Sequence[Response], where: tuple[Mask, Mask, NDArray[np.int64]]) -> Layout:
    """Which tokens are trained and which are counted, as the named fields say. where: (live, countable, group)."""
    live, countable, group = where
    axis = objective.aggregate
    trained, counted, in_count = [], [], []
    for i, r in enumerate(responses):
        kept = r.kept if r.kept is not None and not axis.count_corrected else np.ones(len(r.mask), np.bool_)
        masked = objective.selection.truncated == "mask_loss" and r.truncated
        present = bool(countable[i])
        own = r.mask & kept
        trained.append(own & bool(live[i]) & (not masked))
        counted.append(own & present & (axis.count_masked or not masked))
        in_count.append(present and (axis.count_masked or bool(counted[-1].any())))
    return Layout(trained, counted, np.array(in_count, np.bool_), group)


def _entropy_keep(objective: Objective, responses: Sequence[Response], layout: Layout) -> list[Mask]:
    """[T_i] True where the policy term stays: the top share of the batch's loss tokens by anchor entropy."""
    top = objective.selection.entropy_top
    if top >= 1:
        return [np.ones(len(r.mask), np.bool_) for r in responses]
    pool = [r.entropy[t] for r, t in zip(responses, layout.trained, strict=True) if r.entropy is not None]
    threshold = entropy_threshold(pool, top)
    return [
        np.ones(len(r.mask), np.bool_) if r.entropy is None else np.asarray(r.entropy >= threshold) for r in responses
    ]


def _summaries(
    ddof: int, table: RewardTable, valid: Mask, fates: Iterable[tuple[GroupState, bool]]
) -> list[GroupSummary]:
    totals = table.totals
    out = []
    for g, (name, (state, dropped)) in enumerate(zip(table.names, fates, strict=True)):
        rewards = totals[(table.group == g) & valid]
        centre = mean(rewards) if len(rewards) else None
        spread = std(rewards, ddof) if len(rewards) else None
        out.append(GroupSummary(name, centre, spread, state, dropped))
    return out
