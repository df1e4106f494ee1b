"""The main job, end to end on a very small model."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from small import run_small, small_recipe

from gropius import build
from gropius.errors import DataError, Interrupted, MismatchError, RecipeError, RewardError, RunFolderError
from gropius.objective.explain import explain
from gropius.objective.presets import PRESETS
from gropius.recipe import from_dict
from gropius.records.metrics import METRICS
from gropius.records.reader import RunReader
from gropius.records.replay import batches
from gropius.train.checkpoint import weight_digest
from gropius.train.progress import Silent

TIMINGS = {name for name, metric in METRICS.items() if metric.timing}


def metrics_without_clocks(folder: Path) -> list[dict[str, object]]:
    return [{name: value for name, value in row.items() if name not in TIMINGS} for row in RunReader(folder).metrics()]


def test_the_run_folder_holds_every_response_and_the_held_out_result_before_and_after(tmp_path: Path) -> None:
    folder, progress = run_small(tmp_path)
    reader = RunReader(folder)
    assert reader.steps() == [1, 2, 3] and reader.checkpoints() == [3]
    records = reader.rollouts(2)
    assert len(records) == 16 and {len({r.group_id for r in records})} == {4}
    assert all(r.sampler is not None and len(r.weight) == len(r.response_ids) for r in records)
    assert set(progress.evaluations) == {"before", "after"}
    last = reader.metrics_by_step()[3]
    for name in ("reward", "loss", "groups/all_failed", "entropy", "tokens_sampled", "held_out/mean", "duplicates"):
        assert name in last, name


def test_the_same_seed_gives_the_same_numbers(tmp_path: Path) -> None:
    first, _ = run_small(tmp_path / "a")
    second, _ = run_small(tmp_path / "b")
    assert metrics_without_clocks(first) == metrics_without_clocks(second)


def preset_settings(name: str) -> list[str]:
    more = {
        **dict.fromkeys(("dr_grpo", "dppo", "luffy"), "objective.aggregate.length=8"),
        **dict.fromkeys(("pass_at_k", "pkpo"), "objective.advantage.k=2"),
        "grpo_passk": "rollout.prompts=12",
    }
    return [f'objective.preset="{name}"', *([more[name]] if name in more else [])]


def assert_logged_loss_is_explained(folder: Path) -> None:
    reader = RunReader(folder)
    objective = from_dict(reader.resolved()).objective
    rows = reader.metrics_by_step()
    assert any(rows[step]["grad_norm"] for step in reader.steps()), "a run without a gradient explains nothing"
    for step in reader.steps():
        reports = [explain(batch, objective) for batch in batches(reader.rollouts(step))]
        recomputed = sum(report["loss"] for report in reports) / len(reports) if reports else 0.0
        assert rows[step]["loss"] == pytest.approx(recomputed, rel=1e-6, abs=1e-6), step


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_the_logged_loss_of_every_preset_is_that_of_explain_on_the_recorded_responses(
    name: str, tmp_path: Path
) -> None:
    quiet = ["eval.before=false", "eval.after=false", "train.steps=2"]
    folder, _ = run_small(tmp_path, *preset_settings(name), *quiet)
    assert_logged_loss_is_explained(folder)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_preset_trains_twenty_steps_and_every_logged_loss_is_explained(name: str, tmp_path: Path) -> None:
    quiet = ["eval.before=false", "eval.after=false", "train.steps=20", "train.learning_rate=0.01"]
    folder, _ = run_small(tmp_path, *preset_settings(name), *quiet)
    assert RunReader(folder).steps() == list(range(1, 21))
    assert_logged_loss_is_explained(folder)


def test_several_updates_and_epochs_keep_the_anchor_and_explain_the_first_pass(tmp_path: Path) -> None:
    folder, _ = run_small(tmp_path, "train.updates=2", "train.epochs=2", "train.steps=2")
    assert_logged_loss_is_explained(folder)
    assert RunReader(folder).metrics_by_step()[1]["updates"] == 4
    assert {r.update for r in RunReader(folder).rollouts(1)} == {0, 1}


def test_a_resumed_run_is_the_uninterrupted_run(tmp_path: Path) -> None:
    straight, _ = run_small(tmp_path / "straight", "train.steps=4", "eval.after=false")
    part, _ = run_small(tmp_path / "part", "train.steps=4", "eval.after=false", "checkpoint.every=2")
    broken = part / "checkpoints" / "step-000004"
    (broken / "COMPLETE").unlink()
    resumed = build.resume(part, None, Silent())
    a, b = (
        build.model(small_recipe(tmp_path), f / "checkpoints" / "step-000004" / "model") for f in (straight, resumed)
    )
    assert weight_digest(a.model) == weight_digest(b.model)
    assert metrics_without_clocks(straight) == metrics_without_clocks(resumed)


def test_a_first_interrupt_finishes_the_step_saves_and_says_how_to_go_on(tmp_path: Path) -> None:
    class Impatient(Silent):
        def step(self, step, steps, metrics):  # type: ignore[no-untyped-def]
            super().step(step, steps, metrics)
            os.kill(os.getpid(), signal.SIGINT)

    progress = Impatient()
    with pytest.raises(Interrupted, match="gropius resume") as stopped:
        build.train(small_recipe(tmp_path), progress)
    assert stopped.value.exit_code == 130 and len(progress.steps) == 1
    folder = tmp_path / "small"
    assert RunReader(folder).checkpoints() == [1]
    build.resume(folder, None, Silent())
    assert RunReader(folder).steps() == [1, 2, 3]


def test_a_sampler_at_another_temperature_is_caught_before_a_weight_moves_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import dataclasses

    from gropius.rollout.torch_engine import TorchEngine

    honest = TorchEngine.complete

    async def hot(self, request):  # type: ignore[no-untyped-def]
        return await honest(
            self, dataclasses.replace(request, sampling=dataclasses.replace(request.sampling, temperature=1.4))
        )

    monkeypatch.setattr(TorchEngine, "complete", hot)
    with pytest.raises(MismatchError, match="Likely cause: temperature"):
        run_small(tmp_path, "rollout.temperature=0.7", "eval.before=false")
    assert RunReader(tmp_path / "small").steps() == []


def test_a_taken_folder_an_overlong_prompt_and_a_broken_reward_are_refused_by_name(tmp_path: Path) -> None:
    run_small(tmp_path, "train.steps=1", "eval.before=false", "eval.after=false")
    with pytest.raises(RunFolderError, match="already holds a run"):
        run_small(tmp_path)
    with pytest.raises(DataError, match="context"):
        run_small(tmp_path / "long", "model.tiny.context=4", "rollout.max_tokens=1")
    (tmp_path / "mine.py").write_text("def score(episode):\n    return float('nan')\n")
    with pytest.raises(RewardError, match="score"):
        run_small(tmp_path / "nan", f'reward=[{{name="{tmp_path}/mine.py:score"}}]', "eval.before=false")


def test_a_batched_reward_is_given_a_whole_group_and_a_wrong_length_names_it(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def short(prompts, completions, **kwargs):\n    return [1.0]\n")
    with pytest.raises(RewardError, match=r"short.*1 value.* for 4 completions"):
        run_small(tmp_path, f'reward=[{{name="{tmp_path}/mine.py:short"}}]', "eval.before=false")


def test_several_turns_without_an_environment_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="max_turns = 3 would do nothing"):
        run_small(tmp_path, "rollout.max_turns=3")


def test_a_reference_that_is_refreshed_becomes_the_policy_and_a_fixed_one_never_moves(tmp_path: Path) -> None:
    quiet = ["eval.before=false", "eval.after=false", "train.steps=2"]
    fixed, _ = run_small(tmp_path / "fixed", *quiet)
    moved, _ = run_small(tmp_path / "moved", *quiet, "train.reference_refresh=1")
    kls = [RunReader(folder).metrics_by_step()[2]["kl"] for folder in (fixed, moved)]
    assert kls[0] > 1e-6 and kls[1] == pytest.approx(0.0, abs=1e-9)


def test_a_batch_of_dead_groups_moves_nothing_and_is_counted(tmp_path: Path) -> None:
    settings = ['objective.kl.estimator="none"', 'reward=[{name="exact"}]', "train.steps=1", "eval.before=false"]
    folder, _ = run_small(tmp_path, *settings, "eval.after=false")
    row = RunReader(folder).metrics_by_step()[1]
    assert row["groups/all_failed"] == 1.0 and row["updates"] == 0 and row["tokens_trained"] == 0
    assert json.loads((folder / "metrics.jsonl").read_text().splitlines()[0])["loss"] == 0.0
