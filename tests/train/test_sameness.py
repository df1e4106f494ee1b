"""The comparison behind `gropius check --resume` finds the first bit that is another, wherever it is."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from small import run_small

from gropius.cli import check
from gropius.cli.main import main
from gropius.errors import GropiusError
from gropius.train import checkpoint
from gropius.train.sameness import compare


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_small(tmp_path_factory.mktemp("run"), "train.steps=2", "eval.after=false")[0]


@pytest.fixture
def copy(run: Path, tmp_path: Path) -> Path:
    shutil.copytree(run, tmp_path / "copy")
    return tmp_path / "copy"


def seal(folder: Path) -> None:
    (folder / checkpoint.MARKER).unlink()
    checkpoint._seal(folder)


def test_a_run_is_the_same_as_its_copy_and_clocks_do_not_count(run: Path, copy: Path) -> None:
    metrics = copy / "metrics.jsonl"
    rows = [json.loads(line) | {"step_time": 9.0} for line in metrics.read_text().splitlines()]
    metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = compare(run, copy)
    assert found.difference == "" and "32 responses" in str(found) and "3 rows of metrics" in str(found)


@pytest.mark.parametrize("file", ["model/model.safetensors", "optimiser.safetensors", "random.safetensors"])
def test_one_bit_of_a_tensor_is_found_and_named(file: str, run: Path, copy: Path) -> None:
    folder = copy / "checkpoints" / "step-000002"
    tensors = load_file(folder / file)
    name = sorted(tensors)[-1]
    tensors[name].view(-1)[0] += 1
    save_file(tensors, folder / file, metadata={"format": "pt"})
    seal(folder)
    assert f"{name}: element 0 is " in compare(run, copy).difference


def test_a_zero_of_another_sign_is_another_bit(run: Path, copy: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "other")
    for place, zero in ((copy, 0.0), (tmp_path / "other", -0.0)):
        folder = place / "checkpoints" / "step-000002"
        tensors = load_file(folder / "optimiser.safetensors")
        tensors[min(tensors)].view(-1)[0] = zero
        save_file(tensors, folder / "optimiser.safetensors")
        seal(folder)
    assert "element 0 is 0.0 and -0.0" in compare(copy, tmp_path / "other").difference


def test_a_fact_a_response_and_a_metric_that_differ_are_named(run: Path, copy: Path, tmp_path: Path) -> None:
    state = copy / "checkpoints" / "step-000002" / "state.json"
    document = json.loads(state.read_text())
    document["facts"]["state"]["position"] += 1
    state.write_text(json.dumps(document))
    seal(state.parent)
    assert compare(run, copy).difference == "state, state.position: 8 and 9"
    shutil.copy(run / "checkpoints" / "step-000002" / "state.json", state)
    seal(state.parent)
    rollouts = copy / "rollouts"
    shutil.copy(rollouts / "step-000001.parquet", rollouts / "step-000002.parquet")
    assert compare(run, copy).difference.startswith("step 2, responses: row 0, step: ")
    shutil.copy(run / "rollouts" / "step-000002.parquet", rollouts / "step-000002.parquet")
    metrics = (copy / "metrics.jsonl").read_text().replace('"tokens_sampled": ', '"tokens_sampled": 9', 1)
    (copy / "metrics.jsonl").write_text(metrics)
    assert "metric tokens_sampled: " in compare(run, copy).difference
    (rollouts / "step-000002.parquet").unlink()
    assert compare(run, copy).difference == "recorded steps: [1, 2] and [1]"
    shutil.rmtree(copy / "checkpoints" / "step-000002")
    assert compare(run, copy).difference == "last checkpoints: step [2] and step None"


def test_the_verb_prints_the_first_difference_and_exits_1(
    run: Path, copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words: list[tuple[str, ...]] = []

    def pretend(*given: str, fault: str = "") -> None:
        words.append((*given, fault))
        if given[0] == "train":
            shutil.copytree(copy if fault else run, tmp_path / "kept" / given[given.index("--name") + 1])

    monkeypatch.setattr(check, "_gropius", pretend)
    call = ["check", "arithmetic", "--resume", "--steps", "1", "--keep", str(tmp_path / "kept")]
    for held in (True, False):
        with pytest.raises(SystemExit) as ended:
            main(call)
        out = capsys.readouterr().out
        assert ended.value.code == (0 if held else 1)
        assert ("bit by bit: " if held else "FAILED  resume: the first difference: recorded steps") in out
        shutil.rmtree(tmp_path / "kept")
        (copy / "rollouts" / "step-000002.parquet").unlink(missing_ok=True)
    assert [row[0] for row in words[:3]] == ["train", "train", "resume"] and words[1][-1] == "rollouts.written:2"


def test_a_run_that_ends_otherwise_than_it_should_is_said_with_its_last_words() -> None:
    with pytest.raises(GropiusError, match=r"gropius resume ended with 2: .*there is no such run folder"):
        check._gropius("resume", "nowhere-at-all")
