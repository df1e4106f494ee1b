"""From scored responses to advantages and weights: who takes part, what it is worth, what each token weighs.

`assign` is the one place where the torch-free axes meet. Training, `explain` and the audit all go through it. No torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from gropius.errors import ObjectiveError
from gropius.objective.advantage import Credit, RewardTable, advantages, mean, std, whiten
from gropius.objective.aggregate import Layout, token_weights
from gropius.objective.branches import Branches, branches_of
from gropius.objective.classify import classify
from gropius.objective.marks import covariance_marks, entropy_keep
from gropius.objective.marks import entropy_threshold as entropy_threshold
from gropius.objective.response import Array as Array
from gropius.objective.response import Assigned as Assigned
from gropius.objective.response import Assignment as Assignment
from gropius.objective.response import GroupState as GroupState
from gropius.objective.response import GroupSummary as GroupSummary
from gropius.objective.response import Mask as Mask
from gropius.objective.response import Response as Response
from gropius.objective.spec import Kl, Objective, Selection
from gropius.objective.steps import Scene, critic_credit, token_credit

DEAD: tuple[GroupState, ...] = ("all_failed", "all_solved", "all_equal")


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
    branches = branches_of(responses, group, live)
    scene = Scene(responses, table.rewards[:, 0], live, group)
    per_token, returns = _per_token(objective, scene, credit, branches)
    countable = live | (valid & dead[group]) if objective.aggregate.count_dead else live
    layout = _layout(objective, scene, countable, branches)
    weights = token_weights(objective.aggregate, layout)
    if objective.aggregate.shared == "each":
        weights = branches.times(weights)
    keep = entropy_keep(objective.selection, responses, layout.trained)
    totals = table.totals
    if objective.advantage.credit != "outcome":
        totals = totals + np.array([math.fsum(score for _, score in r.steps) for r in responses])
    assigned = []
    for i, response in enumerate(responses):
        advantage = np.zeros(len(response.mask))
        advantage[response.mask] = per_token[i]
        value = float(per_token[i][0]) if len(per_token[i]) else float(credit.advantage[i])
        reward = float(totals[i]) if response.status != "void" else None
        made = Assigned(advantage, weights[i], keep[i], value, False, reward, returns=returns[i])
        apart = None if branches.trains[i].all() else branches.trains[i]
        assigned.append(replace(made, trains=apart, demonstration=response.demonstration))
    right = [_right(objective, r, part_weights or {}) for r in responses]
    assigned = _marked(objective, scene, assigned, (layout, right))
    assigned = [replace(made, skipped=_skipped(objective, made)) for made in assigned]
    summaries = _summaries(objective.advantage.ddof, (table, totals), valid, zip(states, dropped.tolist(), strict=True))
    return Assignment(assigned, summaries, layout, credit)


def _skipped(objective: Objective, made: Assigned) -> bool:
    """True when a response adds nothing to the loss but a constant, so that it need not be run."""
    if np.any(made.weight * made.advantage * made.keep) or (made.penalised is not None and made.penalised.any()):
        return False
    beside = objective.kl_in_loss or objective.entropy_in_loss
    return not (beside and np.any(made.weight)) and not (made.imitation is not None and np.any(made.imitation))


def _marked(
    objective: Objective, scene: Scene, assigned: list[Assigned], of: tuple[Layout, Sequence[bool]]
) -> list[Assigned]:
    """What looks at the whole optimiser batch: marks by covariance, right against wrong, imitation of what is right."""
    axis, responses = objective.selection, scene.responses
    layout, right = of
    if axis.covariance != "none":
        logprobs = [_fresh(r, ok) for r, ok in zip(responses, scene.live, strict=True)]
        marks = covariance_marks(axis, logprobs, [a.advantage for a in assigned], layout.trained)
        if axis.covariance == "clip":
            assigned = [replace(a, keep=a.keep & ~m) for a, m in zip(assigned, marks, strict=True)]
        else:
            assigned = [replace(a, penalised=m) for a, m in zip(assigned, marks, strict=True)]
    if objective.surrogate.kind == "classify":
        found = classify(responses, right, layout, [a.weight for a in assigned], objective.surrogate.tau)
        assigned = [
            replace(a, advantage=slope, offset=value, value=float(slope[r.mask][0]) if r.mask.any() else 0.0)
            for a, r, slope, value in zip(assigned, responses, *found, strict=True)
        ]
    if objective.terms.imitation:
        own = [trained & good for trained, good in zip(layout.trained, right, strict=True)]
        tokens = sum(int(m.sum()) for m in own)
        share = objective.terms.imitation / tokens if tokens else 0.0
        assigned = [replace(a, imitation=np.where(m, share, 0.0)) for a, m in zip(assigned, own, strict=True)]
    return assigned


def _fresh(response: Response, live: bool) -> Array:
    if response.policy is None:
        if live:
            raise ObjectiveError(
                f"group {response.group}: selection.covariance needs the policy's log-probabilities before the loss"
            )
        return np.zeros(len(response.mask))
    return response.policy


def _right(objective: Objective, response: Response, part_weights: Mapping[str, float]) -> bool:
    """Is the response right: its raw metric, else its unshaped reward, at least `selection.correct`."""
    if response.status == "void":
        return False
    metric = _total(response, part_weights) if response.raw is None else response.raw
    return metric >= objective.selection.correct


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
    """The weighted sum of the reward's parts and the scores of its steps, exactly rounded, so in any order."""
    return _sum(response, part_weights, [score for _, score in response.steps])


