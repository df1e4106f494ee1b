"""Tasksets of the library `verifiers`, its v1 form (extra `verifiers`): tasks that one reply answers. No torch.

The library's tasks are rows with behaviour: prompt, and methods that score a trace. Prompts are taken here, scores come
from those methods in a pool worker (reward `verifiers`). What needs more than a reply is refused: tools, a container,
a runtime, a task that opens the conversation itself.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from gropius.errors import DataError
from gropius.tasks.base import TaskSet, fingerprint, rows_pair
from gropius.types import Message, Task

OLDEST, NEWEST = (0, 4), (0, 5)  # the v1 interface that this was written against


def verifiers(
    *, taskset: str, seed: int = 0, rows: Sequence[int] = (1000, 100), config: Mapping[str, Any] | None = None
) -> TaskSet:
    """Tasks of an installed taskset, the first ones in its order; the held-out rows come before the training rows.

    taskset: its package, as the library names it. rows: train and held-out at most; a taskset with fewer keeps a tenth
    apart. config: the taskset's own configuration. Raises DataError naming the taskset, the task or the extra.
    """
    wanted, kept_out = rows_pair("verifiers", rows)
    origin = {"taskset": taskset, "config": dict(config or {})}
    drawn = list(itertools.islice(open_taskset(origin), wanted + kept_out))
    if not drawn:
        raise DataError(f"verifiers {taskset}: the taskset has no tasks")
    if len(drawn) < wanted + kept_out:
        kept_out = min(kept_out, max(1, len(drawn) // 10)) if len(drawn) > 1 else 0
    tasks = [_task(one, place, origin) for place, one in enumerate(drawn)]
    held_out, train = tuple(tasks[:kept_out]), tuple(tasks[kept_out:])
    return TaskSet(
        name=f"verifiers/{taskset}",
        train=train,
        held_out=held_out,
        solution=None,
        environment=None,
        rewards=("verifiers",),
        system_prompt=None,
        notes=(f"verifiers {taskset}: {len(train)} train and {len(held_out)} held-out tasks",),
        fingerprint=fingerprint(train, held_out),
    )


def open_taskset(origin: Mapping[str, Any]) -> Any:
    """The library's tasks, lazily. origin: {"taskset", "config"}. Raises DataError."""
    library()
    loaders = importlib.import_module("verifiers.v1.utils.loaders")
    name = origin["taskset"]
    try:
        settings = loaders.taskset_config_type(name)(id=name, **origin["config"])
        return iter(loaders.load_taskset(settings))
    except (ImportError, AttributeError, TypeError, ValueError) as fault:  # the boundary: a package of others
        raise DataError(f"verifiers {name}: cannot be opened: {type(fault).__name__}: {fault}") from fault


def library() -> Any:
    """The library's v1 module. Raises DataError when it is missing or of a version that is not known to fit."""
    try:
        root, module = importlib.import_module("verifiers"), importlib.import_module("verifiers.v1")
    except ModuleNotFoundError as missing:
        raise DataError(
            f'verifiers needs the extra: pip install "gropius[verifiers]" (no module {missing.name})'
        ) from None
    found = tuple(int(part) for part in re.findall(r"\d+", str(getattr(root, "__version__", "0")))[:2])
    if not OLDEST <= found < NEWEST:
        raise DataError(
            f"verifiers {getattr(root, '__version__', '?')} is installed; this adapter knows "
            f"{'.'.join(map(str, OLDEST))} up to, without, {'.'.join(map(str, NEWEST))}"
        )
    return module


def _task(one: Any, place: int, origin: Mapping[str, Any]) -> Task:
    where = f"verifiers {origin['taskset']}, task {place}"
    data, v1 = one.data, library()
    needs = [
        ("tools", type(one).toolsets(one.config)),
        ("a container", type(one).NEEDS_CONTAINER or data.image),
        ("a setup", any(getattr(type(one), name) is not getattr(v1.Task, name) for name in ("setup", "finalize"))),
        ("a runtime for its rewards", [f.__name__ for f in one.hooks("reward") if _needs_runtime(f)]),
        ("a user that opens the conversation", data.prompt is None),
    ]
    missing = [name for name, needed in needs if needed]
    if missing:
        raise DataError(f"{where}: needs {', '.join(missing)}, which one reply to a prompt cannot give")
    if not one.hooks("reward"):
        raise DataError(f"{where}: has no reward")
    prompt = _prompt(where, data)
    row = json.loads(json.dumps(data.model_dump(mode="json", exclude_none=True), default=str))
    return Task(f"verifiers:{origin['taskset']}:{place}", prompt, None, {**origin, "index": place, "data": row})


def _needs_runtime(function: Any) -> bool:
    parameter = inspect.signature(function).parameters.get("runtime")
    return parameter is not None and parameter.default is inspect.Parameter.empty


def _prompt(where: str, data: Any) -> str | tuple[Message, ...]:
    system = data.system_prompt
    if isinstance(data.prompt, str) and not system:
        return str(data.prompt)
    given = [("user", data.prompt)] if isinstance(data.prompt, str) else [(m.role, m.content) for m in data.prompt]
    messages: list[Message] = [{"role": "system", "content": system}] if system else []
    for role, content in given:
        if not isinstance(content, str):
            raise DataError(f"{where}: a message of role {role} has content parts; plain text is taken")
        messages.append({"role": role, "content": content})
    return tuple(messages)
