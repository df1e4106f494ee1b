"""The probe of a plan draws what training would draw, counts what it scores, and takes no step."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from small import run_small, small_recipe

from gropius import survey
from gropius.cli.main import main
from gropius.errors import DataError
from gropius.plan.recorded import from_run
from gropius.train import pass_rates
from gropius.train.pass_rates import counted
from gropius.train.progress import Silent
from gropius.types import Episode, Group, Outcome, Task, Turn, Verdict, scored, void


def tally(counts) -> Counter:  # type: ignore[no-untyped-def, type-arg]
    return Counter(zip(counts.solved.tolist(), counts.sampled.tolist(), strict=True))


def test_the_probe_finds_the_pass_rates_of_the_first_step_of_training(tmp_path: Path) -> None:
    settings = ("rollout.prompts=16", "rollout.max_tokens=12", "train.steps=1", "eval.before=false", "eval.after=false")
    folder, _ = run_small(tmp_path, *settings)
    recorded, _ = from_run(folder)
    probed = survey.pass_counts(small_recipe(tmp_path, *settings), 16, Silent())
    assert tally(probed) == tally(recorded) and len(set(probed.solved.tolist())) > 1
    assert probed.response_tokens == pytest.approx(recorded.response_tokens)


def test_more_prompts_than_a_step_has_are_drawn_in_several_rounds_and_each_task_once(tmp_path: Path) -> None:
    drawn: list[str] = []
    honest = pass_rates.collect

    async def collect(tasks, plan, player):  # type: ignore[no-untyped-def]
        drawn.extend(task.key for task in tasks)
        assert len(tasks) <= 4
        return await honest(tasks, plan, player)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(pass_rates, "collect", collect)
        counts = survey.pass_counts(small_recipe(tmp_path, 'data.options={"digits"=1,"rows"=[10,2]}'), 64, Silent())
    assert len(counts.solved) == 10 and sorted(set(drawn)) == sorted(drawn) and (counts.sampled == 4).all()
    assert not any(tmp_path.iterdir())


TASK = Task("t", "q")


def episode(member: int, outcome: Outcome, raw: float | None) -> Episode:
    turn = Turn("model", np.arange(member + 1), "x")
    return Episode(TASK, "g", member, np.arange(2), (turn,), (), "stop", verdict=Verdict(outcome, {}, raw))


def test_solved_is_a_metric_of_one_and_what_has_no_verdict_leaves() -> None:
    own = [episode(0, scored(0.2), 1.0), episode(1, scored(9.0), 0.5), episode(2, void("no"), None)]
    counts = counted([Group("g", TASK, tuple(own))])
    assert (counts.solved.tolist(), counts.sampled.tolist(), counts.response_tokens) == ([1], [2], 2.0)
    with pytest.raises(DataError, match="no response of the probe has a verdict"):
        counted([Group("g", TASK, (own[2],))])


def ran(words: list[str]) -> int:
    with pytest.raises(SystemExit) as ended:
        main(words)
    return int(ended.value.code or 0)


RECIPE = """
[model]
source = "tiny"
tiny = { hidden = 32, layers = 2, heads = 2, kv_heads = 2, mlp = 64 }
[data]
source = "arithmetic"
options = { digits = 1, rows = [60, 8] }
[[reward]]
name = "format"
options = { pattern = "[^a-z]*[a-z](.|\\n)*" }
[rollout]
prompts = 4
group_size = 4
max_tokens = 4
[objective]
preset = "rloo"
"""


def test_plan_probes_a_recipe_takes_its_budget_and_its_objective(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "mine.toml"
    recipe.write_text(RECIPE.replace("\\n", "\\\\n"))
    assert ran(["plan", str(recipe), "--probe", "6", "--set", "rollout.group_size=8", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)["plan"]
    assert report["measured_prompts"] == 6 and report["budget"]["responses"] == 32
    assert report["scale"] == "leave_one_out" and "6 prompts drawn now, 8 responses each" in report["notes"][0]
    low, high = (report["pass_rate"][end] for end in ("low", "high"))
    assert low < report["pass_rate"]["value"] < high


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["mine.toml"], "gropius plan mine.toml --probe 64"),
        (["counts.json", "--probe", "4"], "holds pass rates already"),
        (["counts.json", "--set", "rollout.group_size=4"], "is a key of a recipe"),
        (["--probe", "4"], "gropius plan RECIPE --probe 64"),
    ],
)
def test_what_cannot_be_probed_is_refused_with_what_to_write(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.toml").write_text(RECIPE)
    (tmp_path / "counts.json").write_text('{"solved": [1, 2, 0], "sampled": 4}')
    assert ran(["plan", *words]) == 2
    assert said in capsys.readouterr().err
