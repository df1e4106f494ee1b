"""Another trainer's log as a run folder of ours, so that whatever reads run folders can show it. No torch.

What the log does not hold stays empty and is named in resolved.json, under `imported`.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

import numpy as np

from gropius.doctor.foreign.answers import Answer
from gropius.doctor.log import Log
from gropius.doctor.source import FOREIGN
from gropius.errors import RunFolderError
from gropius.objective.selection import group_state
from gropius.records import ResponseRecord, RunWriter
from gropius.types import Outcome, scored, void

FORMAT = "1"
FIELDS = ("responses.tokens", "responses.truncated", "responses.advantage", "responses.raw", "responses.status",
          "tokens.policy", "metrics.loss")  # fmt: skip
NOTHING = np.zeros(0, np.int64)
UNMASKED = np.zeros(0, np.bool_)


def recognised(path: Path) -> str | None:
    """The trainer whose log it is, a name in FOREIGN; None when nobody knows it."""
    return next((name for name, module in FOREIGN.items() if module.recognises(path)), None)


def as_run(path: Path, place: Path) -> Path:
    """A run folder below `place` with the log's content, made again only when its files have changed.

    Errors: RunFolderError when nobody recognises the log, it is damaged, or `place` cannot be written.
    """
    kind = recognised(path)
    if kind is None:
        raise RunFolderError(f"{path}: neither a run folder nor a log that is known")
    folder = place / _signature(path) / (path.resolve().stem or "log")
    if folder.is_dir():
        return folder
    making = place / f"making-{os.getpid()}" / folder.name
    try:
        _write(path, kind, making)
        folder.parent.mkdir(parents=True, exist_ok=True)
        making.replace(folder)
    except OSError as error:
        raise RunFolderError(f"{folder}: the log cannot be kept there: {error.strerror}") from error
    finally:
        shutil.rmtree(making.parent, ignore_errors=True)
    return folder


def _signature(path: Path) -> str:
    """Changes with any file of the log."""
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    facts = [(str(file), *(file.stat().st_size, file.stat().st_mtime_ns)) for file in files if file.is_file()]
    return hashlib.sha256(json.dumps([FORMAT, str(path.resolve()), facts]).encode()).hexdigest()[:24]


def _write(path: Path, kind: str, folder: Path) -> None:
    module = FOREIGN[kind]
    log: Log = module.read(path)
    missing = [f"{name} ({log.hint([name])})" if log.hint([name]) else name for name in log.lacks(FIELDS)]
    told = {"from": kind, "source": str(path), "missing": missing, "notes": list(log.notes)}
    answers: list[Answer] = sorted(module.answers(path), key=lambda answer: answer.step)
    with RunWriter.create(folder, {"name": folder.name, "imported": told}) as writer:
        metrics = {step: {k: v for k, v in row.items() if k != "step"} for step, row in log.metrics.items()}
        for step, rows in groupby(answers, key=lambda answer: answer.step):
            own = list(rows)
            writer.write_rollouts(max(step, 0), _records(own))
            if step not in metrics:
                known = [answer.reward for answer in own if answer.reward is not None]
                metrics[step] = {"reward": sum(known) / len(known)} if known else {}
        for step in sorted(metrics):
            writer.write_metrics(step, metrics[step])


def _records(answers: Sequence[Answer]) -> list[ResponseRecord]:
    """The rows of one step; siblings are numbered as they come, groups named by their place in the step."""
    groups: dict[str, list[Answer]] = {}
    for answer in answers:
        groups.setdefault(answer.group, []).append(answer)
    out = []
    for index, siblings in enumerate(groups.values()):
        verdicts = [_outcome(answer) for answer in siblings]
        metrics = [a.metric if a.metric is not None else v.value for a, v in zip(siblings, verdicts, strict=True)]
        known = [float(m) for m, v in zip(metrics, verdicts, strict=True) if m is not None and v.status == "scored"]
        state = group_state(known, len(siblings))
        seen: set[str] = set()
        for member, (answer, verdict) in enumerate(zip(siblings, verdicts, strict=True)):
            out.append(_record(answer, verdict, (f"{answer.step:06d}-{index:04d}", member, state, answer.text in seen)))
            seen.add(answer.text)
    return out


def _outcome(answer: Answer) -> Outcome:
    if answer.status == "void" or answer.reward is None:
        return void(answer.reason or "the log has no reward here")
    return scored(answer.reward)


def _record(answer: Answer, verdict: Outcome, place: tuple[str, int, str, bool]) -> ResponseRecord:
    group_id, member, state, duplicate = place
    asked = answer.prompt or answer.task
    said = [{"role": "user", "content": asked}, {"role": "assistant", "content": answer.text}]
    parts = {name: scored(value) for name, value in answer.parts.items() if value is not None}
    return ResponseRecord(
        step=answer.step, group_id=group_id, member=member, task_key=answer.task, prompt_ids=NOTHING,
        response_ids=NOTHING, prompt_text=asked, response_text=answer.text,
        messages=json.dumps(said, ensure_ascii=False), loss_mask=UNMASKED, parts=parts, status=verdict.status,
        reward=verdict.value, reason=answer.reason, raw=answer.metric, state=state, advantage=answer.advantage,
        token_advantages=None, skipped=False, update=0, duplicate=duplicate, truncated=bool(answer.truncated),
        finish_reason="length" if answer.truncated else "", error="", policy_version=answer.version or 0,
        weight_digest="", sampling_time_s=0.0, scoring_time_s=0.0, sampler=None, drawn=None, anchor=None,
        policy=None, reference=None, entropy=None, weight=None, contribution=None,
    )  # fmt: skip
