"""Groups that wait for the next step, as JSON: what a checkpoint holds of them, exact to the bit.

Only what the model drew is kept. Prompt, environment and rewards follow from it when the group is gone on with, so the
same episode comes out whether the program went on or was ended and begun again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gropius.errors import RunFolderError
from gropius.rollout.collect import Begun
from gropius.rollout.course import Said
from gropius.tasks.base import TaskSet


def as_json(group: Begun) -> dict[str, Any]:
    """A begun group, in lists and numbers."""
    return {
        "task": group.task.key,
        "step": group.step,
        "index": group.index,
        "said": [[_turn(turn) for turn in member] for member in group.said],
    }


def from_json(rows: Sequence[Mapping[str, Any]], tasks: TaskSet) -> list[Begun]:
    """Read begun groups back. Raises RunFolderError where a task of theirs is not among the training tasks."""
    if not rows:
        return []
    by_key = {task.key: task for task in tasks.train}
    lost = [row["task"] for row in rows if row["task"] not in by_key]
    if lost:
        raise RunFolderError(f"a group of the task {lost[0]} waits to be gone on with, and the data has no such task")
    return [
        Begun(
            by_key[row["task"]],
            row["step"],
            row["index"],
            tuple(tuple(_said(turn) for turn in member) for member in row["said"]),
        )
        for row in rows
    ]


def _turn(said: Said) -> dict[str, Any]:
    return {
        "ids": said.token_ids.tolist(),
        "logprobs": said.logprobs.tolist(),
        "drawn": said.drawn_logprobs.tolist(),
        "versions": said.versions.tolist(),
        "finish_reason": said.finish_reason,
    }


def _said(turn: Mapping[str, Any]) -> Said:
    return Said(
        np.array(turn["ids"], np.int64),
        np.array(turn["logprobs"], np.float32),
        np.array(turn["drawn"], np.float32),
        np.array(turn["versions"], np.int64),
        turn["finish_reason"],
    )
