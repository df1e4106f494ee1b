"""Reward functions in killable processes: a hang, a crash or a leak costs one worker, never the run.

`PooledScorer` stands where `InProcessScorer` stands. Every worker is a fresh interpreter at the lowest priority that
builds the same scorer from the same recipe parts. Episodes go to it as copies; verdicts come back as JSON and are
checked here. The deadline of a call starts when the worker starts on it, not when it was queued. What a function does
to its process (working directory, random state, number types, signal handlers, memory) stays there.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import pickle
import queue
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from gropius.errors import RewardError
from gropius.rewards.base import NOTHING_APPLIES
from gropius.types import Episode, Outcome, Status, Verdict, void

if TYPE_CHECKING:
    from gropius.rewards.base import InProcessScorer, RewardPart

START_S = 120.0
FAULTS_IN_A_ROW = 64
MAX_ANSWER_BYTES = 16 << 20


@dataclass
class PoolCounts:
    """What happened so far: calls answered, deadlines missed, workers that died by themselves, workers started."""

    calls: int = 0
    timeouts: int = 0
    crashes: int = 0
    started: int = 0


class WorkerLost(Exception):
    """The worker did not answer: it was killed at the deadline, or it died. The text names the function."""

    def __init__(self, text: str, timeout: bool) -> None:
        super().__init__(text)
        self.timeout = timeout


@dataclass
class PooledScorer:
    """Scores episodes in `workers` killable processes.

    parts: what a recipe's [[reward]] tables say. base_dir: where a person's functions are looked up. floor: the value
    of a rejected part. deadline_s: for one call (one episode, or one group when unit is "group"), from the start of its
    work. unit: "group" keeps siblings together. recycle_calls: a worker is replaced after so many calls, or when it
    holds more than `memory_bytes`, so that leaks end.

    A call that misses the deadline is void at once; one whose worker died is asked once more, then void. When every
    episode of a `score` is void, and none has ever been judged or 64 in a row were not, the run halts (RewardError).
    """

    parts: Sequence[Mapping[str, Any]]
    base_dir: Path
    floor: float = 0.0
    workers: int = 2
    deadline_s: float = 10.0
    unit: Literal["episode", "group"] = "episode"
    recycle_calls: int = 10_000
    memory_bytes: int = 4 << 30
    counts: PoolCounts = field(default_factory=PoolCounts, init=False)
    _idle: queue.SimpleQueue[Worker | None] = field(default_factory=queue.SimpleQueue, init=False, repr=False)
    _threads: ThreadPoolExecutor = field(init=False, repr=False)
    _in_a_row: int = field(default=0, init=False, repr=False)
    _worked: bool = field(default=False, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.workers < 1 or self.deadline_s <= 0:
            raise RewardError("a pool of rewards needs at least one worker and a deadline above 0 seconds")
        for _ in range(self.workers):
            self._idle.put(None)
        self._threads = ThreadPoolExecutor(self.workers, thread_name_prefix="gropius-reward")

    async def score(self, episodes: Sequence[Episode]) -> list[Verdict]:
        """One verdict an episode, in order. Raises RewardError naming the function that broke its contract."""
        calls = _calls(episodes, self.unit)
        futures = [
            asyncio.wrap_future(self._threads.submit(self._call, [episodes[place] for place in places]))
            for places in calls
        ]
        verdicts: list[Verdict] = [Verdict(void("not scored"))] * len(episodes)
        lost: list[bool] = []
        for places, answer in zip(calls, await asyncio.gather(*futures), strict=True):
            for place, verdict in zip(places, answer, strict=True):
                verdicts[place] = verdict
                lost.append(verdict.outcome.status == "void" and verdict.outcome.reason != NOTHING_APPLIES)
        self._count(lost, verdicts)
        return verdicts

    def close(self) -> None:
        """Kill every worker and wait for the threads."""
        self._threads.shutdown(wait=True)
        while not self._idle.empty():
            worker = self._idle.get()
            if worker is not None:
                worker.kill()

    def _call(self, episodes: Sequence[Episode]) -> list[Verdict]:
        """One call in one worker; runs in one of the pool's threads."""
        worker = self._idle.get()
        try:
            for attempt in (1, 2):
                try:
                    worker = worker or self._start()
                    answer = worker.ask(episodes, self.deadline_s)
                    self.counts.calls += 1
                    if worker.calls >= self.recycle_calls or answer.get("resident_bytes", 0) > self.memory_bytes:
                        worker.kill()
                        worker = None
                    return _verdicts(answer, len(episodes))
                except WorkerLost as problem:
                    if worker is not None:
                        worker.kill()
                    worker = None
                    self.counts.timeouts += problem.timeout
                    self.counts.crashes += not problem.timeout
                    if problem.timeout or attempt == 2:
                        return [Verdict(void(str(problem)))] * len(episodes)
            raise AssertionError("unreachable")
        finally:
            self._idle.put(worker)

    def _start(self) -> Worker:
        self.counts.started += 1
        return Worker.start(
            {"parts": [dict(part) for part in self.parts], "base_dir": str(self.base_dir), "floor": self.floor}
        )

    def _count(self, lost: Sequence[bool], verdicts: Sequence[Verdict]) -> None:
        for failed in lost:
            self._in_a_row = self._in_a_row + 1 if failed else 0
        self._worked = self._worked or not all(lost)
        if lost and all(lost) and (not self._worked or self._in_a_row >= FAULTS_IN_A_ROW):
            raise RewardError(f"every one of {len(lost)} episodes is void: {verdicts[0].outcome.reason}")


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
            [sys.executable, "-c", "from gropius.rewards.pool import work; work()"],
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


def _calls(episodes: Sequence[Episode], unit: str) -> list[list[int]]:
    """The places of the episodes of each call."""
    if unit == "episode":
        return [[place] for place in range(len(episodes))]
    groups: dict[str, list[int]] = {}
    for place, episode in enumerate(episodes):
        groups.setdefault(episode.group_id, []).append(place)
    return list(groups.values())


def _verdicts(answer: Mapping[str, Any], expected: int) -> list[Verdict]:
    """The verdicts of an answer, checked value by value."""
    rows = answer.get("verdicts")
    if not isinstance(rows, list) or len(rows) != expected:
        raise WorkerLost(f"a reward worker answered {ascii(answer)[:100]} for {expected} episodes", timeout=False)
    try:
        return [
            Verdict(
                _outcome(row["outcome"]), {str(k): _outcome(v) for k, v in row["parts"].items()}, _number(row["raw"])
            )
            for row in rows
        ]
    except (KeyError, TypeError, ValueError, AttributeError) as problem:
        raise WorkerLost(f"a reward worker answered what is no verdict: {problem}", timeout=False) from problem


def _outcome(row: Sequence[Any]) -> Outcome:
    status, value, reason = row
    if status not in ("scored", "rejected", "void"):
        raise ValueError(f"status {ascii(status)[:40]}")
    return Outcome(cast("Status", status), _number(value), str(reason))


def _number(value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"value {ascii(value)[:40]}")
    return float(value)


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
    scorer._worked.update(part.name for part in scorer.parts)  # one bad episode is void; the pool counts them together
    scorer._faults_in_a_row.clear()
    try:
        verdicts = asyncio.run(scorer.score(episodes))
    except RewardError as problem:
        return {"halt": str(problem)[:2000]}
    return {"verdicts": [_plain(verdict) for verdict in verdicts], "resident_bytes": _resident_bytes()}


def _plain(verdict: Verdict) -> dict[str, Any]:
    def row(outcome: Outcome) -> list[Any]:
        return [outcome.status, outcome.value, outcome.reason[:2000]]

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
