"""From groups of episodes to what the objective sees, and from its answer to trainable sequences. No reduction here.

An episode becomes one sequence: its prompt and every later id, the environment's included, in the order they were
seen. The flat order (groups in order, members in order) is the order of every per-sequence list in this room.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from gropius.objective.selection import Assigned, Assignment, Response
from gropius.types import Episode, Group, Verdict

Ids = NDArray[np.int64]
Mask = NDArray[np.bool_]
Array = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class TrainSequence:
    """One trainable row. Every per-token array has length _T, the response's (environment tokens included).

    episode: index into the flat order. mask: True at the model's own tokens. advantage, weight, keep, skipped: from
    `objective.selection.assign`; all zero, all True and False before it. sampler_logprobs: as drawn, 0 at masked ones.
    penalised, imitation, offset, returns, trains, demonstration: see `Assigned`.
    """

    group_id: str
    member: int
    episode: int
    prompt_ids: Ids
    response_ids: Ids
    mask: Mask
    sampler_logprobs: NDArray[np.float32]
    advantage: Array
    weight: Array
    keep: Mask
    skipped: bool = False
    penalised: Mask | None = None
    imitation: Array | None = None
    offset: Array | None = None
    returns: Array | None = None
    trains: Mask | None = None
    demonstration: bool = False

    @property
    def length_tokens(self) -> int:
        """_P + _T: every id of the row."""
        return len(self.prompt_ids) + len(self.response_ids)

    @cached_property
    def loss_positions(self) -> Ids:
        """Indices of the response's own tokens, ascending."""
        return np.flatnonzero(self.mask)

    @cached_property
    def run_ids(self) -> Ids:
        """The ids that have to be run: up to, and without, the last token that is predicted. Empty without any."""
        own = self.loss_positions
        if len(own) == 0:
            return np.zeros(0, np.int64)
        return np.concatenate([self.prompt_ids, self.response_ids[: own[-1]]])


def to_responses(
    groups: Sequence[Group], part_weights: Mapping[str, float] | None = None, *, positions: bool = False
) -> list[Response]:
    """The episodes as the objective sees them, in flat order.

    positions: scores with a place are steps of the response; without, they are part of its one reward.

    part_weights: given (for `advantage.combine = "normalise_then_sum"`), a reward is its named parts; without, it is
    the verdict's value, which is what `sum_then_normalise` uses. A part that does not apply to an episode, or is void,
    is 0 in it. A rejected verdict without parts spreads its value so that the weighted sum of its parts is that value.
    An episode without a verdict is void: nobody scored it.
    """
    responses = []
    for group in groups:
        greedy = group.baseline_episode.verdict if group.baseline_episode is not None else None
        for episode in group.episodes:
            verdict = episode.verdict
            status = verdict.outcome.status if verdict is not None else "void"
            responses.append(
                Response(
                    group=group.group_id,
                    reward=None if status == "void" else _reward(verdict, part_weights or {}, positions),
                    mask=episode.loss_mask,
                    status=status,
                    truncated=episode.truncated,
                    raw=verdict.raw if verdict is not None else None,
                    greedy_reward=greedy.outcome.value if greedy is not None else None,
                    member=episode.member,
                    steps=_steps(verdict) if positions and status != "void" else (),
                    origin=episode.origin,
                    demonstration=episode.demonstration,
                )
            )
    return responses


def _steps(verdict: Verdict | None) -> list[tuple[int, float]]:
    return [(step.token, step.score) for step in verdict.steps if step.token is not None] if verdict else []


def _reward(verdict: Verdict | None, part_weights: Mapping[str, float], positions: bool) -> float | dict[str, float]:
    assert verdict is not None and verdict.outcome.value is not None
    value = verdict.outcome.value
    if positions and verdict.steps and verdict.final is not None:
        return verdict.final
    if not part_weights:
        return value
    if not verdict.parts:
        total = math.fsum(part_weights.values())
        return dict.fromkeys(part_weights, value / total if total else 0.0)
    parts = {name: verdict.parts[name].value if name in verdict.parts else None for name in part_weights}
    return {name: 0.0 if part is None else part for name, part in parts.items()}


def cut(groups: Sequence[Group], assignment: Assignment | None = None) -> list[TrainSequence]:
    """One sequence an episode, in flat order, with the objective's advantages and weights where they are known.

    Without an assignment (to score the rows before rewards are final): advantage and weight 0, nothing skipped.
    Raises ValueError for an episode without a prompt: its first token would be predicted from nothing.
    """
    episodes = [episode for group in groups for episode in group.episodes]
    rows = [_bare(episode, index) for index, episode in enumerate(episodes)]
    return rows if assignment is None else assigned(rows, assignment)


def assigned(sequences: Sequence[TrainSequence], assignment: Assignment) -> list[TrainSequence]:
    """The sequences with the assignment's advantages, weights, kept tokens and skips; same order, same number."""
    return [_with(row, given) for row, given in zip(sequences, assignment.responses, strict=True)]


def _with(row: TrainSequence, given: Assigned) -> TrainSequence:
    return dataclasses.replace(row, **{name: getattr(given, name) for name in GIVEN})


GIVEN = (
    "advantage", "weight", "keep", "skipped", "penalised", "imitation", "offset", "returns", "trains", "demonstration",
)  # fmt: skip


def _bare(episode: Episode, index: int) -> TrainSequence:
    mask = episode.loss_mask
    if len(episode.prompt_ids) == 0:
        raise ValueError(f"group {episode.group_id}, member {episode.member}: the prompt has no tokens")
    return TrainSequence(
        group_id=episode.group_id,
        member=episode.member,
        episode=index,
        prompt_ids=np.asarray(episode.prompt_ids, np.int64),
        response_ids=episode.response_ids,
        mask=mask,
        sampler_logprobs=episode.sampler_logprobs,
        advantage=np.zeros(len(mask)),
        weight=np.zeros(len(mask)),
        keep=np.ones(len(mask), np.bool_),
    )
