"""Credit by position: rewards that fall at a step or a turn, and baselines that differ from token to token. No torch.

A position is an index into everything after the prompt, the environment's text included. All results are per own token
(loss token) of a response, float64.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gropius.errors import ObjectiveError
from gropius.objective.advantage import Credit, mean, std
from gropius.objective.gae import advantage_and_return
from gropius.objective.response import Response
from gropius.objective.spec import Advantage

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]
Pool = dict[tuple[int, int], list[tuple[int, float]]]  # pool → (response, value)


def turns_of(mask: Mask) -> NDArray[np.int64]:
    """[T] the number of the model's turn that a token belongs to, from 0: turns are runs of own tokens.

    The environment's text belongs to the turn before it, text before any turn to the first.

    >>> turns_of(np.array([True, True, False, True])).tolist()
    [0, 0, 0, 1]
    """
    begins = mask & ~np.concatenate([[False], mask[:-1]])
    return np.asarray(np.maximum(np.cumsum(begins) - 1, 0), np.int64)


def _turns(response: Response) -> NDArray[np.int64]:
    """[L] the turn of every own token."""
    turns = turns_of(response.mask) if response.turns is None else response.turns
    return turns[response.mask]


def placed(response: Response) -> list[tuple[int, float]]:
    """(own token, score) of every positioned reward: the last own token at or before the position, else the first."""
    own = np.flatnonzero(response.mask)
    found = []
    for position, score in response.steps:
        if not 0 <= position < len(response.mask):
            raise ObjectiveError(
                f"group {response.group}: a step reward at token {position} of a response of {len(response.mask)} "
                "tokens; positions count everything after the prompt, from 0"
            )
        if len(own):
            found.append((max(int(np.searchsorted(own, position, side="right")) - 1, 0), float(score)))
    return found


@dataclass(frozen=True, eq=False)
class Scene:
    """A batch: responses, their shaped rewards without a position [n], which take part [n], their groups [n]."""

    responses: Sequence[Response]
    finals: Array
    live: Mask
    group: NDArray[np.int64]


def token_credit(axis: Advantage, scene: Scene, credit: Credit) -> list[Array]:
    """[L_i] advantages of the own tokens of every response, before any KL to go, whitening or override.

    outcome: the response's number on every token (minus the optimal token baseline where declared). step: plus, for
    every step that ends at or after the token, its standardised score. turn: plus the turn's standardised return to go.
    A reward without a position counts `final_weight` times, or falls at the last own token (`in_return`).
    """
    weight = 1.0 if axis.credit == "outcome" else axis.final_weight if axis.final == "beside" else 0.0
    out = [np.full(int(r.mask.sum()), weight * a) for r, a in zip(scene.responses, credit.advantage, strict=True)]
    if axis.baseline == "optimal_token":
        return _optimal(scene, out)
    if axis.credit == "outcome":
        return out
    added = CREDITS[axis.credit](axis, scene)
    return [base + extra if ok else base for base, extra, ok in zip(out, added, scene.live, strict=True)]


def _events(axis: Advantage, scene: Scene, i: int) -> list[tuple[int, float]]:
    """Positioned scores of a live response, with its final reward at the last own token where that is in the return."""
    if not scene.live[i]:
        return []
    events = placed(scene.responses[i])
    own = int(scene.responses[i].mask.sum())
    if axis.final == "in_return" and own:
        events.append((own - 1, float(scene.finals[i])))
    return events


def _step_credit(axis: Advantage, scene: Scene) -> list[Array]:
    """Σ of the standardised scores of the steps that end at or after a token. Source: DeepSeekMath 4.1.3."""
    pool: Pool = {}
    events = [_events(axis, scene, i) for i in range(len(scene.responses))]
    for i, found in enumerate(events):
        for _, score in found:
            pool.setdefault((int(scene.group[i]), 0), []).append((i, score))
    taken = {key: iter(values) for key, values in _standardised(axis, pool).items()}
    out = []
    for i, (r, found) in enumerate(zip(scene.responses, events, strict=True)):
        at = np.zeros(int(r.mask.sum()))
        for token, _ in found:
            at[token] += next(taken[int(scene.group[i]), 0])
        out.append(np.cumsum(at[::-1])[::-1])
    return out


def _turn_credit(axis: Advantage, scene: Scene) -> list[Array]:
    """The return to go of a turn, G_k = Σ_{l≥k} γ^{l−k} r_l, against the same turn of its siblings or all of theirs."""
    pool: Pool = {}
    turns = [_turns(r) for r in scene.responses]
    keys: list[list[tuple[int, int]]] = []
    for i, own in enumerate(turns):
        rewards = np.zeros(int(own.max()) + 1 if len(own) and scene.live[i] else 0)
        for token, score in _events(axis, scene, i):
            rewards[own[token]] += score
        numbers = [k if axis.pool == "turn_index" else 0 for k in range(len(rewards))]
        keys.append([(int(scene.group[i]), number) for number in numbers])
        for key, value in zip(keys[-1], _to_go(rewards, axis.discount), strict=True):
            pool.setdefault(key, []).append((i, value))
    taken = {key: iter(values) for key, values in _standardised(axis, pool).items()}
    out = []
    for own, mine in zip(turns, keys, strict=True):
        values = np.array([next(taken[key]) for key in mine])
        out.append(values[own] if len(mine) else np.zeros(len(own)))
    return out


def _to_go(rewards: Array, discount: float) -> list[float]:
    out, running = [0.0] * len(rewards), 0.0
    for k in range(len(rewards) - 1, -1, -1):
        running = float(rewards[k]) + discount * running
        out[k] = running
    return out


def _standardised(axis: Advantage, pool: Pool) -> dict[tuple[int, int], list[float]]:
    """(v − baseline) / (std + ε) within each pool, in the order given; equal values, and a value alone, give 0."""
    out = {}
    for key, entries in pool.items():
        values = [value for _, value in entries]
        equal = max(values) == min(values)
        spread = 1.0
        if axis.scale == "group_std":
            spread = std(values, axis.ddof) + axis.epsilon
        if axis.baseline != "none" and (equal or len({i for i, _ in entries}) == 1 < len(entries)):
            out[key] = [0.0] * len(values)
            continue
        baselines = [_baseline(axis, entries, i) for i, _ in entries]
        out[key] = [0.0 if spread == 0.0 else (v - b) / spread for v, b in zip(values, baselines, strict=True)]
    return out


def _baseline(axis: Advantage, entries: Sequence[tuple[int, float]], response: int) -> float:
    if axis.baseline == "none":
        return 0.0
    if axis.baseline == "group_mean":
        return mean([value for _, value in entries])
    others = [value for i, value in entries if i != response]
    return mean(others) if others else mean([value for _, value in entries])


CREDITS = {"step": _step_credit, "turn": _turn_credit}


def _optimal(scene: Scene, returns: list[Array]) -> list[Array]:
    """G − B_t, B_t = Σ_i G_i W_it / Σ_i W_it over the siblings that have a token t, W_it = Σ_{s≤t} energy_is.

    energy: 1 − 2π + Σ_v π_v², the squared length of the score in the logits. Equal returns give exactly 0.
    Source: the optimal token baseline of verl's documentation.
    """
    out = [a.copy() for a in returns]
    for g in sorted(set(scene.group[scene.live].tolist())):
        members = [i for i in np.flatnonzero((scene.group == g) & scene.live).tolist() if len(returns[i])]
        energy = {i: np.cumsum(_energy(scene.responses[i])) for i in members}
        for t in range(max((len(returns[i]) for i in members), default=0)):
            here = [i for i in members if len(returns[i]) > t]
            values = [float(returns[i][t]) for i in here]
            total = math.fsum(energy[i][t] for i in here)
            if max(values) == min(values):
                baseline = values[0]
            elif total > 0:
                baseline = math.fsum(returns[i][t] * energy[i][t] for i in here) / total
            else:
                baseline = mean(values)
            for i in here:
                out[i][t] = returns[i][t] - baseline
    return out


def _energy(response: Response) -> Array:
    if response.energy is None:
        raise ObjectiveError(
            f'group {response.group}: advantage.baseline = "optimal_token" needs the energy of every token, '
            "1 − 2π + Σ π²; add it, or write another baseline"
        )
    return np.asarray(response.energy, np.float64)[response.mask]


def critic_credit(axis: Advantage, response: Response, final: float, penalty: Array | None) -> tuple[Array, Array]:
    """([L] advantages, [L] returns) of one response from its values; penalty [L]: β · KL of each token, or None.

    final: what falls at the last own token; under outcome credit it holds the positioned rewards too. Under step credit
    those stay where they are, under turn credit they fall at their turn's last token.
    """
    if response.values is None:
        raise ObjectiveError(
            f'group {response.group}: advantage.baseline = "critic" needs the value of every token; add values, or '
            'supply advantages yourself, or write baseline = "group_mean"'
        )
    values = np.asarray(response.values, np.float64)[response.mask]
    rewards = np.zeros(len(values))
    if len(values):
        turns = _turns(response)
        rewards[-1] += final
        for token, score in placed(response) if axis.credit != "outcome" else ():
            rewards[token if axis.credit == "step" else np.flatnonzero(turns == turns[token])[-1]] += score
    if penalty is not None:
        rewards -= penalty
    return advantage_and_return(axis, rewards, values)
