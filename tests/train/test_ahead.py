"""Batches drawn ahead: exactly as stale as declared, the same bits wherever and whenever they were drawn."""

from __future__ import annotations

import functools
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small import run_small
from tests.rollout.hosts import InThread

from gropius import build
from gropius.errors import EngineError, RunHalted
from gropius.records.reader import RunReader
from gropius.train import checkpoint
from gropius.train.beside import Beside
from gropius.train.progress import Silent
from gropius.train.sameness import compare

QUIET = ("eval.before=false", "eval.after=false", "train.learning_rate=3e-3", "train.steps=6")
CORRECTED = ('objective.ratio.correction="truncate"', "objective.ratio.correction_high=2.0")


def train(out: Path, name: str, *settings: str) -> Path:
    return run_small(out, *QUIET, f'name="{name}"', *settings)[0]


def drawn(folder: Path) -> list[list[tuple[Any, ...]]]:
    """Step by step what every response is and who drew it, bit by bit."""
    reader = RunReader(folder)
    return [
        [
            (r.group_id, r.member, r.task_key, tuple(r.response_ids), r.sampler.tobytes(), r.weight_digest)
            for r in reader.rollouts(step)
        ]
        for step in reader.steps()
    ]


def weights(folder: Path) -> str:
    return str(checkpoint.load(checkpoint.newest(folder / "checkpoints").folder).facts["weights"])


@pytest.mark.parametrize("staleness", [1, 2, 4])
def test_every_batch_is_drawn_from_the_weights_of_so_many_steps_before(staleness: int, tmp_path: Path) -> None:
    reader = RunReader(train(tmp_path, "a", f"train.max_staleness={staleness}"))
    for step in range(1, 7):
        assert {row.policy_version for row in reader.rollouts(step)} == {version_after(reader, step - 1 - staleness)}
        metrics = reader.metrics_by_step()[step]
        assert metrics["staleness/mean"] == metrics["staleness/max"] == min(staleness, step - 1)
    assert version_after(reader, 6) > version_after(reader, 3) > 0


def version_after(reader: RunReader, step: int) -> int:
    """Optimiser steps taken up to a step."""
    return int(sum(row["updates"] for number, row in reader.metrics_by_step().items() if 1 <= number <= step))


def test_several_updates_a_step_are_one_version_of_staleness(tmp_path: Path) -> None:
    reader = RunReader(train(tmp_path, "a", "train.max_staleness=1", "train.updates=2", "train.epochs=2"))
    found = [{row.policy_version for row in reader.rollouts(step)} for step in range(1, 7)]
    assert found == [{version_after(reader, max(0, step - 2))} for step in range(1, 7)]
    assert version_after(reader, 6) > 6 and reader.metrics_by_step()[6]["staleness/max"] == 1


def test_a_step_trains_on_the_same_tasks_and_random_numbers_as_the_synchronous_run(tmp_path: Path) -> None:
    synchronous, ahead = train(tmp_path, "a"), train(tmp_path, "b", "train.max_staleness=2")
    keys = [[[row[:3] for row in step] for step in drawn(folder)] for folder in (synchronous, ahead)]
    assert keys[0] == keys[1] and drawn(synchronous)[0] == drawn(ahead)[0] and drawn(synchronous) != drawn(ahead)


@pytest.mark.parametrize("more", [(), CORRECTED, ("train.updates=2", "objective.preset=grpo")], ids=str)
@pytest.mark.parametrize("staleness", [0, 2])
def test_engines_apart_draw_meanwhile_and_the_run_has_the_same_bits(
    staleness: int, more: tuple[str, ...], apart: list, tmp_path: Path
) -> None:
    settings = [f"train.max_staleness={staleness}", *more]
    own = train(tmp_path, "own", *settings)
    other = train(tmp_path, "apart", *settings, "cluster.engines=1")
    assert len(apart) == 1 and drawn(own) == drawn(other) and weights(own) == weights(other)


def test_the_correction_is_the_anchors_probability_over_the_stale_samplers(tmp_path: Path) -> None:
    """Three policies: what drew, what the step begins with, what is moved."""
    reader = RunReader(train(tmp_path, "a", "train.max_staleness=2", *CORRECTED, "train.learning_rate=1e-2"))
    rows = [row for row in reader.rollouts(6) if row.anchor is not None and len(row.response_ids)]
    gaps = np.concatenate([np.abs(row.anchor - row.sampler) for row in rows])
    assert len(rows) > 4 and gaps.max() > 1e-3
    fresh = RunReader(train(tmp_path, "b", *CORRECTED, "train.learning_rate=1e-2"))
    rows = [row for row in fresh.rollouts(6) if row.anchor is not None and len(row.response_ids)]
    assert np.concatenate([np.abs(row.anchor - row.sampler) for row in rows]).max() < 1e-5


@pytest.mark.parametrize("where", [(), ("cluster.engines=1",)], ids=["beside", "apart"])
def test_a_run_goes_on_with_what_was_drawn_ahead_to_the_same_bits(where: tuple, apart: list, tmp_path: Path) -> None:
    settings = ["train.max_staleness=2", "checkpoint.every=1", "checkpoint.keep_last=9", *CORRECTED, *where]
    straight = train(tmp_path, "small", *settings)
    for step in (1, 3, 5):
        again = tmp_path / f"from-{step}"
        shutil.copytree(straight, again)
        for later in range(step + 1, 7):
            shutil.rmtree(again / "checkpoints" / f"step-{later:06d}")
        build.resume(again, None, Silent())
        found = compare(straight, again)
        assert found.difference == "" and found.counts["responses"] == 16 * 6


