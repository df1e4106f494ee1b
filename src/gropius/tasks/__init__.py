"""Task sets: seeded generators, known data sets, and a person's own rows. No torch.

`TASKS` is the table of named sets; `load_tasks` takes what a recipe writes.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gropius.errors import DataError, did_you_mean
from gropius.naming import check_options, load_function, names_a_function
from gropius.tasks.arithmetic import arithmetic, times_table
from gropius.tasks.base import TaskSet
from gropius.tasks.competition import math
from gropius.tasks.countdown import countdown
from gropius.tasks.files import READERS
from gropius.tasks.gsm8k import gsm8k
from gropius.tasks.guess_number import guess_number
from gropius.tasks.openenv import openenv
from gropius.tasks.programs import code, humaneval, mbpp
from gropius.tasks.reasoning_gym import reasoning_gym
from gropius.tasks.sources import Reading, from_function, from_hub, from_path
from gropius.tasks.tools import calculator, python_tool
from gropius.tasks.verifiers import verifiers

__all__ = ["TASKS", "TaskSet", "load_tasks"]

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+\Z")


def load_tasks(
    source: str,
    options: Mapping[str, Any],
    seed: int,
    columns: Mapping[str, str],
    held_out: int | None,
    base_dir: Path,
) -> TaskSet:
    """The task set that a recipe's `[data]` describes.

    source: a name in `TASKS`; a file (.jsonl .json .csv .parquet) or folder; `module:function`; a hub id. Paths are
    relative to base_dir, or else to the working folder. options: of the named set or the function; for files, folders
    and the hub `limit`, `where`, `held_out_path` (files) and `config` (hub). columns: which columns hold prompt and
    answer. held_out: number of held-out tasks, None for the source's own default. Raises DataError naming what was
    found and what to write instead.
    """
    if source in TASKS:
        return _named(source, options, seed, columns, held_out, base_dir)
    if held_out is not None and held_out < 0:
        raise DataError(f"data.held_out = {held_out}; write 0 or more")
    if names_a_function(source) and not (base_dir / source).exists():
        function = load_function(source, base_dir, DataError)
        return from_function(source, function, options, Reading(seed, held_out, columns=columns))
    check_options(f"data set {source}", row_options, options, DataError)
    reading = Reading(seed, held_out, options.get("limit", 0), columns, options.get("where", {}))
    path = base_dir / source if (base_dir / source).exists() else Path(source)
    saved = path.is_dir() and any((path / mark).is_file() for mark in ("state.json", "dataset_dict.json"))
    if path.exists() and not saved:
        unseen = options.get("held_out_path", "")
        return from_path(path, reading, base_dir / unseen if unseen else None)
    if saved or (_HUB_ID.match(source) and not source.endswith((*READERS, ".gz"))):
        return from_hub(str(path) if saved else source, options.get("config", ""), reading)
    if source.endswith((*READERS, ".gz")):
        raise DataError(f"{path}: no such file")
    raise DataError(
        f'data.source = "{source}": no such task set, file or folder; {did_you_mean(source, TASKS)} A source is '
        "one of these names, a .jsonl, .json, .csv or .parquet file, a folder, module:function, or a hub id owner/name"
    )


def row_options(
    *, limit: int = 0, where: Mapping[str, Any] | None = None, held_out_path: str = "", config: str = ""
) -> None:
    """The options that rows from a file, a folder or the hub take; its signature is what they are checked against.

    limit: training tasks at most (0: all). where: {column: value or list of values} a row must have. held_out_path: a
    file with the held-out rows. config: the hub data set's configuration.
    """


def _named(
    source: str,
    options: Mapping[str, Any],
    seed: int,
    columns: Mapping[str, str],
    held_out: int | None,
    base_dir: Path,
) -> TaskSet:
    builder = TASKS[source]
    parameters = inspect.signature(builder).parameters
    if columns:
        raise DataError(f"data.columns has no effect on the task set {source}; leave it out")
    given = check_options(f"task set {source}", builder, options, DataError)
    given.setdefault("seed", seed)
    if "path" in given and (base_dir / given["path"]).exists():
        given["path"] = str(base_dir / given["path"])
    if held_out is not None and "held_out" in parameters:
        given["held_out"] = held_out
    elif held_out is not None:
        rows = given.get("rows", parameters["rows"].default)
        given["rows"] = [*rows[:1], held_out] if isinstance(rows, (list, tuple)) else rows
    return builder(**given)


TASKS: dict[str, Callable[..., TaskSet]] = {
    "arithmetic": arithmetic,
    "times_table": times_table,
    "countdown": countdown,
    "gsm8k": gsm8k,
    "math": math,
    "mbpp": mbpp,
    "humaneval": humaneval,
    "code": code,
    "guess_number": guess_number,
    "calculator": calculator,
    "python_tool": python_tool,
    "reasoning_gym": reasoning_gym,
    "verifiers": verifiers,
    "openenv": openenv,
}
