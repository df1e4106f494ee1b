"""Every wait has a deadline and an owner: when nobody answers any more, the run halts and says who is late."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from gropius.errors import EngineError, RewardError, RunHalted
from gropius.rewards.base import Scorer
from gropius.rollout.collect import Player
from gropius.rollout.engine import Around
from gropius.types import Completion, Episode, Request, Verdict

T = TypeVar("T")
Owner = Literal["the rollout engine", "the reward", "the environment"]
LOOK_S = 1.0
KINDS: dict[Owner, type[RunHalted]] = {
    "the rollout engine": EngineError,
    "the reward": RewardError,
    "the environment": RunHalted,
}


@dataclass
class Waits:
    """Who is waited for. last: when anybody answered last, on the event loop's clock."""

    last: float
    waiting: dict[int, tuple[Owner, str, float]] = field(default_factory=dict)

    @contextmanager
    def on(self, owner: Owner, what: str) -> Iterator[None]:
        """Wait for an owner; its answer, whatever it is, starts the clock anew."""
        clock, key = asyncio.get_running_loop().time, len(self.waiting)
        while key in self.waiting:
            key += 1
        self.waiting[key] = (owner, what, clock())
        try:
            yield
        finally:
            del self.waiting[key]
            self.last = clock()

    def late(self, now: float, deadline_s: float) -> RunHalted | None:
        """The error of the one that is waited for longest, when nobody answered within the deadline."""
        if not self.waiting or now - self.last < deadline_s:
            return None
        owner, what, since = min(self.waiting.values(), key=lambda wait: wait[2])
        kind = KINDS[owner]
        return kind(
            f"{owner} is late: {what} has been waited for {now - since:.0f} s, and nobody answered for "
            f"{now - self.last:.0f} s (train.deadline_s = {deadline_s:g}; {len(self.waiting)} are waiting). Mend or "
            "restart it, or raise the deadline, then resume the run"
        )


@dataclass
class WatchedEngine(Around):
    """An `Engine` whose answers are timed."""

    waits: Waits

    async def complete(self, request: Request) -> Completion:
        """Draw one response."""
        seed, step, group, member = (*request.stream, 0, 0, 0, 0)[:4]
        with self.waits.on("the rollout engine", f"group {step:06d}-{group:04d}, member {member} (seed {seed})"):
            return await self.engine.complete(request)


@dataclass
class WatchedScorer:
    """A `Scorer` whose answers are timed."""

    scorer: Scorer
    waits: Waits

    @property
    def unit(self) -> Literal["episode", "group"]:
        """What must not be split over two calls."""
        return self.scorer.unit

    async def score(self, episodes: Sequence[Episode]) -> list[Verdict]:
        """One verdict an episode, in order."""
        first = episodes[0] if episodes else None
        what = f"group {first.group_id}, member {first.member} (task {first.task.key})" if first else "nothing"
        with self.waits.on("the reward", what):
            return await self.scorer.score(episodes)


async def within(player: Player, deadline_s: float, work: Callable[[Player], Awaitable[T]]) -> T:
    """Do work with a player; halt when neither engine nor scorer nor environment answers for `deadline_s` (0: never).

    Errors: EngineError, RewardError or RunHalted naming who is late; the work is cancelled first.
    """
    if not deadline_s:
        return await work(player)
    clock = asyncio.get_running_loop().time
    waits = Waits(clock())
    watched = dataclasses.replace(
        player,
        engine=WatchedEngine(player.engine, waits),
        scorer=WatchedScorer(player.scorer, waits),
        wait=lambda what: waits.on("the environment", what),
    )
    job = asyncio.ensure_future(work(watched))
    try:
        while not job.done():
            await asyncio.wait({job}, timeout=min(LOOK_S, deadline_s / 4))
            if not job.done() and (error := waits.late(clock(), deadline_s)) is not None:
                raise error
        return job.result()
    finally:
        if not job.done():
            job.cancel()
            await asyncio.wait({job}, timeout=LOOK_S)
