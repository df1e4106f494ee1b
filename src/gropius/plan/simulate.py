"""A cluster that trains, played event by event. No torch.

What happens: responses end, the trainer is done with a part of a batch, weights have arrived, devices fail and come
back. The lengths of the n-th group are the same in every layout of one seed, so that layouts differ by themselves and
not by luck. Steps, seconds and staleness are exact for this model; what the model leaves out is said in the docs.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from gropius.plan.cluster import Cluster, Job, Layout, require_possible
from gropius.plan.replica import Group, Replica, Row

BLOCK = 4096  # lengths drawn at once
TRAINER = -1  # in place of an engine's number


@dataclass(frozen=True)
class Outcome:
    """What a layout does. Means are over the steps after the pipeline has filled.

    step_s: of one step. engine_busy, trainer_busy, transfer: shares of the time; engine_fill: mean rows of an engine,
    standing still included, over the most that one ran. staleness: share of trained groups by versions since they were
    begun; token_staleness: mean over trained tokens of versions since each was drawn. responses_s, tokens_s: trained
    a second. dropped: groups thrown away; carried: rows that went on under new weights, a step; failures: of devices;
    redone: steps done twice.
    """

    step_s: float
    total_s: float
    engine_busy: float
    engine_fill: float
    trainer_busy: float
    transfer: float
    staleness: Mapping[int, float]
    token_staleness: float
    responses_s: float
    tokens_s: float
    dropped: int
    carried: float
    failures: int
    redone: int

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def simulate(cluster: Cluster, layout: Layout, job: Job) -> Outcome:
    """Play `job.steps` steps. Errors: UsageError for a layout that cannot run."""
    require_possible(cluster, layout, job)
    return _Run(cluster, layout, job).play()


class _Run:
    """One simulation. begun, taken: groups begun and trained on; alive, ready: by the version that began them. busy:
    engines that may have rows; halted: all stand still.
    """

    def __init__(self, cluster: Cluster, layout: Layout, job: Job):
        self.cluster, self.layout, self.job = cluster, layout, job
        self.rng, self.chance = np.random.default_rng([job.seed, 1]), np.random.default_rng([job.seed, 2])
        self.lengths: deque[int] = deque()
        self.engines = [
            Replica(cluster.engine, job.prompt_tokens) for _ in range(layout.engine_devices // cluster.engine.devices)
        ]
        self.busy: set[int] = set()
        self.halted = False
        self.parts = 1 if layout.colocated else layout.chunks
        self.events: list[tuple[float, int, str, int, int]] = []
        self.act: dict[str, Callable[[int, int], None]] = {
            "end": self._end, "trained": self._trained, "sent": self._sent, "lost": self._lost, "back": self._back
        }  # fmt: skip
        self.now, self.serial, self.until = 0.0, 0, 0.0
        self.waiting: deque[Row] = deque()
        self.version = self.begun = self.taken = self.part = self.kept = 0
        self.alive: dict[int, int] = {}
        self.ready: dict[int, deque[Group]] = {}
        self.state, self.stamp = "idle", 0  # idle, training, draining, sending, down
        self.sums = dict.fromkeys(("trainer", "transfer", "tokens", "lag", "carried"), 0.0)
        self.stale: dict[int, int] = {}
        self.dropped = self.failures = self.redone = 0
        self.warm = min(layout.bound + 1, job.steps // 2) if layout.staleness else 0
        self.since: dict[str, float] = {}
        self.stale_since: dict[int, int] = {}

    def play(self) -> Outcome:
        """To the last step."""
        self._arm(TRAINER)
        if not self.layout.colocated:
            for i in range(len(self.engines)):
                self._arm(i)
        self._mark()
        self._begin()
        while self.version < self.job.steps:
            self.now, _, what, which, stamp = heapq.heappop(self.events)
            self.act[what](which, stamp)
        return self._outcome()

    def _at(self, when: float, what: str, which: int, stamp: int) -> None:
        if when < math.inf:
            self.serial += 1
            heapq.heappush(self.events, (when, self.serial, what, which, stamp))

    # Sampling

    def _begin(self) -> None:
        """Begin as many groups as the bound allows, and give waiting responses to engines that have room."""
        job = self.job
        allowed = math.floor((self.version + 1 + self.layout.staleness) * job.prompts + 1e-9)
        if self.layout.queue:
            allowed = min(allowed, self.taken + self.layout.queue)
        while self.begun < allowed:
            group = Group(job.group_size)
            self.begun += 1
            self.waiting.extend([Row(group, self._length()) for _ in range(job.group_size)])
        self._spread()

    def _length(self) -> int:
        if not self.lengths:
            self.lengths.extend(self.job.lengths.draw(self.rng, BLOCK).tolist())
        return self.lengths.popleft()

    def _spread(self) -> None:
        """Waiting responses go to the engine with the fewest rows."""
        if not self.waiting or self.halted or self.state == "draining":
            return
        free = [(len(e.rows), i) for i, e in enumerate(self.engines) if e.room > 0]
        heapq.heapify(free)
        touched: dict[int, Replica] = {}
        while self.waiting and free:
            rows, i = free[0]
            engine = self.engines[i]
            if i not in touched:
                touched[i] = engine
                self.busy.add(i)
                engine.advance(self.now)
            self._give(engine)
            if engine.room > 0:
                heapq.heapreplace(free, (rows + 1, i))
            else:
                heapq.heappop(free)
        for i, engine in touched.items():
            self._at(engine.next_end(), "end", i, engine.stamp)

    def _give(self, engine: Replica) -> None:
        row = self.waiting.popleft()
        first = row.group.begun < 0
        engine.add(row, self.version, first or not self.job.shared_prompt)
        if first:
            self.alive[self.version] = self.alive.get(self.version, 0) + 1

    def _end(self, i: int, stamp: int) -> None:
        """Rows of an engine are over."""
        engine = self.engines[i]
        if stamp != engine.stamp:
            return
        complete = engine.ended(self.now)
        for group in complete:
            self.ready.setdefault(group.begun, deque()).append(group)
        while self.waiting and engine.room > 0 and self.state != "draining":
            self._give(engine)
        self._at(engine.next_end(), "end", i, engine.stamp)
        if self.state == "draining":
            self._hand_over()
        elif complete:
            self._train()

    # Training

    def _choose(self, wanted: int) -> list[int] | None:
        """Versions of the `wanted` complete groups to train on, the oldest first; None while there are not so many.

        When late groups are waited for, a group may be taken only while every older one still finds its place in a
        batch that is not too late for it: `free` is the number of places that the older ones do not need.
        """
        chosen: list[int] = []
        older, free = 0, math.inf
        for begun in sorted(self.alive):
            many = int(min(len(self.ready.get(begun, ())), wanted - len(chosen), free))
            chosen += [begun] * many
            if len(chosen) == wanted:
                return chosen
            if self.layout.late == "wait":
                older += self.alive[begun]
                last = max(begun + self.layout.bound, self.version)  # the last batch that is not too late for it
                free = min(free - many, (last + 1) * self.job.prompts - self.taken - older)
        return None

    def _train(self) -> None:
        """Take the next part of the batch if the trainer is free and the groups are there."""
        job, faults = self.job, self.cluster.faults
        if self.state != "idle":
            return
        chosen = self._choose((self.part + 1) * job.prompts // self.parts - self.part * job.prompts // self.parts)
        if chosen is None:
            return
        tokens = longest = 0.0
        for begun in chosen:
            group = self._take(begun)
            tokens += group.tokens + job.prompt_tokens * (1 if job.shared_prompt else job.group_size)
            longest = max(longest, job.prompt_tokens + group.longest)
        self.part += 1
        seconds = self.cluster.trainer.seconds(tokens * job.live_share, longest, self.layout.trainer_devices)
        if self.part == self.parts:
            seconds += self.cluster.trainer.step_s
            seconds += faults.checkpoint_s if (self.version + 1) % faults.checkpoint_every == 0 else 0.0
        if self.layout.colocated:
            self._halt()
        self._busy("training", seconds, "trained")
        if self.layout.queue:
            self._begin()

    def _take(self, begun: int) -> Group:
        """One complete group out of the buffer, counted as trained."""
        group = self.ready[begun].popleft()
        self.alive[begun] -= 1
        if not self.alive[begun]:
            del self.alive[begun]
        age = self.version - begun
        self.stale[age] = self.stale.get(age, 0) + 1
        self.sums["lag"] += self.version * group.tokens - group.drawn
        self.sums["tokens"] += group.tokens
        self.taken += 1
        return group

    def _busy(self, state: str, seconds: float, then: str) -> None:
        """The trainer does something until an event ends it."""
        self.state, self.until = state, self.now + seconds
        self.sums["trainer" if state == "training" else "transfer"] += seconds
        self._at(self.until, then, TRAINER, self.stamp)

    def _halt(self) -> None:
        """Engines stand still."""
        self.halted = True
        self.busy = {i for i in self.busy if self.engines[i].rows}
        for engine in self._running():
            engine.advance(self.now)
            engine.on = False
            engine.stamp += 1

    def _running(self) -> list[Replica]:
        """Engines that may have rows, in their order."""
        return [self.engines[i] for i in sorted(self.busy)]

    def _trained(self, _: int, stamp: int) -> None:
        if stamp != self.stamp:
            return
        if self.part < self.parts:
            self.state = "idle"
            self._train()
        else:
            self.state = "draining"
            self._hand_over()

    def _hand_over(self) -> None:
        """Send the weights: at once, or when no response is running any more."""
        if not self.layout.swap and not self.layout.colocated and any(engine.rows for engine in self._running()):
            return
        self._halt()
        transfer = self.cluster.transfer
        self._busy("sending", transfer.colocated_s if self.layout.colocated else transfer.seconds, "sent")

    def _sent(self, _: int, stamp: int) -> None:
        """A new version is everywhere: a step is over."""
        if stamp != self.stamp:
            return
        self.version += 1
        self.part, self.state = 0, "idle"
        if self.version % self.cluster.faults.checkpoint_every == 0:
            self.kept = self.version
        if self.layout.late == "drop":
            self._drop()
        self.sums["carried"] += sum(len(engine.rows) for engine in self._running())
        if self.version == self.warm:
            self._mark()
        if self.version < self.job.steps:
            self._resume()

    def _resume(self) -> None:
        """Engines go on, with the version that there is."""
        anew = self.layout.colocated or self.cluster.transfer.recompute
        self.halted = False
        for i in sorted(self.busy):
            engine = self.engines[i]
            if not engine.on:
                engine.advance(self.now)
            engine.on = True
            if engine.rows:
                engine.swap(self.version, anew)
            self._at(engine.next_end(), "end", i, engine.stamp)
        self._begin()
        self._train()

    def _drop(self) -> None:
        """Throw away what no later batch may train on, complete or not; as many groups may begin instead."""
        late = {begun for begun in self.alive if begun + self.layout.bound < self.version}
        if not late:
            return
        for begun in late:
            count = self.alive.pop(begun)
            self.ready.pop(begun, None)
            self.dropped += count
            self.begun -= count
        for engine in self.engines:
            engine.drop(late)
        self.waiting = deque(row for row in self.waiting if row.group.begun not in late)

    # Faults

    def _arm(self, which: int) -> None:
        """Draw when the trainer, or engine `which`, next loses a device. A failing trainer takes a colocated engine."""
        faults = self.cluster.faults
        devices = self.layout.trainer_devices if which == TRAINER else self.cluster.engine.devices
        if faults.mtbf_s < math.inf:
            self._at(self.now + self.chance.exponential(faults.mtbf_s / devices), "lost", which, 0)

    def _lost(self, which: int, _: int) -> None:
        self.failures += 1
        if which == TRAINER:
            self._back_to_checkpoint()
        else:
            engine = self.engines[which]
            engine.advance(self.now)
            self.waiting.extendleft(reversed(engine.lose()))
            engine.down, engine.stamp = True, engine.stamp + 1
            self._spread()
            if self.state == "draining":
                self._hand_over()
        self._at(self.now + self.cluster.faults.restart_s, "back", which, 0)

    def _back_to_checkpoint(self) -> None:
        """All that was done since, and all that is under way, is lost."""
        if self.state in ("training", "sending"):
            self.sums["trainer" if self.state == "training" else "transfer"] -= self.until - self.now
        self._halt()
        for engine in self.engines:
            engine.lose()
        self.waiting.clear()
        self.alive.clear()
        self.ready.clear()
        self.redone += self.version - self.kept
        self.version, self.part, self.state = self.kept, 0, "down"
        self.begun = self.taken = self.version * self.job.prompts
        self.stamp += 1

    def _back(self, which: int, _: int) -> None:
        self._arm(which)
        if which == TRAINER:
            self.state = "idle"
            self._resume()
        else:
            self.engines[which].down = False
            self.engines[which].at = self.now
            self._spread()

    # What it comes to

    def _totals(self) -> dict[str, float]:
        for engine in self.engines:
            engine.advance(self.now)
        busy, rows = sum(e.busy_s for e in self.engines), sum(e.row_s for e in self.engines)
        return {**self.sums, "time": self.now, "busy": busy, "rows": rows, "taken": float(sum(self.stale.values()))}

    def _mark(self) -> None:
        """Measure from here on."""
        self.since, self.stale_since = self._totals(), dict(self.stale)

    def _outcome(self) -> Outcome:
        now = self._totals()
        spent = {name: now[name] - self.since[name] for name in now}
        time, steps = spent["time"], self.job.steps - self.warm
        trained = {age: count - self.stale_since.get(age, 0) for age, count in sorted(self.stale.items())}
        engines = len(self.engines) * time
        peak = max(engine.peak for engine in self.engines)
        return Outcome(
            step_s=time / steps, total_s=self.now, engine_busy=spent["busy"] / engines,
            engine_fill=spent["rows"] / (engines * peak), trainer_busy=spent["trainer"] / time,
            transfer=spent["transfer"] / time,
            staleness={age: count / spent["taken"] for age, count in trained.items() if count},
            token_staleness=spent["lag"] / spent["tokens"],
            responses_s=spent["taken"] * self.job.group_size / time, tokens_s=spent["tokens"] / time,
            dropped=self.dropped, carried=spent["carried"] / steps, failures=self.failures, redone=self.redone,
        )  # fmt: skip
