"""From the records of a step back to the batches that the objective was evaluated on. No torch.

What comes out is the structure that `gropius explain` reads, so a logged loss can be taken apart to its tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gropius.errors import RunFolderError
from gropius.objective.spec import Objective
from gropius.records.schema import GREEDY_MEMBER, NEVER_TRAINED, ResponseRecord


def batches(
    records: Sequence[ResponseRecord], *, part_weights: Mapping[str, float] | None = None
) -> list[dict[str, Any]]:
    """One batch an optimiser step of the first pass, in order; the mean of their losses is the step's logged loss.

    part_weights: given when the objective normalises reward parts apart; a reward is then its parts. With several
    optimiser steps the advantages are those recorded, as their statistics were those of the whole rollout batch.
    A response that was not run contributes nothing, and stands in with the sampler's log-probabilities.
    Errors: RunFolderError when the records have no token lists (record.token_logprobs was false).
    """
    steps = sorted({record.update for record in records if record.update != NEVER_TRAINED})
    greedy = {r.group_id: r.reward for r in records if r.member == GREEDY_MEMBER}
    out = []
    for step in steps:
        groups: dict[str, dict[str, Any]] = {}
        for record in records:
            if record.update != step:
                continue
            group = groups.setdefault(record.group_id, {"id": record.group_id, "responses": []})
            if greedy.get(record.group_id) is not None:
                group["greedy_reward"] = greedy[record.group_id]
            group["responses"].append(_response(record, part_weights, fixed=len(steps) > 1))
        batch: dict[str, Any] = {"groups": list(groups.values())}
        if part_weights:
            batch["weights"] = dict(part_weights)
        out.append(batch)
    return out


def in_force(objective: Objective, entropy_bonus: float | None) -> Objective:
    """The objective as it was in a step: with the entropy coefficient that a target had moved by then."""
    if entropy_bonus is None:
        return objective
    terms = dataclasses.replace(objective.terms, entropy=entropy_bonus, entropy_target=0.0, entropy_step=0.0)
    return dataclasses.replace(objective, terms=terms)


def _response(record: ResponseRecord, part_weights: Mapping[str, float] | None, *, fixed: bool) -> dict[str, Any]:
    if record.sampler is None:
        raise RunFolderError(
            f"step {record.step}, group {record.group_id}: the run kept no per-token lists "
            "(record.token_logprobs = false), so its loss cannot be taken apart"
        )
    void = record.status in (None, "void")
    row: dict[str, Any] = {
        "reward": None if void else _reward(record, part_weights),
        "length": len(record.response_ids),
        "status": "void" if void else record.status,
        "mask": record.loss_mask.astype(int).tolist(),
        "truncated": record.truncated,
        "raw": record.raw,
        "sampler": record.sampler.tolist(),
        "policy": _or(record.policy, record.sampler),
        "anchor": _or(record.anchor, record.sampler),
    }
    row["reference"] = _or(record.reference, np.asarray(row["policy"]))
    row["entropy"] = _or(record.entropy, np.zeros(len(record.response_ids)))
    for name in ("values", "energy", "policy_entropy"):
        if (values := getattr(record, name)) is not None:
            row[name] = values.tolist()
    row |= _positions(record, part_weights)
    if fixed and record.advantage is not None:
        tokens = record.token_advantages
        row["advantage"] = record.advantage if tokens is None else tokens.tolist()
    return row


def _positions(record: ResponseRecord, part_weights: Mapping[str, float] | None) -> dict[str, Any]:
    """Rewards with a position, branches and demonstrations, where the record has them."""
    row: dict[str, Any] = {}
    if record.steps and record.final is not None and not part_weights:
        row |= {"reward": record.final, "steps": [[step.token, step.score] for step in record.steps]}
    if record.origin is not None:
        row["origin"] = [int(member) for member in record.origin]
    if record.demonstration:
        row["demonstration"] = True
    return row | {"member": record.member}


def _reward(record: ResponseRecord, part_weights: Mapping[str, float] | None) -> float | dict[str, float] | None:
    if not part_weights:
        return record.reward
    values = {name: part.value for name, part in record.parts.items()}
    return {name: float(values.get(name) or 0.0) for name in part_weights}


def _or(values: NDArray[Any] | None, otherwise: NDArray[Any]) -> list[float]:
    found: list[float] = (otherwise if values is None else values).tolist()
    return found
