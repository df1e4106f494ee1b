"""Laws of the scorer: three kinds of outcome, weights, and who is named when a function breaks its contract."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gropius.errors import RecipeError, RewardError
from gropius.rewards import METRICS, REWARDS, load_scorer
from gropius.rewards.base import BatchedReward, InProcessScorer, RewardPart, outcome_as_metric
from gropius.types import EnvironmentStep, Episode, Task, Turn, Verdict, rejected, scored, void


def episode(reply: str = "42", member: int = 0, **fields: Any) -> Episode:
    task = Task("t:1", "q", "42")
    fields.setdefault("finish_reason", "stop")
    turn = Turn("model", np.zeros(2, np.int64), reply)
    return Episode(task, "000001-0000", member, np.zeros(2, np.int64), (turn,), (), **fields)


def run(scorer: InProcessScorer, episodes: Sequence[Episode]) -> list[Verdict]:
    return asyncio.run(scorer.score(episodes))


def scorer_of(*functions: Callable[[Episode], Any], floor: float = 0.0, weight: float = 1.0) -> InProcessScorer:
    parts = [RewardPart(f"f{n}", weight, function, source="mine:f") for n, function in enumerate(functions)]
    return InProcessScorer(parts, floor)


def by_member(values: dict[int, Any], otherwise: Any = 1.0) -> Callable[[Episode], Any]:
    def function(one: Episode) -> Any:
        value = values.get(one.member, otherwise)
        if isinstance(value, BaseException):
            raise value
        return value

    return function


FOUR = [episode(member=n) for n in range(4)]


def test_the_verdict_is_the_weighted_sum_of_its_parts() -> None:
    parts = [
        RewardPart("a", 2.0, lambda e: 0.5),
        RewardPart("b", -1.0, lambda e: scored(0.25)),
        RewardPart("c", 0, lambda e: 9),
    ]
    verdict = run(InProcessScorer(parts), [episode()])[0]
    assert verdict.outcome.value == 0.75
    assert {name: part.value for name, part in verdict.parts.items()} == {"a": 0.5, "b": 0.25, "c": 9.0}


def test_a_rejected_part_counts_at_the_floor() -> None:
    scorer = scorer_of(lambda e: rejected("wrong"), lambda e: 0.5, floor=-1.0, weight=2.0)
    verdict = run(scorer, [episode()])[0]
    assert (verdict.outcome.status, verdict.outcome.value, verdict.outcome.reason) == ("scored", -1.0, "f0: wrong")
    assert verdict.parts["f0"].value == -1.0
    alone = run(scorer_of(lambda e: rejected("wrong", floor=-0.5)), [episode()])[0].outcome
    assert (alone.status, alone.value) == ("rejected", -0.5)


def test_a_void_part_makes_the_verdict_void_unless_it_weighs_nothing() -> None:
    assert run(scorer_of(lambda e: 1.0, lambda e: void("no gold")), [episode()])[0].outcome.status == "void"
    parts = [RewardPart("a", 1.0, lambda e: 1.0), RewardPart("watch", 0.0, lambda e: void("broken"))]
    verdict = run(InProcessScorer(parts), [episode()])[0]
    assert verdict.outcome.value == 1.0
    assert verdict.parts["watch"].status == "void"


def test_a_part_without_weight_never_changes_the_status() -> None:
    sure, other = RewardPart("sure", 1.0, lambda e: rejected("wrong")), RewardPart("other", 0.0, lambda e: scored(1.0))
    verdict = run(InProcessScorer([sure, other]), [episode()])[0]
    assert (verdict.outcome.status, verdict.outcome.value, verdict.parts["other"].value) == ("rejected", 0.0, 1.0)


def test_none_is_not_applicable_and_leaves_the_sum() -> None:
    verdict = run(scorer_of(lambda e: None, lambda e: 0.5), [episode()])[0]
    assert verdict.outcome.value == 0.5
    assert list(verdict.parts) == ["f1"]


def test_when_nothing_applies_the_verdict_is_void_and_it_is_said(caplog: pytest.LogCaptureFixture) -> None:
    verdict = run(scorer_of(lambda e: None), [episode()])[0]
    assert verdict.outcome.status == "void"
    assert "every reward returned None" in caplog.text


@pytest.mark.parametrize(
    "fault", [ValueError("boom"), SystemExit(3), RecursionError("deep"), math.nan, math.inf, -math.inf]
)
def test_one_failure_of_many_is_void_with_its_text(fault: Any, caplog: pytest.LogCaptureFixture) -> None:
    verdicts = run(scorer_of(by_member({2: fault})), FOUR)
    assert [v.outcome.status for v in verdicts] == ["scored", "scored", "void", "scored"]
    expected = f"{type(fault).__name__}: {fault}" if isinstance(fault, BaseException) else "not finite"
    assert expected in verdicts[2].outcome.reason
    assert "failed for 1 of 4" in caplog.text


@pytest.mark.parametrize("fault", [ValueError("boom"), math.nan])
def test_failing_everywhere_halts_and_names_the_function(fault: Any) -> None:
    with pytest.raises(RewardError, match=r"reward f0 \(mine:f\) failed for all 4 episodes"):
        run(scorer_of(by_member({}, fault)), FOUR)


def test_a_function_that_has_worked_may_fail_for_a_group_but_not_64_times_in_a_row() -> None:
    broken: list[bool] = []
    scorer = scorer_of(lambda e: 1 / 0 if broken else 1.0)
    run(scorer, FOUR)
    broken.append(True)
    for _ in range(15):
        assert {v.outcome.status for v in run(scorer, FOUR)} == {"void"}
    with pytest.raises(RewardError, match="failed for all 64 episodes"):
        run(scorer, FOUR)


@pytest.mark.parametrize(
    "returned", ["0.5", True, np.bool_(True), Decimal(1), [1.0], {"score": 1}, 1j, (n for n in "a")]
)
def test_a_wrong_type_halts_and_names_the_function(returned: Any) -> None:
    with pytest.raises(RewardError, match=rf"reward f0 \(mine:f\) returned a {type(returned).__name__}.*member 0"):
        run(scorer_of(lambda e: returned), FOUR)


@pytest.mark.parametrize("returned", [1, 1.0, np.float32(1), np.int64(1), scored(1)])
def test_every_kind_of_real_number_is_taken(returned: Any) -> None:
    assert run(scorer_of(lambda e: returned), [episode()])[0].outcome.value == 1.0


@pytest.mark.parametrize("returned", [[1.0] * 3, [1.0] * 5, [], [[1.0], [1.0], [1.0], [1.0]], ["1"] * 4, [True] * 4])
def test_a_batch_of_wrong_length_or_type_halts(returned: Any) -> None:
    part = RewardPart("many", 1.0, BatchedReward(lambda episodes: returned), source="mine:many")
    with pytest.raises(RewardError, match=r"reward many \(mine:many\) returned"):
        run(InProcessScorer([part]), FOUR)


@pytest.mark.parametrize("returned", [1.0, None, "1111", np.ones((4, 1)), (x for x in [1, 2, 3, 4])])
def test_a_batch_that_is_no_list_halts(returned: Any) -> None:
    part = RewardPart("many", 1.0, BatchedReward(lambda episodes: returned))
    with pytest.raises(RewardError, match="reward many returned"):
        run(InProcessScorer([part]), FOUR)


def test_a_batched_function_that_raises_is_asked_again_one_by_one() -> None:
    def call(episodes: Sequence[Episode]) -> list[float]:
        return [1.0 / (e.member - 1) for e in episodes]

    verdicts = run(InProcessScorer([RewardPart("many", 1.0, BatchedReward(call))]), FOUR)
    assert [v.outcome.status for v in verdicts] == ["scored", "void", "scored", "scored"]
    assert "ZeroDivisionError" in verdicts[1].outcome.reason


def test_async_functions_are_awaited() -> None:
    async def slow(one: Episode) -> float:
        await asyncio.sleep(0)
        return 0.5

    assert run(scorer_of(slow), [episode()])[0].outcome.value == 0.5


def test_failed_and_cancelled_episodes_are_void_without_asking_anyone() -> None:
    asked: list[int] = []
    scorer = scorer_of(lambda e: asked.append(e.member) or 1.0)
    episodes = [episode(member=0, finish_reason="error", error="engine died"), episode(member=1)]
    verdicts = run(scorer, episodes)
    assert [v.outcome.status for v in verdicts] == ["void", "scored"]
    assert "engine died" in verdicts[0].outcome.reason
    assert asked == [1]


def test_no_episodes_no_verdicts() -> None:
    assert run(scorer_of(lambda e: 1.0), []) == []


def test_raw_is_the_first_declared_metric_unweighted(tmp_path: Path) -> None:
    config = [{"name": "length", "options": {"maximum": 9}}, {"name": "exact", "weight": 0.1}, {"name": "last_number"}]
    scorer = load_scorer(config, tmp_path)
    verdicts = run(scorer, [episode("42"), episode("it is 42")])
    assert [v.raw for v in verdicts] == [1.0, 0.0]
    assert [v.outcome.value for v in verdicts] == [2.1, 2.0]
    assert scorer.describe()[1].endswith("task metric")


def test_raw_of_an_environment_is_its_own_metric_even_when_shaped(tmp_path: Path) -> None:
    step = EnvironmentStep(done=True, parts={"success": 0.0, "narrowing": 0.5}, raw=0.0)
    scorer = load_scorer([{"name": "environment", "options": {"shaped": True}}], tmp_path)
    verdict = run(scorer, [episode(outcome_step=step)])[0]
    assert (verdict.outcome.value, verdict.raw) == (0.5, 0.0)


def test_the_persons_function_is_the_metric_when_nothing_declares_one(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def taste(episode):\n    return 0.25\n")
    config = [{"name": "length", "options": {"maximum": 9}}, {"name": "mine:taste", "weight": 4}]
    verdict = run(load_scorer(config, tmp_path), [episode()])[0]
    assert (verdict.raw, verdict.outcome.value) == (0.25, 2.0)
    assert run(load_scorer(config[:1], tmp_path), [episode()])[0].raw == 1.0


def test_a_name_that_stands_twice_gets_a_number(tmp_path: Path) -> None:
    config = [{"name": "length", "options": {"maximum": n}} for n in (1, 2, 3)]
    assert [part.name for part in load_scorer(config, tmp_path).parts] == ["length", "length.2", "length.3"]


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ([], "no reward"),
        ([{"weight": 1}], "without a name"),
        ([{"name": "exakt"}], 'did you mean "exact"'),
        ([{"name": "exact", "wieght": 2}], 'did you mean "weight"'),
        ([{"name": "exact", "weight": "2"}], "finite number"),
        ([{"name": "exact", "weight": math.nan}], "finite number"),
        ([{"name": "exact", "options": {"ignorecase": True}}], 'did you mean "ignore_case"'),
        ([{"name": "exact", "options": {"ignore_case": 1}}], "type bool"),
        ([{"name": "nowhere:f"}], "no module nowhere"),
        ([{"name": "mine:nothing"}], 'mine has no "nothing"'),
        ([{"name": "mine:number"}], "not a function"),
        ([{"name": "mine:two"}], "cannot tell how to call"),
        ([{"name": "mine:one", "options": {"x": 1}}], "no parameter x"),
        ([{"name": "broken.py:f"}], "importing .* failed: ZeroDivisionError"),
    ],
)
def test_a_wrong_recipe_says_what_to_write(tmp_path: Path, config: list[dict[str, Any]], words: str) -> None:
    (tmp_path / "mine.py").write_text("number = 3\ndef two(a, b):\n    return 1\ndef one(episode):\n    return 1\n")
    (tmp_path / "broken.py").write_text("1 / 0\n")
    with pytest.raises(RecipeError, match=words):
        load_scorer(config, tmp_path)


def test_options_of_a_persons_function_are_bound(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def bonus(episode, size=1.0):\n    return size\n")
    scorer = load_scorer([{"name": "mine:bonus", "options": {"size": 0.5}}], tmp_path)
    assert run(scorer, [episode()])[0].outcome.value == 0.5


def test_every_metric_is_a_reward() -> None:
    assert set(METRICS) <= set(REWARDS)
    assert outcome_as_metric(episode(), rejected("x", floor=-1)) == 0.0
    assert outcome_as_metric(episode(), void("x")) is None


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 1, 0, 2], [2]])
def test_a_verdict_does_not_depend_on_batch_mates(order: list[int], tmp_path: Path) -> None:
    replies = ["42", "it is 42", "no", "41"]
    scorer = load_scorer([{"name": "last_number"}, {"name": "exact", "weight": 0.5}], tmp_path)
    verdicts = run(scorer, [episode(replies[n], member=n) for n in order])
    assert [v.outcome.value for v in verdicts] == [[1.5, 1.0, 0.0, 0.0][n] for n in order]


def test_equal_part_names_and_unfinite_weights_are_refused() -> None:
    with pytest.raises(RewardError, match="different names"):
        InProcessScorer([RewardPart("a", 1.0, lambda e: 1.0), RewardPart("a", 1.0, lambda e: 1.0)])
    with pytest.raises(RewardError, match="finite"):
        InProcessScorer([RewardPart("a", math.inf, lambda e: 1.0)])
