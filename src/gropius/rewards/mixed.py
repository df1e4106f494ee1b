"""Our rewards in this process, a person's own in killable ones, one verdict over all. No torch."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from gropius.rewards.base import (
    NOTHING_APPLIES,
    InProcessScorer,
    Memory,
    Outcomes,
    RewardPart,
    described,
    judge,
    unit_of,
)
from gropius.rewards.pool import PooledScorer
from gropius.types import Episode, Verdict, void

_LOG = logging.getLogger("gropius.rewards")


@dataclass(frozen=True)
class PoolSettings:
    """workers: processes for a person's functions. deadline_s: of one call, from the start of its work."""

    workers: int = 2
    deadline_s: float = 10.0


@dataclass(frozen=True)
class Pooled:
    """The parts (by name) that run in one pool."""

    names: tuple[str, ...]
    pool: PooledScorer


@dataclass
class MixedScorer:
    """Judges by parts of two kinds: `inline` ones run here, the others in pools; weights are applied here.

    parts: all, in the order of the recipe; their weights count, those inside a pool do not. What a pooled part is
    worth comes back as its outcome; a call that was lost (deadline, crash) is void for every part of that pool.
    """

    parts: Sequence[RewardPart]
    inline: InProcessScorer | None
    pools: Sequence[Pooled]
    unit: Literal["episode", "group"] = field(init=False)

    def __post_init__(self) -> None:
        self.unit = unit_of(self.parts)
        for pooled in self.pools:
            pooled.pool.unit = unit_of([part for part in self.parts if part.name in pooled.names])

    async def score(self, episodes: Sequence[Episode]) -> list[Verdict]:
        """One verdict an episode, in order. Raises RewardError naming the function that broke its contract."""
        return await judge(self.parts, episodes, self._outcomes)

    def describe(self) -> tuple[str, ...]:
        """One line a part, and where a person's functions run."""
        places = [
            f"{', '.join(p.names)}: in {p.pool.workers} process{'' if p.pool.workers == 1 else 'es'}, "
            f"{p.pool.deadline_s:g} s a call"
            for p in self.pools
        ]
        return (*described(self.parts), *places)

    def close(self) -> None:
        """End the pools' processes."""
        for pooled in self.pools:
            pooled.pool.close()

    def memory(self) -> Memory:
        """What has to survive a pause, of both kinds."""
        here = self.inline.memory() if self.inline is not None else {}
        return {"here": here, **{",".join(pooled.names): pooled.pool.memory() for pooled in self.pools}}

    def remember(self, memory: Memory) -> None:
        """Take up what `memory` gave before a pause."""
        if self.inline is not None:
            self.inline.remember(memory.get("here", {}))
        for pooled in self.pools:
            pooled.pool.remember(memory.get(",".join(pooled.names), {}))

    async def _outcomes(self, episodes: Sequence[Episode]) -> list[Outcomes]:
        here = self.inline.outcomes(episodes) if self.inline is not None else _nothing(len(episodes))
        ours, *answers = await asyncio.gather(here, *(self._asked(pooled, episodes) for pooled in self.pools))
        order = [part.name for part in self.parts]
        found = []
        for outcomes in zip(ours, *answers, strict=True):
            together = {name: outcome for some in outcomes for name, outcome in some.items()}
            found.append({name: together[name] for name in order if name in together})
        return found

    async def _asked(self, pooled: Pooled, episodes: Sequence[Episode]) -> list[Outcomes]:
        found = []
        counts = pooled.pool.counts
        before = counts.lost() + counts.faults
        verdicts = await pooled.pool.score(episodes)
        if counts.lost() + counts.faults > before:
            _LOG.warning(
                "%s: %d deadlines missed, %d workers died and %d episodes failed so far; %d were called void by the "
                "function, %d workers started, %d calls answered",
                ", ".join(pooled.names), counts.timeouts, counts.crashes, counts.faults, counts.voids, counts.started,
                counts.calls,
            )  # fmt: skip
        for verdict in verdicts:
            lost = not verdict.parts and verdict.outcome.reason != NOTHING_APPLIES
            found.append({n: void(verdict.outcome.reason) for n in pooled.names} if lost else dict(verdict.parts))
        return found


async def _nothing(count: int) -> list[Outcomes]:
    return [{} for _ in range(count)]
