"""Laws of rewards that see a whole group."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gropius.errors import RewardError
from gropius.rewards import load_scorer
from gropius.rewards.base import BatchedReward, InProcessScorer, RewardPart
from gropius.types import Episode, Task, Turn

HERE = Path(".")


def siblings(texts: list[str], group: str = "000001-0000") -> list[Episode]:
    return [
        Episode(
            Task("t", "q", "1"), group, i, np.zeros(1, np.int64),
            (Turn("model", np.zeros(len(text), np.int64), text),), (), "stop",
        )
        for i, text in enumerate(texts)
    ]  # fmt: skip


def values(name: str, rows: list[Episode]) -> list[float | None]:
    scorer = load_scorer([{"name": name}], HERE)
    assert scorer.unit == "group"
    return [v.outcome.value for v in asyncio.run(scorer.score(rows))]


def test_equal_siblings_are_not_diverse_and_strangers_are() -> None:
    assert values("diversity", siblings(["a b c", "a b c"])) == [0.0, 0.0]
    assert values("diversity", siblings(["a b c", "d e f"])) == [1.0, 1.0]
    assert values("diversity", siblings(["a b c", "a b d"])) == [pytest.approx(2 / 3)] * 2
    assert values("diversity", siblings(["alone"])) == [0.0]


def test_the_shortest_sibling_ranks_first_and_ties_share() -> None:
    assert values("brevity", siblings(["aaa", "a", "aa"])) == [0.0, 1.0, 0.5]
    assert values("brevity", siblings(["aa", "aa", "a"])) == [0.25, 0.25, 1.0]
    assert values("brevity", siblings(["a"])) == [0.5]
    assert values("brevity", siblings(["", "a", "aa"])) == [0.0, 1.0, 0.0]  # empty: rejected, no rank


@settings(deadline=None, max_examples=40)
@given(st.lists(st.text(alphabet="ab ", max_size=12), min_size=1, max_size=6), st.randoms())
def test_a_groupwise_value_does_not_depend_on_the_order_of_siblings_or_on_other_groups(texts, draw) -> None:
    rows = siblings(texts)
    other = siblings(["zz", "a b"], "000001-0001")
    mixed = [*rows, *other]
    draw.shuffle(mixed)
    for name in ("diversity", "brevity"):
        expected = dict(zip([id(r) for r in rows], values(name, rows), strict=True))
        found = dict(zip([id(r) for r in mixed], values(name, mixed), strict=True))
        assert all(found[key] == pytest.approx(value) for key, value in expected.items())


def test_a_wrong_length_from_a_group_halts_and_a_raise_voids_that_group_only() -> None:
    part = RewardPart("mine", 1.0, BatchedReward(lambda group: [1.0], siblings=True))
    with pytest.raises(RewardError, match="returned 1 values for 2 completions"):
        asyncio.run(InProcessScorer([part], unit="group").score(siblings(["a", "b"])))

    def picky(group: list[Episode]) -> list[float]:
        if group[0].group_id.endswith("1"):
            raise ValueError("no")
        return [1.0] * len(group)

    part = RewardPart("mine", 1.0, BatchedReward(picky, siblings=True))
    rows = [*siblings(["a", "b"]), *siblings(["c"], "000001-0001")]
    verdicts = asyncio.run(InProcessScorer([part], unit="group").score(rows))
    assert [v.outcome.status for v in verdicts] == ["scored", "scored", "void"]
