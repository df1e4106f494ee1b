"""OpenRLHF's dumps: JSONL of prompt (or input), output (or response), reward(s), label and extras. No torch.

OpenRLHF names no groups: equal prompts within a step are one group. The step is the row's, or the file name's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from gropius.doctor.foreign.answers import Answer, columns_of, first_row, json_rows, number, step_in_name, text_of
from gropius.doctor.log import Log

_PROMPT = ("prompt", "prompts", "input", "query")
_RESPONSE = ("response", "output", "completion", "sequences_text")
_REWARD = ("reward", "rewards", "score", "scores")
_HINTS = {
    "responses.tokens": "rows have no response_length",
    "responses.truncated": "rows have no truncated",
    "responses.advantage": "rows have no advantage",
    "responses.raw": "rows have no accuracy beside the reward",
    "responses.parts": "rows have no extra_logs",
    "responses.status": "OpenRLHF does not tell a failed verifier from a wrong answer",
    "responses.version": "rows do not say which weights drew them",
    "metrics": "OpenRLHF sends metrics to its logger, not to the dump",
    "tokens": "the dump holds no per-token log-probabilities",
    "settings": "the dump does not say how the run was configured",
}


def recognises(path: Path) -> bool:
    """JSONL, or a folder of it, whose first row has a prompt, a response and a reward."""
    files = _files(path)
    names = set(first_row(files[0])) if files else set()
    return all(names & set(choices) for choices in (_PROMPT, _RESPONSE, _REWARD))


def answers(path: Path) -> list[Answer]:
    """Every response with its text. Errors: RunFolderError naming file and line."""
    return [answer for file in _files(path) for answer in _answers(file)]


def read(path: Path) -> Log:
    """The log. Errors: RunFolderError naming file and line."""
    found = answers(path)
    notes = ("groups are not named in this log: equal prompts within a step are one group",)
    return Log(source=f"{path} (OpenRLHF)", responses=columns_of(found) if found else {}, hints=_HINTS, notes=notes)


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path] if path.suffix == ".jsonl" else []
    return sorted(path.glob("*.jsonl"), key=lambda file: (step_in_name(file) or 0, file.name))


def _answers(path: Path) -> Iterator[Answer]:
    for row in json_rows(path):
        prompt = text_of(_first(row, _PROMPT))
        extras = row.get("extra_logs") if isinstance(row.get("extra_logs"), Mapping) else {}
        parts = {str(k): _scalar(v) for k, v in extras.items()} if isinstance(extras, Mapping) else {}
        step = number(row.get("step", row.get("global_step")))
        length = _scalar(row.get("response_length"))
        cut = _scalar(row.get("truncated", row.get("response_clip_ratio")))
        yield Answer(
            step=int(step) if step is not None else step_in_name(path) or 0,
            group=prompt,
            task=prompt,
            text=text_of(_first(row, _RESPONSE)),
            reward=_scalar(_first(row, _REWARD)),
            metric=next((_scalar(row[name]) for name in ("accuracy", "acc", "correct") if name in row), None),
            advantage=_scalar(row.get("advantage")),
            tokens=None if length is None else int(length),
            truncated=None if cut is None else cut > 0,
            parts={name: value for name, value in parts.items() if value is not None},
        )


def _first(row: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    return next((row[name] for name in names if name in row), None)


def _scalar(value: Any) -> float | None:
    """A number, or the only number of a list."""
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    return number(value)
