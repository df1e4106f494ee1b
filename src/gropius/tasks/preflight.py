"""What is wrong with a set of tasks before anything is trained on it. No torch, no model, no reward."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from gropius.tasks.base import TaskSet
from gropius.types import Task

MOST_ROWS = 20


@dataclass(frozen=True)
class Finding:
    """One fault of data or reward. severity: "finding" fails a check, "note" is worth knowing.

    message: what is seen. change: what to do. rows: keys of tasks, or names, at most 20 of `count`.
    """

    name: str
    severity: Literal["finding", "note"]
    message: str
    change: str
    rows: tuple[str, ...] = ()
    count: int = 0

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {**vars(self), "rows": list(self.rows)}


def finding(name: str, message: str, change: str, rows: Iterable[str] = (), *, note: bool = False) -> Finding:
    """A finding, or with `note` a note, its rows counted and cut."""
    every = list(rows)
    return Finding(name, "note" if note else "finding", message, change, tuple(every[:MOST_ROWS]), len(every))


def preflight(tasks: TaskSet, programs: bool = False) -> list[Finding]:
    """Rows that stand twice, prompts with two answers, training prompts among the held-out ones, missing gold answers.

    Prompts are compared as they stand, and once more without case, accents' form, punctuation and blanks ("nearly").
    Nothing is said of tasks with an environment. programs: answers are reference programs, of which many are right.
    """
    every = [*tasks.train, *tasks.held_out]
    if tasks.environment is not None:
        return []  # what tells such tasks apart is hidden, and not in the prompt
    by_prompt, nearly = _groups(every, _exact), _groups(every, _normal)
    found = []
    twice = [rows for rows in by_prompt.values() if len(rows) > 1]
    if same := [task.key for rows in twice for task in rows[1:] if task.answer == rows[0].answer]:
        found.append(
            finding("duplicate rows", f"{len(same)} rows repeat the prompt and answer of another",
                    "leave them out, or they count several times", same, note=True)
        )  # fmt: skip
    if not programs and (two := [rows[0].key for rows in twice if len({task.answer for task in rows}) > 1]):
        found.append(
            finding("several answers", f"{len(two)} prompts stand in several rows with different gold answers",
                    "keep the right one: the same reply is right in one row and wrong in the other", two)
        )  # fmt: skip
    near = [rows[1].key for rows in nearly.values() if len({_exact(task) for task in rows}) > 1]
    if near:
        found.append(
            finding("near duplicates", f"{len(near)} prompts equal another but for case, punctuation or blanks",
                    "leave them out, or keep them on one side of the split", near, note=True)
        )  # fmt: skip
    found += _overlap(tasks)
    without = [task.key for task in every if not (task.answer or "").strip()]
    if without and len(without) < len(every):
        found.append(
            finding("no gold answer", f"{len(without)} of {len(every)} rows have no gold answer, the others have one",
                    "fill it in, or leave the rows out: nothing can be compared with them", without)
        )  # fmt: skip
    return found


def overlong(tasks: Sequence[Task], length: Callable[[Task], int], context: int, room: int) -> list[Finding]:
    """Prompts that leave fewer than `room` tokens of `context` for a reply. length: tokens after the chat template."""
    long = [task.key for task in tasks if length(task) + room > context]
    if not long:
        return []
    return [
        finding("overlong prompts", f"{len(long)} of {len(tasks)} prompts leave fewer than {room} tokens of {context}",
                'shorten them, lower rollout.max_tokens, or write data.overlong = "drop"', long)
    ]  # fmt: skip


def _overlap(tasks: TaskSet) -> list[Finding]:
    trained, nearly = {_exact(task) for task in tasks.train}, {_normal(task) for task in tasks.train}
    both = [task.key for task in tasks.held_out if _exact(task) in trained]
    near = [task.key for task in tasks.held_out if _exact(task) not in trained and _normal(task) in nearly]
    found = []
    for keys, how in ((both, ""), (near, " but for case, punctuation or blanks")):
        if keys:
            found.append(
                finding("train/held-out overlap",
                        f"{len(keys)} of {len(tasks.held_out)} held-out prompts are trained on{how}",
                        "take them out of one side: held-out results would show memory", keys)
            )  # fmt: skip
    return found


def _groups(tasks: Sequence[Task], key: Callable[[Task], str]) -> dict[str, list[Task]]:
    groups: dict[str, list[Task]] = {}
    for task in tasks:
        groups.setdefault(key(task), []).append(task)
    return groups


def _exact(task: Task) -> str:
    return task.prompt if isinstance(task.prompt, str) else repr(task.prompt)


def _normal(task: Task) -> str:
    """The prompt's letters, digits and mathematical signs; operators keep their meaning, so `1-2` is not `1+2`."""
    text = unicodedata.normalize("NFKC", " ".join(message["content"] for message in task.messages())).casefold()
    return "".join(
        c for c in text if c.isalnum() or unicodedata.category(c) in ("Sm", "Pd", "Sc") or c in "*/^%()[]{}<>"
    )
