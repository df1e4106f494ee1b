"""Task sets out of a person's own rows: files, folders, the Hugging Face hub, and functions. No torch."""

from __future__ import annotations

import importlib
import inspect
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gropius.errors import DataError, GropiusError
from gropius.tasks.base import Solution, TaskSet, fingerprint
from gropius.tasks.files import READERS, Row, Rows, clean_rows, read_rows
from gropius.tasks.shapes import Shape, recognise, to_task
from gropius.types import Task

HELD_OUT_SHARE, HELD_OUT_MOST = 0.1, 200


@dataclass(frozen=True)
class Reading:
    """How rows become a task set. held_out: tasks kept out of training; None takes the source's own test split, else a
    tenth (at most 200). limit: training tasks at most, the first ones; 0 for all. where: {column: value or list of
    values} that a row must have. columns: {"prompt": …, "answer": …}.
    """

    seed: int = 0
    held_out: int | None = None
    limit: int = 0
    columns: Mapping[str, str] = field(default_factory=dict)
    where: Mapping[str, Any] = field(default_factory=dict)
    solution: Callable[[Task], Solution] | None = None


def from_path(path: Path, reading: Reading, held_out_path: Path | None = None) -> TaskSet:
    """A task set from a file, or from a folder with `train.*` and perhaps `test.*`, `validation.*` or `held_out.*`.

    Raises DataError naming file and row.
    """
    if path.is_dir():
        path, held_out_path = _folder(path, held_out_path)
    given = held_out_path is not None and not reading.where
    rows = read_rows(path, reading.limit or None if given else None)
    unseen = None if held_out_path is None else read_rows(held_out_path)
    name = path.name.partition(".")[0]
    return from_rows(path.resolve().parent.name if name in ("train", "test") else name, rows, unseen, reading)


def from_rows(name: str, rows: Rows, unseen: Rows | None, reading: Reading) -> TaskSet:
    """A task set from rows already read; `unseen` are the held-out rows, None to split `rows` by the seed.

    A split keeps rows with the same prompt on one side. Rows that stand twice are kept: a key names the row.
    """
    shape = recognise(rows, reading.columns)
    notes = [_recognised(rows, shape)]
    train = _tasks(rows, shape, reading, notes, prefix="")
    if unseen is None:
        train, held_out = split(train, reading.held_out, reading.seed)
        notes.append(f"{rows.name}: {len(held_out)} of {len(train) + len(held_out)} rows held out by the seed")
    else:
        prefix = "held_out/" if unseen.name == rows.name else ""
        held_out = _tasks(unseen, recognise(unseen, reading.columns), reading, notes, prefix)
        held_out = held_out if reading.held_out is None else held_out[: reading.held_out]
        notes.append(f"{unseen.name}: {len(held_out)} rows held out")
    train = train[: reading.limit] if reading.limit else train
    notes += _overlap(train, held_out)
    return TaskSet(
        name=name,
        train=train,
        held_out=held_out,
        solution=reading.solution
        or shape.solution
        or (_answer if all(task.answer is not None for task in train) else None),
        environment=None,
        rewards=shape.rewards,
        system_prompt=None,
        notes=tuple(notes),
        fingerprint=fingerprint(train, held_out),
    )


def split(tasks: Sequence[Task], held_out: int | None, seed: int) -> tuple[tuple[Task, ...], tuple[Task, ...]]:
    """(train, held-out) by the seed, equal prompts on one side; each half keeps the order of the rows.

    held_out: rows wanted (None: a tenth, at most 200, at least 1 when there are two prompts); with equal prompts it is
    the most that fits. Raises DataError when nothing would be left to train on.
    """
    wanted = min(HELD_OUT_MOST, max(1, int(len(tasks) * HELD_OUT_SHARE))) if held_out is None else held_out
    by_prompt: dict[str, list[int]] = {}
    for place, task in enumerate(tasks):
        by_prompt.setdefault(repr(task.prompt), []).append(place)
    if held_out is None and len(by_prompt) < 2:
        wanted = 0
    if wanted and wanted >= len(tasks):
        raise DataError(f"held_out = {wanted}, but there are only {len(tasks)} rows; nothing is left to train on")
    prompts = list(by_prompt.values())
    random.Random(f"{seed}:held_out").shuffle(prompts)
    unseen: set[int] = set()
    for places in prompts:
        if len(unseen) + len(places) <= wanted:
            unseen.update(places)
    kept = [place in unseen for place in range(len(tasks))]
    train = tuple(task for task, out in zip(tasks, kept, strict=True) if not out)
    return train, tuple(task for task, out in zip(tasks, kept, strict=True) if out)


