"""The doctor while a run goes on: what is new is told once, all is stored, and a serious finding pauses the run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from sick import HEALTHY, rewarded, train

from gropius import build
from gropius.errors import RunHalted
from gropius.recipe import from_dict, resolve
from gropius.records.reader import RunReader
from gropius.train.progress import Silent

BROKEN = rewarded(("exact", 1.0, lambda episode: 0.0, True))


def recipe(out: Path, warm: Path, *settings: str):  # type: ignore[no-untyped-def]
    return resolve(HEALTHY, [f'out="{out}"', f'model.source="{warm}"', "train.steps=16", *settings])


def test_a_finding_is_told_once_and_stored_with_its_rows(warm: Path, tmp_path: Path) -> None:
    progress = Silent()
    with BROKEN():
        folder = build.train(recipe(tmp_path, warm, "doctor.every=4"), progress)
    told = [note for note in progress.notes if "all_failed_groups" in note]
    assert len(told) == 1 and "sft.steps" in told[0]
    stored = {finding["name"]: finding for finding in RunReader(folder).findings()}
    assert stored["all_failed_groups"]["evidence"][0]["group_id"]
    assert stored["budget_waste"]["explained_by"] == "all_failed_groups"


def test_a_serious_finding_pauses_the_run_at_a_saved_state_and_it_can_go_on(warm: Path, tmp_path: Path) -> None:
    settings = ("doctor.every=4", 'doctor.pause_on="critical"')
    with BROKEN(), pytest.raises(RunHalted, match="all_failed_groups") as stopped:
        build.train(recipe(tmp_path, warm, *settings), Silent())
    assert "gropius resume" in str(stopped.value)
    folder = tmp_path / "run"
    assert RunReader(folder).checkpoints() == [8] and RunReader(folder).findings()
    with BROKEN():
        build.resume(folder, None, Silent())
    assert RunReader(folder).steps()[-1] == 16


def test_looking_changes_no_number_of_the_run_nor_its_hash(warm: Path, tmp_path: Path) -> None:
    often = train(tmp_path / "a", warm, ("doctor.every=2", "train.steps=4"))
    never = train(tmp_path / "b", warm, ("doctor.every=0", "train.steps=4"))
    rewards = [[row["loss"] for row in RunReader(folder).metrics()] for folder in (often, never)]
    assert rewards[0] == rewards[1]
    assert from_dict(RunReader(often).resolved()).sha256 == from_dict(RunReader(never).resolved()).sha256
    assert (often / "findings.json").is_file() and not (never / "findings.json").exists()
    assert json.loads((often / "findings.json").read_text()) == []
