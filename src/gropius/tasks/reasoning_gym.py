"""Task families of the library `reasoning-gym` by name, with their parameters (extra `tasks`). No torch.

Tasks are drawn here by the library's own seeded generators. Its scorers evaluate what a model wrote, so they run in a
confined child process only: the reward `reasoning_gym`.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from gropius.errors import DataError, did_you_mean
from gropius.tasks.base import TaskSet, answer_of, fingerprint, rows_pair
from gropius.types import Task

SYSTEM = "Think it through, then write the final answer between <answer> and </answer>."


def reasoning_gym(
    *, family: str, seed: int = 0, rows: Sequence[int] = (1000, 100), parameters: Mapping[str, Any] | None = None
) -> TaskSet:
    """Tasks of one family, such as "chain_sum" or "sudoku".

    rows: train and held-out tasks. parameters: of the family's own configuration, such as {min_terms = 2}. Task i is
    the library's item i under `seed`; rows that repeat a prompt are left out. Raises DataError naming the family, the
    parameter, or the extra that is missing.
    """
    wanted, kept_out = rows_pair("reasoning_gym", rows)
    given = dict(parameters or {})
    library = _library()
    known = sorted(library.factory.DATASETS)
    if family not in known:
        raise DataError(f'reasoning_gym: family = "{family}" is unknown; {did_you_mean(family, known)}')
    size = 2 * (wanted + kept_out)
    try:
        drawn = library.create_dataset(family, seed=seed, size=size, **given)
        tasks = _tasks(drawn, wanted + kept_out, {"family": family, "seed": seed, "size": size, "parameters": given})
    except (AssertionError, TypeError, ValueError) as fault:  # the boundary: the library checks its own parameters
        raise DataError(f"reasoning_gym {family}: parameters = {json.dumps(given, default=str)}: {fault}") from fault
    if len(tasks) < wanted + kept_out:
        raise DataError(f"reasoning_gym {family}: only {len(tasks)} different tasks in {size}; ask for fewer rows")
    train, held_out = tuple(tasks[kept_out:]), tuple(tasks[:kept_out])
    return TaskSet(
        name=f"reasoning_gym/{family}",
        train=train,
        held_out=held_out,
        solution=lambda task: f"<answer>{answer_of(task)}</answer>",
        environment=None,
        rewards=("reasoning_gym",),
        system_prompt=SYSTEM,
        notes=(f"reasoning_gym {family}: {wanted} train and {kept_out} held-out tasks, scored in a confined process",),
        fingerprint=fingerprint(train, held_out),
    )


def _tasks(drawn: Any, count: int, origin: Mapping[str, Any]) -> list[Task]:
    tasks: list[Task] = []
    seen: set[str] = set()
    for index in range(origin["size"]):
        item = drawn[index]
        question, answer = str(item["question"]), item["answer"]
        if question in seen:
            continue
        seen.add(question)
        metadata = {**origin, "index": index}
        key = f"reasoning_gym:{origin['family']}:{origin['seed']}:{index}"
        tasks.append(Task(key, question, None if answer is None else str(answer), metadata))
        if len(tasks) == count:
            break
    return tasks


def _library() -> Any:
    try:
        return importlib.import_module("reasoning_gym")
    except ModuleNotFoundError as missing:
        raise DataError(
            f'reasoning_gym needs the extra: pip install "gropius[tasks]" (no module {missing.name})'
        ) from None
