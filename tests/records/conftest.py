"""Groups made by hand: four siblings of two turns and one void, enough to tell every column from every other."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from gropius.records import ResponseRecord, Trained, records_of
from gropius.types import Episode, Group, Outcome, Task, Turn, Verdict, rejected, scored, void


def turn(role: str, ids: Sequence[int], text: str) -> Turn:
    own = np.linspace(-1.0, -0.1, len(ids)).astype(np.float32) if role == "model" else None
    return Turn(role, np.array(ids, np.int64), text, own, own)  # type: ignore[arg-type]


def episode(group_id: str, member: int, turns: Sequence[Turn], outcome: Outcome, **fields: object) -> Episode:
    task = Task(f"task-{group_id}", "What is 1+1?", "2")
    raw = outcome.value
    verdict = Verdict(outcome, {"exact": outcome, "format": scored(1.0)}, raw)
    values: dict[str, object] = {"finish_reason": "stop", "verdict": verdict, "sampling_time_s": 0.5} | fields
    messages = ({"role": "user", "content": "What is 1+1?"},)
    return Episode(task, group_id, member, np.array([5, 6]), tuple(turns), messages, **values)  # type: ignore[arg-type]


@pytest.fixture
def groups() -> list[Group]:
    two_turns = [turn("model", [1, 2, 3], "a b"), turn("environment", [8, 8], "higher"), turn("model", [4], "c")]
    first = (
        episode("000001-0000", 0, two_turns, scored(1.0)),
        episode("000001-0000", 1, [turn("model", [1, 2], "ab")], rejected("no number"), finish_reason="length"),
        episode("000001-0000", 2, [turn("model", [1, 2], "ab")], rejected("no number")),
        episode("000001-0000", 3, [turn("model", [7], "\ud800!")], void("the verifier crashed")),
    )
    second = tuple(episode("000001-0001", m, [turn("model", [m], "x")], scored(1.0)) for m in range(4))
    greedy = episode("000001-0001", 0, [turn("model", [9], "g")], scored(1.0))
    return [Group("000001-0000", first[0].task, first), Group("000001-0001", second[0].task, second, greedy)]


@pytest.fixture
def trained() -> dict[tuple[str, int], Trained]:
    rows = {}
    for member, advantage in enumerate((2**0.5, -(0.5**0.5), -(0.5**0.5))):
        length = (6, 2, 2)[member]
        array = np.linspace(0, 1, length)
        rows[("000001-0000", member)] = Trained(
            "informative", advantage, False, 0, array, array - 1, array - 2, array - 3, array, array / 7, array / 9
        )
    rows[("000001-0000", 3)] = Trained("informative")
    rows |= {("000001-0001", member): Trained("all_solved", 0.0) for member in range(4)}
    return rows


@pytest.fixture
def decode() -> Callable[[Sequence[int]], str]:
    return lambda ids: "<" + " ".join(map(str, ids)) + ">"


@pytest.fixture
def records(
    groups: list[Group], trained: dict[tuple[str, int], Trained], decode: Callable[[Sequence[int]], str]
) -> list[ResponseRecord]:
    return records_of(1, groups, trained, decode)
