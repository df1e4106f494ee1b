"""Programming tasks whose answers are run: MBPP, HumanEval, and rows with tests of any origin. No torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from gropius.errors import DataError
from gropius.tasks.base import TaskSet, fingerprint, require_choice
from gropius.tasks.shapes import fenced
from gropius.tasks.sources import Reading, from_hub, from_path, split
from gropius.types import Task

BROKEN_MBPP = (367, 927)  # their own reference programs fail their own tests
TRAIN_MBPP, TEST_MBPP = range(601, 975), range(11, 511)
ASK = "Reply with one Python code block."


def mbpp(*, path: str, seed: int = 0, held_out: int | None = None, limit: int = 0, split: str = "official") -> TaskSet:
    """MBPP from `mbpp.jsonl` or a hub id (`google-research-datasets/mbpp`, extra `data`); tests run in the sandbox.

    split: "official" trains on task_id 601 to 974 and holds out 11 to 510; "seed" draws the held-out rows. held_out:
    held-out tasks at most. limit: training tasks at most, 0 for all. The two rows whose own reference program fails its
    own tests (367, 927) are left out and named. Raises DataError when the rows are not MBPP's.
    """
    require_choice("mbpp: split", split, ("official", "seed"))
    found = _read(path, "full", Reading(seed=seed, held_out=held_out if split == "seed" else 0))
    every = (*found.train, *found.held_out)
    _require("mbpp", every, "test_list")
    bad = [task for task in every if task.metadata.get("task_id") in BROKEN_MBPP]
    train: Sequence[Task] = [task for task in found.train if task not in bad]
    unseen: Sequence[Task] = [task for task in found.held_out if task not in bad]
    if split == "official":
        good = [task for task in every if task not in bad]
        train = [task for task in good if task.metadata.get("task_id") in TRAIN_MBPP]
        unseen = [task for task in good if task.metadata.get("task_id") in TEST_MBPP]
        unseen = unseen if held_out is None else unseen[:held_out]
        found = replace(
            found, notes=(*found.notes[:-1], f"mbpp: official split, {len(train)} train, {len(unseen)} held out")
        )
    named = ", ".join(f"{task.key} (task_id {task.metadata['task_id']})" for task in bad)
    notes = (f"mbpp: left out, their reference program fails their own tests: {named}",) if bad else ()
    return _asking(found, train[: limit or None], unseen, notes)


def humaneval(*, path: str, seed: int = 0, held_out: int | None = None, limit: int = 0) -> TaskSet:
    """HumanEval from `HumanEval.jsonl(.gz)` or a hub id (`openai/openai_humaneval`, extra `data`).

    An evaluation set of 164 rows: what is trained on can no longer be measured on. held_out: None keeps half of the
    rows apart, by the seed. A reply may be the whole function or its body. Raises DataError for rows of another kind.
    """
    found = _read(path, "", Reading(seed=seed, held_out=0))
    every = (*found.train, *found.held_out)
    _require("humaneval", every, "entry_point")
    train, unseen = split(every, len(every) // 2 if held_out is None else held_out, seed)
    notes = (
        f"humaneval: {len(unseen)} rows held out by the seed",
        f"humaneval: {len(train)} rows of an evaluation set are trained on; report the held-out ones only",
    )
    return _asking(replace(found, notes=found.notes[:-1]), train[: limit or None], unseen, notes)


def code(*, path: str, seed: int = 0, held_out: int | None = None, limit: int = 0, answer: str = "") -> TaskSet:
    """Programming tasks from rows with `prompt` and tests, in any file, folder or hub data set.

    Tests: `inputs` and `outputs` (standard input and output), or `test_list`, or `test` and `entry_point`, or `cases`.
    answer: the column of the reference program, if any. Raises DataError when a row has no tests.
    """
    columns = {"answer": answer} if answer else {}
    found = _read(path, "", Reading(seed=seed, held_out=held_out, columns=columns))
    for task in (*found.train, *found.held_out):
        if not any(name in task.metadata for name in ("inputs", "test_list", "tests", "test", "cases")):
            raise DataError(
                f"{task.key}: no tests in this row; give inputs and outputs, test_list, test and entry_point, or "
                f"cases; found: {', '.join(task.metadata) or 'nothing but the prompt'}"
            )
    solution = _as_program if answer else found.solution
    return replace(_asking(found, found.train[: limit or None], found.held_out, ()), solution=solution)


def _as_program(task: Task) -> str:
    return fenced(task.answer or "")


def _read(path: str, config: str, reading: Reading) -> TaskSet:
    return from_path(Path(path), reading) if Path(path).exists() else from_hub(path, config, reading)


def _require(name: str, tasks: Sequence[Task], column: str) -> None:
    stranger = next((task for task in tasks if column not in task.metadata), None)
    if stranger is not None:
        raise DataError(f"{name}: {stranger.key}: no column {column}; this is no {name} row")


def _asking(found: TaskSet, train: Sequence[Task], unseen: Sequence[Task], notes: tuple[str, ...]) -> TaskSet:
    """The same set over other rows, every prompt asking for one code block."""
    ask: Callable[[Task], Task] = lambda task: (  # noqa: E731
        replace(task, prompt=f"{task.prompt}\n\n{ASK}") if isinstance(task.prompt, str) else task
    )
    train, unseen = tuple(map(ask, train)), tuple(map(ask, unseen))
    return replace(
        found,
        train=train,
        held_out=unseen,
        rewards=("code",),
        notes=(*found.notes, *notes),
        fingerprint=fingerprint(train, unseen),
    )
