"""Ranks change nothing: the gradient, the scores, the metrics, the responses and the order of data are those of one."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from ranked import Ranked, ranked

from gropius import build
from gropius.recipe import from_dict
from gropius.records.reader import RunReader
from gropius.train.checkpoint import load


def slow(*values: object, name: str | None = None) -> object:
    """A case of make test-all only."""
    return pytest.param(*values, marks=pytest.mark.slow, id=name)


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
        slow({"model": "llama", "pack_tokens": 40, "recompute": True}),
        slow({"model": "qwen2", "lora": 3, "bias": "all", "mode": "all", "pack_tokens": 40, "recompute": True}),
    ],
    ids=str,
)
def test_two_ranks_have_the_gradient_of_one(ranks: Ranked, case: dict) -> None:
    found = ranks.run("gradient", 2, **case)
    assert found["difference"] < 1e-6 and found["scores"] < 1e-4 and found["loss"] < 1e-5
    assert found["same"] and found["counts"][0] == found["counts"][1]
    assert found["metrics"] and all(gap < 1e-5 for gap in found["metrics"].values())
    assert found["passes"] == [2.0 if case.get("recompute") else 1.0] * 2
    if case.get("mode", "optimiser") == "optimiser" and not case.get("lora"):
        assert found["summed"] == 3, "once a step for each layer and for the rest, however many micro-batches"


@pytest.mark.parametrize(
    "case", [{}, slow({"mode": "all", "recompute": True}), slow({"lora": 3}), slow({"packed": False})], ids=str
)
def test_in_bfloat16_two_ranks_have_the_gradient_of_one_to_its_rounding(ranks: Ranked, case: dict) -> None:
    batch = {"model": "llama_tied", "compute_dtype": "bfloat16", "pack_tokens": 40, **case}
    found = ranks.run("gradient", 2, **batch)
    assert found["difference"] < 2e-3 and found["scores"] < 2e-2 and found["same"]
    exact = ranks.run("gradient", 2, **batch, alone_dtype="float32")
    assert 2e-3 < exact["difference"] < (1.0 if "lora" in case else 5e-2), "it was computed in 16 bits"


def test_frames_truth_and_tensors_arrive_at_everybody_as_they_were(ranks: Ranked) -> None:
    found = ranks.run("exchange", 3)
    assert found["heard"] == [["", "a", "ü" * 1000]] * 3
    assert found["gathered"] == [["r0", "r1r1", "r2r2r2"], [], []]
    assert found["empty"] == [["", "", ""], [], []]
    assert found["any"] == [[False, True, True]] * 3
    assert found["spread"] == [[0.0, 1.0, 2.0, 3.0]] * 3


def test_a_rank_that_does_not_come_is_named_and_is_a_lost_one(ranks: Ranked) -> None:
    found = ranks.run("missing", 2)
    assert "do not meet" in found["said"] and "Ranks 1 failed" in found["said"] and found["lost"] and found["later"]


@pytest.mark.parametrize(
    ("mode", "dtype"),
    [("optimiser", "bfloat16"), slow("all", "bfloat16"), slow("optimiser", "float32"), slow("all", "float32")],
)
def test_layers_are_divided_one_by_one_and_kept_whole_no_longer_than_the_mode_says(
    ranks: Ranked, mode: str, dtype: str
) -> None:
    found = ranks.run("layout", 2, mode=mode, compute_dtype=dtype)
    assert found["rank 0's"], "every rank has rank 0's weights, whatever it began with"
    norms = {"input_layernorm.weight", "post_attention_layernorm.weight"}
    assert found["units"] == 3 + (4 if dtype == "bfloat16" else 0)
    if mode == "all":
        assert found["left"] == {}
    else:
        assert len(found["left"]) == 9 and {n for n, kind in found["left"].items() if kind != f"torch.{dtype}"} == (
            norms if dtype == "bfloat16" else set()
        )
    assert found["after"] == 0 and found["frees"]


@pytest.mark.parametrize(
    ("kind", "mode"), [("off", "optimiser"), slow("copy", "optimiser"), slow("off", "all"), slow("copy", "all")]
)
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
SAME += ("critic/loss", "critic/grad_norm", "critic/explained_variance", "critic/clip_fraction")
TARGET = ["objective.terms.entropy=0.01", "objective.terms.entropy_target=9.0", "objective.terms.entropy_step=0.5"]


PPO = ["objective.preset=ppo", "critic.learning_rate=0.01"]
KINDS = {
    "every weight": [],
    "an adapter": LORA,
    "an entropy target": TARGET,
    "a critic": PPO,
    "a critic, layer by layer": [*PPO, "cluster.shard=all", "train.recompute=true"],
    "a critic on the policy's trunk": [*PPO, "critic.trunk=shared"],
    "a critic in the policy's gradient": [*PPO, "critic.trunk=shared", "critic.coefficient=0.5", "critic.huber=0.5"],
    "a critic beside an adapter": [*PPO, *LORA],
    "the optimal token baseline": ["objective.preset=otb"],
}
FAST = ("every weight", "an adapter")


@pytest.mark.parametrize(
    "more", [pytest.param(more, id=name) if name in FAST else slow(more, name=name) for name, more in KINDS.items()]
)
def test_a_run_of_two_ranks_is_the_run_of_one(ranks: Ranked, tmp_path: Path, more: list[str]) -> None:
    settings = [f'out="{tmp_path}"', "checkpoint.every=2", "train.updates=2", "objective.preset=grpo", *more]
    one = ranks.run("run", 1, settings=[*(s for s in settings if not s.startswith("cluster.")), "name=one"])
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


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], LORA, PPO], ids=["every weight", "an adapter", "a critic"])
def test_with_engines_elsewhere_no_rank_holds_the_policy_whole_and_the_run_is_the_same(
    ranks: Ranked, tmp_path: Path, more: list[str]
) -> None:
    settings = [f'out="{tmp_path}"', "checkpoint.every=1", "checkpoint.keep_last=9", "objective.preset=grpo", *more]
    settings += ["eval.before=false", "eval.after=false", "model.tiny.hidden=64", "model.tiny.layers=4"]
    settings += ["rollout.temperature=0.7"]
    two = ranks.run("run", 2, settings=[*settings, "name=two"])
    bucket = 20_000 if not more else 2_000
    apart = ranks.run(
        "divided", 2, settings=[*settings, "name=apart"], bucket=bucket, threads=True, notes=str(tmp_path)
    )
    assert responses(apart) == responses(two)
    assert [weights(apart, step) for step in (1, 2, 3)] == [weights(two, step) for step in (1, 2, 3)]
    model = build.model(from_dict(RunReader(Path(apart)).resolved()), Path(apart) / "checkpoints/step-000003/model")
    assert model.digest() == weights(apart, 3)
    handed = [tensor.nbytes for tensor in model.handed().values()]
    largest = max(handed)
    for rank in (0, 1):
        seen = json.loads((tmp_path / f"rank-{rank}.json").read_text())
        assert seen["asked"] > 4 * 2, "the weights went in several buckets, every time"
        # each of gloo's two threads keeps what it moved last until it moves something else
        assert 0 < seen["most"] <= max(bucket, largest) + 2 * largest < sum(handed) / 3
        if rank:  # the engine of the test lies in rank 0's process
            assert seen["beside"] < seen["model"] / 32, "nothing else is there than this rank's parts"
    for step, row in RunReader(Path(apart)).metrics_by_step().items():
        if "step_time" in row:
            assert row["weights/version"] == step and row["weights/time_s"] > 0
            assert row["weights/bytes"] == sum(handed)
    for number in (2, 1):
        shutil.copytree(apart, tmp_path / f"again-{number}")
        for later in (tmp_path / f"again-{number}" / "checkpoints").glob("step-00000[23]"):
            shutil.rmtree(later)
        ranks.run("run", number, resume=str(tmp_path / f"again-{number}"), settings=["cluster.engines=0"])
        assert responses(str(tmp_path / f"again-{number}")) == responses(apart)
    assert weights(str(tmp_path / "again-2"), 3) == weights(apart, 3)


def weights(folder: str, step: int) -> str:
    """The digest of a checkpoint's weights."""
    return str(load(Path(folder) / "checkpoints" / f"step-{step:06d}").facts["weights"])


