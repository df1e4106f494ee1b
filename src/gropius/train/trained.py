"""What training adds to the record of a step: per response, and as metrics of the step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gropius.records.schema import ResponseRecord, Trained, records_of
from gropius.rollout.select import state_of
from gropius.train.credit import Credit, Known
from gropius.train.savings import Saving
from gropius.train.step import UpdateReport
from gropius.types import Group

Reports = Sequence[Sequence[UpdateReport]]
Number = float | int | None


@dataclass(frozen=True, eq=False)
class Work:
    """What was computed on a batch: known before the update; reports[pass][part] of the optimiser steps.

    entropy_in_loss: the objective has an entropy term. critic: what a critic did, as metrics.
    """

    known: Known
    reports: Reports
    entropy_in_loss: bool = False
    critic: Mapping[str, float] = field(default_factory=dict)


def records(
    step: int,
    groups: Sequence[Group],
    discarded: Sequence[Group],
    credit: Credit,
    work: Work,
    decode: Callable[[Sequence[int]], str],
) -> list[ResponseRecord]:
    """One record a response: those trained on first, then those of groups that were sampled and thrown away."""
    added = _trained(groups, credit, work)
    for group in discarded:
        for episode in group.episodes:
            added[group.group_id, episode.member] = Trained(state_of(group))
    return records_of(step, [*groups, *discarded], added, decode)


def _trained(groups: Sequence[Group], credit: Credit, work: Work) -> dict[tuple[str, int], Trained]:
    states = {summary.id: summary.state for summary in credit.assignment.groups}
    first = work.reports[0] if work.reports else []
    added = {}
    for k, part in enumerate(credit.parts):
        report = first[k] if k < len(first) else None
        for j, (i, row) in enumerate(zip(part.rows, part.sequences, strict=True)):
            given = credit.assignment.responses[i]
            own = given.advantage[row.mask]
            policy = report.logprobs[j] if report else None
            if part.responses and part.responses[j].policy is not None:
                policy = part.responses[j].policy  # what decided, of rows too that were not run again
            anchor = policy if work.known.anchor is None else work.known.anchor[i]
            added[row.group_id, row.member] = Trained(
                state=states[row.group_id],
                advantage=given.value if np.any(row.weight) else None,
                skipped=row.skipped,
                update=k,
                token_advantages=given.advantage if len(own) and own.max() != own.min() else None,
                anchor=anchor,
                policy=policy,
                reference=None if work.known.reference is None else work.known.reference[i],
                entropy=_entropy(work, report, i, j),
                weight=row.weight,
                contribution=report.contributions[j] if report else None,
                values=_of(work.known.values, i),
                returns=row.returns,
                energy=_of(work.known.energy, i),
                policy_entropy=report.entropies[j] if report and work.entropy_in_loss else None,
                imitation=row.imitation if row.imitation is not None and row.imitation.any() else None,
            )
    return added


def _of(values: Sequence[NDArray[Any] | None] | None, i: int) -> NDArray[Any] | None:
    return None if values is None else values[i]


def _entropy(work: Work, report: UpdateReport | None, i: int, j: int) -> NDArray[Any] | None:
    """The anchor's entropies where they decided something, else those of the first update."""
    if work.known.entropy is not None:
        return work.known.entropy[i]
    return report.entropies[j] if report else None


def metrics(work: Work, groups: Sequence[Group], times: Mapping[str, float]) -> dict[str, Number]:
    """The metrics that training makes; times: `step_time`, `sampling_time_s`, `training_time_s`.

    Token shares are weighted by the tokens of each optimiser step. `loss` is of the first pass, before or while the
    policy moves: the mean over its optimiser steps, equal to `explain` on the recorded responses.
    """
    every = [report for one_pass in work.reports for report in one_pass]
    taken = [report for report in every if report.taken]
    first = list(work.reports[0]) if work.reports else []
    found: dict[str, Number] = {
        "loss": _mean([report.loss for report in first]),
        "grad_norm": _mean([report.grad_norm for report in taken]),
        "learning_rate": taken[-1].learning_rate if taken else None,
        "updates": len(taken),
        "updates_skipped": sum(bool(report.culprits) for report in every),
    }
    for name in ("clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean", "kl", "entropy"):
        pairs = [(report.metrics[name], report.all_tokens) for report in every if name in report.metrics]
        total = sum(weight for _, weight in pairs)
        found[name] = math.fsum(value * weight for value, weight in pairs) / total if total else None
    found |= _difference(work, groups)
    found |= sum((report.saving for report in every), Saving()).metrics()
    scoring = sum(episode.scoring_time_s for group in groups for episode in group.episodes)
    return found | dict(work.critic) | dict(times) | {"scoring_time_s": scoring}


def _difference(work: Work, groups: Sequence[Group]) -> dict[str, Number]:
    """|trainer − sampler| on the rows that were run before the weights moved."""
    episodes = [episode for group in groups for episode in group.episodes]
    rows: list[tuple[int, NDArray[Any]]] = []
    if work.known.anchor is not None:
        rows = [(i, values) for i, values in enumerate(work.known.anchor) if values is not None]
    elif work.reports and work.reports[0]:
        report = work.reports[0][0]
        rows = [(i, values) for i, values in enumerate(report.logprobs) if values is not None]
    rows = [(i, values) for i, values in rows if not episodes[i].demonstration]
    gaps = [np.abs(values - episodes[i].sampler_logprobs)[episodes[i].loss_mask] for i, values in rows]
    pool = np.concatenate([*gaps, np.zeros(0)])
    name = "sampling/sampling_logp_difference"
    return {f"{name}/mean": float(pool.mean()), f"{name}/max": float(pool.max())} if len(pool) else {}


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None
