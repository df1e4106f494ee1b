"""A checkpoint is whole or it is not there; what was saved comes back bit for bit."""

from __future__ import annotations

import json

import pytest
import torch
from batches import build
from transformers import AutoModelForCausalLM

from gropius.errors import RunFolderError, RunHalted
from gropius.models.load import load_model
from gropius.models.tiny import TinyShape
from gropius.train import checkpoint, randomness
from gropius.train.checkpoint import Snapshot, damage, load, newest, save, weight_digest
from gropius.train.retention import Retention


@pytest.fixture(scope="module")
def loaded():
    return load_model("tiny", tiny=TinyShape(hidden=16, layers=1, heads=2, kv_heads=2, mlp=16, context=32))


def snapshot(step: int) -> Snapshot:
    tensors = {"optimiser": {"a.exp_avg": torch.full((3,), float(step))}, "random": randomness.capture().tensors}
    return Snapshot(step, {"tokens": 10 * step, "position": {"epoch": 1}}, tensors)


def test_what_is_saved_comes_back(tmp_path, loaded):
    folder = save(tmp_path, snapshot(3), loaded)
    again = load(folder)
    assert (again.step, again.facts) == (3, {"tokens": 30, "position": {"epoch": 1}})
    assert torch.equal(again.tensors["optimiser"]["a.exp_avg"], torch.full((3,), 3.0))
    assert torch.equal(again.tensors["random"]["cpu"], torch.get_rng_state())
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    assert weight_digest(model) == weight_digest(loaded.model)
    assert not list(tmp_path.glob(".*"))


def test_the_newest_complete_one_wins_and_the_fall_back_is_said(tmp_path, loaded):
    for step in (1, 2, 3, 4):
        save(tmp_path, snapshot(step), loaded)
    (tmp_path / "step-000004" / "COMPLETE").unlink()
    weights = tmp_path / "step-000003" / "model" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    found = newest(tmp_path)
    assert found.folder == tmp_path / "step-000002"
    assert ["step-000004" in found.notes[0], "step-000003" in found.notes[1]] == [True, True]
    assert "interrupted" in found.notes[0] and "model/model.safetensors" in found.notes[1]
    with pytest.raises(RunFolderError, match="content"):
        load(tmp_path / "step-000003")


HARMS = ["shorter", "missing", "torn marker", "marker of another shape", "foreign", "pickle", "empty", "a flipped bit"]


@pytest.mark.parametrize("harm", HARMS)
def test_every_damage_is_found(tmp_path, loaded, harm):
    folder = save(tmp_path, snapshot(1), loaded)
    assert damage(folder) == ""
    if harm == "shorter":
        (folder / "optimiser.safetensors").write_bytes(b"x")
    elif harm == "missing":
        (folder / "state.json").unlink()
    elif harm == "torn marker":
        (folder / "COMPLETE").write_text((folder / "COMPLETE").read_text()[:40])
    elif harm == "foreign":
        (folder / "COMPLETE").write_text(json.dumps({"files": {}}))
    elif harm == "pickle":
        (folder / "model" / "pytest.bin").write_bytes(b"\x80\x04.")
    elif harm == "empty":
        (folder / "model" / "tokenizer.json").write_bytes(b"")
    elif harm == "a flipped bit":
        content = bytearray((folder / "optimiser.safetensors").read_bytes())
        content[-1] ^= 1
        (folder / "optimiser.safetensors").write_bytes(content)
    else:
        (folder / "COMPLETE").write_text(json.dumps([1]))
    assert damage(folder) != ""
    assert newest(tmp_path).folder is None


@pytest.mark.parametrize("stop_at", ["save_model", "write", "_seal", "_flush"])
def test_an_interrupted_save_leaves_the_earlier_checkpoints_usable(tmp_path, loaded, monkeypatch, stop_at):
    save(tmp_path, snapshot(1), loaded)

    def interrupt(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(checkpoint, stop_at, interrupt)
        save(tmp_path, snapshot(2), loaded)
    assert newest(tmp_path) == checkpoint.Newest(tmp_path / "step-000001")
    save(tmp_path, snapshot(2), loaded)
    assert newest(tmp_path).folder == tmp_path / "step-000002"


def test_a_checkpoint_moved_aside_for_its_replacement_is_put_back(tmp_path, loaded):
    save(tmp_path, snapshot(1), loaded)
    (tmp_path / "step-000001").rename(tmp_path / ".replaced-step-000001")
    save(tmp_path, snapshot(2), loaded)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000001", "step-000002"]


def test_the_same_step_can_be_written_again(tmp_path, loaded):
    save(tmp_path, snapshot(1), loaded)
    save(tmp_path, Snapshot(1, {"again": True}), loaded)
    assert load(tmp_path / "step-000001").facts == {"again": True}


def test_only_the_last_ones_are_kept(tmp_path, loaded):
    for step in (1, 2, 3, 10):
        save(tmp_path, snapshot(step), loaded, Retention(keep_last=2))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000003", "step-000010"]


def test_the_checkpoint_just_written_is_kept_beside_newer_ones_of_an_abandoned_future(tmp_path, loaded):
    save(tmp_path, snapshot(10), loaded)
    save(tmp_path, snapshot(3), loaded, Retention(keep_last=1))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000003", "step-000010"]


def test_a_number_that_is_not_finite_is_refused_before_anything_is_written(tmp_path, loaded):
    with pytest.raises(ValueError, match="JSON"):
        save(tmp_path, Snapshot(1, {"loss": float("nan")}), loaded)
    assert not list(tmp_path.iterdir())


def test_the_digest_follows_the_bits_of_the_weights():
    model = build("llama_tied", torch.float32)
    before = weight_digest(model)
    assert before == weight_digest(build("llama_tied", torch.float32))
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[0, 0] += 1e-6
    assert weight_digest(model) != before


def test_old_ones_stay_by_their_number_and_by_their_held_out_mean(tmp_path, loaded):
    rule = Retention(keep_last=1, keep_every=4, best=True)
    for step, mean in ((2, 0.25), (3, 0.75), (4, None), (5, 0.5), (6, 0.5)):
        save(tmp_path, Snapshot(step, {"held_out": mean}), loaded, rule)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000003", "step-000004", "step-000006"]


def test_a_disk_without_room_is_asked_before_anything_is_written(tmp_path, loaded, monkeypatch):
    save(tmp_path, snapshot(1), loaded)
    monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 1000})())
    with pytest.raises(RunHalted, match=r"step-000002.* MB are free"):
        save(tmp_path, snapshot(2), loaded)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"] and damage(tmp_path / "step-000001") == ""


def test_what_a_save_needs_counts_shared_tensors_once(loaded):
    weights = sum(p.nbytes for p in loaded.model.parameters())
    needed = checkpoint.needed_bytes(Snapshot(1, {}), loaded) - checkpoint.SLACK_BYTES
    assert weights <= needed <= weights + sum(b.nbytes for b in loaded.model.buffers())
