"""Score recorded responses with another reward, and say what training would have seen. No torch, nothing is written."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import numpy as np

from gropius.errors import RunFolderError
from gropius.objective.selection import Response, assign
from gropius.objective.spec import Objective
from gropius.records.schema import GREEDY_MEMBER, ResponseRecord
from gropius.rewards.base import RewardPart, Scorer
from gropius.tasks.base import TaskSet
from gropius.types import EnvironmentStep, Episode, FinishReason, Message, Outcome, Task, Turn, Verdict

MOST_EXAMPLES = 10
CLOSE = 1e-9


@dataclass(frozen=True)
class Change:
    """One response whose verdict changed: where it is, its outcome before and after, the end of what was said."""

    step: int
    group_id: str
    member: int
    task_key: str
    before: Outcome
    after: Outcome
    reply: str

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {**vars(self), "before": vars(self.before), "after": vars(self.after)}


@dataclass
class StepChange:
    """One step under both rewards. reward: means over valid responses. informative: groups whose siblings differ.

    turned: responses whose advantage has another sign. moved: mean |difference of advantages| over the responses.
    """

    step: int
    responses: int
    reward_before: float | None
    reward_after: float | None
    void_before: int
    void_after: int
    informative_before: int
    informative_after: int
    groups: int
    turned: int
    moved: float
    changes: list[Change] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready, with the first changed responses."""
        shown = [change.as_dict() for change in self.changes[:MOST_EXAMPLES]]
        return {**vars(self), "changed": len(self.changes), "changes": shown}


async def rescore(
    records: Sequence[ResponseRecord], tasks: TaskSet, judge: tuple[Scorer, Sequence[RewardPart]], objective: Objective
) -> StepChange:
    """What one step's responses get from `judge` (scorer and its parts), beside what they got.

    Advantages are those of `objective` on both. A task with an environment is played again with the recorded replies.
    Greedy responses of a baseline are left out. Errors: RunFolderError for a response whose task is not in `tasks`.
    """
    scorer, parts = judge
    siblings = [record for record in records if record.member != GREEDY_MEMBER]
    by_key = {task.key: task for task in (*tasks.train, *tasks.held_out)}
    episodes = [_episode(record, by_key, tasks) for record in siblings]
    verdicts = await scorer.score(episodes)
    weights = {part.name: part.weight for part in parts}
    before = _assigned(siblings, [_recorded(record) for record in siblings], objective, weights)
    after = _assigned(siblings, verdicts, objective, weights)
    changes = [
        Change(r.step, r.group_id, r.member, r.task_key, _recorded(r).outcome, v.outcome, e.last_reply[-200:])
        for r, v, e in zip(siblings, verdicts, episodes, strict=True)
        if not _same(_recorded(r).outcome, v.outcome)
    ]
    return StepChange(
        step=siblings[0].step if siblings else 0,
        responses=len(siblings),
        reward_before=_mean([r.reward for r in siblings]),
        reward_after=_mean([v.outcome.value for v in verdicts]),
        void_before=sum(r.status == "void" for r in siblings),
        void_after=sum(v.outcome.status == "void" for v in verdicts),
        informative_before=before.informative,
        informative_after=after.informative,
        groups=before.groups,
        turned=int(np.sum(np.sign(before.advantages) != np.sign(after.advantages))),
        moved=float(np.mean(np.abs(before.advantages - after.advantages))) if siblings else 0.0,
        changes=changes,
    )


@dataclass(frozen=True, eq=False)
class _Seen:
    """What the objective makes of one step. advantages [N]; informative, groups: counts."""

    advantages: np.ndarray[Any, np.dtype[np.float64]]
    informative: int
    groups: int


