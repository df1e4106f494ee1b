"""The controller of a run on a cluster: it places the parts, watches them, and says who was lost. No torch, no Ray.

It holds names, states and counters. Responses go from engines to the trainer and episodes to reward hosts by
connections of their own; what passes here is what a process prints for a person.

    ranks            one lost, all start again from the last checkpoint
    engines          one lost is started again alone, and the trainer hands it the weights
    reward hosts     one lost is started again alone; the trainer asks another meanwhile
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

from gropius.distributed.launch import ATTEMPT, LOST, SECRET, SIGNALS
from gropius.distributed.parts import Cluster, Gone, Job, Kind, Part
from gropius.errors import RunHalted

TICK_S = 0.2
GRACE_S = 15.0


class _Unplaced(Exception):
    """A part was not started; the text says why."""


class _Stopped(Exception):
    """A person asked the run to stop before it had begun."""


class Controller:
    """Runs a job on a cluster, from its start to its end.

    note: for a person. show(text, error): what rank 0 printed, on its standard error or not; what the others print on
    their standard error is shown too.
    """

    def __init__(
        self, cluster: Cluster, job: Job, note: Callable[[str], None], show: Callable[[str, bool], None]
    ) -> None:
        self.cluster, self.job, self._note, self._show = cluster, job, note, show
        self.ranks: list[Part] = []
        self.others: list[Part] = []
        self._known: dict[str, Any] = {}
        self._asked = 0
        self._handed_on = False

    def run(self) -> int:
        """The exit code of rank 0. Errors: RunHalted when parts are lost more often than restarts allow."""
        with self._signals():
            try:
                self.others += [self._other("reward host", number, 1) for number in range(self.job.rewards)]
                self.others += [self._other("engine", number, 1) for number in range(self.job.engines)]
                for attempt in range(self.job.restarts + 1):
                    code = self._attempt(attempt)
                    if code is not None:
                        return code
                raise AssertionError("unreachable")
            except _Stopped:
                return 128 + self._asked
            finally:
                self._end([*self.ranks, *self.others])

    def _attempt(self, attempt: int) -> int | None:
        """One start of all ranks: an exit code, or None when they are to be started again."""
        try:
            self._start_ranks(attempt)
            lost = self._watch()
        except _Stopped:
            self._note("stopped before rank 0 had anything to save")
            return 128 + self._asked
        except _Unplaced as error:
            lost = str(error)
        if lost is None:
            return int(next(word for part in self.ranks if (word := part.seen.get("word")) is not None))
        self._end(self.ranks)
        if self._asked:
            self._note(f"{lost}; nothing more was saved")
            return 128 + self._asked
        if attempt == self.job.restarts:
            raise RunHalted(
                f"{lost}; the ranks were started {attempt + 1} times (cluster.restarts = {self.job.restarts}). "
                "Mend the cause, then resume the run"
            )
        self._note(f"{lost}; all ranks start again from the last checkpoint ({attempt + 1} of {self.job.restarts})")
        return None

    def _watch(self) -> str | None:
        """Until a rank has left word of how the run ended (None), or somebody was lost: who."""
        while True:
            self._look([*self.ranks, *self.others])
            self._mend()
            self._tell()
            if any(part.seen.get("word") is not None for part in self.ranks):
                self._await_end()
                return None
            if any(part.lost for part in self.ranks):
                return self._first_lost()
            if all(part.code == 0 for part in self.ranks):
                return "every rank ended, and rank 0 left no word of how"
            if self._asked and not self._handed_on:
                self._handed_on = bool(self._ask(self.ranks[0], "signal", self._asked))

    def _first_lost(self) -> str:
        """Who was lost by itself, not because another was: looked for as long as one may be silent."""
        until = time.monotonic() + self.job.lost_after_s + GRACE_S
        while time.monotonic() < until:
            culprits = [part for part in self.ranks if part.lost and part.code != LOST]
            if culprits:
                return culprits[0].end_of_it()
            if all(part.code is not None or part.gone for part in self.ranks):
                break
            self._look(self.ranks)
        return next(part for part in self.ranks if part.lost).end_of_it()

    def _await_end(self) -> None:
        """Rank 0 is done: let all ranks leave, and hear their last words."""
        until = time.monotonic() + GRACE_S
        while time.monotonic() < until and not all(part.code is not None or part.gone for part in self.ranks):
            self._look(self.ranks)
        self._look(self.ranks)

    def _look(self, parts: Sequence[Part]) -> None:
        """See how parts are; one that stays silent too long is gone. Takes about TICK_S."""
        now = time.monotonic()
        for part in parts:
            if part.pending is None and not part.gone:
                part.pending = (part.post.ask("look"), now)
        waiting = {part.pending[0]: part for part in parts if part.pending is not None}
        answers = self.cluster.answers(list(waiting), TICK_S)
        for token, part in waiting.items():
            assert part.pending is not None
            if token in answers:
                self._seen(part, answers[token])
            elif time.monotonic() - part.pending[1] > self.job.lost_after_s:
                part.gone, part.pending = f"{part.machine} has not answered for {self.job.lost_after_s:g} s", None
        time.sleep(max(0.0, TICK_S - (time.monotonic() - now)))

    def _seen(self, part: Part, answer: Any) -> None:
        part.pending = None
        if isinstance(answer, Gone):
            part.gone = str(answer)
            return
        part.seen = answer
        for name in ("out", "err"):
            if answer[name] and (part.number == 0 or name == "err"):
                self._show(answer[name], name == "err")

    def _mend(self) -> None:
        """Start engines and reward hosts again that were lost, each for itself."""
        for place, part in enumerate(self.others):
            if not (part.lost or part.code == 0):
                continue
            if part.started > self.job.restarts:
                raise RunHalted(
                    f"{part.end_of_it()}; it was started {part.started} times (cluster.restarts = "
                    f"{self.job.restarts}). Mend the cause, then resume the run"
                )
            self._note(f"{part.end_of_it()}; it is started again, and what it had under way is asked for once more")
            self._end([part])
            self.others[place] = self._other(part.kind, part.number, part.started + 1)

    def _other(self, kind: Kind, number: int, started: int) -> Part:
        """An engine or a reward host, started; one that could not be is gone."""
        (post,) = self.cluster.place([self.job.needs[kind]], True)
        part = Part(kind, number, post, started=started)
        with contextlib.suppress(_Unplaced):
            self._introduce(part)
            if kind == "engine":
                told = {"recipe": self.job.recipe, "secret": self.job.secret, "bind": part.address, "device": ""}
                self._start(part, ["-P", "-m", "gropius.hosting"], {}, told)
            else:
                self._start(part, ["-m", "gropius.rewards.host", part.address, str(part.port)], {})
        return part

    def _start_ranks(self, attempt: int) -> None:
        """Place and start all ranks. Errors: _Unplaced, _Stopped; RunHalted where there is no room for them."""
        job = self.job
        self.ranks = [
            Part("rank", number, post)
            for number, post in enumerate(self.cluster.place([job.needs["rank"]] * job.ranks, False))
        ]
        for part in self.ranks:
            self._introduce(part)
        leader = self.ranks[0]
        self._known = {}
        self._tell()
        self._note(f"{job.ranks} trainer ranks on {', '.join(sorted({part.machine for part in self.ranks}))}")
        for part in self.ranks:
            seat = {
                "RANK": str(part.number),
                "WORLD_SIZE": str(job.ranks),
                "LOCAL_RANK": "0",  # of the devices that it is given, it takes the first
                "MASTER_ADDR": leader.address,
                "MASTER_PORT": str(leader.port),
                ATTEMPT: str(attempt),
            }
            bind = ["--set", f'cluster.bind="{part.address}"'] if job.ranks > 1 else []
            self._start(part, ["-m", "gropius", *job.words, *bind], seat)

    def _introduce(self, part: Part) -> None:
        """Wait until a part has its place."""
        here = self._ask(part, "here", patience_s=self.job.deadline_s)
        if here is None and not part.gone:
            need = self.job.needs[part.kind]
            raise RunHalted(
                f"no room for {part.kind} {part.number} within cluster.deadline_s = {self.job.deadline_s:g} s: it "
                f"needs {need.cpus:g} CPUs and {need.gpus:g} GPUs; {self.cluster.describe()}"
            )
        if here is None:
            raise _Unplaced(f"{part.kind} {part.number} could not be placed: {part.gone}")
        part.machine, part.address, part.port = here["host"], here["address"], here["port"]

    def _start(
        self, part: Part, words: Sequence[str], environment: Mapping[str, str], told: Mapping[str, Any] | None = None
    ) -> None:
        said = {**self.job.environment, **environment, SECRET: self.job.secret}
        pid = self._ask(part, "start", list(words), said, self.job.folder, told)
        if pid is None:
            part.gone = part.gone or f"{part.machine} does not answer"
            raise _Unplaced(f"{part.name} could not be started: {part.gone}")
        part.pid = pid

    def _ask(self, part: Part, method: str, *arguments: Any, patience_s: float = 0.0) -> Any:
        """What one keeper answers; None when it does not, or is gone. The others are looked after meanwhile."""
        if part.gone:
            return None
        token = part.post.ask(method, *arguments)
        until = time.monotonic() + (patience_s or self.job.lost_after_s)
        while time.monotonic() < until:
            answers = self.cluster.answers([token], TICK_S)
            if token in answers:
                if isinstance(answers[token], Gone):
                    part.gone = str(answers[token])
                    return None
                return answers[token]
            if patience_s and self._asked:
                raise _Stopped
            self._look([other for other in (*self.ranks, *self.others) if other is not part and other.pid])
        return None

    def _tell(self) -> None:
        """Tell rank 0 where engines and reward hosts are, when that has changed."""
        book: dict[str, Any] = {"hosts": self.job.rewards, "rewards": [], "engines": {}}
        for part in self.others:
            report = part.seen.get("report") or {}
            if part.lost:
                continue
            if part.kind == "reward host":
                book["rewards"].append([part.address, part.port, part.name])
            elif report:
                book["engines"][str(part.number)] = [
                    part.address, report["port"], part.name, report["describes"], part.started
                ]  # fmt: skip
        if book != self._known and self._ask(self.ranks[0], "note", book) is not None:
            self._known = book

    def _end(self, parts: Sequence[Part]) -> None:
        """Kill what runs there and give the places back. A machine that is cut off ends its own within its lease."""
        tokens = [part.post.ask("end") for part in parts if not part.gone]
        with contextlib.suppress(RunHalted):
            left = set(tokens)
            until = time.monotonic() + GRACE_S
            while left and time.monotonic() < until:
                left -= set(self.cluster.answers(list(left), TICK_S))
        self.cluster.release([part.post for part in parts])
        for part in parts:
            part.gone = part.gone or "it was ended"

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """SIGINT, SIGTERM and SIGHUP are kept for rank 0, which finishes its step and saves."""

        def received(number: int, frame: FrameType | None) -> None:
            self._asked = self._asked or number

        before: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    before[number] = signal.signal(number, received)
        try:
            yield
        finally:
            for which, handler in before.items():
                signal.signal(which, handler)