def _sum(response: Response, part_weights: Mapping[str, float], scores: Sequence[float]) -> float:
    parts = [part_weights.get(name, 1.0) * value for name, value in _parts(response.reward).items()]
    try:
        total = math.fsum([*parts, *scores])
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
        with_steps = objective.advantage.credit == "outcome"
        sums = [_total(r, part_weights) if with_steps else _sum(r, part_weights, ()) for r in responses]
        table = np.array(sums, np.float64).reshape(len(responses), 1)
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


def _per_token(
    objective: Objective, scene: Scene, credit: Credit, branches: Branches
) -> tuple[list[Array], list[Array | None]]:
    """([L_i] advantages at own tokens, [T_i] returns of a critic): credit by position, minus KL to go, means over
    branches, whitening, then overrides."""
    axis, responses = objective.advantage, scene.responses
    form = objective.kl.reward_form if objective.kl.place == "reward" and objective.kl.estimator != "none" else ""
    returns: list[Array | None] = [None] * len(responses)
    out = token_credit(axis, scene, credit)
    for i, r in enumerate(responses):
        if not scene.live[i]:
            continue
        penalty = objective.kl.coefficient * _reward_kl(objective, r) if form in ("to_go", "token") else None
        if axis.baseline == "critic" and (r.values is not None or r.advantage is None):
            out[i], found = critic_credit(axis, r, float(scene.finals[i]), penalty)
            returns[i] = np.zeros(len(r.mask))
            returns[i][r.mask] = found  # type: ignore[index]
        elif penalty is not None:
            out[i] = out[i] - np.cumsum(penalty[::-1])[::-1]
    out = _whitened(objective, branches.merged(out, responses), scene, branches)
    for i, r in enumerate(responses):
        if r.advantage is not None and scene.live[i]:
            given = np.asarray(r.advantage, np.float64)
            out[i] = np.full(int(r.mask.sum()), float(given)) if given.ndim == 0 else given[r.mask]
    return out, returns


def _whitened(objective: Objective, per_token: list[Array], scene: Scene, branches: Branches) -> list[Array]:
    """Whitening over what is trained: a token that branches share counts once, and keeps one value in all of them."""
    if objective.advantage.whiten == "none" or not branches.shared:
        return whiten(objective.advantage, per_token, scene.live)
    drawn = branches.drawn(per_token, scene.responses)
    return branches.spread(whiten(objective.advantage, drawn, scene.live), scene.responses)


def _layout(objective: Objective, scene: Scene, countable: Mask, branches: Branches) -> Layout:
    """Which tokens are trained and which are counted, as the named fields say; a token that branches share, once."""
    axis, live = objective.aggregate, scene.live
    trained, counted, in_count = [], [], []
    for i, r in enumerate(scene.responses):
        kept = r.kept if r.kept is not None and not axis.count_corrected else np.ones(len(r.mask), np.bool_)
        masked = objective.selection.truncated == "mask_loss" and r.truncated
        present = bool(countable[i])
        own = r.mask & kept & branches.trains[i]
        trained.append(own & bool(live[i]) & (not masked))
        counted.append(own & present & (axis.count_masked or not masked))
        in_count.append(present and (axis.count_masked or bool(counted[-1].any())))
    return Layout(trained, counted, np.array(in_count, np.bool_), scene.group)


def _summaries(
    ddof: int, rewards: tuple[RewardTable, Array], valid: Mask, fates: Iterable[tuple[GroupState, bool]]
) -> list[GroupSummary]:
    table, totals = rewards
    out = []
    for g, (name, (state, dropped)) in enumerate(zip(table.names, fates, strict=True)):
        own = totals[(table.group == g) & valid]
        centre = mean(own) if len(own) else None
        spread = std(own, ddof) if len(own) else None
        out.append(GroupSummary(name, centre, spread, state, dropped))
    return out
