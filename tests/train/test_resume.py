"""A continued run is the same run, or it is refused, difference by difference."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from small import RECIPE, run_small, small_recipe

from gropius import build
from gropius.cli.main import main
from gropius.errors import RunFolderError
from gropius.recipe import resolve
from gropius.records.reader import RunReader
from gropius.records.writer import RunWriter
from gropius.train import checkpoint, resume
from gropius.train.progress import Silent
from gropius.train.sameness import compare

# Four steps of two to an epoch, all of them kept.
SETTINGS = ["data.options.rows=[8, 8]", "train.steps=4", "checkpoint.every=1", "checkpoint.keep_last=9"]


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_small(tmp_path_factory.mktemp("straight"), *SETTINGS)[0]


@pytest.fixture
def copy(straight: Path, tmp_path: Path) -> Path:
    shutil.copytree(straight, tmp_path / "small")
    return tmp_path / "small"


@pytest.mark.parametrize("step", [1, 2, 3])
def test_inside_an_epoch_and_at_its_edge_it_goes_on_to_the_same_bits(step: int, straight: Path, copy: Path) -> None:
    build.resume(copy, step, Silent())
    found = compare(straight, copy)
    assert found.difference == "" and found.counts["responses"] == 64


def test_without_a_checkpoint_it_begins_again_in_the_same_folder(straight: Path, copy: Path) -> None:
    shutil.rmtree(copy / "checkpoints")
    progress = Silent()
    build.resume(copy, None, progress)
    assert "no checkpoint yet: from the beginning" in progress.notes
    assert compare(straight, copy).difference == ""


def test_after_the_last_step_only_the_last_measurement_is_made_and_then_there_is_nothing_to_do(
    straight: Path, copy: Path
) -> None:
    rows = (copy / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    assert "loss" not in json.loads(rows[-1])
    (copy / "metrics.jsonl").write_bytes(b"".join(rows[:-1]))
    progress = Silent()
    build.resume(copy, None, progress)
    assert progress.steps == [] and set(progress.evaluations) == {"after"}
    assert compare(straight, copy).difference == ""
    with pytest.raises(RunFolderError, match=r"all 4 steps are done.*--set train\.steps=8"):
        build.resume(copy, None, Silent())


def test_harmless_keys_may_change_and_a_longer_run_is_the_longer_run(copy: Path, tmp_path: Path) -> None:
    progress = Silent()
    build.resume(copy, None, progress, ["train.steps=5", "eval.samples=3"])
    assert "changed: train.steps: 4 when the run began, 5 now" in progress.notes
    assert RunReader(copy).resolved()["train"]["steps"] == 5
    longer, _ = run_small(tmp_path / "longer", *SETTINGS, "train.steps=5")
    folders = [folder / "checkpoints" / "step-000005" / "model" for folder in (copy, longer)]
    a, b = (checkpoint.weight_digest(build.model(small_recipe(tmp_path), folder).model) for folder in folders)
    assert a == b


def test_every_other_change_is_refused_and_all_are_listed(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def score(episode):\n    return float(len(episode.completion) % 2)\n")
    rows = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(12)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = RECIPE | {
        "data": {"source": str(tmp_path / "rows.jsonl"), "held_out": 2},
        "reward": [{"name": f"{tmp_path}/mine.py:score"}],
        "train": {"steps": 1, "threads": 1},
        "eval": {"before": False, "after": False},
    }
    folder = build.train(resolve(recipe, [f'out="{tmp_path}"']), Silent())
    (tmp_path / "mine.py").write_text("def score(episode):\n    return 1.0\n")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[::-1]))
    before = sorted((path, path.read_bytes()) for path in folder.rglob("*.json*"))
    with pytest.raises(RunFolderError) as refused:
        build.resume(folder, None, Silent(), ["train.steps=2", "train.learning_rate=0.5", "rollout.top_p=0.5"])
    lines = str(refused.value).splitlines()
    assert "--fork" in lines[0]
    for words in ("train.learning_rate: 1e-05 when", "rollout.top_p: 1.0 when", "the tasks: ", "mine.py:score: "):
        assert sum(words in line for line in lines) == 1, words
    assert len(lines) == 5 and not any("train.steps" in line for line in lines)
    assert before == sorted((path, path.read_bytes()) for path in folder.rglob("*.json*"))


def test_a_schedule_that_looks_at_the_steps_makes_them_harmful(tmp_path: Path) -> None:
    quiet = ["train.steps=1", "train.schedule=linear", "eval.before=false", "eval.after=false"]
    folder, _ = run_small(tmp_path, *quiet)
    with pytest.raises(RunFolderError, match=r"train\.steps: 1 when the run began, 2 now"):
        build.resume(folder, None, Silent(), ["train.steps=2"])


def test_another_tokenizer_is_refused(copy: Path) -> None:
    for step in (1, 2, 3, 4):
        folder = copy / "checkpoints" / f"step-00000{step}"
        template = folder / "model" / "chat_template.jinja"
        template.write_text(template.read_text() + "!")
        (folder / checkpoint.MARKER).unlink()
        checkpoint._seal(folder)
    with pytest.raises(RunFolderError, match="the tokenizer: "):
        build.resume(copy, 2, Silent())


def test_weights_that_were_swapped_are_refused(copy: Path) -> None:
    folders = [copy / "checkpoints" / f"step-00000{step}" for step in (2, 3)]
    shutil.copy(folders[0] / "model" / "model.safetensors", folders[1] / "model" / "model.safetensors")
    (folders[1] / checkpoint.MARKER).unlink()
    checkpoint._seal(folders[1])
    with pytest.raises(RunFolderError, match="are not those that were saved"):
        build.resume(copy, 3, Silent())


PARTS = ["model/model.safetensors", "optimiser.safetensors", "random.safetensors", "state.json", "model/tokenizer.json"]


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("harm", ["flipped", "truncated", "missing"])
def test_a_damaged_newest_checkpoint_is_passed_over_and_it_is_said(part: str, harm: str, copy: Path) -> None:
    path = copy / "checkpoints" / "step-000004" / part
    content = bytearray(path.read_bytes())
    path.unlink()
    if harm != "missing":
        content[len(content) // 2] ^= 1
        path.write_bytes(content if harm == "flipped" else content[:-1])
    start, notes = resume.choose(copy, None, RunReader(copy).resolved())
    assert start.step == 3 and len(notes) == 1 and "step-000004 is passed over" in notes[0] and part in notes[0]
    with pytest.raises(RunFolderError, match="step-000004"):
        resume.choose(copy, 4, RunReader(copy).resolved())


def test_where_every_checkpoint_is_damaged_nothing_is_begun_anew(copy: Path) -> None:
    for path in (copy / "checkpoints").glob("*/state.json"):
        path.write_text("{}")
    with pytest.raises(RunFolderError, match="no checkpoint is whole") as refused:
        build.resume(copy, None, Silent())
    assert len(str(refused.value).splitlines()) == 5 and RunReader(copy).steps() == [1, 2, 3, 4]


def test_two_trainers_never_share_a_folder_and_a_lock_that_was_left_is_none(straight: Path, copy: Path) -> None:
    with RunWriter.reopen(copy), pytest.raises(RunFolderError, match=rf"in use by process {os.getpid()}"):
        build.resume(copy, 2, Silent())
    assert (copy / "run.lock").read_text()  # names a process that holds nothing any more
    (copy / "run.lock").write_text('{"pid": 1, "started": "2999-01-01 00:00:00"}')
    build.resume(copy, 3, Silent())
    assert compare(straight, copy).difference == ""


@pytest.fixture
def read_only(copy: Path, tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "read-only"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(place)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("a file system is mounted by root only")
    shutil.copytree(copy, place / "small")
    subprocess.run(["mount", "-o", "remount,ro", str(place)], check=True)
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_folder_that_cannot_be_written_is_refused_in_words(read_only: Path) -> None:
    with pytest.raises(RunFolderError, match="cannot be written: Read-only file system"):
        build.resume(read_only / "small", 2, Silent())
    with pytest.raises(RunFolderError, match="Read-only file system"):
        build.train(small_recipe(read_only, "name=other"), Silent())


def test_a_fork_takes_the_whole_state_into_a_new_run_and_keeps_where_it_came_from(
    straight: Path, tmp_path: Path
) -> None:
    progress = Silent()
    forked = build.fork(small_recipe(tmp_path, *SETTINGS, "name=forked"), (straight, 2), progress)
    assert RunReader(forked).checkpoints() == [2, 3, 4] and RunReader(forked).steps() == [3, 4]
    models = [folder / "checkpoints" / "step-000004" / "model" / "model.safetensors" for folder in (straight, forked)]
    assert models[0].read_bytes() == models[1].read_bytes()  # nothing was changed, so it is the same run
    lineage = RunReader(forked).resolved()["fork"]
    assert (lineage["run"], lineage["step"]) == (str(straight), 2)
    assert any("name: 'small' in" in line for line in lineage["differences"])


def test_a_fork_may_change_recipe_and_data_but_not_the_model(straight: Path, tmp_path: Path) -> None:
    changed = [*SETTINGS, "train.learning_rate=0.1", "data.options.rows=[6, 8]", "train.steps=3"]
    progress = Silent()
    forked = build.fork(small_recipe(tmp_path, *changed), (straight, 2), progress)
    assert sum("train.learning_rate: 0.001" in note or "the tasks: " in note for note in progress.notes) == 2
    facts = checkpoint.load(forked / "checkpoints" / "step-000002").facts
    assert facts["state"]["position"] == 0 and facts["optimiser_steps"] == 2
    with pytest.raises(RunFolderError, match=r"model\.tiny\.hidden: 32"):
        build.fork(small_recipe(tmp_path, "model.tiny.hidden=64"), (straight, 2), Silent())
    with pytest.raises(RunFolderError, match="nothing to do"):
        build.fork(small_recipe(tmp_path, *SETTINGS), (straight, 4), Silent())
    with pytest.raises(RunFolderError, match="no complete checkpoint of step 7"):
        build.fork(small_recipe(tmp_path, *SETTINGS), (straight, 7), Silent())


def test_the_same_command_again_on_an_unfinished_run_says_how_far_it_is_and_how_to_go_on(
    copy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.rmtree(copy / "checkpoints" / "step-000004")
    monkeypatch.setattr("gropius.cli.train.for_run", lambda *_: resolve(RECIPE, ['out="."', *SETTINGS]))
    with pytest.raises(SystemExit) as ended:
        main(["train", "small.toml"])
    said = capsys.readouterr().err
    assert ended.value.code == 2
    assert "step 4 of 4 is recorded, step 3 is saved" in said and "gropius resume small" in said
