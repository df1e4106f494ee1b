"""From rows of another trainer to the columns of a log; what no row has stays away and is named as missing."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from gropius.doctor.log import PART, Column, repetition
from gropius.doctor.run import EXCERPT
from gropius.doctor.sample import fingerprint
from gropius.errors import RunFolderError


@dataclass(frozen=True)
class Answer:
    """One response of another trainer's log. None: the log does not say.

    group: siblings share it within a step. task: what was asked, across steps. metric: the unshaped success.
    prompt: what was asked, in words, where `task` is only its name.
    """

    step: int
    group: str
    task: str
    text: str
    reward: float | None = None
    metric: float | None = None
    advantage: float | None = None
    tokens: int | None = None
    truncated: bool | None = None
    status: str | None = None
    reason: str = ""
    version: int | None = None
    parts: Mapping[str, float | None] = field(default_factory=dict)
    prompt: str = ""


def columns_of(answers: Sequence[Answer]) -> dict[str, Column]:
    """Columns of a log; one that no answer has is left out. Members are numbered in the order they come."""
    members: dict[tuple[int, str], int] = {}
    numbers = []
    for answer in answers:
        key = (answer.step, answer.group)
        members[key] = members.get(key, -1) + 1
        numbers.append(members[key])
    columns: dict[str, Column] = {
        "step": np.array([a.step for a in answers], np.int64),
        "group_id": np.array([a.group for a in answers], object),
        "member": np.array(numbers, np.int64),
        "task": np.array([a.task for a in answers], object),
        "identity": np.array([fingerprint(a.text) for a in answers], np.int64),
        "repetition": np.array([repetition(a.text[:4000]) for a in answers], np.float64),
        "excerpt": np.array([a.text[:EXCERPT] for a in answers], object),
        "reason": np.array([a.reason for a in answers], object),
    }
    for name, own in (("reward", "reward"), ("raw", "metric"), ("advantage", "advantage")):
        columns |= _known(name, [getattr(a, own) for a in answers], np.float64, math.nan)
    columns |= _known("tokens", [a.tokens for a in answers], np.int64, 0)
    columns |= _known("truncated", [a.truncated for a in answers], np.bool_, False)
    columns |= _known("version", [a.version for a in answers], np.int64, 0)
    columns |= _known("status", [a.status for a in answers], object, "scored")
    names = dict.fromkeys(name for a in answers for name in a.parts)
    if len(names) > 1:
        for name in names:
            columns |= _known(PART + name, [a.parts.get(name) for a in answers], np.float64, math.nan)
    return columns


def _known(name: str, values: Sequence[Any], kind: Any, absent: Any) -> dict[str, Column]:
    if all(value is None for value in values):
        return {}
    return {name: np.array([absent if value is None else value for value in values], kind)}


def json_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Rows of a JSONL file. Errors: RunFolderError naming file and line; a half-written last line is left out."""
    try:
        *lines, last = path.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError as error:
        raise RunFolderError(f"{path}: cannot be read: {error.strerror}") from error
    for number, line in enumerate([*lines, last], start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            if number == len(lines) + 1:
                return
            raise RunFolderError(f"{path}:{number}: this is not JSON: {error}") from error
        if not isinstance(row, dict):
            raise RunFolderError(f"{path}:{number}: a row is a table of keys, this is a {type(row).__name__}")
        yield row


def first_row(path: Path) -> dict[str, Any]:
    """The first row of a JSONL file; empty when it has none or is no JSONL."""
    try:
        with path.open(encoding="utf-8") as file:
            row = json.loads(file.readline())
    except (OSError, ValueError):
        return {}
    return row if isinstance(row, dict) else {}


def number(value: object) -> float | None:
    """A finite number, also one written as text or true/false; else None.

    >>> number("1.5"), number(True), number("no"), number(float("nan"))
    (1.5, 1.0, None, None)
    """
    if isinstance(value, bool | int | float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, str) and re.fullmatch(r"\s*[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?\s*", value):
        return float(value)
    if value in ("True", "False"):
        return float(value == "True")
    return None


def text_of(value: object) -> str:
    """The text of a message, of a list of messages (assistant's only), or of text.

    >>> text_of([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])
    'b'
    """
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        said = [m for m in value if isinstance(m, dict) and m.get("role", "assistant") == "assistant"]
        return "".join(text_of(m.get("content")) for m in said)
    if isinstance(value, dict):
        return text_of(value.get("content") or value.get("text"))
    return "" if value is None else str(value)


def step_in_name(path: Path) -> int | None:
    """The step that a path names: `step_12`, `12.jsonl`, `completions_00012.parquet`.

    >>> step_in_name(Path("rollouts/step_12/train_rollouts.jsonl")), step_in_name(Path("a/7.jsonl"))
    (12, 7)
    """
    for part in (path.stem, *(parent.name for parent in path.parents)):
        if match := re.fullmatch(r"(?:.*[_-])?0*(\d+)", part):
            return int(match.group(1))
    return None
