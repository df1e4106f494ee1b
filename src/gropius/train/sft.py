"""Supervised warm start: imitate the tasks' own solutions, by the same packs and the same weighted sum.

Its loss is an objective like any other: −Σ log π / N, that is REINFORCE with every advantage 1 and the token mean.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from gropius.errors import DataError
from gropius.models.chat import ChatFormat
from gropius.objective.presets import resolve
from gropius.objective.selection import Response, assign
from gropius.objective.spec import Objective
from gropius.tasks.base import TaskSet
from gropius.train.order import TaskOrder
from gropius.train.sequences import TrainSequence, assigned
from gropius.train.step import Learner, UpdateReport
from gropius.types import Message, Task


def imitation() -> Objective:
    """The objective of a warm start: the mean over all tokens of −log π."""
    return resolve("reinforce", {"aggregate.kind": "token_mean"})


def demonstration(task: Task, tasks: TaskSet, chat: ChatFormat) -> TrainSequence:
    """The solution of a task as one trainable row: the model's words and its stop token unmasked, the rest masked.

    Errors: DataError when the set has no solutions or the row no answer.
    """
    stop = int(chat.tokenizer.eos_token_id)
    history: list[Message] = list(task.messages())
    prompt_ids = chat.prompt_ids(history)
    ids: list[int] = []
    mask: list[bool] = []
    for message in tasks.demonstration(task):
        if message["role"] == "assistant":
            own = [*chat.tokenizer(message["content"], add_special_tokens=False).input_ids, stop]
        else:
            own = list(chat.environment_ids(history, [message], last_id=stop))
        ids += own
        mask += [message["role"] == "assistant"] * len(own)
        history.append(message)
    size = len(ids)
    return TrainSequence(
        group_id=task.key,
        member=0,
        episode=0,
        prompt_ids=np.asarray(prompt_ids, np.int64),
        response_ids=np.asarray(ids, np.int64),
        mask=np.asarray(mask, np.bool_),
        sampler_logprobs=np.zeros(size, np.float32),
        advantage=np.zeros(size),
        weight=np.zeros(size),
        keep=np.ones(size, np.bool_),
    )


def batch(rows: Sequence[TrainSequence], context_length: int) -> list[TrainSequence]:
    """Rows with advantage 1 and weight 1/N. Errors: DataError when one is longer than the model's context."""
    for row in rows:
        if row.length_tokens > context_length:
            raise DataError(
                f"{row.group_id}: prompt and solution are {row.length_tokens} tokens and the model's context "
                f"{context_length}; leave the row out or use a model with a longer context"
            )
    responses = [Response(row.group_id, 1.0, row.mask, advantage=1.0) for row in rows]
    return assigned(rows, assign(imitation(), responses))


@dataclass(frozen=True)
class WarmStart:
    """steps: optimiser steps. batch: solutions in one. seed: of the order. context_length: tokens, of the model."""

    steps: int
    batch: int
    seed: int
    context_length: int


def warm_start(
    tasks: TaskSet,
    chat: ChatFormat,
    learner: Learner,
    plan: WarmStart,
    report: Callable[[int, UpdateReport], None],
) -> None:
    """Take `plan.steps` optimiser steps on the training tasks' solutions, in an order of their own."""
    order = TaskOrder(tasks.train, plan.seed)
    known: dict[str, TrainSequence] = {}
    for step in range(1, plan.steps + 1):
        drawn = {task.key: task for task in order.take(plan.batch)}  # twice at an epoch's edge: weighed once
        for key, task in drawn.items():
            if key not in known:
                known[key] = demonstration(task, tasks, chat)
        report(step, learner.update(batch([known[key] for key in drawn], plan.context_length)))
