"""MATH: competition problems with a worked solution and a final answer in `\\boxed{}`. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gropius.errors import DataError
from gropius.tasks.base import TaskSet, answer_of
from gropius.tasks.sources import Reading, from_hub, from_path
from gropius.types import Task

SYSTEM = "Solve the problem step by step and write the final answer in \\boxed{}."


def math(
    *,
    path: str,
    seed: int = 0,
    held_out: int | None = None,
    limit: int = 0,
    levels: Sequence[int] = (),
    subjects: Sequence[str] = (),
) -> TaskSet:
    """MATH (or MATH-500) from a file, a folder with train and test files, or a hub id (extra `data`).

    levels: 1 to 5, subjects: such as "Algebra"; empty for all. held_out, limit: as for `gsm8k`. The answer is the
    column `answer`, else the last `\\boxed{}` of the solution. Raises DataError naming a row without either.
    """
    where: dict[str, Any] = {}
    if levels:
        where["level"] = [level for number in levels for level in (number, f"Level {number}")]
    if subjects:
        where["subject"] = list(subjects)
    reading = Reading(seed=seed, held_out=held_out, limit=limit, where=where, solution=worked)
    found = from_path(Path(path), reading) if Path(path).exists() else from_hub(path, "", reading)
    if "math" not in found.rewards:
        raise DataError(f"math: {path}: these are no MATH rows; those have the columns problem, and answer or solution")
    for task in (*found.train, *found.held_out):
        if not (task.answer or "").strip():
            raise DataError(f"{task.key}: neither an answer nor a \\boxed{{}} in the solution")
    return TaskSet(
        name="math",
        train=found.train,
        held_out=found.held_out,
        solution=worked,
        environment=None,
        rewards=("math",),
        system_prompt=SYSTEM,
        notes=found.notes,
        fingerprint=found.fingerprint,
    )


def worked(task: Task) -> str:
    """The worked solution up to the paragraph of its boxed answer (a check may follow), or the answer in a box."""
    text = str(task.metadata.get("solution") or "")
    box = max(text.rfind("\\boxed"), text.rfind("\\fbox"))
    return text[:box] + text[box:].partition("\n\n")[0] if box >= 0 else f"\\boxed{{{answer_of(task)}}}"
