"""Recognise the row shapes of the field and turn rows into tasks. No torch.

A shape is a row of data: the columns it is known by, how prompt and gold answer are read, and the rewards that suit it.
The first shape of `SHAPES` whose columns are all there wins; `columns` of the recipe overrides single columns.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from gropius.errors import DataError, did_you_mean
from gropius.tasks.files import Row, Rows
from gropius.types import Message, Task

ROLES = ("system", "user", "assistant", "tool")
_FOLLOWS = {
    None: ("system", "user"),
    "system": ("user",),
    "user": ("assistant",),
    "assistant": ("user", "tool"),
    "tool": ("tool", "assistant"),
}
_MESSAGE_KEYS = ("role", "content", "tool_calls", "tool_call_id", "name")


@dataclass(frozen=True)
class Shape:
    """One recognised kind of row. needs: columns it is known by. prompt, answer: columns that hold them ("" for none).

    read_answer, read_prompt: from the cell and the whole row. rewards: suitable default rewards, () when none is sure.
    solution: the reply that a gold answer makes, where it is not the answer itself. keeps_prompt: whether the
    prompt of a row stays among the metadata as it stood, for a reward that puts a reply behind it.
    """

    name: str
    needs: tuple[str, ...]
    prompt: str
    answer: str
    rewards: tuple[str, ...]
    read_answer: Callable[[Any, Mapping[str, Any]], Any] = lambda cell, row: cell
    read_prompt: Callable[[Any, Mapping[str, Any]], Any] = lambda cell, row: cell
    solution: Callable[[Task], str] | None = None
    keeps_prompt: Callable[[Any, Mapping[str, Any]], bool] = lambda cell, row: False


def after_hashes(text: Any, row: Mapping[str, Any] | None = None) -> str | None:
    """The gold number of a GSM8K answer: what follows the last `####`, commas removed; None without `####`.

    >>> after_hashes("5 * 200 = 1000\\n#### 1,000")
    '1000'
    """
    _, mark, tail = str(text).rpartition("####")
    return tail.strip().replace(",", "") if mark and tail.strip() else None


def last_boxed(text: Any) -> str | None:
    """The content of the last `\\boxed{…}` with balanced braces; None when there is none.

    >>> last_boxed(r"so it is \\boxed{\\frac{1}{2}}.")
    '\\\\frac{1}{2}'
    """
    source = str(text)
    start = source.rfind("\\boxed{")
    if start < 0:
        return None
    depth, begin = 0, start + len("\\boxed{")
    for place in range(begin - 1, len(source)):
        depth += {"{": 1, "}": -1}.get(source[place], 0)
        if depth == 0:
            return source[begin:place].strip()
    return None


def _question_answer(cell: Any, row: Mapping[str, Any]) -> Any:
    gold = after_hashes(cell)
    return cell if gold is None else gold


def _ground_truth(cell: Any, row: Mapping[str, Any]) -> Any:
    return cell.get("ground_truth") if isinstance(cell, Mapping) else None


def _mbpp_prompt(cell: Any, row: Mapping[str, Any]) -> Any:
    tests = row.get("test_list")
    return f"{cell}\nYour code should pass this test:\n{tests[0]}" if isinstance(tests, list) and tests else cell


def fenced(program: str) -> str:
    """A program as a reply: one Python code block, line ends made plain.

    >>> fenced("x = 1\\r\\n")
    '```python\\nx = 1\\n```'
    """
    plain = program.replace("\r\n", "\n").strip("\n")
    return f"```python\n{plain}\n```"


def _program(task: Task) -> str:
    return fenced(task.answer or "")


def _completed(task: Task) -> str:
    return fenced(f"{task.metadata.get('prompt', '')}{task.answer or ''}")


def _opens_function(cell: Any, row: Mapping[str, Any]) -> bool:
    """True for a prompt that is the head of the function under test, which the reply may go on from."""
    return f"def {row.get('entry_point')}" in str(cell)


def _boxed_solution(cell: Any, row: Mapping[str, Any]) -> Any:
    return last_boxed(cell)


SHAPES: tuple[Shape, ...] = (
    Shape("verl", ("data_source", "prompt", "reward_model"), "prompt", "reward_model", (), _ground_truth),
    Shape("HumanEval", ("prompt", "entry_point", "test"), "prompt", "canonical_solution", ("code",),
          solution=_completed, keeps_prompt=_opens_function),
    Shape("MBPP", ("text", "code", "test_list"), "text", "code", ("code",), read_prompt=_mbpp_prompt,
          solution=_program),
    Shape("MBPP", ("prompt", "code", "test_list"), "prompt", "code", ("code",), read_prompt=_mbpp_prompt,
          solution=_program),
    Shape("code with input and output", ("prompt", "inputs", "outputs"), "prompt", "", ("code",)),
    Shape("code with tests", ("prompt", "test_list"), "prompt", "", ("code",)),
    Shape("code with tests", ("prompt", "cases"), "prompt", "", ("code",)),
    Shape("MATH", ("problem", "answer"), "problem", "answer", ("math",)),
    Shape("MATH", ("problem", "solution"), "problem", "solution", ("math",), _boxed_solution),
    Shape("GSM8K", ("question", "answer"), "question", "answer", ("math",), _question_answer),
    Shape("prompt and answer", ("prompt", "answer"), "prompt", "answer", ("exact",)),
    Shape("TRL", ("prompt", "solution"), "prompt", "solution", ("exact",)),
    Shape("TRL", ("prompt", "ground_truth"), "prompt", "ground_truth", ("exact",)),
    Shape("OpenRLHF", ("input", "label"), "input", "label", ("exact",)),
    Shape("prompt only", ("prompt",), "prompt", "", ()),
    Shape("prompt only", ("input",), "input", "", ()),
)  # fmt: skip


def recognise(rows: Rows, columns: Mapping[str, str]) -> Shape:
    """The shape of the rows, by the columns present in any of them, with the recipe's `columns` put on top.

    columns: {"prompt": column, "answer": column}, either or both. A column given there is read as it stands, except
    that the shape's own column keeps the shape's way of reading. Raises DataError naming the file and the columns
    found.
    """
    found = rows.columns
    for key, column in columns.items():
        if key not in ("prompt", "answer"):
            raise DataError(f"data.columns.{key}: unknown; {did_you_mean(key, ('prompt', 'answer'))}")
        if column not in found:
            raise DataError(f'{rows.name}: no column "{column}" (data.columns.{key}); found: {", ".join(found)}')
    shape = next((s for s in SHAPES if set(s.needs) <= set(found)), None)
    if shape is None and "prompt" not in columns:
        raise DataError(
            f"{rows.name}:1: no prompt column; found: {', '.join(found) or 'none'}. Name columns prompt and answer, or "
            "say which they are in data.columns"
        )
    if shape is None:
        shape = Shape("columns of the recipe", (), columns["prompt"], "", ("exact",) if "answer" in columns else ())
    if shape.name == "GSM8K" and not any("####" in str(row.values.get("answer")) for row in rows.rows):
        shape = replace(shape, name="question and answer", rewards=("exact",))
    if columns.get("prompt", shape.prompt) != shape.prompt:
        shape = replace(shape, prompt=columns["prompt"], read_prompt=lambda cell, row: cell)
    if columns.get("answer", shape.answer) != shape.answer:
        shape = replace(shape, answer=columns["answer"], read_answer=lambda cell, row: cell, solution=None)
    return shape


def to_task(row: Row, shape: Shape, key: str) -> Task:
    """One row as a task. Every column but the prompt goes into the metadata under its own name.

    Raises DataError naming file:row for a null or empty prompt, a missing column and messages no template takes.
    """
    if shape.prompt not in row.values:
        raise DataError(f'{row.place}: no column "{shape.prompt}" in this row; found: {", ".join(row.values)}')
    cell = row.values[shape.prompt]
    prompt = read_prompt(row.place, shape.prompt, cell if cell is None else shape.read_prompt(cell, row.values))
    gold = row.values.get(shape.answer) if shape.answer else None
    answer = None if gold is None else _text(shape.read_answer(gold, row.values))
    kept = shape.keeps_prompt(cell, row.values)
    metadata = {name: value for name, value in row.values.items() if name != shape.prompt or kept}
    return Task(key, prompt, answer, metadata)


def read_prompt(place: str, column: str, cell: Any) -> str | tuple[Message, ...]:
    """A prompt cell: text, or messages whose roles stand in an order that chat templates take.

    Roles: system first if at all, then user and assistant in turn (tool after assistant), the last one user or tool.
    Raises DataError naming `place` otherwise.
    """
    if isinstance(cell, str):
        if not cell.strip():
            raise DataError(f"{place}: the prompt ({column}) is empty")
        return cell
    if cell is None:
        raise DataError(f"{place}: the prompt ({column}) is null")
    if not isinstance(cell, list):
        raise DataError(f"{place}: the prompt ({column}) is a {type(cell).__name__}; write text or a list of messages")
    if not cell:
        raise DataError(f"{place}: the prompt ({column}) is an empty list; it needs a user message")
    messages: list[Message] = []
    before: str | None = None
    for number, message in enumerate(cell, start=1):
        messages.append(_message(f"{place}: message {number}", message))
        role = messages[-1]["role"]
        if role not in _FOLLOWS[before]:
            after = "at the start" if before is None else f"after {before}"
            raise DataError(f"{place}: message {number}: {role} {after}; here goes {' or '.join(_FOLLOWS[before])}")
        before = role
    if before not in ("user", "tool"):
        raise DataError(
            f"{place}: the prompt ends with {before}; it must end with user (or tool), for the model to answer"
        )
    return tuple(messages)


def _message(place: str, message: Any) -> Message:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise DataError(f'{place} is no message; write {{"role": "user", "content": "..."}}')
    if message["role"] not in ROLES:
        raise DataError(f'{place}: unknown role "{message["role"]}"; {did_you_mean(message["role"], ROLES)}')
    content = message.get("content")
    if content is None and message.get("tool_calls"):
        content = ""
    if not isinstance(content, str):
        kind = "null" if content is None else f"a {type(content).__name__}"
        raise DataError(f"{place}: content is {kind}; write plain text (content parts are not taken)")
    kept = {key: message[key] for key in _MESSAGE_KEYS if message.get(key) is not None}
    return Message(**{**kept, "content": content})  # type: ignore[typeddict-item]


def _text(value: Any) -> str | None:
    """A gold cell as text: whole floats without their point, lists and objects as JSON."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    if isinstance(value, (list, Mapping)):
        return json.dumps(value, ensure_ascii=False, default=str)
    return str(value)
