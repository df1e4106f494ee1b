"""Our rewards in this process, a person's own in killable ones, one verdict over all. No torch."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from gropius.rewards.base import (
    NOTHING_APPLIES,
    InProcessScorer,
    Outcomes,
    RewardPart,
    described,
    judge,
    unit_of,
)
from gropius.rewards.pool import PooledScorer
from gropius.types import Episode, Verdict, void


@dataclass(frozen=True)
class PoolSettings:
    """workers: processes for a person's functions. deadline_s: of one call, from the start of its work."""

    workers: int = 2
    deadline_s: float = 10.0


@dataclass
class MixedScorer:
    """Judges by parts of two kinds: `inline` ones run here, the others in `pool`; weights are applied here.

    parts: all, in the order of the recipe; their weights count, those inside the pool do not. What a pooled part is
    worth comes back as its outcome; a call that was lost (deadline, crash) is void for every pooled part.
    """

    parts: Sequence[RewardPart]
    inline: InProcessScorer | None
    pool: PooledScorer
    pooled: frozenset[str]
    unit: Literal["episode", "group"] = field(init=False)

    def __post_init__(self) -> None:
        self.unit = unit_of(self.parts)
        self.pool.unit = self.unit

    async def score(self, episodes: Sequence[Episode]) -> list[Verdict]:
        """One verdict an episode, in order. Raises RewardError naming the function that broke its contract."""
        return await judge(self.parts, episodes, self._outcomes)

    def describe(self) -> tuple[str, ...]:
        """One line a part, and where a person's functions run."""
        pool = self.pool
        processes = "process" if pool.workers == 1 else "processes"
        where = f"{', '.join(sorted(self.pooled))}: in {pool.workers} {processes}, {pool.deadline_s:g} s a call"
        return (*described(self.parts), where)

    def close(self) -> None:
        """End the pool's processes."""
        self.pool.close()

    async def _outcomes(self, episodes: Sequence[Episode]) -> list[Outcomes]:
        here = self.inline.outcomes(episodes) if self.inline is not None else _nothing(len(episodes))
        ours, verdicts = await asyncio.gather(here, self.pool.score(episodes))
        found = []
        for own, verdict in zip(ours, verdicts, strict=True):
            parts = dict(verdict.parts)
            if not parts and verdict.outcome.reason != NOTHING_APPLIES:
                parts = {name: void(verdict.outcome.reason) for name in self.pooled}
            found.append(
                {part.name: {**own, **parts}[part.name] for part in self.parts if part.name in {**own, **parts}}
            )
        return found


async def _nothing(count: int) -> list[Outcomes]:
    return [{} for _ in range(count)]
