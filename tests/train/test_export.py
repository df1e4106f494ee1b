"""What comes out: a folder that others load to the same logits, and a card that leaves nothing out."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path

import pytest
import torch
from small import run_small
from transformers import AutoModelForCausalLM, AutoTokenizer

from gropius.cli.main import main
from gropius.errors import RunFolderError, UsageError
from gropius.models.load import load_model
from gropius.records.reader import RunReader
from gropius.train.export import export


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    settings = ["train.steps=2", "checkpoint.every=1", "eval.every=1"]
    return run_small(tmp_path_factory.mktemp("run"), *settings)[0]


def test_the_exported_folder_loads_in_transformers_to_the_same_logits(run: Path, tmp_path: Path) -> None:
    notes = export(run, 1, tmp_path / "out")
    assert "loaded again and equal" in notes[-1]
    ours = load_model(str(run / "checkpoints" / "step-000001" / "model"))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    ids = tokenizer("1+2=", return_tensors="pt").input_ids
    with torch.no_grad():
        assert torch.equal(ours.model(ids).logits, theirs(ids).logits)
    assert tokenizer.get_vocab() == ours.tokenizer.get_vocab()
    assert not list(tmp_path.glob(".*")) and not (tmp_path / "out" / "state.json").exists()


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed")
def test_the_exported_folder_loads_in_vllm(run: Path, tmp_path: Path) -> None:
    from vllm import LLM

    export(run, None, tmp_path / "out")
    engine = LLM(str(tmp_path / "out"), enforce_eager=True, gpu_memory_utilization=0.2)
    assert engine.generate(["1+2="])[0].outputs


def test_the_card_says_what_was_done_with_what_and_what_came_of_it(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "run")
    document = json.loads((tmp_path / "run" / "resolved.json").read_text())
    document |= {"sandbox": {"tier": "none", "minimum": "none", "unsafe": True}}
    (tmp_path / "run" / "resolved.json").write_text(json.dumps(document))
    finding = {"severity": "warning", "name": "collapse", "message": "one answer ```\n# in all"}
    (tmp_path / "run" / "findings.json").write_text(json.dumps([finding]))
    export(tmp_path / "run", None, tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    origin = RunReader(run).resolved()["origin"]
    for words in (
        "built-in model with random weights", "step 2 of 2", document["sha256"], origin["tasks"], "format: weight 1",
        "loss = Σ_t", "[objective.surrogate]\nkind", "isolation tier `none`", "rights of the user", "warning: collapse",
        f"torch {torch.__version__}",
    ):  # fmt: skip
        assert words in card, words
    rows = [line for line in card.splitlines() if line.startswith("| ")]
    assert [row.split(" | ")[0] for row in rows[1:]] == ["| 0", "| 1", "| 2"] and rows[1].count("[") == 3
    outside = "".join(part for number, part in enumerate(card.split("````")) if number % 2 == 0)
    assert "# in all" not in outside  # text of foreign origin cannot close its block
    assert card.startswith("---\nlibrary_name: transformers\n") and "base_model:" not in card


def test_an_export_is_whole_or_it_is_not_there(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    with pytest.raises(UsageError, match="is there already"):
        export(run, None, tmp_path / "taken")
    with pytest.raises(RunFolderError, match=r"no complete checkpoint of step 9; there are 1, 2"):
        export(run, 9, tmp_path / "out")
    monkeypatch.setattr("gropius.models.load.tensor_digest", lambda *_: "0" * 64)
    with pytest.raises(RunFolderError, match="is not the model of step 2"):
        export(run, None, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["taken"]


def test_the_verb_takes_a_run_and_a_step(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["export", f"{run}@1", str(tmp_path / "out")])
    assert ended.value.code == 0 and capsys.readouterr().out == f"{tmp_path / 'out'}\n"
    with pytest.raises(SystemExit) as ended:
        main(["export", f"{run}@last", str(tmp_path / "other")])
    assert ended.value.code == 2 and "after @ goes the number of a step" in capsys.readouterr().err
