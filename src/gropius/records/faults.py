"""Named points at which a test may kill the program: one at every step of saving, logging and publishing. No torch.

Off, a point costs one comparison. `GROPIUS_FAULT=checkpoint.sealed` (or `checkpoint.sealed:3`, the third time) arms one
for a whole process; it then ends by SIGKILL, as a machine that loses power would.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass

from gropius.errors import UsageError, did_you_mean

VARIABLE = "GROPIUS_FAULT"

POINTS: dict[str, str] = {
    "run.locked": "a new run folder is locked and empty",
    "run.described": "resolved.json is there, the folders beside it are not",
    "file.written": "a file lies whole under its temporary name",
    "file.renamed": "a file has its name; its folder's entries are not flushed",
    "metrics.torn": "half a line of metrics.jsonl is written",
    "metrics.written": "the whole line is",
    "rollouts.written": "a step's responses are written, its metrics are not",
    "rewind.metrics": "on resuming, later metrics are taken back, later rollouts not yet",
    "rewind.rollouts": "on resuming, both are",
    "step.sampled": "a batch is drawn and scored",
    "step.updated": "the weights have moved, nothing is written",
    "step.recorded": "rollouts and metrics are written, the checkpoint is due",
    "checkpoint.begun": "an empty folder lies under the temporary name",
    "checkpoint.model": "weights and tokenizer are written",
    "checkpoint.tensors": "a file of tensors is written",
    "checkpoint.state": "state.json is written",
    "checkpoint.flushed": "everything is flushed, the marker is missing",
    "checkpoint.sealed": "the marker is there, the name is temporary",
    "checkpoint.aside": "an earlier checkpoint of the same step is moved out of the way",
    "checkpoint.published": "the checkpoint has its name",
    "checkpoint.dropped": "an old checkpoint has lost its name and still lies there",
    "checkpoint.retained": "old checkpoints are deleted",
    "run.trained": "all steps are done and saved, the last measurement is missing",
    "run.measured": "the last measurement is written",
}


@dataclass
class _Armed:
    point: str
    left: int
    action: Callable[[], None]


_armed: _Armed | None = None


def reached(point: str, before: Callable[[], object] | None = None) -> None:
    """Pass a named point. before: what is done first when the point is about to act (tear a line, for example)."""
    if _armed is not None and _armed.point == point:
        _armed.left -= 1
        if _armed.left == 0:
            if before is not None:
                before()
            _armed.action()


def kill() -> None:
    """End this process as `kill -9` does."""
    os.kill(os.getpid(), signal.SIGKILL)


def arm(point: str, times: int = 1, action: Callable[[], None] = kill) -> None:
    """Act when `point` is passed for the `times`-th time. Errors: UsageError for an unknown point."""
    global _armed
    if point not in POINTS:
        raise UsageError(f"{VARIABLE}: there is no point {point!r}; {did_you_mean(point, POINTS)}")
    _armed = _Armed(point, times, action)


def disarm() -> None:
    """Pass every point."""
    global _armed
    _armed = None


def arm_from_environment() -> None:
    """Arm what GROPIUS_FAULT names, `POINT` or `POINT:TIMES`; nothing where it is not set.

    Errors: UsageError for an unknown point, or a count that is none.
    """
    text = os.environ.get(VARIABLE, "")
    if not text:
        return
    point, _, times = text.partition(":")
    if times and not (times.isdecimal() and int(times) > 0):
        raise UsageError(f"{VARIABLE}: {times!r} is no count; write {VARIABLE}={point}:2")
    arm(point, int(times or 1))
