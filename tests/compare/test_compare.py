"""What a comparison may say: paired by seed, at equal tokens, corrected for how many pairs are looked at."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from gropius.cli import compare as verb
from gropius.cli.main import main
from gropius.compare import Curve, compare
from gropius.compare.page import page
from gropius.errors import UsageError


def line(seed: int, end: float, total: int = 100, start: float = 0.2) -> Curve:
    return Curve(seed, (0, total), (0, 10), (start, end), (0.1, end - 0.1), (0.3, end + 0.1), total)


def test_recipes_are_compared_after_the_tokens_that_the_shortest_run_sampled() -> None:
    found = compare({"long": [line(0, 0.6, 200), line(1, 0.6, 200)], "short": [line(0, 0.5), line(1, 0.5)]})
    assert found.budget == 100
    assert {s.name: round(s.mean, 6) for s in found.standings} == {"short": 0.5, "long": 0.4}
    with pytest.raises(UsageError, match="short sampled 100"):
        compare({"long": [line(0, 0.6, 200)], "short": [line(0, 0.5)]}, budget=150)


def test_seeds_that_move_together_are_told_apart_and_unpaired_they_would_not_be() -> None:
    luck = [0.1, -0.1, 0.05, -0.05, 0.0]
    a = [line(s, 0.50 + x) for s, x in enumerate(luck)]
    b = [line(s, 0.47 + x + 0.001 * s) for s, x in enumerate(luck)]
    found = compare({"a": a, "b": b})
    assert found.differences[0].distinguishable and found.standings[0].low < found.standings[1].high


def test_a_difference_within_the_spread_is_not_claimed_and_the_seeds_that_would_settle_it_are_counted() -> None:
    a = [line(s, 0.5 + x) for s, x in enumerate((0.1, -0.1, 0.05))]
    b = [line(s, 0.49 - x) for s, x in enumerate((0.1, -0.1, 0.05))]
    difference = compare({"a": a, "b": b}).differences[0]
    assert not difference.distinguishable and difference.more_seeds is not None and difference.more_seeds > 3
    assert "not distinguishable" in difference.sentence(3)


def test_equal_recipes_are_called_different_no_more_often_than_five_times_in_a_hundred() -> None:
    random = np.random.default_rng(0)
    called = 0
    for _ in range(400):
        runs = {name: [line(s, 0.5 + 0.05 * random.standard_normal()) for s in range(4)] for name in "abcd"}
        called += any(d.distinguishable for d in compare(runs).differences)
    assert called / 400 < 0.05 + 2 * (0.05 * 0.95 / 400) ** 0.5


def test_one_seed_claims_nothing() -> None:
    difference = compare({"a": [line(0, 0.9)], "b": [line(0, 0.1)]}).differences[0]
    assert not difference.distinguishable and "tells nothing" in difference.sentence(1)


def test_other_seeds_or_a_single_recipe_are_refused() -> None:
    with pytest.raises(UsageError, match="seeds"):
        compare({"a": [line(0, 0.5)], "b": [line(1, 0.5)]})
    with pytest.raises(UsageError, match="two recipes"):
        compare({"a": [line(0, 0.5)]})


def test_the_page_holds_curves_and_names_without_markup_of_their_own() -> None:
    runs = {"<b>a</b>": [line(0, 0.5), line(1, 0.6)], "b": [line(0, 0.4), line(1, 0.5)]}
    html = page(compare(runs), runs, "gropius compare <x>")
    assert "<b>a</b>" not in html and "&lt;b&gt;a" in html and html.count("<polyline") == 2 and "<script" not in html


SMALL = """
seed = 3
[model]
source = "tiny"
tiny = { hidden = 32, layers = 1, heads = 2, kv_heads = 2, mlp = 32 }
[data]
source = "arithmetic"
options = { digits = 1, rows = [60, 8] }
[[reward]]
name = "format"
options = { pattern = "[^a-z]*[a-z](.|\\\\n)*" }
[rollout]
prompts = 4
group_size = 4
max_tokens = 4
[train]
steps = 3
learning_rate = 1e-3
threads = 1
[eval]
tasks = 8
samples = 2
[checkpoint]
final = false
"""


def test_the_verb_trains_both_recipes_on_every_seed_reuses_them_and_prints_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "small.toml"
    recipe.write_text(SMALL)
    words = ["compare", f"{recipe},objective.preset=grpo", f"{recipe},objective.preset=rloo", "--seeds", "2"]
    words += ["--out", str(tmp_path / "runs"), "--json"]
    answers = []
    for _ in range(2):
        with pytest.raises(SystemExit) as ended:
            main(words)
        assert ended.value.code == 0
        told = capsys.readouterr()
        answers.append(json.loads(told.out))
    assert "reused" in told.err and answers[0] == answers[1]
    assert {s["name"] for s in answers[0]["standings"]} == {"small-grpo", "small-rloo"}
    assert answers[0]["seeds"] == [0, 1] and answers[0]["budget_tokens"] > 0
    assert sorted(p.name for p in (tmp_path / "runs").iterdir()) == [
        "comparison.html", "small-grpo-0", "small-grpo-1", "small-rloo-0", "small-rloo-1"
    ]  # fmt: skip
    assert (tmp_path / "runs" / "comparison.html").read_text().startswith("<!doctype html>")


def test_recipes_that_are_measured_on_other_tasks_are_refused_by_key(tmp_path: Path) -> None:
    recipe = tmp_path / "small.toml"
    recipe.write_text(SMALL)
    plans = {
        name: verb.plan(f"{recipe},{own}", [], tmp_path, name, 0)
        for name, own in (("a", "eval.samples=2"), ("b", "eval.samples=4"))
    }
    with pytest.raises(UsageError, match=r"eval\.samples"):
        verb._refuse_incomparable(plans, True)


def test_two_seeds_claim_nothing_and_ties_have_no_spread_of_zero() -> None:
    two = compare({"a": [line(s, 0.24) for s in range(2)], "b": [line(s, 0.20) for s in range(2)]}).differences[0]
    assert not two.distinguishable and "two seeds" in two.sentence(2)
    coarse = {
        name: [Curve(s, (0, 9), (0, 1), (0.2, end), (0.1, 0.1), (0.3, 0.3), 9, resolution=0.05) for s in range(3)]
        for name, end in (("a", 0.25), ("b", 0.20))
    }
    assert not compare(coarse).differences[0].distinguishable
