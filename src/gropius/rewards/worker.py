"""One process that judges episodes: started, asked and killed from outside, and its life inside. No torch.

Frames go in (a length, a pickle), lines of JSON come back. The worker says which reward it is at, so that a hang or a
crash can be named.
"""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gropius.errors import RewardError
from gropius.types import Episode, Outcome, Verdict

if TYPE_CHECKING:
    from gropius.rewards.base import InProcessScorer, RewardPart

START_S = 120.0
MAX_ANSWER_BYTES = 16 << 20


class WorkerLost(Exception):
    """The worker did not answer: it was killed at the deadline, or it died. The text names the function."""

    def __init__(self, text: str, timeout: bool) -> None:
        super().__init__(text)
        self.timeout = timeout


@dataclass
class Worker:
    """One process. Frames go in (length, pickle); lines of JSON come back."""

    process: subprocess.Popen[bytes]
    calls: int = 0
    _received: bytearray = field(default_factory=bytearray)

    @classmethod
    def start(cls, settings: Mapping[str, Any]) -> Worker:
        """Start a process; it says "ready" once its scorer is built."""
        process = subprocess.Popen(
            [sys.executable, "-c", "from gropius.rewards.worker import work; work()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            bufsize=0,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        )
        worker = cls(process)
        try:
            worker._send(dict(settings))
            answer = worker._line(time.monotonic() + START_S, "the start of a reward worker")
        except WorkerLost:
            worker.kill()
            raise
        if "halt" in answer:
            worker.kill()
            raise RewardError(str(answer["halt"]))
        return worker

    def ask(self, episodes: Sequence[Episode], deadline_s: float) -> dict[str, Any]:
        """The worker's answer. Raises WorkerLost at the deadline (from the start of the work), RewardError to halt."""
        self.calls += 1
        self._send(list(episodes))
        what, until = "taking up an episode", time.monotonic() + START_S
        while True:
            answer = self._line(until, what)
            if "started" in answer:
                until = time.monotonic() + deadline_s
            elif "part" in answer:
                what = f"reward {answer['part']}"
            elif "halt" in answer:
                raise RewardError(str(answer["halt"]))
            else:
                return answer

    def kill(self) -> None:
        """Kill the process and its children, and wait for its end."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()

    def _send(self, message: object) -> None:
        assert self.process.stdin is not None
        data = pickle.dumps(message)
        try:
            self.process.stdin.write(len(data).to_bytes(8, "little"))
            view = memoryview(data)
            while view:
                view = view[self.process.stdin.write(view) or 0 :]
        except BrokenPipeError:
            raise WorkerLost(f"a reward worker died before its work ({self._end()})", timeout=False) from None

    def _line(self, until: float, what: str) -> dict[str, Any]:
        assert self.process.stdout is not None
        while (at := self._received.find(b"\n")) < 0:
            left = until - time.monotonic()
            if left <= 0 or not select.select([self.process.stdout], [], [], left)[0]:
                raise WorkerLost(f"{what} took longer than its deadline", timeout=True)
            data = os.read(self.process.stdout.fileno(), 1 << 16)
            if not data:
                raise WorkerLost(f"{what} ended its process ({self._end()})", timeout=False)
            self._received += data
            if len(self._received) > MAX_ANSWER_BYTES:
                raise WorkerLost(f"{what} answered more than {MAX_ANSWER_BYTES} bytes", timeout=False)
        line = bytes(self._received[:at])
        del self._received[: at + 1]
        try:
            answer = json.loads(line)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise WorkerLost(f"{what} wrote into the pool's pipe", timeout=False)
        return answer

    def _end(self) -> str:
        try:
            code = self.process.wait(timeout=5.0)
        except subprocess.TimeoutExpired:
            return "its pipe is closed"
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


# the inner side


def work() -> None:
    """The life of one worker: build the scorer, then judge episodes until the input ends."""
    questions, answers = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)  # what a function prints is not an answer
    os.nice(19)
    _die_with_parent()
    settings = _receive(questions)
    if settings is None:
        return
    try:
        scorer = _build(settings, answers)
    except (Exception, SystemExit) as problem:  # the boundary: a person's module is imported here
        _answer(answers, {"halt": f"{type(problem).__name__}: {problem}"[:2000]})
        return
    _answer(answers, {"ready": True})
    while (episodes := _receive(questions)) is not None:
        _answer(answers, {"started": True})
        _answer(answers, _judge(scorer, episodes))


def _build(settings: Mapping[str, Any], answers: int) -> InProcessScorer:
    from gropius.rewards import load_scorer

    scorer = load_scorer(settings["parts"], Path(settings["base_dir"]), settings["floor"])
    return replace(scorer, parts=[_announcing(part, answers) for part in scorer.parts])


def _announcing(part: RewardPart, answers: int) -> RewardPart:
    """The same part; it says its name before it starts, so that a hang or a crash can be named."""
    from gropius.rewards.base import BatchedReward

    function = part.function

    def announced(subject: Any) -> Any:
        _answer(answers, {"part": part.name})
        return function.call(subject) if isinstance(function, BatchedReward) else function(subject)

    return replace(part, function=BatchedReward(announced) if isinstance(function, BatchedReward) else announced)


def _judge(scorer: InProcessScorer, episodes: Sequence[Episode]) -> dict[str, Any]:
    scorer.remember({"worked": [part.name for part in scorer.parts]})  # the pool counts faults, over all its workers
    try:
        verdicts = asyncio.run(scorer.score(episodes))
    except RewardError as problem:
        return {"halt": str(problem)[:2000]}
    rows = [_plain(verdict) for verdict in verdicts]
    return {"verdicts": rows, "faults": sum(scorer.faults.values()), "resident_bytes": _resident_bytes()}


def _plain(verdict: Verdict) -> dict[str, Any]:
    def row(outcome: Outcome) -> list[Any]:
        places = [[float(p.score), p.turn, p.characters, p.note[:200]] for p in outcome.places]
        return [outcome.status, outcome.value, outcome.reason[:2000], places]

    raw = None if verdict.raw is None else float(verdict.raw)
    return {"outcome": row(verdict.outcome), "parts": {k: row(o) for k, o in verdict.parts.items()}, "raw": raw}


def _resident_bytes() -> int:
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def _receive(fd: int) -> Any:
    head = _read(fd, 8)
    return pickle.loads(_read(fd, int.from_bytes(head, "little"))) if len(head) == 8 else None


def _read(fd: int, size: int) -> bytes:
    parts: list[bytes] = []
    while size and (part := os.read(fd, min(size, 1 << 20))):
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def _answer(fd: int, message: Mapping[str, Any]) -> None:
    data = json.dumps(message, allow_nan=False).encode() + b"\n"
    while data:
        data = data[os.write(fd, data) :]


def _die_with_parent() -> None:
    """Ask the kernel to kill this process when the trainer dies, however it dies (Linux)."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
