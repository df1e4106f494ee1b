"""Nobody is waited for without an end, and the halt says who was late."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from small import run_small

from gropius.errors import EngineError, RewardError
from gropius.records.reader import RunReader
from gropius.rewards.base import InProcessScorer
from gropius.rollout.torch_engine import TorchEngine
from gropius.train.deadline import Waits


async def never(*_: object, **__: object) -> None:
    await asyncio.Event().wait()


def test_an_engine_that_hangs_halts_the_run_and_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TorchEngine, "complete", never)
    with pytest.raises(EngineError, match=r"the rollout engine is late: group 000001-0000, member 0 .*16 are waiting"):
        run_small(tmp_path, "train.deadline_s=0.2", "eval.before=false")
    assert RunReader(tmp_path / "small").steps() == []


def test_a_reward_that_hangs_halts_the_run_and_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(InProcessScorer, "score", never)
    with pytest.raises(RewardError, match=r"the reward is late: group 000001-000\d, member \d \(task "):
        run_small(tmp_path, "train.deadline_s=0.5", "eval.before=false")


def test_an_answer_of_anybody_starts_the_clock_anew() -> None:
    async def course() -> None:
        clock = asyncio.get_running_loop().time
        waits = Waits(clock() - 100)
        assert waits.late(clock(), 50) is None  # nobody is waited for
        with waits.on("the reward", "one"):
            assert isinstance(waits.late(clock(), 50), RewardError)
            with waits.on("the rollout engine", "two"):
                pass
            assert waits.late(clock(), 50) is None

    asyncio.run(course())