def from_hub(source: str, config: str, reading: Reading) -> TaskSet:
    """A task set from a `datasets` folder or hub id: split "train", and "test" or "validation" held out.

    Needs the extra `data`. Raises DataError when it is missing or the data set cannot be loaded.
    """
    try:
        datasets = importlib.import_module("datasets")
    except ModuleNotFoundError:
        raise DataError(
            f'"{source}" is no file, folder or known task set, and hub data sets need the extra: '
            'pip install "gropius[data]"'
        ) from None
    try:
        folder = Path(source).is_dir()
        found = datasets.load_from_disk(source) if folder else datasets.load_dataset(source, config or None)
    except (OSError, ValueError, RuntimeError) as fault:  # the boundary: network, files and names of others
        raise DataError(f"{source}: cannot be loaded as a data set: {fault}") from fault
    splits: dict[str, Any] = dict(found) if isinstance(found, Mapping) else {"train": found}
    if "train" not in splits:
        raise DataError(f"{source}: no split train; found: {', '.join(splits)}")
    unseen = next((splits[name] for name in ("test", "validation") if name in splits), None)
    rows = _from_objects(f"{source}/train", splits["train"])
    return from_rows(source, rows, None if unseen is None else _from_objects(f"{source}/held_out", unseen), reading)


def from_function(name: str, function: Callable[..., Any], options: Mapping[str, Any], reading: Reading) -> TaskSet:
    """A task set from a function that returns a TaskSet, or rows: an iterable of tasks, or of objects with columns.

    The function gets the options, and `seed` when it has a parameter of that name. Raises DataError naming the function
    and what it raised or returned.
    """
    extra = {"seed": reading.seed} if "seed" in inspect.signature(function).parameters else {}
    try:
        made = function(**{**extra, **options})
        if inspect.isgenerator(made):
            made = list(made)
    except GropiusError:
        raise
    except (Exception, SystemExit) as fault:  # the boundary: a person's own function
        given = ", ".join({**extra, **options}) or "none"
        raise DataError(f"{name} raised {type(fault).__name__}: {fault} (options given: {given})") from fault
    if isinstance(made, TaskSet):
        return made
    if isinstance(made, (str, bytes, Mapping)) or not isinstance(made, Iterable):
        raise DataError(f"{name}: returned a {type(made).__name__}; return a TaskSet or a list of rows")
    items = list(made)
    if not items:
        raise DataError(f"{name}: returned no rows")
    if not all(isinstance(item, Task) for item in items):
        return from_rows(name, _from_objects(name, items), None, reading)
    train, held_out = split(items, reading.held_out, reading.seed)
    train = train[: reading.limit] if reading.limit else train
    notes = (f"{name}: {len(train)} train and {len(held_out)} held-out tasks", *_overlap(train, held_out))
    solution = reading.solution or (_answer if all(task.answer is not None for task in train) else None)
    return TaskSet(name, train, held_out, solution, None, (), None, notes, fingerprint(train, held_out))


def _answer(task: Task) -> str:
    return task.answer or ""


def _from_objects(name: str, objects: Iterable[Any]) -> Rows:
    return clean_rows(name, [(f"{name}:{number}", values) for number, values in enumerate(objects, start=1)])


def _folder(folder: Path, held_out_path: Path | None) -> tuple[Path, Path | None]:
    def find(*stems: str) -> Path | None:
        names = [stem + suffix + end for stem in stems for suffix in READERS for end in ("", ".gz")]
        return next((folder / name for name in names if (folder / name).is_file()), None)

    train = find("train")
    if train is None:
        raise DataError(f"{folder}: no train.jsonl (or .json, .csv, .parquet) in this folder")
    return train, held_out_path or find("test", "validation", "held_out")


def _tasks(rows: Rows, shape: Shape, reading: Reading, notes: list[str], prefix: str) -> tuple[Task, ...]:
    for column in reading.where:
        if column not in rows.columns:
            raise DataError(f'{rows.name}: no column "{column}" (where); found: {", ".join(rows.columns)}')
    kept = [row for row in rows.rows if _passes(row, reading.where)]
    if not kept:
        raise DataError(f"{rows.name}: empty after filtering: none of {len(rows.rows)} rows has {dict(reading.where)}")
    tasks = tuple(to_task(row, shape, f"{prefix}{rows.name}:{row.place.rpartition(':')[2]}") for row in kept)
    if len(kept) < len(rows.rows):
        notes.append(f"{rows.name}: {len(kept)} of {len(rows.rows)} rows pass the filter")
    if rows.replaced:
        notes.append(f"{rows.name}: lone surrogates replaced in {rows.replaced} texts")
    without = sum(task.answer is None for task in tasks)
    if shape.answer and without:
        notes.append(f"{rows.name}: {without} of {len(tasks)} rows have no gold answer")
    repeated = len(tasks) - len({repr(task.prompt) for task in tasks})
    if repeated:
        notes.append(f"{rows.name}: {repeated} rows repeat the prompt of another (kept; each row is its own task)")
    return tasks


def _passes(row: Row, where: Mapping[str, Any]) -> bool:
    return all(
        row.values.get(column) in wanted if isinstance(wanted, list) else row.values.get(column) == wanted
        for column, wanted in where.items()
    )


def _recognised(rows: Rows, shape: Shape) -> str:
    answer = f"answer = {shape.answer}" if shape.answer else "no answer column"
    return f"{rows.name}: {len(rows.rows)} rows, recognised as {shape.name} (prompt = {shape.prompt}, {answer})"


def _overlap(train: Sequence[Task], held_out: Sequence[Task]) -> list[str]:
    seen = {repr(task.prompt) for task in train}
    both = sum(repr(task.prompt) in seen for task in held_out)
    return [f"warning: {both} of {len(held_out)} held-out prompts also stand in the training rows"] if both else []
