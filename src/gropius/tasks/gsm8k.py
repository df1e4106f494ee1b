"""GSM8K: school word problems with a worked solution and a whole-number answer after `####`. No torch."""

from __future__ import annotations

import re
from pathlib import Path

from gropius.errors import DataError
from gropius.tasks.base import TaskSet
from gropius.tasks.sources import Reading, from_hub, from_path
from gropius.types import Task

_CALCULATION = re.compile(r"<<[^<>]*>>")


def gsm8k(*, path: str, seed: int = 0, held_out: int | None = None, limit: int = 0) -> TaskSet:
    """GSM8K from a file, a folder with train.jsonl and test.jsonl, or a hub id (`openai/gsm8k`, extra `data`).

    The answer is what follows `####`, commas removed. The solution is the worked text without its `<<…>>` notes.
    held_out: tasks of the test split at most (None: all of it; without a test split a tenth of the rows, at most 200).
    limit: training tasks at most, 0 for all. Raises DataError naming the row when a row has no `####`.
    """
    reading = Reading(seed=seed, held_out=held_out, limit=limit, solution=worked_solution)
    found = from_path(Path(path), reading) if Path(path).exists() else from_hub(path, "main", reading)
    for task in (*found.train, *found.held_out):
        if "####" not in str(task.metadata.get("answer", "")):
            raise DataError(f"{path}: {task.key}: no #### with the final answer; this is no GSM8K row")
    return found


def worked_solution(task: Task) -> str:
    """The worked text of a GSM8K row, calculator notes removed, the final answer after `####` as it stands."""
    return _CALCULATION.sub("", str(task.metadata["answer"])).strip()
