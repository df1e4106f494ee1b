"""Small runs with credit by position, critics, branches and demonstrations: the record rebuilds the loss."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from gropius import build, survey
from gropius.objective.explain import explain
from gropius.recipe import resolve
from gropius.recipe.stored import from_dict
from gropius.records.reader import RunReader
from gropius.records.replay import batches, in_force
from gropius.train.progress import Silent

RECIPE: dict[str, Any] = {
    "name": "game",
    "seed": 3,
    "model": {
        "source": "tiny",
        "tiny": {"hidden": 16, "layers": 1, "heads": 2, "kv_heads": 2, "mlp": 32, "context": 96},
    },
    "data": {"source": "guess_number", "options": {"budget": 3, "rows": [24, 4]}},
    "reward": [
        {"name": "environment"},
        {"name": "guess_progress", "weight": 0.5, "options": {"measure": "interval"}},
        {"name": "format", "weight": 0.3, "options": {"pattern": "[^1-4]*[1-4](.|\\n)*"}},
    ],
    "rollout": {"prompts": 4, "group_size": 4, "max_tokens": 3, "max_turns": 3},
    "sft": {"steps": 6, "batch": 16},
    "train": {"steps": 2, "learning_rate": 1e-2, "threads": 1},
    "eval": {"before": False, "after": False},
    "doctor": {"every": 0},
    "checkpoint": {"final": False},
}


def run(out: Path, *settings: str) -> Path:
    return build.train(resolve(RECIPE, [f'out="{out}"', *settings]), Silent())


def assert_rebuilt(folder: Path) -> RunReader:
    reader = RunReader(folder)
    objective = from_dict(reader.resolved()).objective
    moved = False
    for step, row in reader.metrics_by_step().items():
        used = in_force(objective, row.get("entropy_bonus"))
        reports = [explain(batch, used) for batch in batches(reader.rollouts(step))]
        if row.get("loss") is None:
            continue
        assert row["loss"] == pytest.approx(sum(r["loss"] for r in reports) / len(reports), rel=1e-6, abs=1e-6), step
        moved = moved or bool(row["grad_norm"])
    assert moved, "a run without a gradient shows nothing"
    return reader


CASES: dict[str, tuple[str, ...]] = {
    "turn": ("objective.preset=grpo_turn", "train.updates=2"),
    "step in the return": ("objective.preset=grpo_process", "objective.advantage.final=in_return"),
    "critic by turn": ("objective.preset=ppo", "objective.advantage.credit=turn", "train.updates=2"),
    "critic on a shared trunk": (
        "objective.preset=vapo", "critic.trunk=shared", "critic.coefficient=0.5", "critic.huber=0.5",
    ),
    "branches by turn": (
        "objective.preset=grpo_turn", "rollout.branches=2", "objective.advantage.whiten=tokens",
        "objective.advantage.scale=none",
    ),
    "branches by token": (
        "objective.preset=gspo", "rollout.branches=4", "rollout.branch_at=token", "rollout.branch_choice=surprising",
    ),
    "demonstrations": ("objective.preset=luffy", "rollout.demonstrations=1", "rollout.group_size=4"),
    "entropy with a target": (
        "objective.preset=dapo", "objective.selection.dead=keep", "objective.terms.entropy=0.01",
        "objective.terms.entropy_target=9.0", "objective.terms.entropy_step=0.005",
    ),
    "clip_cov over two updates": (
        "objective.preset=clip_cov", "train.updates=2", "objective.selection.covariance_low=-9.0",
        "objective.selection.covariance_share=0.1",
    ),
    "real over two updates": ("objective.preset=real", "train.updates=2", "objective.selection.correct=0.2"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_record_rebuilds_the_loss(name: str, tmp_path: Path) -> None:
    reader = assert_rebuilt(run(tmp_path, *CASES[name]))
    records = reader.rollouts(1)
    if "branches" in name:
        taken = [r for r in records if r.origin is not None]
        assert taken and any(r.own_tokens < r.tokens for r in taken)
        assert reader.metrics_by_step()[1]["tokens_shared"] > 0
        for r in taken:  # what was taken over is id by id the trunk's
            trunk = next(t for t in records if t.group_id == r.group_id and t.member == int(r.origin[0]))
            size = int((r.origin == trunk.member).sum())
            assert r.response_ids[:size].tolist() == trunk.response_ids[:size].tolist()
    if name == "demonstrations":
        assert [r.member for r in records if r.demonstration] == [3] * 4
        assert reader.metrics_by_step()[1]["tokens_sampled"] == sum(r.tokens for r in records if not r.demonstration)
    if name == "entropy with a target":
        assert [row["entropy_bonus"] for row in reader.metrics_by_step().values() if "entropy_bonus" in row] == [0.015]


def test_steps_are_recorded_with_their_tokens_and_add_up_with_the_final_reward(tmp_path: Path) -> None:
    reader = RunReader(run(tmp_path, "objective.preset=grpo_turn", "train.steps=1"))
    seen = 0
    for r in reader.rollouts(1):
        assert r.reward == pytest.approx(r.final + sum(s.score for s in r.steps))
        ends = [t for t in range(len(r.loss_mask)) if r.loss_mask[t] and not r.loss_mask[t + 1 : t + 2].any()]
        assert [s.token for s in r.steps] == ends[: len(r.steps)]
        assert {s.part for s in r.steps} <= {"guess_progress"}
        seen += len(r.steps)
    assert seen > 16


def test_a_critic_learns_to_explain_returns_while_the_policy_stands_still(tmp_path: Path) -> None:
    settings = ("objective.preset=ppo", "critic.pretrain_steps=7", "train.steps=8", "critic.learning_rate=0.01")
    reader = RunReader(run(tmp_path, *settings, "reward.1.weight=3.0", "objective.kl.estimator=none"))
    rows = reader.metrics_by_step()
    assert all(rows[step]["loss"] is None and rows[step]["updates"] == 0 for step in range(1, 8))
    assert rows[8]["updates"] == 1
    losses = [rows[step]["critic/loss"] for step in range(1, 9)]
    assert min(losses[-3:]) < 0.7 * losses[0]


@pytest.mark.parametrize("trunk", ["own", "shared"])
def test_a_resumed_critic_goes_on_to_the_same_bits(trunk: str, tmp_path: Path) -> None:
    more = ("objective.preset=ppo", f"critic.trunk={trunk}", "checkpoint.every=1", "checkpoint.final=true")
    straight = run(tmp_path / "a", *more)
    stopped = run(tmp_path / "b", *more)
    last = stopped / "checkpoints" / "step-000002"
    for path in sorted(last.rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
    last.rmdir()
    build.resume(stopped, None, Silent())
    from gropius.train.sameness import compare

    found = compare(straight, stopped)
    assert found.difference == "" and found.counts["tensors of critic"] >= 2
    names = {path.name for path in (straight / "checkpoints" / "step-000002" / "model").iterdir()}
    assert not any("critic" in name for name in names)


def test_the_critics_gradient_does_not_depend_on_how_the_batch_is_laid_out(tmp_path: Path) -> None:
    rows = survey.invariance(
        resolve(RECIPE, [f'out="{tmp_path}"', "objective.preset=ppo", "objective.advantage.credit=turn"]), Silent()
    )
    critic = [row for row in rows if row.name.startswith("critic")]
    assert len(critic) >= 4 and all(row.held for row in rows), [(r.name, r.found) for r in rows]
    assert torch.is_grad_enabled() and dataclasses.is_dataclass(critic[0])
