"""Runs that were really trained: each token's arithmetic is the recorded one, and all of it is the logged loss."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from gropius.viewer.index import RunIndex
from gropius.viewer.response import arithmetic, balance, response_head
from gropius.viewer.store import RunStore

ROOT = Path(__file__).parents[2]
SMALL = ("sft.steps=40", "train.steps=2", "rollout.prompts=8", "rollout.group_size=8", "eval.samples=1")
KL = ("objective.kl.estimator=k3", "objective.kl.coefficient=0.04")
RUNS = {
    "grpo, two updates": ("arithmetic", ()),
    "grpo with a KL, four updates": ("arithmetic", (*KL, "train.updates=4")),
    "gspo": ("arithmetic", ("objective.preset=gspo",)),
    "dapo": ("arithmetic", ("objective.preset=dapo",)),
    "KL and an entropy bonus": ("arithmetic", (*KL, "objective.terms.entropy=0.01")),
    "an entropy bonus with a target": (
        "arithmetic",
        ("objective.terms.entropy_target=2.0", "objective.terms.entropy_step=0.005"),
    ),
    "several turns": ("guess-number", KL),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_the_tokens_of_a_trained_run_add_up_to_its_logged_loss(name: str, tmp_path: Path) -> None:
    recipe, settings = RUNS[name]
    words = ["train", str(ROOT / "recipes" / f"{recipe}.toml"), "--out", str(tmp_path), "--name", "run"]
    for setting in (*SMALL, *settings):
        words += ["--set", setting]
    code = "import sys; from gropius.cli.main import main; main(sys.argv[1:])"
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    store = RunStore("run", tmp_path / "run")
    index = RunIndex(store, None)
    index.wait()
    seen = 0
    for step in (1, 2):
        told = balance(store, step)
        assert told is not None and told["gap"] == pytest.approx(0, abs=1e-6 * max(1.0, abs(told["logged"])))
        for group in [g for g in index.groups().to_pylist() if g["step"] == step]:
            for member in range(group["size"]):
                made = arithmetic(store, step, group["group_id"], member)
                head = response_head(store, step, group["group_id"], member)
                assert head is not None
                if head["skipped"]:
                    assert not head["contribution"]
                    continue
                assert "missing" not in made and made["gap"] < 1e-6, (group["group_id"], member, made)
                assert made["sum"] == pytest.approx(head["contribution"], abs=1e-6)
                seen += 1
    assert seen > 8
