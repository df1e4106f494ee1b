"""TRL's GRPOTrainer: `completions_*.parquet` (log_completions=True) and `trainer_state.json`. No torch.

Read from TRL 1.16: columns step, prompt, completion, one a reward function, advantage; `log_history` of the state.
Groups are not named in it: within a step, equal prompts that stand together are taken as one group.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from gropius.doctor.foreign.answers import Answer, columns_of, number, step_in_name, text_of
from gropius.doctor.log import Log
from gropius.errors import RunFolderError

STATE = "trainer_state.json"
_FIXED = {"step", "prompt", "completion", "advantage", "mode", "image", "images"}
_HINTS = {
    "responses": "TRL writes them with log_completions=True",
    "responses.tokens": "TRL's completions are text; lengths are in trainer_state.json as means only",
    "responses.truncated": "TRL logs completions/clipped_ratio only",
    "responses.raw": "TRL has no task metric beside the reward functions",
    "responses.parts": "one reward function only",
    "responses.status": "TRL does not tell a failed verifier from a wrong answer",
    "responses.version": "TRL does not log which weights drew a completion",
    "tokens": "TRL stores no per-token log-probabilities",
    "metrics": f"no {STATE} (it lies in each checkpoint folder)",
    "metrics.held_out/mean": "TRL logs eval_reward without an interval",
    "metrics.kl": "logged when beta is not 0",
    "settings": "TRL's folder does not say how it was configured",
}


def recognises(path: Path) -> bool:
    """A folder with completions or a trainer state, or one such file."""
    if path.is_dir():
        return bool(_completions(path)) or _state(path) is not None
    return path.name == STATE or (path.suffix == ".parquet" and path.name.startswith("completions_"))


def answers(path: Path) -> list[Answer]:
    """Every response with its text. Errors: RunFolderError naming the file that is damaged."""
    folder = path if path.is_dir() else path.parent
    files = _completions(folder) if path.is_dir() or path.name == STATE else [path]
    return [answer for file in files for answer in _answers(file)]


def read(path: Path) -> Log:
    """The log. Errors: RunFolderError naming the file that is damaged, or the column that is missing."""
    folder = path if path.is_dir() else path.parent
    found = answers(path)
    notes = []
    if found:
        notes.append("groups are not named in this log: equal prompts that stand together in a step are one group")
        if any(len(answer.parts) > 1 for answer in found):
            notes.append("reward weights are not in this log: the reward is taken as the plain sum of its functions")
    state = _state(folder) if path.is_dir() or path.name == STATE else None
    return Log(
        source=f"{path} (TRL)",
        metrics=_metrics(state) if state is not None else {},
        responses=columns_of(found) if found else {},
        hints=_HINTS,
        notes=tuple(notes),
    )


def _completions(folder: Path) -> list[Path]:
    return sorted({*folder.glob("completions_*.parquet"), *folder.glob("completions/**/completions_*.parquet")})


def _state(folder: Path) -> Path | None:
    """The newest trainer state: in the folder, or in its last checkpoint."""
    if (folder / STATE).is_file():
        return folder / STATE
    found = sorted(folder.glob(f"checkpoint-*/{STATE}"), key=lambda p: step_in_name(p.parent) or 0)
    return found[-1] if found else None


def _answers(path: Path) -> Iterator[Answer]:
    try:
        rows = pq.read_table(path).to_pylist()
    except (OSError, pa.ArrowException) as error:
        raise RunFolderError(f"{path}: damaged: {str(error).splitlines()[0]}") from error
    if not rows:
        return
    if missing := {"prompt", "completion"} - set(rows[0]):
        raise RunFolderError(f"{path}: has no column {', '.join(sorted(missing))}, which TRL's completions have")
    names = [name for name in rows[0] if name not in _FIXED and any(number(row[name]) is not None for row in rows)]
    group, before = -1, None
    for row in rows:
        prompt = json.dumps(row["prompt"], ensure_ascii=False, default=str)
        if prompt != before:
            group, before = group + 1, prompt
        parts = {name: number(row[name]) for name in names}
        known = [value for value in parts.values() if value is not None]
        step = row.get("step")
        yield Answer(
            step=int(step) if step is not None else step_in_name(path) or 0,
            group=f"{group:04d}",
            task=prompt,
            prompt=_asked(row["prompt"]),
            text=text_of(row["completion"]),
            reward=sum(known) if known else None,
            advantage=number(row.get("advantage")),
            parts=parts,
        )


def _asked(prompt: object) -> str:
    """The last message of a conversation, or the text."""
    if isinstance(prompt, list) and prompt and isinstance(prompt[-1], dict):
        return str(prompt[-1].get("content") or "")
    return str(prompt)


def _metrics(path: Path) -> dict[int, dict[str, Any]]:
    try:
        history = json.loads(path.read_bytes())["log_history"]
    except OSError as error:
        raise RunFolderError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise RunFolderError(f"{path}: is no trainer state: it has no log_history") from error
    merged: dict[int, dict[str, Any]] = {}
    for row in history:
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            merged.setdefault(row["step"], {}).update({k: number(v) for k, v in row.items() if number(v) is not None})
    return merged
