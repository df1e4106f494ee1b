"""Process rewards: where their scores fall, what they refuse, and how a place comes to a token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from gropius.errors import RewardError
from gropius.rewards import REWARDS
from gropius.rewards.base import RewardPart, weigh
from gropius.rewards.places import on_tokens, require_places
from gropius.rewards.pool import _verdicts
from gropius.rewards.worker import _plain
from gropius.types import Episode, Outcome, Place, Task, Turn, Verdict, placed, scored


def decode(ids: Sequence[int]) -> str:
    """Two characters a token."""
    return "".join(f"{i:02d}" for i in ids)


def episode(*replies: str, metadata: dict[str, Any] | None = None) -> Episode:
    """Model turns of one token a character, a masked token of the environment between them."""
    turns: list[Turn] = []
    for number, text in enumerate(replies):
        if number:
            turns.append(Turn("environment", np.array([9]), "…"))
        turns.append(Turn("model", np.array([ord(c) for c in text]), text))
    return Episode(Task("t", "p", "7", metadata or {}), "g", 0, np.array([1]), tuple(turns), (), "stop")


def spell(ids: Sequence[int]) -> str:
    return "".join(map(chr, ids))


def part(name: str = "p", weight: float = 1.0) -> RewardPart:
    return RewardPart(name, weight, lambda e: None)


def test_every_step_is_checked_as_an_exact_rational_and_ends_where_it_ends() -> None:
    text = "48/2 = 24, <<24+48=72>> so 0.1 + 0.2 = 0.3 and 7/3=2.33 but 2*3=7, 1/0=5, 48/2 = 24"
    found = REWARDS["arithmetic_steps"]()(episode(text))
    assert [place.score for place in found.places] == [1, 1, 1, 1, -1, -1]
    assert [text[: p.characters].rpartition("=")[2].strip(" <>") for p in found.places] == [
        "24", "72", "0.3", "2.33", "7", "5",
    ]  # fmt: skip
    assert found.value == 2.0 and found.places[4].note == "2*3=7 does not hold"
    assert REWARDS["arithmetic_steps"](limit=2)(episode(text)).value == 2.0
    assert REWARDS["arithmetic_steps"]()(episode("no step")) == placed([], "0 of 0 steps hold")


def test_guesses_score_what_they_bring_and_add_up_to_the_whole_way() -> None:
    game = {"hidden": 7, "low": 1, "high": 15}
    played = episode("15", "no", "9", "7", metadata=game)
    near = REWARDS["guess_progress"]()(played)
    assert [round(p.score, 6) for p in near.places] == [round(x / 14, 6) for x in (6, 0, 6, 2)]
    assert near.value == pytest.approx(1.0) and [p.turn for p in near.places] == [0, 1, 2, 3]
    bits = REWARDS["guess_progress"](measure="interval")(played)
    left = np.log([15, 14, 14, 8, 1]) / np.log(15)
    assert [p.score for p in bits.places] == pytest.approx((left[:-1] - left[1:]).tolist())
    assert REWARDS["guess_progress"]()(episode("3")).status == "void"


def test_a_place_comes_to_the_token_that_completes_it() -> None:
    played = episode("abcd", "efg")
    verdict = weigh(
        [part(weight=0.5), part("end", 2.0)],
        played,
        {"p": placed([Place(1.0, 0, 3), Place(1.0, 0), Place(-1.0, -1, 1)]), "end": scored(0.25)},
    )
    assert verdict.outcome.value == pytest.approx(1.0) and verdict.final == 0.5
    steps = on_tokens(played, verdict, spell).steps
    assert [(s.token, s.score) for s in steps] == [(2, 0.5), (3, 0.5), (5, -0.5)]
    wide = on_tokens(episode("abcd"), weigh([part()], played, {"p": placed([Place(1.0, 0, 3)])}), decode)
    assert wide.steps[0].token == 1  # two characters a token


@pytest.mark.parametrize(
    ("outcome", "says"),
    [
        (placed([Place(1.0, turn=2)]), "a score falls in turn 2 and the model has 2"),
        (placed([Place(1.0, turn=0, characters=9)]), "ends after 9 characters of turn 0, which has 4"),
        (Outcome("scored", 2.0, "", (Place(1.0),)), "add up to 1 and the value is 2.0"),
        (Outcome("rejected", 1.0, "", (Place(1.0),)), "a rejected outcome has no places"),
        (Outcome("scored", 1.0, "", (Place(float("nan")),)), "a score of nan has a place"),
    ],
)
def test_a_place_that_is_none_is_refused_by_name(outcome: Outcome, says: str) -> None:
    with pytest.raises(RewardError, match=says):
        require_places(part("mine"), episode("abcd", "efg"), outcome)


def test_places_travel_through_the_pool_as_they_are() -> None:
    sent = Verdict(scored(1.5), {"p": placed([Place(1.0, 0, 3, "why"), Place(0.5)])}, None)
    (back,) = _verdicts({"verdicts": [_plain(sent)]}, 1)
    assert back.parts["p"] == sent.parts["p"]
