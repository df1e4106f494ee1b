"""`gropius check --resume` holds for the built-in recipes, cut short."""

from __future__ import annotations

from pathlib import Path

import pytest

from gropius.cli.main import main

SHORT = ["sft.steps=20", "rollout.prompts=4", "rollout.group_size=4", "train.threads=1"]
RECIPES = {
    "arithmetic": [],
    "guess-number": [],
    "arithmetic, several updates": ["train.updates=2", "train.epochs=2"],
    "arithmetic, LoRA": ["model.lora.rank=8"],
    "arithmetic, dynamic sampling": ['objective.preset="dapo"', 'objective.selection.dead="refill"'],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_straight_equals_killed_and_resumed(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = [word for setting in (*SHORT, *RECIPES[name]) for word in ("--set", setting)]
    with pytest.raises(SystemExit) as ended:
        main(["check", name.partition(",")[0], "--resume", "--keep", str(tmp_path), *settings])
    said = capsys.readouterr()
    assert ended.value.code == 0 and "bit by bit" in said.out, said
