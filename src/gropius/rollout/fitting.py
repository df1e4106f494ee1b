"""Which tasks leave the model room for an answer, once the chat template is around them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from gropius.errors import DataError
from gropius.models.chat import ChatFormat
from gropius.tasks.base import TaskSet
from gropius.types import Task


def fitting(found: TaskSet, chat: ChatFormat, context_length: int, overlong: str) -> tuple[TaskSet, list[str]]:
    """The tasks whose prompts leave at least one token of the context, and a note for each half that lost some.

    overlong: "drop" or "refuse". Errors: DataError naming the first row that does not fit, when it says refuse.
    """
    notes: list[str] = []

    def half(name: str, rows: Sequence[Task]) -> tuple[Task, ...]:
        """The rows of one half that fit."""
        lengths = {task.key: len(chat.prompt_ids(task.messages())) for task in rows}
        long = [task for task in rows if lengths[task.key] + 1 > context_length]
        if long and overlong == "refuse":
            raise DataError(
                f"{long[0].key}: the prompt has {lengths[long[0].key]} tokens after the template and the model's "
                f"context is {context_length}, which leaves no room for an answer ({len(long)} such {name} rows); "
                'shorten them, or write data.overlong = "drop"'
            )
        if long:
            notes.append(
                f"{len(long)} {name} rows dropped: their prompts leave no room in a context of {context_length}"
            )
        return tuple(task for task in rows if lengths[task.key] + 1 <= context_length)

    fitted = dataclasses.replace(found, train=half("train", found.train), held_out=half("held-out", found.held_out))
    return fitted, notes
