"""Ranks change nothing: the gradient, the scores, the metrics, the responses and the order of data are those of one."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from ranked import Ranked, ranked

from gropius.records.reader import RunReader
from gropius.train.checkpoint import load


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranked]:
    with ranked() as server:
        yield server


@pytest.mark.parametrize(
    "case",
    [
        {"model": "llama"},
        {"model": "llama_tied", "pack_tokens": 40},
        {"model": "llama_tied", "mode": "all", "pack_tokens": 40, "recompute": True},
        {"model": "qwen3", "dead": [0, 1, 2], "mode": "all"},
        {"model": "gemma3", "packed": False, "rows": 3},
        {"model": "llama_tied", "frozen": True, "rows": 1},
        {"model": "llama_tied", "lora": 3, "pack_tokens": 40},
        {"model": "qwen2", "lora": 3, "bias": "all", "mode": "all", "pack_tokens": 40, "recompute": True},
    ],
    ids=str,
)
def test_two_ranks_have_the_gradient_of_one(ranks: Ranked, case: dict) -> None:
    found = ranks.run("gradient", 2, **case)
    assert found["difference"] < 1e-6 and found["scores"] < 1e-4 and found["loss"] < 1e-5
    assert found["same"] and found["counts"][0] == found["counts"][1]
    assert found["metrics"] and all(gap < 1e-5 for gap in found["metrics"].values())


@pytest.mark.parametrize("mode", ["optimiser", "all"])
@pytest.mark.parametrize("kind", ["off", "copy"])
def test_a_reference_by_the_policys_own_adapter_scores_on_two_ranks_as_on_one(
    ranks: Ranked, kind: str, mode: str
) -> None:
    found = ranks.run("references", 2, kind=kind, mode=mode, lora=3)
    assert max(found["gaps"]) < 1e-4 and found["still"] and found["apart"] > 1e-2
    assert found["moved"], "what is trained moved, all of it and nothing else"
    assert found["is_policy"] is (kind == "copy")


def test_four_ranks_have_it_too(ranks: Ranked) -> None:
    found = ranks.run("gradient", 4, model="llama_tied", pack_tokens=30)
    assert found["difference"] < 1e-6 and found["same"]


def test_a_batch_without_a_live_row_is_no_step_on_any_rank(ranks: Ranked) -> None:
    found = ranks.run("gradient", 2, dead=[0, 1, 2, 3], rows=4)
    assert found == {"taken": False, "refused": "no live sequence"}


def test_a_loss_that_is_not_finite_on_one_rank_moves_no_weight_on_any_and_names_the_row(ranks: Ranked) -> None:
    found = ranks.run("culprits", 2, broken=[2])
    assert found == {"culprits": [2], "taken": False, "moved": False, "refused": "the loss is not finite"}
    sound = ranks.run("culprits", 2)
    assert sound["taken"] and sound["moved"] and not sound["culprits"]


def responses(folder: str) -> list[list[tuple]]:
    """Step by step: who drew what, in order."""
    reader = RunReader(Path(folder))
    return [
        [(row.group_id, row.member, row.task_key, tuple(row.response_ids)) for row in reader.rollouts(step)]
        for step in reader.steps()
    ]


LORA = ["model.lora.rank=4", "train.learning_rate=1e-2"]
SAME = ("reward", "loss", "kl", "entropy", "entropy_bonus", "grad_norm", "tokens_trained", "held_out/mean")
TARGET = ["objective.terms.entropy=0.01", "objective.terms.entropy_target=9.0", "objective.terms.entropy_step=0.5"]


@pytest.mark.parametrize("more", [[], LORA, TARGET], ids=["every weight", "an adapter", "an entropy target"])
def test_a_run_of_two_ranks_is_the_run_of_one(ranks: Ranked, tmp_path: Path, more: list[str]) -> None:
    settings = [f'out="{tmp_path}"', "checkpoint.every=2", "train.updates=2", "objective.preset=grpo", *more]
    one = ranks.run("run", 1, settings=[*settings, "name=one"])
    two = ranks.run("run", 2, settings=[*settings, "name=two"])
    assert responses(one) == responses(two) and len(responses(one)) == 3
    for alone, shared in zip(RunReader(Path(one)).metrics(), RunReader(Path(two)).metrics(), strict=True):
        assert list(alone) == [name for name in shared if not name.startswith("weights/")]
        if "step_time" in shared:
            assert shared["weights/version"] == 2 * shared["step"] and shared["weights/bytes"] > 0
        for name in SAME:
            if alone.get(name) is None:
                assert shared.get(name) is None
            else:
                assert shared[name] == pytest.approx(alone[name], rel=1e-4, abs=1e-6), name


def weights(folder: str, step: int) -> str:
    """The digest of a checkpoint's weights."""
    return str(load(Path(folder) / "checkpoints" / f"step-{step:06d}").facts["weights"])


@pytest.mark.parametrize("more", [[], LORA], ids=["every weight", "an adapter"])
def test_a_checkpoint_of_two_ranks_goes_on_to_the_same_bits_on_two_and_to_the_same_responses_on_one(
    ranks: Ranked, tmp_path: Path, more: list[str]
) -> None:
    settings = [f'out="{tmp_path}"', "checkpoint.every=1", "checkpoint.keep_last=9", "objective.preset=grpo"]
    settings += ["train.reference_refresh=1", "eval.before=false", "eval.after=false", "cluster.shard=all", *more]
    straight = ranks.run("run", 2, settings=[*settings, "name=straight"])
    for number, name in ((2, "two"), (1, "one")):
        shutil.copytree(straight, tmp_path / name)
        for later in (tmp_path / name / "checkpoints").glob("step-00000[23]"):
            shutil.rmtree(later)
        ranks.run("run", number, resume=str(tmp_path / name))
        assert responses(str(tmp_path / name)) == responses(straight)
    assert weights(str(tmp_path / "two"), 3) == weights(straight, 3)
    assert weights(str(tmp_path / "one"), 1) == weights(straight, 1)
