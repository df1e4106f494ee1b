"""The isolation of a model's programs is demanded before a run begins, and written into it; groups are scored whole."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from small import run_small, small_recipe

from gropius import build
from gropius.errors import RecipeError, SafetyRefusal
from gropius.records.reader import RunReader
from gropius.rewards.isolation import restamped
from gropius.sandbox.tiers import probe
from gropius.train.card import isolation
from gropius.train.progress import Silent

QUIET = ("eval.before=false", "eval.after=false", "train.steps=1")
TOOL = ('data.source="python_tool"', 'data.options={rows=[8,4],calls=1}', 'reward=[{name="environment"}]',
        "rollout.max_turns=3", "model.tiny.context=512")  # fmt: skip
needs_isolation = pytest.mark.skipif(
    all(probe(tier) for tier in ("bubblewrap", "landlock")), reason="this machine isolates no programs"
)


@needs_isolation
def test_the_tier_that_programs_ran_in_is_written_into_the_run_and_said(tmp_path: Path) -> None:
    folder, progress = run_small(tmp_path, *QUIET, *TOOL)
    stamp = RunReader(folder).resolved()["sandbox"]
    assert stamp["minimum"] == "landlock" and stamp["tier"] in ("bubblewrap", "landlock") and not stamp["unsafe"]
    assert any(f"programs of the model run in: {stamp['tier']}" in note for note in progress.notes)
    assert "sandbox" not in RunReader(run_small(tmp_path / "other", *QUIET)[0]).resolved()


def test_an_unsafe_run_is_possible_only_by_name_and_stamped_as_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gropius.sandbox.tiers.probe", lambda tier: "" if tier == "none" else "forbidden here")
    with pytest.raises(SafetyRefusal, match="forbidden here") as caught:
        run_small(tmp_path / "refused", *QUIET, *TOOL)
    assert caught.value.exit_code == 3 and not (tmp_path / "refused" / "small").exists()
    unsafe = [word.replace("calls=1}", 'calls=1,minimum="none"}') for word in TOOL]
    resolved = small_recipe(tmp_path, *QUIET, *unsafe)
    assert build.isolation(resolved, build.tasks(resolved)) == {"minimum": "none", "tier": "none", "unsafe": True}


def test_libraries_that_evaluate_answers_are_stamped_with_their_tier_and_refused_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for reward, name in (('{name="math",options={second="math-verify"}}', "math_verify"),
                         ('{name="reasoning_gym"}', "reasoning_gym")):  # fmt: skip
        resolved = small_recipe(tmp_path, *QUIET, f"reward=[{reward}]")
        monkeypatch.setattr("gropius.rewards.isolation.landlock_version", lambda: 1)
        assert build.isolation(resolved, build.tasks(resolved)) == {"scorers": {name: "landlock fork"}}
        monkeypatch.setattr("gropius.rewards.isolation.landlock_version", lambda: 0)
        with pytest.raises(SafetyRefusal, match=f"{name} lets a library evaluate"):
            build.isolation(resolved, build.tasks(resolved))


def test_a_run_that_goes_on_elsewhere_is_stamped_with_both_tiers_and_once_unsafe_stays_so(tmp_path: Path) -> None:
    safe = {"minimum": "none", "tier": "bubblewrap", "unsafe": False}
    unsafe = {"minimum": "none", "tier": "none", "unsafe": True}
    assert restamped(safe, safe) == safe and restamped(None, safe) == safe and restamped(safe, None) == safe
    stamp = restamped(unsafe, safe)
    assert stamp == {**safe, "unsafe": True, "before": [unsafe]}
    assert restamped(stamp, safe) == stamp
    assert restamped(stamp, unsafe)["before"] == [unsafe, {**safe, "unsafe": True}]
    words = isolation(stamp)
    assert "`none`, then `bubblewrap`" in words and "with the rights of the user" in words
    assert isolation({"scorers": {"math_verify": "landlock fork"}}).endswith("ran in tier `landlock fork`.")


@needs_isolation
def test_the_tier_of_the_machine_that_goes_on_is_stamped_into_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = run_small(tmp_path, *QUIET, *TOOL, "train.steps=2", "checkpoint.every=1", "checkpoint.final=false")
    first = RunReader(folder).resolved()["sandbox"]
    other = {"minimum": "landlock", "tier": "another", "unsafe": False}
    monkeypatch.setattr("gropius.rewards.isolation.isolation", lambda parts, environment: other)
    for path in (folder / "checkpoints").glob("step-000002"):
        shutil.rmtree(path)
    build.resume(folder, 1, Silent())
    assert RunReader(folder).resolved()["sandbox"] == {**other, "before": [first]}


@needs_isolation
def test_the_strictest_demand_of_a_recipe_counts(tmp_path: Path) -> None:
    code = 'reward=[{name="code",options={minimum="none"}},{name="environment"}]'
    resolved = small_recipe(tmp_path, *QUIET, *TOOL, code)
    found = build.isolation(resolved, build.tasks(resolved))
    assert found is not None and found["minimum"] == "landlock" and found["tier"] != "none"


def test_siblings_that_would_be_scored_apart_are_refused_with_a_groupwise_reward(tmp_path: Path) -> None:
    groupwise = 'reward=[{name="format",options={pattern="a*"}},{name="diversity"}]'
    with pytest.raises(RecipeError, match="scored apart"):
        run_small(tmp_path, *QUIET, groupwise, 'objective.selection.dead="grow"')


def test_a_groupwise_reward_trains_and_its_value_is_recorded_by_part(tmp_path: Path) -> None:
    groupwise = 'reward=[{name="format",options={pattern=".*"}},{name="diversity",weight=0.5}]'
    folder, _ = run_small(tmp_path, *QUIET, groupwise)
    records = RunReader(folder).rollouts(1)
    assert all(set(record.parts) == {"format", "diversity"} for record in records)
    assert len({record.parts["diversity"].value for record in records}) > 1
