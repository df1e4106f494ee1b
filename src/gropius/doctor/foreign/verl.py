"""verl's rollout dump: `trainer.rollout_data_dir` holds STEP.jsonl with input, output, gts, score, step. No torch.

Groups are not named: equal inputs within a step are one group, whatever their order (verl balances batches over ranks,
which scatters siblings). `acc` is the task metric where the reward function returns it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from gropius.doctor.foreign.answers import Answer, columns_of, first_row, json_rows, number, step_in_name, text_of
from gropius.doctor.log import Log

_METRICS = ("acc", "accuracy", "correct", "is_correct")
_FIXED = {"input", "output", "gts", "score", "step", "pred", "request_id", "uid", *_METRICS}
_HINTS = {
    "responses.tokens": "verl dumps decoded text, not ids",
    "responses.truncated": "verl does not dump why a response ended",
    "responses.advantage": "verl dumps scores, not advantages",
    "responses.raw": "return `acc` in the reward's dict beside `score`",
    "responses.parts": "the reward returns no extra numbers",
    "responses.status": "verl does not tell a failed verifier from a wrong answer",
    "responses.version": "verl does not dump which weights drew a response",
    "responses.reward": "the rows have no score",
    "metrics": "verl sends metrics to its logger (wandb, tensorboard, console), not to this folder",
    "tokens": "verl dumps no per-token log-probabilities",
    "settings": "verl's dump does not say how the run was configured",
}


def recognises(path: Path) -> bool:
    """A folder with N.jsonl, or one such file, whose rows have input, output and score."""
    files = _files(path)
    return bool(files) and {"input", "output", "score"} <= set(first_row(files[0]))


def answers(path: Path) -> list[Answer]:
    """Every response with its text. Errors: RunFolderError naming file and line."""
    return [answer for file in _files(path) for answer in _answers(file)]


def read(path: Path) -> Log:
    """The log. Errors: RunFolderError naming file and line."""
    found = answers(path)
    notes = ("groups are not named in this log: equal inputs within a step are one group",)
    return Log(source=f"{path} (verl)", responses=columns_of(found) if found else {}, hints=_HINTS, notes=notes)


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path] if path.suffix == ".jsonl" else []
    numbered = [file for file in path.glob("*.jsonl") if file.stem.isdecimal()]
    return sorted(numbered, key=lambda file: int(file.stem))


def _answers(path: Path) -> Iterator[Answer]:
    for row in json_rows(path):
        prompt = text_of(row.get("input"))
        metric = next((number(row[name]) for name in _METRICS if name in row), None)
        score = number(row.get("score"))
        extras = {name: number(value) for name, value in row.items() if name not in _FIXED}
        step = number(row.get("step"))
        yield Answer(
            step=int(step) if step is not None else step_in_name(path) or 0,
            group=str(row.get("uid") or prompt),
            task=prompt,
            text=text_of(row.get("output")),
            reward=score,
            metric=metric,
            parts={name: value for name, value in extras.items() if value is not None},
        )