def _assigned(
    records: Sequence[ResponseRecord], verdicts: Sequence[Verdict], objective: Objective, weights: Mapping[str, float]
) -> _Seen:
    if not records:
        return _Seen(np.zeros(0), 0, 0)
    apart = objective.advantage.combine == "normalise_then_sum"
    names = list(dict.fromkeys(name for verdict in verdicts for name in verdict.parts))
    rows = [
        Response(
            group=record.group_id,
            reward=None if verdict.outcome.status == "void" else _reward(verdict, names if apart else ()),
            mask=record.loss_mask,
            status=verdict.outcome.status,
            truncated=record.truncated,
            raw=verdict.raw,
            anchor=_or(record.anchor, record.sampler, record),
            reference=_or(record.reference, record.sampler, record),
            entropy=_or(record.entropy, None, record),
        )
        for record, verdict in zip(records, verdicts, strict=True)
    ]
    made = assign(objective, rows, {name: weights.get(name, 1.0) for name in names} if apart else None)
    live = sum(group.state == "informative" for group in made.groups)
    return _Seen(np.array([one.value for one in made.responses], np.float64), live, len(made.groups))


def _reward(verdict: Verdict, names: Sequence[str]) -> float | dict[str, float]:
    if not names:
        return float(verdict.outcome.value or 0.0)
    return {name: float(verdict.parts[name].value or 0.0) if name in verdict.parts else 0.0 for name in names}


def _or(values: Any, otherwise: Any, record: ResponseRecord) -> Any:
    if values is not None:
        return np.asarray(values, np.float64)
    return np.zeros(len(record.response_ids)) if otherwise is None else np.asarray(otherwise, np.float64)


def _recorded(record: ResponseRecord) -> Verdict:
    status = record.status or "void"
    value = None if status == "void" else record.reward
    return Verdict(Outcome(status, value, record.reason), record.parts, record.raw)


def _same(one: Outcome, other: Outcome) -> bool:
    if one.status != other.status or one.value is None or other.value is None:
        return one.status == other.status
    return abs(one.value - other.value) <= CLOSE


def _episode(record: ResponseRecord, by_key: Mapping[str, Task], tasks: TaskSet) -> Episode:
    task = by_key.get(record.task_key)
    if task is None:
        raise RunFolderError(
            f"step {record.step}, group {record.group_id}: no task {record.task_key} in these tasks; rescore with the "
            "data the run was trained on"
        )
    messages: tuple[Message, ...] = tuple(json.loads(record.messages))
    replies = [message["content"] for message in messages if message["role"] == "assistant"]
    replies = replies[len([message for message in task.messages() if message["role"] == "assistant"]) :]
    return Episode(
        task=task,
        group_id=record.group_id,
        member=record.member,
        prompt_ids=record.prompt_ids,
        turns=_turns(record, replies),
        messages=messages,
        finish_reason=_finish(record.finish_reason),
        error=record.error,
        outcome_step=_played(tasks, task, replies),
    )


def _turns(record: ResponseRecord, replies: Sequence[str]) -> tuple[Turn, ...]:
    """The stretches of the loss mask as turns; the model's get the texts of its replies, in order."""
    turns: list[Turn] = []
    said = iter(replies)
    place = 0
    for own, run in groupby(record.loss_mask.tolist()):
        length = len(list(run))
        ids = record.response_ids[place : place + length]
        turns.append(Turn("model" if own else "environment", ids, next(said, "") if own else ""))
        place += length
    turns += [Turn("model", np.zeros(0, np.int64), text) for text in said]
    return tuple(turns)


def _played(tasks: TaskSet, task: Task, replies: Sequence[str]) -> EnvironmentStep | None:
    if tasks.environment is None:
        return None
    environment = tasks.environment(task)
    environment.start()
    last = None
    for reply in replies:
        last = environment.step(reply)
        if last.done:
            break
    return last


def _finish(text: str) -> FinishReason:
    known: tuple[FinishReason, ...] = ("stop", "length", "tool_limit", "environment_end", "cancelled", "error")
    return next((name for name in known if name == text), "error")


def _mean(values: Sequence[float | None]) -> float | None:
    valid = [value for value in values if value is not None]
    return sum(valid) / len(valid) if valid else None