@pytest.mark.slow
def test_two_ranks_train_on_batches_drawn_ahead_as_one_does(ranks: Ranked, tmp_path: Path) -> None:
    settings = [f'out="{tmp_path}"', "train.max_staleness=1", "train.updates=2", "objective.preset=grpo"]
    one = ranks.run("run", 1, settings=[*settings, "name=one"])
    two = ranks.run("run", 2, settings=[*settings, "name=two"])
    assert responses(one) == responses(two) and len(responses(two)) == 3
    stale = [RunReader(Path(run)).metrics_by_step()[3]["staleness/max"] for run in (one, two)]
    assert stale == [1, 1]


@pytest.mark.parametrize(
    "more", [[], slow(LORA), slow([*PPO, "train.reference_refresh=0"])], ids=["every weight", "an adapter", "a critic"]
)
def test_a_checkpoint_of_two_ranks_goes_on_to_the_same_bits_on_two_and_to_the_same_responses_on_one(
    ranks: Ranked, tmp_path: Path, more: list[str]
) -> None:
    settings = [f'out="{tmp_path}"', "checkpoint.every=1", "checkpoint.keep_last=9", "objective.preset=grpo"]
    settings += [
        "train.schedule=linear",
        "train.reference_refresh=2",
        "eval.before=false",
        "eval.after=false",
        "cluster.shard=all",
        *more,
    ]
    straight = ranks.run("run", 2, settings=[*settings, "name=straight"])
    for number, name in ((2, "two"), (1, "one")):
        shutil.copytree(straight, tmp_path / name)
        for later in (tmp_path / name / "checkpoints").glob("step-00000[23]"):
            shutil.rmtree(later)
        ranks.run("run", number, resume=str(tmp_path / name))
        assert responses(str(tmp_path / name)) == responses(straight)
    assert weights(str(tmp_path / "two"), 3) == weights(straight, 3)
    assert weights(str(tmp_path / "one"), 1) == weights(straight, 1)
