"""What is saved is one moment of the run, wherever and whenever it is written; and what a step must never touch."""

from __future__ import annotations

import dataclasses
import json
import math
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from small import run_small

from gropius import build
from gropius.errors import EngineError, RunHalted
from gropius.models.load import load_model
from gropius.models.tiny import TinyShape
from gropius.records.reader import RunReader
from gropius.rollout.torch_engine import TorchEngine
from gropius.train import checkpoint, keep, step
from gropius.train.checkpoint import Snapshot, weight_digest
from gropius.train.progress import Silent
from gropius.train.sameness import compare
from gropius.train.step import Learner

QUIET = ["eval.before=false", "eval.after=false"]


def small_run(folder: Path) -> Any:
    loaded = load_model("tiny", tiny=TinyShape(hidden=16, layers=1, heads=2, kv_heads=2, mlp=16, context=32))
    plan = SimpleNamespace(keep_last=2, keep_every=0, best=False)
    return SimpleNamespace(writer=SimpleNamespace(folder=folder), plan=SimpleNamespace(checkpoint=plan), loaded=loaded)


def test_a_save_in_the_background_holds_the_moment_it_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, go = small_run(tmp_path), threading.Event()
    honest = checkpoint.save
    monkeypatch.setattr(checkpoint, "save", lambda *given: (go.wait(30), honest(*given)))
    moment, before = torch.ones(3), weight_digest(run.loaded.model)
    keeper = keep.Keeper(background=True)
    keeper.save(run, Snapshot(1, {"held_out": None}, {"optimiser": {"m": moment}}))
    with torch.no_grad():
        moment.add_(1)
        for parameter in run.loaded.model.parameters():
            parameter.add_(1)
    assert not (tmp_path / "checkpoints").exists()
    go.set()
    keeper.wait()
    folder = tmp_path / "checkpoints" / "step-000001"
    assert torch.equal(checkpoint.load(folder).tensors["optimiser"]["m"], torch.ones(3))
    assert weight_digest(load_model(str(folder / "model")).model) == before


def test_what_goes_wrong_in_the_background_is_heard_of_at_the_next_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise RunHalted("no room")

    monkeypatch.setattr(checkpoint, "save", full)
    keeper = keep.Keeper(background=True)
    keeper.save(small_run(tmp_path), Snapshot(1, {}))
    with pytest.raises(RunHalted, match="no room"):
        keeper.save(small_run(tmp_path), Snapshot(2, {}))
    monkeypatch.undo()
    shared = torch.ones(2)
    keeper.save(small_run(tmp_path), Snapshot(3, {}, {"bad": {"a": shared[:1], "b": shared.to(torch.complex128)}}))
    with pytest.raises(Exception):  # noqa: B017 (whatever it is, it is not lost)
        keeper.wait()
    keeper.wait()


def test_the_best_by_held_out_mean_is_saved_out_of_turn_and_outlives_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    means = iter([0.5, 0.75, 0.25, 0.25, 0.5])
    honest = build.loop.measure

    def measured(run: Any, label: str) -> Any:
        found = honest(run, label)
        return dataclasses.replace(found, mean=dataclasses.replace(found.mean, value=next(means)))

    monkeypatch.setattr(build.loop, "measure", measured)
    settings = [*QUIET, "train.steps=6", "eval.every=1", "checkpoint.best=true", "checkpoint.every=6"]
    folder, _ = run_small(tmp_path, *settings, "checkpoint.keep_last=1")
    assert RunReader(folder).checkpoints() == [2, 6]
    facts = checkpoint.load(folder / "checkpoints" / "step-000006").facts
    assert facts["state"]["best"] == 0.75 and facts["held_out"] is None


def test_a_user_function_that_draws_from_the_global_generators_continues_its_draws(tmp_path: Path) -> None:
    settings = [*QUIET, "train.steps=3", "checkpoint.every=1", "checkpoint.keep_last=9"]
    draws: list[float] = []
    honest = build.loop.score

    def drawing(*given: Any, **named: Any) -> Any:
        import random

        import numpy as np

        draws.append(random.random() + np.random.rand() + float(torch.rand(())))
        return honest(*given, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build.loop, "score", drawing)
        folder, _ = run_small(tmp_path, *settings)
        build.resume(folder, 1, Silent())
    assert draws[3:] == draws[1:3]


