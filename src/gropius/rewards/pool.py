"""Reward functions in killable processes: a hang, a crash or a leak costs one worker, never the run.

`PooledScorer` stands where `InProcessScorer` stands. Every worker is a fresh interpreter at the lowest priority that
builds the same scorer from the same recipe parts (`worker.py`). Episodes go to it as copies; verdicts come back as JSON
and are checked here. The deadline of a call starts when the worker starts on it, not when it was queued. What a
function does to its process (working directory, random state, number types, signal handlers, memory) stays there.
"""

from __future__ import annotations

import asyncio
import math
import queue
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

from gropius.distributed.keeper import book
from gropius.errors import RewardError
from gropius.rewards.base import NOTHING_APPLIES, Memory
from gropius.rewards.remote_worker import RemoteWorker
from gropius.rewards.worker import Worker, WorkerLost
from gropius.types import Episode, Outcome, Place, Status, Verdict, void

FAULTS_IN_A_ROW = 64


@dataclass
class PoolCounts:
    """What happened since the run began.

    calls: answered. timeouts: deadlines missed. crashes: workers that died by themselves. faults: episodes a function
    raised for or gave no finite number. voids: episodes a function called void itself. started: workers, by this
    process alone.
    """

    calls: int = 0
    timeouts: int = 0
    crashes: int = 0
    faults: int = 0
    voids: int = 0
    started: int = 0

    def lost(self) -> int:
        """Calls without an answer."""
        return self.timeouts + self.crashes


@dataclass
class PooledScorer:
    """Scores episodes in `workers` killable processes.

    parts: what a recipe's [[reward]] tables say. base_dir: where a person's functions are looked up. floor: the value
    of a rejected part. deadline_s: for one call (one episode, or one group when unit is "group"), from the start of its
    work. unit: "group" keeps siblings together. recycle_calls: a worker is replaced after so many calls, or when it
    holds more than `memory_bytes`, so that leaks end.

    A call that misses the deadline is void at once; one whose worker died is asked once more, then void. When every
    episode of a `score` is lost or failed, and none has ever been judged or 64 in a row were not, the run halts
    (RewardError). What a function calls void itself is an answer like any other.
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
    _idle: queue.SimpleQueue[Worker | RemoteWorker | None] = field(
        default_factory=queue.SimpleQueue, init=False, repr=False
    )
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
            for place, verdict in zip(places, answer.verdicts, strict=True):
                verdicts[place] = verdict
                avoided = verdict.outcome.status == "void" and verdict.outcome.reason != NOTHING_APPLIES
                lost.append(avoided and answer.failed)
                self.counts.voids += avoided and not answer.failed
            self.counts.faults += answer.faults
        self._count(lost, verdicts)
        return verdicts

    def memory(self) -> Memory:
        """What has to survive a pause; workers started are this process' own affair."""
        counts = {key: count for key, count in vars(self.counts).items() if key != "started"}
        return {"counts": counts, "in_a_row": self._in_a_row, "worked": self._worked}

    def remember(self, memory: Memory) -> None:
        """Take up what `memory` gave before a pause."""
        self.counts = PoolCounts(**memory.get("counts", {}), started=self.counts.started)
        self._in_a_row = int(memory.get("in_a_row", 0))
        self._worked = bool(memory.get("worked", False))

    def close(self) -> None:
        """Kill every worker and wait for the threads."""
        self._threads.shutdown(wait=True)
        while not self._idle.empty():
            worker = self._idle.get()
            if worker is not None:
                worker.kill()

    def _call(self, episodes: Sequence[Episode]) -> _Answer:
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
                    return _Answer(_verdicts(answer, len(episodes)), _faults(answer))
                except WorkerLost as problem:
                    if worker is not None:
                        worker.kill()
                    worker = None
                    self.counts.timeouts += problem.timeout
                    self.counts.crashes += not problem.timeout
                    if problem.timeout or attempt == 2:
                        return _Answer([Verdict(void(str(problem)))] * len(episodes), lost=True)
            raise AssertionError("unreachable")
        finally:
            self._idle.put(worker)

    def _start(self) -> Worker | RemoteWorker:
        self.counts.started += 1
        settings = {"parts": [dict(part) for part in self.parts], "base_dir": str(self.base_dir), "floor": self.floor}
        if book()["hosts"]:
            return RemoteWorker.start(settings, self.counts.started)
        return Worker.start(settings)

    def _count(self, lost: Sequence[bool], verdicts: Sequence[Verdict]) -> None:
        for failed in lost:
            self._in_a_row = self._in_a_row + 1 if failed else 0
        self._worked = self._worked or not all(lost)
        if lost and all(lost) and (not self._worked or self._in_a_row >= FAULTS_IN_A_ROW):
            raise RewardError(f"every one of {len(lost)} episodes is void: {verdicts[0].outcome.reason}")


@dataclass(frozen=True)
class _Answer:
    """One call's verdicts. faults: episodes a function failed for. lost: nobody answered."""

    verdicts: list[Verdict]
    faults: int = 0
    lost: bool = False

    @property
    def failed(self) -> bool:
        """True when a void among the verdicts is a failure, not what a function said."""
        return self.lost or self.faults > 0


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


def _faults(answer: Mapping[str, Any]) -> int:
    count = answer.get("faults", 0)
    if isinstance(count, bool) or not isinstance(count, int) or count < 0:
        raise WorkerLost(f"a reward worker answered {ascii(count)[:40]} faults", timeout=False)
    return count


def _outcome(row: Sequence[Any]) -> Outcome:
    status, value, reason, places = row
    if status not in ("scored", "rejected", "void"):
        raise ValueError(f"status {ascii(status)[:40]}")
    return Outcome(cast("Status", status), _number(value), str(reason), tuple(map(_place, places)))


def _place(row: Sequence[Any]) -> Place:
    score, turn, characters, note = row
    if any(isinstance(n, bool) or not isinstance(n, int) for n in (turn, characters or 0)):
        raise ValueError(f"place {ascii(row)[:60]}")
    return Place(float(_number(score) or 0.0), turn, characters, str(note))


def _number(value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"value {ascii(value)[:40]}")
    return float(value)
