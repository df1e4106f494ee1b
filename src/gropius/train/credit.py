"""Compare siblings: from scored groups to sequences with advantages and weights, one list an optimiser step.

Statistics (baselines, scales, whitening) are those of the whole rollout batch and stay fixed for it; weights are those
of the optimiser batch, which is the part of it that one step is taken on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gropius.objective.ratio import kept_by_correction
from gropius.objective.selection import Assigned, Assignment, Response, assign
from gropius.objective.spec import Objective
from gropius.train.sequences import TrainSequence, assigned, cut, to_responses
from gropius.types import Group

PerSequence = Sequence[NDArray[Any] | None]


@dataclass(frozen=True, eq=False)
class Known:
    """What is computed before the update, one [T] array a sequence; None where the objective needs none.

    anchor, reference: log-probabilities. entropy: of the anchor. values: of the critic. energy: 1 − 2π + Σ π².
    """

    anchor: PerSequence | None = None
    entropy: PerSequence | None = None
    reference: PerSequence | None = None
    values: PerSequence | None = None
    energy: PerSequence | None = None


@dataclass(frozen=True, eq=False)
class Part:
    """What one optimiser step is taken on. rows: indices into the flat order of the batch; sequences: the same rows.

    responses: what they were made from, advantages fixed, to make them again with `fresh`.
    """

    rows: tuple[int, ...]
    sequences: list[TrainSequence]
    responses: Sequence[Response] = ()


@dataclass(frozen=True, eq=False)
class Credit:
    """Assignment of the whole batch, and the parts that the optimiser steps through."""

    assignment: Assignment
    parts: list[Part]


def needs_anchor_pass(objective: Objective, optimiser_steps: int) -> bool:
    """Must the policy score the batch before its first update, rather than be its own anchor?"""
    shrinks = objective.ratio.correction != "none" and not objective.aggregate.count_corrected
    kl_in_reward = objective.kl.estimator != "none" and objective.kl.place == "reward"
    looks_ahead = objective.selection.entropy_top < 1 or objective.needs_fresh
    return optimiser_steps > 1 or shrinks or kl_in_reward or looks_ahead


def compare(
    objective: Objective,
    groups: Sequence[Group],
    known: Known,
    updates: int = 1,
    part_weights: Mapping[str, float] | None = None,
) -> Credit:
    """Advantages over the whole batch, then weights for each of `updates` parts; groups are never divided.

    part_weights: weights of the reward parts, for `normalise_then_sum`. Parts without a group are left out.
    """
    apart = part_weights if objective.advantage.combine == "normalise_then_sum" else None
    rows = cut(groups)
    responses = [
        _with_known(objective, response, known, i, rows[i].sampler_logprobs)
        for i, response in enumerate(to_responses(groups, apart, positions=objective.advantage.credit != "outcome"))
    ]
    whole = assign(objective, responses, part_weights)
    if updates == 1:
        fixed = [_fixed(r, a) for r, a in zip(responses, whole.responses, strict=True)]
        return Credit(whole, [Part(tuple(range(len(rows))), assigned(rows, whole), fixed)])
    parts = []
    for members in _divide(groups, updates):
        fixed = [_fixed(responses[i], whole.responses[i]) for i in members]
        share = assign(objective, fixed, part_weights)
        parts.append(Part(members, assigned([rows[i] for i in members], share), fixed))
    return Credit(whole, parts)


def fresh(
    objective: Objective, part: Part, logprobs: PerSequence, part_weights: Mapping[str, float] | None = None
) -> Part:
    """The part as the policy sees it now, where its own log-probabilities decide something (`needs_fresh`)."""
    responses = [
        dataclasses.replace(r, policy=None if lp is None else np.asarray(lp, np.float64))
        for r, lp in zip(part.responses, logprobs, strict=True)
    ]
    share = assign(objective, responses, part_weights)
    return dataclasses.replace(part, sequences=assigned(part.sequences, share), responses=responses)


def _fixed(response: Response, given: Assigned) -> Response:
    """The response with the advantages that the whole batch gave it. What a critic should have said is kept apart."""
    return dataclasses.replace(response, advantage=given.advantage)


def _divide(groups: Sequence[Group], updates: int) -> list[tuple[int, ...]]:
    """Flat indices of every `updates`-th group, so that parts are equal to within one group."""
    members, start = [], 0
    for group in groups:
        members.append(range(start, start + len(group.episodes)))
        start += len(group.episodes)
    parts = [tuple(i for group in members[k::updates] for i in group) for k in range(updates)]
    return [part for part in parts if part]


def _with_known(objective: Objective, response: Response, known: Known, i: int, sampler: NDArray[Any]) -> Response:
    def array(values: PerSequence | None) -> NDArray[np.float64] | None:
        return None if values is None or values[i] is None else np.asarray(values[i], np.float64)

    anchor = array(known.anchor)
    shrinks = objective.ratio.correction != "none" and not objective.aggregate.count_corrected
    kept = None
    if shrinks and anchor is not None:
        kept = kept_by_correction(objective.ratio, anchor, sampler, response.mask)
    return dataclasses.replace(
        response,
        policy=anchor if objective.needs_fresh else None,
        values=array(known.values),
        energy=array(known.energy),
        anchor=anchor,
        reference=array(known.reference),
        entropy=array(known.entropy),
        kept=kept,
    )
