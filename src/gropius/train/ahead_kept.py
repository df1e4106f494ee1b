"""Batches that were drawn ahead, as bytes: what a checkpoint holds of them, exact to the bit, verdicts included."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gropius.distributed.wire import Codec
from gropius.errors import EngineError, RunFolderError
from gropius.rollout.select import Budget, Selected, Shortfall
from gropius.tasks.base import TaskSet
from gropius.train.ahead import Drawn
from gropius.types import EnvironmentStep, Episode, Group, Outcome, Place, Step, Task, Turn, Verdict


@dataclass(frozen=True)
class _Named:
    """A task by its key: the run's data has the rest."""

    key: str


CODEC = Codec(
    (Drawn, Selected, Budget, Shortfall, Group, Episode, Turn, Verdict, Outcome, Place, Step, EnvironmentStep, _Named)
)


def as_tensors(waiting: Sequence[Drawn]) -> dict[str, Tensor]:
    """Drawn batches as one tensor of bytes; none without any."""
    if not waiting:
        return {}
    frame = CODEC.encode([_with_tasks(drawn, lambda task: _Named(task.key)) for drawn in waiting])
    return {"batches": torch.from_numpy(np.frombuffer(frame, np.uint8).copy())}


def from_tensors(tensors: Mapping[str, Tensor], tasks: TaskSet) -> tuple[Drawn, ...]:
    """Read drawn batches back. Errors: RunFolderError where they do not fit this program or its data."""
    if not tensors:
        return ()
    by_key = {task.key: task for task in tasks.train}

    def known(named: Any) -> Task:
        return by_key[named.key]

    try:
        found = CODEC.decode(tensors["batches"].numpy().tobytes())
        return tuple(_with_tasks(drawn, known) for drawn in found)
    except KeyError as error:
        raise RunFolderError(
            f"a batch that was drawn ahead is of the task {error}, and the data has no such"
        ) from error
    except (EngineError, TypeError, AttributeError) as error:
        raise RunFolderError(f"the batches that were drawn ahead cannot be read: {error}") from error


def _with_tasks(drawn: Drawn, change: Any) -> Drawn:
    def _group(one: Group) -> Group:
        greedy = one.baseline_episode
        return dataclasses.replace(
            one,
            task=change(one.task),
            episodes=tuple(dataclasses.replace(e, task=change(e.task)) for e in one.episodes),
            baseline_episode=None if greedy is None else dataclasses.replace(greedy, task=change(greedy.task)),
        )

    batch = drawn.batch
    groups, dropped = tuple(map(_group, batch.groups)), tuple(map(_group, batch.dropped))
    return dataclasses.replace(drawn, batch=dataclasses.replace(batch, groups=groups, dropped=dropped))
