"""A stream of groups: who drew which token is known, none is too old, nothing is lost, and nothing is trained twice."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import functools
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small import run_small, small_recipe
from tests.rollout.hosts import InThread

from gropius import build
from gropius.errors import EngineError, RecipeError
from gropius.records.reader import RunReader
from gropius.rollout import stretch
from gropius.train import checkpoint, loop
from gropius.train.progress import Silent
from gropius.train.stream import Stream

QUIET = ("eval.before=false", "eval.after=false", "train.learning_rate=3e-3", "train.steps=5")
LONG = ("rollout.max_tokens=16", "rollout.token_budget=600")  # some wait for a place, so they end at different times
WAYS = ["between_tokens", "between_responses"]
APART = ("cluster.engines=1",)
LORA = ("model.lora.rank=4", "train.learning_rate=1e-2")


def train(out: Path, name: str, *settings: str) -> Path:
    return run_small(out, *QUIET, f'name="{name}"', *settings)[0]


def stream(way: str, staleness: int = 2) -> tuple[str, ...]:
    return (f"train.stream={way}", f"train.max_staleness={staleness}", *LONG)


def keys(folder: Path) -> list[list[tuple[Any, ...]]]:
    reader = RunReader(folder)
    return [[(r.group_id, r.member, r.task_key) for r in reader.rollouts(step)] for step in reader.steps()]


def said(folder: Path) -> list[list[tuple[int, ...]]]:
    reader = RunReader(folder)
    return [[tuple(r.response_ids) for r in reader.rollouts(step)] for step in reader.steps()]


def versions_of(row: Any) -> np.ndarray:
    return np.full(len(row.response_ids), row.policy_version) if row.versions is None else row.versions


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> tuple[dict[int, Any], list[Any]]:
    """Weights by version, and the episodes of every batch, of the runs to come."""
    models: dict[int, Any] = {}
    episodes: list[Any] = []
    hand_over, score = loop.hand_over_weights, loop.score

    def handed(run: Any) -> None:
        hand_over(run)
        models[run.learner.optimiser.steps] = copy.deepcopy(run.loaded.model)

    def scored(run: Any, batch: Any, check_sampler: bool) -> Any:
        episodes.extend((run.state.step + 1, episode) for group in batch.groups for episode in group.episodes)
        return score(run, batch, check_sampler)

    monkeypatch.setattr(loop, "hand_over_weights", handed)
    monkeypatch.setattr(loop, "score", scored)
    return models, episodes


@pytest.mark.parametrize("where", [(), APART, LORA, LORA + APART], ids=["beside", "apart", "adapter", "adapter apart"])
@pytest.mark.parametrize("way", WAYS)
def test_every_token_was_drawn_by_the_version_that_it_carries(
    way: str, where: tuple, apart: list, trained: Any, tmp_path: Path
) -> None:
    """Its log-probability is that of a forward pass under those weights; the versions of a response never go back."""
    train(tmp_path, "a", *stream(way), *where)
    models, episodes = trained
    several = 0
    for _, episode in episodes:
        (turn,) = episode.turns
        versions = np.full(len(turn.token_ids), episode.policy_version) if turn.versions is None else turn.versions
        assert (np.diff(versions) >= 0).all()
        several += len(set(versions.tolist())) > 1
        ids = torch.tensor([[*episode.prompt_ids, *turn.token_ids]])
        for version in set(versions.tolist()):
            with torch.no_grad():
                found = models[version](ids).logits[0, len(episode.prompt_ids) - 1 : -1].log_softmax(-1)
            found = found.gather(-1, torch.tensor(turn.token_ids)[:, None])[:, 0].numpy()
            np.testing.assert_allclose(turn.logprobs[versions == version], found[versions == version], atol=2e-4)
    assert len(models) > 3 and (several > 0 if way == "between_tokens" and APART[0] not in where else True)
    assert several == 0 or way == "between_tokens"


@pytest.mark.parametrize("where", [(), APART], ids=["beside", "apart"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("staleness", [1, 3])
def test_who_waits_trains_every_group_once_in_its_own_step_and_on_no_token_that_is_too_old(
    way: str, staleness: int, where: tuple, apart: list, tmp_path: Path
) -> None:
    folder = train(tmp_path, "a", *stream(way, staleness), *where)
    assert keys(folder) == keys(train(tmp_path, "synchronous", *LONG))
    reader = RunReader(folder)
    made = [0]
    for step in range(1, 6):
        metrics = reader.metrics_by_step()[step]
        oldest = min(int(versions_of(row).min()) for row in reader.rollouts(step) if len(row.response_ids))
        assert oldest >= made[max(0, step - 1 - staleness)]
        assert metrics["staleness/mean"] <= metrics["staleness/max"] <= min(staleness, step - 1)
        made.append(made[-1] + int(metrics["updates"]))
    assert max(metrics["staleness/max"] or 0 for metrics in reader.metrics()) >= 1


@pytest.mark.parametrize("way", WAYS)
def test_of_no_staleness_it_is_the_synchronous_run_bit_by_bit(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it is chosen, and where a stream that may hold one batch draws it."""
    synchronous = train(tmp_path, "a", *LONG)
    chosen = train(tmp_path, "b", *stream(way, 0))

    def streamed(run: Any, order: Any) -> Stream:
        return Stream(run, order, lambda step: loop.collecting(run.plan, run.loaded, step)[0])

    monkeypatch.setattr(loop, "batches", streamed)
    forced = train(tmp_path, "c", *stream(way, 0))
    for other in (chosen, forced):
        assert bits(synchronous) == bits(other)