def test_after_a_pause_agreement_is_looked_for_on_a_batch_of_the_weights_as_they_are(tmp_path: Path) -> None:
    settings = ["train.max_staleness=2", "checkpoint.every=1", "checkpoint.keep_last=9", "train.learning_rate=0.1"]
    folder = train(tmp_path, "small", *settings)
    for later in range(4, 7):
        shutil.rmtree(folder / "checkpoints" / f"step-{later:06d}")
    progress = Silent()
    build.resume(folder, None, progress)
    (said,) = [note for note in progress.notes if note.startswith("sampler and trainer agree")]
    assert float(said.partition("largest ")[2].split()[0]) < 1e-4


def test_nothing_is_drawn_from_weights_that_did_not_arrive(apart: list, tmp_path: Path) -> None:
    honest = InThread.__init__

    def forgetful(self: InThread, *given: Any, **named: Any) -> None:
        honest(self, *given, **named)
        self.engine.set_policy = functools.partial(_keep_first, self.engine, self.engine.set_policy)  # type: ignore

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InThread, "__init__", forgetful)
        with pytest.raises(EngineError, match="the engine did not take the weights over"):
            train(tmp_path, "a", "train.max_staleness=1", "cluster.engines=1")


def _keep_first(engine: Any, take: Any, version: int, digest: str) -> None:
    if not engine._digest:
        take(version, digest)
    else:
        engine._path.refresh()  # the right weights under the wrong name


def test_a_void_batch_drawn_ahead_halts_its_own_step_and_is_drawn_again_when_the_cause_is_mended(
    tmp_path: Path,
) -> None:
    (tmp_path / "mine.py").write_text(
        "from pathlib import Path\n"
        "def score(episode):\n"
        "    if Path(__file__).with_name('broken').exists() and episode.group_id.startswith('000004'):\n"
        "        raise ValueError('the grader is out of disk')\n"
        "    return float(len(episode.completion) % 3)\n"
    )
    (tmp_path / "broken").touch()
    reward = f'reward=[{{name="{tmp_path}/mine.py:score"}}]'
    settings = ["train.max_staleness=2", "reward_pool.workers=1", "checkpoint.every=1", reward]
    with pytest.raises(RunHalted, match=r"step 4: 16 of 16 verdicts are void.*after step 3"):
        train(tmp_path, "small", *settings)
    (tmp_path / "broken").unlink()
    build.resume(tmp_path / "small", None, Silent())
    reader = RunReader(tmp_path / "small")
    assert reader.steps() == [1, 2, 3, 4, 5, 6]
    assert not any(row.status == "void" for step in reader.steps() for row in reader.rollouts(step))
    keys = [row.task_key for step in reader.steps() for row in reader.rollouts(step)]
    straight = RunReader(train(tmp_path, "straight", *settings))
    assert keys == [row.task_key for step in straight.steps() for row in straight.rollouts(step)]


def test_drawing_and_training_happen_at_the_same_time(
    apart: list, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The update of step 2 waits until the batch of step 3 is under way; in turn it would wait for ever."""
    under_way, honest = threading.Event(), InThread._counted

    async def counted(self: InThread, request: Any) -> Any:
        if request.stream[1] == 3:
            under_way.set()
        return await honest(self, request)

    monkeypatch.setattr(InThread, "_counted", counted)
    update = build.loop.update

    def waiting(run: Any, *given: Any) -> Any:
        if run.state.step == 1:
            assert under_way.wait(20)
        return update(run, *given)

    monkeypatch.setattr(build.loop, "update", waiting)
    metrics = RunReader(train(tmp_path, "a", "train.max_staleness=1", "cluster.engines=1")).metrics_by_step()[2]
    assert metrics["idle/trainer_s"] is not None and metrics["weights/version"] >= 1 and metrics["weights/bytes"] > 0


def test_what_fails_beside_is_raised_where_it_is_waited_for_and_what_is_cancelled_ends() -> None:
    import asyncio

    async def fails() -> int:
        raise EngineError("lost")

    with pytest.raises(EngineError, match="lost"):
        Beside(fails).result()
    ended: list[str] = []

    async def hangs() -> int:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("yes")
        return 0

    Beside(hangs).cancel()
    assert ended == ["yes"] and not [t for t in threading.enumerate() if t.name == "gropius-beside"]


def test_what_a_fork_draws_ahead_of_less_begins_where_its_data_goes_on(tmp_path: Path) -> None:
    from small import small_recipe

    source = train(tmp_path, "source", "train.max_staleness=2", "checkpoint.every=1", "checkpoint.keep_last=9")
    plan = small_recipe(tmp_path, *QUIET, 'name="less"')
    folder = build.fork(plan, (source, 3), Silent())
    keys = lambda where: [[row[:3] for row in step] for step in drawn(where)]  # noqa: E731
    assert keys(folder) == keys(source)[3:]


def test_a_critic_is_trained_on_batches_drawn_ahead_to_the_same_bits(apart: list, tmp_path: Path) -> None:
    settings = ("train.max_staleness=2", "objective.preset=ppo", "critic.learning_rate=0.01")
    own, other = train(tmp_path, "own", *settings), train(tmp_path, "apart", *settings, "cluster.engines=1")
    assert drawn(own) == drawn(other) and weights(own) == weights(other)
    reader = RunReader(own)
    losses = [reader.metrics_by_step()[step]["critic/loss"] for step in range(1, 7)]
    assert all(loss is not None and loss > 0 for loss in losses) and losses[-1] != losses[0]
    assert {row.policy_version for row in reader.rollouts(6)} == {version_after(reader, 3)}
