"""prime-rl's and verifiers' traces: `traces.jsonl`, `results.jsonl`, `step_N/train_rollouts.jsonl`. No torch.

A row is one rollout: example_id (or task), prompt, completion (messages) or nodes, reward, metrics or rewards by name,
is_truncated or stop_condition, and in prime-rl a stamp `info.prime_rl`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from gropius.doctor.foreign.answers import Answer, columns_of, first_row, json_rows, number, step_in_name, text_of
from gropius.doctor.log import Log

NAMES = ("traces.jsonl", "train_rollouts.jsonl", "results.jsonl")
_CUT = ("max_output_tokens", "max_tokens", "max_total_tokens", "length", "context_length", "prompt_too_long")
_FAILED = ("error", "has_error", "errored")
_HINTS = {
    "responses.tokens": "rows have no token counts (trajectory, usage)",
    "responses.truncated": "rows have neither is_truncated nor stop_condition",
    "responses.advantage": "rows have no advantage",
    "responses.raw": "rows have no metric of success beside the reward (correct, accuracy, solved)",
    "responses.parts": "rows have fewer than two reward functions",
    "responses.status": "rows do not say whether scoring failed",
    "responses.version": "rows do not say which weights drew them",
    "metrics": "prime-rl sends metrics to its logger, not to the rollouts",
    "tokens": "traces hold no per-token log-probabilities of the trainer",
    "settings": "traces do not say how the run was configured",
}
_SUCCESS = ("correct", "accuracy", "acc", "solved", "success", "pass")


def recognises(path: Path) -> bool:
    """A folder with such a file in it (or in step_N below it), or one whose first row has a reward and a task."""
    files = _files(path)
    row = first_row(files[0]) if files else {}
    return ("reward" in row or "rewards" in row) and bool({"example_id", "task", "completion", "nodes"} & set(row))


def answers(path: Path) -> list[Answer]:
    """Every response with its text. Errors: RunFolderError naming file and line."""
    return [answer for file in _files(path) for answer in _answers(file)]


def read(path: Path) -> Log:
    """The log. Errors: RunFolderError naming file and line."""
    found = answers(path)
    notes = ("siblings are the rows of one example in one step",)
    return Log(source=f"{path} (verifiers)", responses=columns_of(found) if found else {}, hints=_HINTS, notes=notes)


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path] if path.suffix == ".jsonl" else []
    found = {
        file
        for name in NAMES
        for place in (name, f"*/{name}", f"*/*/{name}", f"*/*/*/{name}")
        for file in path.glob(place)
    }
    return sorted(found, key=lambda file: (step_in_name(file) or 0, file.as_posix()))


def _answers(path: Path) -> Iterator[Answer]:
    for row in json_rows(path):
        info = row.get("info") if isinstance(row.get("info"), Mapping) else {}
        stamp = info.get("prime_rl", {}) if isinstance(info, Mapping) else {}
        rewards = _numbers(row.get("rewards"))
        metrics = {**_numbers(row.get("metrics")), **rewards}
        reward = number(row.get("reward"))
        step = next((number(v) for v in (row.get("step"), stamp.get("step")) if number(v) is not None), None)
        failed = any(row.get(name) for name in _FAILED)
        task = _task(row, stamp)
        yield Answer(
            step=int(step) if step is not None else step_in_name(path) or 0,
            group=str(row.get("group_id") or stamp.get("group_id") or task),
            task=task,
            prompt=_asked(row.get("prompt")),
            text=text_of(row.get("completion")) or _nodes_text(row.get("nodes")),
            reward=None if failed else reward if reward is not None else (sum(rewards.values()) if rewards else None),
            metric=next((metrics[name] for name in _SUCCESS if name in metrics), None),
            advantage=number(row.get("advantage")),
            tokens=_tokens(row),
            truncated=_truncated(row),
            status="void" if failed else "scored",
            reason=str(row.get("error") or "")[:200],
            version=_whole(stamp.get("policy_version", stamp.get("ckpt_step", row.get("ckpt_step")))),
            parts=rewards,
        )


def _task(row: Mapping[str, Any], stamp: Mapping[str, Any]) -> str:
    """The environment's name and the example's number, else its prompt."""
    task = row.get("task")
    name = row.get("example_id")
    if name is None and isinstance(task, Mapping):
        name = task.get("idx", task.get("id"))
    environment = stamp.get("env_name") or (task if isinstance(task, str) else "")
    return f"{environment}/{name}" if name is not None else text_of(row.get("prompt")) or str(row.get("prompt"))


def _asked(prompt: object) -> str:
    """What the user said, or the text."""
    said = [m.get("content") for m in prompt if isinstance(m, Mapping)] if isinstance(prompt, list) else [prompt]
    return "\n".join(str(text) for text in said if text)


def _numbers(value: object) -> dict[str, float]:
    if not isinstance(value, Mapping):
        return {}
    return {str(name): x for name, v in value.items() if (x := number(v)) is not None}


def _nodes_text(nodes: object) -> str:
    if not isinstance(nodes, list):
        return ""
    return text_of([n.get("message", n) for n in nodes if isinstance(n, Mapping)])


def _tokens(row: Mapping[str, Any]) -> int | None:
    for place in ("usage", "token_usage"):
        usage = row.get(place)
        if isinstance(usage, Mapping):
            return _whole(usage.get("completion_tokens", usage.get("output_tokens")))
    for name in ("completion_tokens", "completion_len", "num_completion_tokens"):
        if row.get(name) is not None:
            return _whole(row[name])
    ids = row.get("completion_ids")
    return len(ids) if isinstance(ids, list) else None


def _truncated(row: Mapping[str, Any]) -> bool | None:
    if "is_truncated" in row:
        return bool(row["is_truncated"])
    stop = row.get("stop_condition")
    return str(stop) in _CUT if stop is not None else None


def _whole(value: object) -> int | None:
    found = number(value)
    return None if found is None else int(found)
