"""What one rank of several runs, without the others: every row is somebody's, and nobody speaks of another's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from batches import batch, build

from gropius.objective.presets import resolve
from gropius.train.forward import Forward
from gropius.train.optim import Optimiser, OptimiserSettings
from gropius.train.pack import pack
from gropius.train.shares import evenly
from gropius.train.step import Learner, LearnerSettings
from gropius.train.team import Team


class OneOf(Team):
    """A rank of several, on whole weights, whom nobody hears."""

    alone, size, rank = False, 0, 0  # type: ignore[assignment]

    def __init__(self, rank: int, size: int) -> None:
        super().__init__()
        self.rank, self.size = rank, size  # type: ignore[misc]

    def lead(self, call: str, *arguments: Any) -> None:
        """Nobody listens."""


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("tokens", [20, 33, 60, 90, 200])
def test_every_live_row_is_scored_by_exactly_one_rank_and_is_the_row(size: int, tokens: int) -> None:
    rows, model = batch(), build("llama", torch.float32)
    parts = Forward.of(model), resolve("dapo"), Optimiser(model, OptimiserSettings()), LearnerSettings(1.0, tokens)
    alone = Learner(*parts).score(rows).logprobs
    every = [Learner(*parts, OneOf(rank, size)).score(rows).logprobs for rank in range(size)]
    for i, row in enumerate(rows):
        mine = [one[i] for one in every if one[i] is not None]
        assert len(mine) == (alone[i] is not None), f"row {i}"
        if mine:
            assert len(mine[0]) == len(row.mask)
            np.testing.assert_allclose(mine[0], alone[i], atol=1e-4)


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("budget", [60, 150, 1000])
def test_the_busiest_rank_has_little_more_than_its_share_however_large_a_pack_may_be(ranks: int, budget: int) -> None:
    rows = batch(groups=8)
    packs, dealt = evenly(lambda tokens: pack(rows, budget_tokens=tokens), budget, ranks)
    spent = [sum(packs[i].cost for i in mine) for mine in dealt]
    assert max(spent) <= 1.3 * sum(spent) / ranks
    assert sorted(i for mine in dealt for i in mine) == list(range(len(packs)))
    assert all(one.run_tokens <= budget for one in packs if len(one.sequences) > 1)
    assert sorted(i for one in packs for i in one.index) == [i for i, row in enumerate(rows) if not row.skipped]
