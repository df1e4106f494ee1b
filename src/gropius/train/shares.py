"""Who runs what of a batch: packs dealt to ranks by their cost, and what came of them put together again."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gropius.train.deal import deal
from gropius.train.pack import Pack, pack
from gropius.train.sequences import TrainSequence

SLACK = (1.0, 1.1, 1.25, 1.5)  # how much larger than an even share a pack may be, as tried


@dataclass(frozen=True, eq=False)
class Share:
    """packs: of the whole batch. mine: those that this rank runs. count: micro-batches of every rank."""

    packs: Sequence[Pack]
    mine: Sequence[Pack]
    count: int

    def rounds(self) -> Iterator[tuple[Pack | None, bool]]:
        """`count` micro-batches, None where this rank has nothing left; True with the last one."""
        for n in range(self.count):
            yield (self.mine[n] if n < len(self.mine) else None, n == self.count - 1)


def filled(parts: Sequence[Sequence[Any]]) -> list[Any]:
    """One list from several of the same length, each of which has some of the entries and None elsewhere."""
    return [next((value for value in entries if value is not None), None) for entries in zip(*parts, strict=True)]


def nothing() -> Pack:
    """The smallest pack: two tokens, no weight."""
    (one,) = pack([_NOTHING], budget_tokens=2, skip=False)
    return one


_NOTHING = TrainSequence(
    group_id="",
    member=0,
    episode=0,
    prompt_ids=np.zeros(1, np.int64),
    response_ids=np.zeros(1, np.int64),
    mask=np.ones(1, np.bool_),
    sampler_logprobs=np.zeros(1, np.float32),
    advantage=np.zeros(1),
    weight=np.zeros(1),
    keep=np.ones(1, np.bool_),
)


def evenly(packed: Callable[[int], list[Pack]], budget: int, ranks: int) -> tuple[list[Pack], list[list[int]]]:
    """Packs, and which of them each rank runs, such that the busiest rank is done as early as may be.

    packed: packs of at most so many tokens. One pack cannot be run by two ranks, so packs smaller than the budget are
    tried too; the same input gives the same answer on every rank.
    """
    largest = packed(budget)
    tokens = sum(one.run_tokens for one in largest)
    rounds = max(1, math.ceil(tokens / (ranks * budget)))
    even = tokens / (ranks * rounds)
    sizes = sorted({max(1, min(budget, math.ceil(even * slack))) for slack in SLACK} - {budget}, reverse=True)
    best, least = (largest, deal([one.cost for one in largest], ranks)), math.inf
    for packs in (largest, *map(packed, sizes)):
        dealt = deal([one.cost for one in packs], ranks)
        busiest = max(sum(packs[i].cost for i in mine) for mine in dealt)
        if busiest < 0.99 * least:
            best, least = (packs, dealt), busiest
    return best
