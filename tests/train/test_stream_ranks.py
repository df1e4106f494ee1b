"""A stream of groups that several ranks train on is that of one: engines draw on while all of them train."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from ranked import Ranked, ranked

from gropius.records.reader import RunReader
from gropius.train import checkpoint

STEPS = 4
QUIET = ["eval.before=false", "eval.after=false", f"train.steps={STEPS}", "objective.preset=grpo"]
LONG = ["rollout.max_tokens=16", "rollout.token_budget=600"]  # some wait for a place, so they end at different times
STILL = "train.learning_rate=1e-30"
WAYS = ["between_tokens", pytest.param("between_responses", marks=pytest.mark.slow)]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranked]:
    with ranked() as server:
        yield server


def trained(ranks: Ranked, out: Path, name: str, *settings: str, resume: Path | None = None) -> Path:
    """Two ranks, and one engine that draws for both in a thread of the first; no rank has the policy whole."""
    job = {"bucket": 20_000, "threads": True, "notes": str(out)}
    if resume is not None:
        return Path(ranks.run("divided", 2, resume=str(resume), settings=list(settings), **job))
    words = [f'out="{out}"', f'name="{name}"', *QUIET, *LONG, *settings]
    return Path(ranks.run("divided", 2, settings=words, **job))


def stream(way: str, *settings: str) -> list[str]:
    return [f"train.stream={way}", "train.max_staleness=2", "train.learning_rate=3e-3", *settings]


def said(folder: Path) -> list[list[tuple]]:
    reader = RunReader(folder)
    return [[(r.group_id, r.member, tuple(r.response_ids)) for r in reader.rollouts(n)] for n in reader.steps()]


def keys(folder: Path) -> list[list[tuple]]:
    return [[row[:2] for row in step] for step in said(folder)]


def versions_of(row: object) -> np.ndarray:
    return np.full(len(row.response_ids), row.policy_version) if row.versions is None else row.versions  # type: ignore


@pytest.mark.parametrize("way", WAYS)
def test_while_the_weights_stay_two_ranks_are_given_what_one_draws_in_turn(
    ranks: Ranked, way: str, tmp_path: Path
) -> None:
    alone = ranks.run("run", 1, settings=[f'out="{tmp_path}"', "name=alone", *QUIET, *LONG, STILL])
    assert said(trained(ranks, tmp_path, "two", *stream(way), STILL)) == said(Path(alone))


@pytest.mark.parametrize("stale", ["wait", pytest.param("drop", marks=pytest.mark.slow)])
@pytest.mark.parametrize("way", WAYS)
def test_every_group_is_trained_once_and_on_no_token_that_is_too_old(
    ranks: Ranked, way: str, stale: str, tmp_path: Path
) -> None:
    folder = trained(ranks, tmp_path, "two", *stream(way), f"train.stale={stale}")
    every = [key for step in keys(folder) for key in step]
    assert len(every) == len(set(every)) == STEPS * 16
    if stale == "wait":
        assert [{group.split("-")[0] for group, _ in step} for step in keys(folder)] == [
            {f"{n:06d}"} for n in range(1, STEPS + 1)
        ]
    reader, made = RunReader(folder), [0]
    for step in range(1, STEPS + 1):
        metrics = reader.metrics_by_step()[step]
        oldest = min(int(versions_of(row).min()) for row in reader.rollouts(step) if len(row.response_ids))
        assert oldest >= made[max(0, step - 3)] and metrics["staleness/max"] <= 2
        made.append(made[-1] + int(metrics["updates"]))
    assert made[-1] == STEPS and max(m["staleness/max"] or 0 for m in reader.metrics()) >= 1


@pytest.mark.slow
@pytest.mark.parametrize("way", ["between_tokens", "between_responses"])
def test_two_ranks_go_on_with_what_was_on_its_way_and_draw_no_token_of_it_twice(
    ranks: Ranked, way: str, tmp_path: Path
) -> None:
    straight = trained(ranks, tmp_path, "small", *stream(way), "checkpoint.every=1", "checkpoint.keep_last=9")
    rows = {(r.group_id, r.member): r for step in range(1, STEPS + 1) for r in RunReader(straight).rollouts(step)}
    again, kept = tmp_path / "again", 0
    shutil.copytree(straight, again)
    for later in range(2, STEPS + 1):
        shutil.rmtree(again / "checkpoints" / f"step-{later:06d}")
    version = checkpoint.load(again / "checkpoints" / "step-000001").facts["optimiser_steps"]
    trained(ranks, tmp_path, "", resume=again)
    assert keys(again) == keys(straight)
    for step in range(2, STEPS + 1):
        for row in RunReader(again).rollouts(step):
            before = rows[row.group_id, row.member]
            mine, theirs = (versions_of(r) < version for r in (row, before))
            assert row.response_ids[mine].tolist() == before.response_ids[theirs].tolist()
            assert row.sampler[mine].tobytes() == before.sampler[theirs].tobytes()
            kept += int(mine.sum())
    assert kept > 0