def bits(folder: Path) -> tuple[Any, ...]:
    """Every response as it was drawn and what became of it, and the weights at the end."""
    reader = RunReader(folder)
    rows = [
        (r.group_id, r.task_key, tuple(r.response_ids), r.sampler.tobytes(), r.policy.tobytes(), r.weight_digest)
        for step in reader.steps()
        for r in reader.rollouts(step)
    ]
    return rows, checkpoint.load(checkpoint.newest(folder / "checkpoints").folder).facts["weights"]


@pytest.mark.parametrize("where", [(), APART], ids=["beside", "apart"])
@pytest.mark.parametrize("way", WAYS)
def test_while_the_weights_stay_as_they_are_a_stream_draws_what_the_synchronous_run_draws(
    way: str, where: tuple, apart: list, tmp_path: Path
) -> None:
    """Wherever a response is cut, it is gone on with at the same place of its own random stream."""
    still = "train.learning_rate=1e-30"
    assert said(train(tmp_path, "a", *LONG, still)) == said(train(tmp_path, "b", *stream(way), *where, still))


def test_drawing_goes_on_while_the_trainer_trains(apart: list, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A response of step 2 is held back until the update of step 1 has begun, and that waits until it is drawn."""
    training, drawn, honest = threading.Event(), threading.Event(), InThread._counted

    async def counted(self: InThread, request: Any) -> Any:
        if request.stream[1] == 2:
            while not training.is_set():
                await asyncio.sleep(0.001)
        completion = await honest(self, request)
        if request.stream[1] == 2:
            drawn.set()
        return completion

    monkeypatch.setattr(InThread, "_counted", counted)
    update = loop.update

    def waiting(run: Any, *given: Any) -> Any:
        training.set()
        assert drawn.wait(20)
        return update(run, *given)

    monkeypatch.setattr(loop, "update", waiting)
    metrics = RunReader(train(tmp_path, "a", *stream("between_tokens", 1), *APART)).metrics_by_step()
    assert metrics[2]["weights/version"] >= 1 and metrics[5]["staleness/max"] >= 1


@pytest.mark.parametrize("where", [(), APART], ids=["beside", "apart"])
@pytest.mark.parametrize("way", WAYS)
def test_a_run_goes_on_with_what_was_on_its_way_and_draws_no_token_of_it_twice(
    way: str, where: tuple, apart: list, tmp_path: Path
) -> None:
    straight = train(tmp_path, "small", *stream(way), "checkpoint.every=1", "checkpoint.keep_last=9", *where)
    rows = {(r.group_id, r.member): r for step in range(1, 6) for r in RunReader(straight).rollouts(step)}
    kept = 0
    for step in (1, 3):
        again = tmp_path / f"from-{step}"
        shutil.copytree(straight, again)
        for later in range(step + 1, 6):
            shutil.rmtree(again / "checkpoints" / f"step-{later:06d}")
        version = checkpoint.load(again / "checkpoints" / f"step-{step:06d}").facts["optimiser_steps"]
        build.resume(again, None, Silent())
        assert keys(again) == keys(straight)
        for later in range(step + 1, 6):
            assert RunReader(again).metrics_by_step()[later]["staleness/max"] <= 2  # when a version was made is known
            for row in RunReader(again).rollouts(later):
                mine, theirs = (versions_of(r) < version for r in (row, rows[row.group_id, row.member]))
                before = rows[row.group_id, row.member]
                assert row.response_ids[mine].tolist() == before.response_ids[theirs].tolist()
                assert row.sampler[mine].tobytes() == before.sampler[theirs].tobytes()
                kept += int(mine.sum())
    assert kept > 0


def held_back(monkeypatch: pytest.MonkeyPatch, step: int, index: int) -> None:
    """One group draws no more than a token for each response between two hand-overs."""
    honest = stretch._Valve.complete

    async def complete(self: Any, request: Any) -> Any:
        if request.stream[1:3] != (step, index):
            return await honest(self, request)
        short = dataclasses.replace(request.sampling, max_tokens=1)
        completion = await honest(self, dataclasses.replace(request, sampling=short))
        return dataclasses.replace(completion, finish_reason="cancelled")

    monkeypatch.setattr(stretch._Valve, "complete", complete)


def test_who_drops_throws_a_group_away_that_has_become_too_old_and_counts_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held_back(monkeypatch, 1, 2)
    folder = train(tmp_path, "a", *stream("between_tokens", 1), "train.stale=drop")
    every = [key for step in keys(folder) for key in step]
    assert len(every) == len(set(every)) == 5 * 16 and not any(key[0] == "000001-0002" for key in every)
    metrics = RunReader(folder).metrics_by_step()
    assert [metrics[step]["responses_aborted"] for step in range(1, 6)] == [0, 0, 4, 0, 0]
    assert metrics[3]["tokens_aborted"] == 8 and metrics[3]["groups_begun"] == 5
    assert [metrics[step]["responses_resumed"] for step in range(1, 6)] == [0, 4, 0, 0, 0]
    assert metrics[2]["tokens_resumed"] == 4
    assert all(metrics[step]["staleness/max"] <= 1 for step in range(1, 6))
    state = checkpoint.load(checkpoint.newest(folder / "checkpoints").folder).facts["state"]
    assert state["position"] == state["stream"]["admitted"] == 5 * 4 + 1 and not state["stream"]["untrained"]


def test_a_group_that_was_complete_too_late_is_recorded_as_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first four to be complete are trained each time; one of step 1 is complete, and never among them."""
    chosen = Stream._chosen

    def others_first(self: Any, step: int) -> Any:
        if step < 3 and 3 in self._over:
            self._over[3] = self._over.pop(3)
        return chosen(self, step)

    monkeypatch.setattr(Stream, "_chosen", others_first)
    monkeypatch.setattr(Stream, "_is_full", lambda self, step: len(self._over) >= (8 if step < 3 else 4))
    folder = train(tmp_path, "a", *stream("between_responses", 1), "train.stale=drop")
    metrics = RunReader(folder).metrics_by_step()
    assert metrics[3]["tokens_dropped"] > 0 and [metrics[step]["tokens_dropped"] for step in (1, 2, 4)] == [0, 0, 0]
    (dropped,) = {row.group_id for row in RunReader(folder).rollouts(3) if row.skipped and row.update < 0}
    assert dropped == "000001-0003"


def test_weights_that_did_not_arrive_end_the_run(apart: list, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = InThread.__init__

    def forgetful(self: InThread, *given: Any, **named: Any) -> None:
        honest(self, *given, **named)
        self.engine.set_policy = functools.partial(keep_first, self.engine, self.engine.set_policy)  # type: ignore

    monkeypatch.setattr(InThread, "__init__", forgetful)
    with pytest.raises(EngineError, match="the engine did not take the weights over"):
        train(tmp_path, "a", *stream("between_tokens"), *APART)


def keep_first(engine: Any, take: Any, version: int, digest: str) -> None:
    """The right weights under the name of the first."""
    if engine._digest:
        engine._path.refresh()
    else:
        take(version, digest)


def test_an_engine_that_is_killed_in_a_stream_changes_no_group(apart: list, tmp_path: Path) -> None:
    def killed(self: InThread, *given: Any, **named: Any) -> None:
        honest(self, *given, dies_after=20 if not apart else None, **named)

    honest = InThread.__init__
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InThread, "__init__", killed)
        folder = train(tmp_path, "a", *stream("between_tokens"), *APART)
    assert len(apart) == 2 and keys(folder) == keys(train(tmp_path, "b", *LONG))


@pytest.mark.parametrize("first, then", [("stream", "ahead"), ("ahead", "stream")])
def test_a_fork_that_goes_on_otherwise_draws_anew_what_was_not_trained(first: str, then: str, tmp_path: Path) -> None:
    how = {"stream": stream("between_tokens"), "ahead": ("train.max_staleness=2", *LONG)}
    source = train(tmp_path, "source", *how[first], "checkpoint.every=1", "checkpoint.keep_last=9")
    plan = small_recipe(tmp_path, *QUIET, 'name="other"', *how[then])
    folder = build.fork(plan, (source, 2), Silent())
    assert keys(folder) == keys(source)[2:]


@pytest.mark.parametrize(
    "setting, words",
    [
        ("objective.selection.dead=refill", "selection.dead"),
        (
            "rollout.oversample=2.0",
            r'oversample = 1.0 \(train.stale = "drop" trains on the groups that are complete first',
        ),
        ('rollout.stop_strings=["."]', "stop_strings"),
        ("cluster.trainer_ranks=2", "cluster.engines = 1 or more, or trainer_ranks = 1"),
        ("rollout.branches=2", "branches = 1"),
    ],
)
def test_what_a_stream_does_not_go_with_is_refused(setting: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=f"(?s)train.stream.*{words}"):
        small_recipe(tmp_path, *QUIET, *stream("between_tokens"), setting)


def test_what_becomes_of_stale_groups_is_a_matter_of_streams(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"train\.stale.*would do nothing"):
        small_recipe(tmp_path, *QUIET, "train.stale=drop")