def poison(monkeypatch: pytest.MonkeyPatch, calls: set[int]) -> None:
    """Make one row's loss NaN in the given calls of the loss, counted from 1."""
    honest, count = step.loss, [0]

    def poisoned(*given: Any) -> Any:
        count[0] += 1
        out = honest(*given)
        if count[0] not in calls:
            return out
        contribution = out.contribution.clone()
        contribution[given[2].sequence == 0] = math.nan
        return dataclasses.replace(out, contribution=contribution)

    monkeypatch.setattr(step, "loss", poisoned)


def test_a_batch_that_is_not_finite_is_kept_aside_with_its_rows_and_moves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = [*QUIET, "train.steps=2", "checkpoint.every=1", "checkpoint.keep_last=9"]
    poison(monkeypatch, {2})
    folder, progress = run_small(tmp_path, *settings)
    states = [checkpoint.load(folder / "checkpoints" / f"step-00000{n}") for n in (1, 2)]
    assert states[0].facts["weights"] == states[1].facts["weights"]
    assert states[1].facts["state"]["skipped_in_a_row"] == 1 and states[1].facts["optimiser_steps"] == 1
    for name, tensor in states[0].tensors["optimiser"].items():
        assert torch.equal(tensor, states[1].tensors["optimiser"][name])
    (file,) = (folder / "logs").glob("refused-step-000002-*.json")
    kept = json.loads(file.read_text())
    assert kept["refused"] == "the loss is not finite" and len(kept["rows"]) == 1
    row = kept["rows"][0]
    record = next(
        r for r in RunReader(folder).rollouts(2) if (r.group_id, r.member) == (row["group_id"], row["member"])
    )
    assert (
        row["response_ids"] == record.response_ids.tolist()
        and row["prompt"]
        and len(row["advantage"]) == len(row["mask"])
    )
    assert any("the weights were not touched" in note and str(file) in note for note in progress.notes)
    assert RunReader(folder).metrics_by_step()[2]["updates_skipped"] == 1


def test_three_in_a_row_halt_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch, {2, 3, 4})
    with pytest.raises(RunHalted, match=r"3 updates in a row.*refused-step-000004-0\.json.*gropius resume"):
        run_small(tmp_path, *QUIET, "train.steps=9")


def out_of_memory(monkeypatch: pytest.MonkeyPatch, name: str, largest: int) -> None:
    """Memory for packs of so many tokens."""
    honest = getattr(Learner, name)

    def hungry(self: Learner, *given: Any, **named: Any) -> Any:
        if self.settings.pack_tokens > largest:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return honest(self, *given, **named)

    monkeypatch.setattr(Learner, name, hungry)


@pytest.mark.parametrize("where", ["update", "score"])
def test_out_of_memory_takes_the_same_batch_again_in_smaller_packs_and_says_so(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    straight, _ = run_small(tmp_path / "straight", *QUIET, "train.steps=2")
    out_of_memory(monkeypatch, where, 64)
    folder, progress = run_small(tmp_path / "less", *QUIET, "train.steps=2", "train.pack_tokens=256")
    assert [note for note in progress.notes if "out of memory" in note and "packs of 64 tokens" in note]
    saved = checkpoint.load(folder / "checkpoints" / "step-000002")
    assert saved.facts["state"]["pack_tokens"] == 64 and saved.facts["optimiser_steps"] == 2
    losses = [[row["loss"] for row in RunReader(place).metrics()] for place in (straight, folder)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)


def test_where_no_smaller_pack_helps_the_run_halts_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out_of_memory(monkeypatch, "update", 0)
    with pytest.raises(RunHalted, match="memory runs out even in packs of 16 tokens"):
        run_small(tmp_path, *QUIET, "train.pack_tokens=32")


def test_an_engine_that_kept_the_old_weights_is_caught_before_it_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = TorchEngine.set_policy
    monkeypatch.setattr(
        TorchEngine, "set_policy", lambda self, version, digest: version or honest(self, version, digest)
    )
    with pytest.raises(EngineError, match=r"group 000002-0000, member 0: drawn from weights .*the policy is"):
        run_small(tmp_path, *QUIET, "checkpoint.every=1")
    assert RunReader(tmp_path / "small").steps() == [1]
    monkeypatch.undo()
    build.resume(tmp_path / "small", None, Silent())
    straight, _ = run_small(tmp_path / "straight", *QUIET, "checkpoint.every=1")
    assert compare(straight, tmp_path / "small").difference == ""
