"""What a set of tasks is. No torch, no I/O."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from gropius.errors import DataError
from gropius.types import Environment, Message, Task

Solution = str | tuple[Message, ...]


@dataclass(frozen=True)
class TaskSet:
    """Tasks to train on, tasks to be judged on, and what belongs to them.

    train, held_out: disjoint by key; `held_out` may be empty. solution: what a supervised warm start imitates, None
    when there is none. For a single-turn task it is the reply's text. For a task with an environment it is the
    conversation after the prompt: messages of role "assistant" (imitated) and "user" (the environment's answers,
    masked) in turn, beginning and ending with "assistant"; `demonstration` gives that form for both kinds.
    environment: makes a fresh single-use partner for one episode of a task; None for single-turn tasks. Its `start()`
    returns the same messages as `task.messages()`. rewards: names of the rewards used when a recipe names none.
    sandbox: the weakest isolation that the environment takes for programs of the model; "" when it runs none.
    judges_text: the environment ends with an answer in words, which can hedge or deny; False for a game.
    blocking: a call of the environment may take long, so it is made beside the event loop; False: it is quick.
    tools: schemas of the functions that the model may call, for its chat template.
    notes: what was recognised, for a person to read. fingerprint: sha256 over all rows of both halves, in order.
    """

    name: str
    train: Sequence[Task]
    held_out: Sequence[Task]
    solution: Callable[[Task], Solution] | None
    environment: Callable[[Task], Environment] | None
    rewards: tuple[str, ...]
    system_prompt: str | None
    notes: tuple[str, ...]
    fingerprint: str
    sandbox: str = ""
    judges_text: bool = False
    blocking: bool = True
    tools: tuple[dict[str, Any], ...] = ()

    def __post_init__(self) -> None:
        if not self.train:
            raise DataError(f"{self.name}: no tasks to train on; the set is empty")
        twice = [key for key, n in Counter(t.key for t in [*self.train, *self.held_out]).items() if n > 1]
        if twice:
            raise DataError(f'{self.name}: the key "{twice[0]}" belongs to {len(twice) + 1} tasks; a key names one row')

    def demonstration(self, task: Task) -> tuple[Message, ...]:
        """The solution as messages after the prompt: one "assistant" message, or a conversation that ends with one.

        Raises DataError when the set has no solutions.
        """
        if self.solution is None:
            raise DataError(f"{self.name}: these tasks have no solutions to imitate; set sft.steps = 0")
        found = self.solution(task)
        return ({"role": "assistant", "content": found},) if isinstance(found, str) else found


def fingerprint(train: Iterable[Task], held_out: Iterable[Task]) -> str:
    """sha256 over every row of both halves: key, prompt, answer and metadata, as canonical JSON.

    >>> fingerprint([Task("a", "1+1=", "2")], [])[:8] == fingerprint([Task("a", "1+1=", "3")], [])[:8]
    False
    """
    digest = hashlib.sha256()
    for half, tasks in (("train", train), ("held_out", held_out)):
        for task in tasks:
            row = [half, task.key, task.prompt, task.answer, dict(task.metadata)]
            digest.update(json.dumps(row, sort_keys=True, default=str, ensure_ascii=True).encode() + b"\n")
    return digest.hexdigest()


def answer_of(task: Task) -> str:
    """The gold answer, as the text a warm start imitates. Raises DataError where the row has none."""
    if task.answer is None:
        raise DataError(f"{task.key}: the row has no answer to imitate")
    return task.answer


def require_range(where: str, value: int, low: int, high: int) -> None:
    """Refuse a whole number outside low..high. Raises DataError naming `where` and the bounds."""
    if not low <= value <= high:
        raise DataError(f"{where} = {value}; write a whole number from {low} to {high}")


def require_choice(where: str, value: str, choices: Sequence[str]) -> None:
    """Refuse a word that is not among the choices. Raises DataError naming `where` and the choices."""
    if value not in choices:
        raise DataError(f'{where} = "{value}"; choose from: {", ".join(choices)}')


def rows_pair(where: str, rows: Sequence[int]) -> tuple[int, int]:
    """`rows` as (train, held-out). Raises DataError unless it is two whole numbers, the first at least 1."""
    whole = isinstance(rows, (list, tuple)) and all(isinstance(n, int) and not isinstance(n, bool) for n in rows)
    if not whole or len(rows) != 2 or rows[0] < 1 or rows[1] < 0:
        raise DataError(f"{where}: rows = {rows!r}; write [train, held_out], for example [4000, 200]")
    return rows[0], rows[1]
