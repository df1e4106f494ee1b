"""Laws of a scorer with a person's functions in the pool and ours beside it."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gropius.errors import RecipeError, RewardError
from gropius.rewards import MixedScorer, PoolSettings, load_scorer, open_scorer
from gropius.types import Episode, Task, Turn, Verdict

MINE = """
import os, sys, time
from pathlib import Path
from gropius.types import rejected, void
os.environ["GROPIUS_IMPORTED"] = "1"
Path(__file__).with_name("imported").write_text(str(os.getpid()))

def length(episode): return float(len(episode.completion))
def trl(prompts, completions, answer, **columns): return [float(c == a) for c, a in zip(completions, answer)]
def strict(episode): return 1.0 if episode.completion == "42" else rejected("not it")
def sometimes(episode): return 0.5 if "x" in episode.completion else None
def hangs(episode):
    while "loop" in episode.completion: time.sleep(0.01)
    return 1.0
def best(siblings): return [float(len(s.completion) == max(len(o.completion) for o in siblings)) for s in siblings]
async def waits(episode): return 0.25
def odd(a, b, c): return 1.0
"""


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    (tmp_path / "mine.py").write_text(MINE)
    made = []

    def make(*parts: dict[str, Any], **settings: Any) -> Any:
        made.append(open_scorer(parts, tmp_path, PoolSettings(**{"workers": 1, "deadline_s": 30.0, **settings})))
        return made[-1]

    yield make
    for scorer in made:
        scorer.close()


def episodes(*texts: str, group: str = "000001-0000") -> list[Episode]:
    turns = [Turn("model", np.zeros(len(text), np.int64), text) for text in texts]
    return [
        Episode(Task("t", "q", "42"), group, i, np.zeros(1, np.int64), (turn,), (), "stop")
        for i, turn in enumerate(turns)
    ]


def score(scorer: Any, rows: list[Episode]) -> list[Verdict]:
    return asyncio.run(scorer.score(rows))


def test_one_verdict_weighs_parts_of_both_processes_in_the_recipes_order(opened) -> None:
    scorer = opened(
        {"name": "mine.py:length", "weight": 2.0}, {"name": "exact"}, {"name": "mine.py:trl", "weight": 0.5}
    )
    assert isinstance(scorer, MixedScorer)
    verdict = score(scorer, episodes("42"))[0]
    assert list(verdict.parts) == ["length", "exact", "trl"]
    assert verdict.outcome.value == 2.0 * 2 + 1.0 + 0.5
    assert verdict.raw == 1.0  # exact declares the metric


def test_a_mixed_scorer_says_what_a_scorer_of_one_process_says(opened, tmp_path: Path) -> None:
    parts = [
        {"name": "mine.py:strict", "floor": -1.0},
        {"name": "mine.py:sometimes"},
        {"name": "exact", "weight": 0.5},
        {"name": "mine.py:strict", "weight": 0.1},
    ]
    rows = episodes("42", "x", "no")
    assert score(opened(*parts), rows) == score(load_scorer(parts, tmp_path), rows)


def test_a_persons_module_is_never_imported_by_the_trainer(
    opened, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GROPIUS_IMPORTED", raising=False)
    opened({"name": "mine.py:length"})
    assert (tmp_path / "imported").read_text() != str(os.getpid())
    assert "GROPIUS_IMPORTED" not in os.environ
    assert not any("mine" in name and str(tmp_path.name) in name for name in sys.modules)


@pytest.mark.parametrize(
    ("content", "words"),
    [("import os\nos._exit(3)", "ended its process"), ("raise SystemExit", "SystemExit"), ("x = 1", 'has no "f"')],
)
def test_a_module_that_cannot_be_used_is_refused_by_name(tmp_path: Path, content: str, words: str) -> None:
    (tmp_path / "bad.py").write_text(content)
    with pytest.raises(RecipeError, match=words) as caught:
        open_scorer([{"name": "bad.py:f"}], tmp_path)
    assert "bad.py:f" in str(caught.value)


def test_an_unknown_signature_is_refused_before_any_worker_starts(opened) -> None:
    with pytest.raises(RecipeError, match="cannot tell how to call"):
        opened({"name": "mine.py:odd"})


def test_a_lost_call_is_void_for_the_pooled_parts_only_and_counted(opened, caplog: pytest.LogCaptureFixture) -> None:
    scorer = opened({"name": "exact"}, {"name": "mine.py:hangs"}, deadline_s=0.7)
    fine, lost = score(scorer, episodes("42", "loop"))
    assert fine.outcome.value == 2.0
    assert lost.outcome.status == "void" and "hangs" in lost.outcome.reason
    assert lost.parts["exact"].status == "rejected"
    assert "1 deadlines missed, 0 workers died and 0 episodes failed so far; 0 were called void" in caplog.text


def test_a_groupwise_function_sees_the_whole_group_in_the_pool(opened) -> None:
    scorer = opened({"name": "mine.py:best"}, {"name": "exact"})
    assert scorer.unit == "group"
    assert "best: weight 1, signature group, from mine.py:best, sees all siblings of a group" in scorer.describe()
    values = [v.parts["best"].value for v in score(scorer, episodes("a", "bbb", "cc"))]
    assert values == [0.0, 1.0, 0.0]


def test_a_groupwise_reward_here_does_not_make_one_call_of_a_group_there(opened) -> None:
    scorer = opened({"name": "diversity"}, {"name": "mine.py:hangs"}, deadline_s=0.7)
    assert scorer.unit == "group"
    fine, lost = score(scorer, episodes("a b", "loop"))
    assert (fine.outcome.status, lost.outcome.status) == ("scored", "void")


def test_a_function_that_never_applies_voids_its_rows_and_halts_nothing(opened) -> None:
    alone = score(opened({"name": "mine.py:sometimes"}), episodes("a", "b"))
    assert {v.outcome.status for v in alone} == {"void"} and "no reward applies" in alone[0].outcome.reason
    beside = score(opened({"name": "mine.py:sometimes"}, {"name": "exact"}), episodes("42"))[0]
    assert beside.outcome.value == 1.0 and list(beside.parts) == ["exact"]


def test_async_functions_run_in_the_pool(opened) -> None:
    assert score(opened({"name": "mine.py:waits"}), episodes("a", "b"))[1].outcome.value == 0.25


def test_a_declared_range_is_checked_and_the_function_named(opened) -> None:
    scorer = opened({"name": "mine.py:length", "range": [0.0, 3.0]})
    assert score(scorer, episodes("abc"))[0].outcome.value == 3.0
    with pytest.raises(RewardError, match=r"reward length .*returned 4 .*outside its declared range \[0, 3\]"):
        score(scorer, episodes("abcd"))


def test_without_a_persons_function_no_process_is_needed(opened) -> None:
    assert not isinstance(opened({"name": "exact"}), MixedScorer)
