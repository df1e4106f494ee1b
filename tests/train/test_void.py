"""Void verdicts through a whole run: out of loss and baseline, counted, and a halt when there are too many."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pytest
from small import run_small

from gropius import build
from gropius.errors import RunHalted
from gropius.records.reader import RunReader
from gropius.train import resume
from gropius.train.progress import Silent

QUIET = ("eval.before=false", "eval.after=false", "train.steps=2", "reward_pool.workers=1")
REWARD = """
from pathlib import Path
from gropius.types import void
def score(episode):
    step, _, group = episode.group_id.partition("-")
    if Path(__file__).with_name("broken").exists() and step == "000002":
        raise ValueError("the grader is out of disk")
    if group == "0000" and episode.member > 0:
        return void("no gold")
    if group == "0001" and episode.member == 0:
        return void("no gold")
    return float(len(episode.completion) % 3)
"""


def train(folder: Path, *settings: str) -> Path:
    (folder / "mine.py").write_text(REWARD)
    return run_small(folder, f'reward=[{{name="{folder}/mine.py:score"}}]', *QUIET, *settings)[0]


def test_void_responses_leave_loss_and_baseline_and_a_group_of_one_valid_sibling_is_dropped(tmp_path: Path) -> None:
    reader = RunReader(train(tmp_path))
    rows = reader.rollouts(1)
    assert {r.state for r in rows if r.group_id.endswith("0000")} == {"too_few_valid"}
    assert all(r.skipped and r.advantage is None for r in rows if r.group_id.endswith("0000"))
    second = [r for r in rows if r.group_id.endswith("0001")]
    valid = [r for r in second if r.status == "scored"]
    assert (len(second), len(valid)) == (4, 3)
    mean = sum(r.reward for r in valid) / 3
    spread = math.sqrt(sum((r.reward - mean) ** 2 for r in valid) / 3)
    assert [r.advantage for r in valid] == pytest.approx([(r.reward - mean) / spread if spread else 0 for r in valid])
    voided = next(r for r in second if r.status == "void")
    assert voided.reward is None and voided.advantage is None and voided.reason == "score: no gold"
    metrics = reader.metrics_by_step()[1]
    assert metrics["void_rate"] == 4 / 16 and metrics["groups/too_few_valid"] == 1 / 4


def test_too_many_voids_halt_with_the_cause_and_the_run_goes_on_when_it_is_mended(tmp_path: Path) -> None:
    (tmp_path / "broken").touch()
    with pytest.raises(RunHalted, match=r"step 2: 1\d of 16 verdicts are void.*out of disk") as caught:
        train(tmp_path)
    assert "gropius resume" in str(caught.value) and "after step 1" in str(caught.value)
    reader = RunReader(tmp_path / "small")
    assert reader.checkpoints() == [1] and reader.steps() == [1]
    (tmp_path / "broken").unlink()
    build.resume(tmp_path / "small", None, Silent())
    assert reader.steps() == [1, 2]


ALL_VOID = "from gropius.types import void\ndef score(episode): return void('no gold')\n"


def test_a_step_of_voids_alone_is_said_and_trains_nothing(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(ALL_VOID)
    reward = f'reward=[{{name="{tmp_path}/mine.py:score"}}]'
    folder, told = run_small(tmp_path, reward, *QUIET, "void_limit=1.0")
    said = [note for note in told.notes if "every verdict is void" in note]
    assert len(said) == 2 and "the weights stay as they are" in said[0] and "no gold" in said[0]
    metrics = RunReader(folder).metrics_by_step()[2]
    assert (metrics["void_rate"], metrics["updates"], metrics["reward"]) == (1.0, 0, None)


def test_what_the_scorer_counts_survives_a_pause(tmp_path: Path) -> None:
    folder = train(tmp_path, "checkpoint.every=1")
    first = counts_at(folder, 1)
    straight = counts_at(folder, 2)
    assert (first["calls"], first["voids"], straight["calls"], straight["voids"]) == (16, 4, 32, 8)
    shutil.rmtree(folder / "checkpoints" / "step-000002")
    build.resume(folder, 1, Silent())
    assert counts_at(folder, 2) == straight


def counts_at(folder: Path, step: int) -> dict[str, int]:
    return resume.read(folder, step)[0].facts["state"]["scorer"]["score"]["counts"]


def test_the_limit_is_the_recipes_to_set(tmp_path: Path) -> None:
    with pytest.raises(RunHalted, match="step 1: 4 of 16"):
        train(tmp_path, "void_limit=0.2")
