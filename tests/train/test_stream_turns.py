"""A stream of groups whose episodes have several turns: an environment is played again, and no turn is lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_credit_runs import RECIPE

from gropius import build
from gropius.recipe import resolve
from gropius.records.reader import RunReader
from gropius.rollout import stretch
from gropius.rollout.engine import empty_completion
from gropius.train import loop
from gropius.train.progress import Silent

STEPS = 4
STILL = "train.learning_rate=1e-30"
WAYS = ["between_tokens", "between_responses"]


def train(out: Path, name: str, *settings: str) -> Path:
    words = [f'out="{out}"', f'name="{name}"', f"train.steps={STEPS}", "rollout.token_budget=500", *settings]
    return build.train(resolve(RECIPE, words), Silent())


def streamed(way: str) -> tuple[str, ...]:
    return (f"train.stream={way}", "train.max_staleness=2")


def said(folder: Path) -> list[list[tuple]]:
    reader = RunReader(folder)
    return [
        [(r.group_id, r.member, tuple(r.response_ids), r.reward, tuple(r.loss_mask)) for r in reader.rollouts(n)]
        for n in reader.steps()
    ]


@pytest.mark.parametrize("where", [(), ("cluster.engines=1",)], ids=["beside", "apart"])
@pytest.mark.parametrize("way", WAYS)
def test_while_the_weights_stay_a_game_goes_as_in_the_synchronous_run(
    way: str, where: tuple, apart: list, tmp_path: Path
) -> None:
    assert said(train(tmp_path, "a", *streamed(way), *where, STILL)) == said(train(tmp_path, "b", STILL))


@pytest.mark.parametrize("way", WAYS)
def test_later_turns_are_of_later_weights_and_every_game_is_trained_once(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The games of step 2 are stopped after their first turn, and go on when step 1 is trained."""
    episodes: list[Any] = []
    score, hand_over, complete = loop.score, loop.hand_over_weights, stretch._Valve.complete
    asked = set[Any]()
    handed = 0

    def scored(run: Any, batch: Any, check_sampler: bool) -> Any:
        episodes.append([episode for group in batch.groups for episode in group.episodes])
        return score(run, batch, check_sampler)

    def handed_over(run: Any) -> None:
        nonlocal handed
        hand_over(run)
        handed += 1

    async def completed(self: Any, request: Any) -> Any:
        if request.stream[1] == 2 and request.stream in asked and handed < 2:
            return empty_completion("cancelled", 0, "")
        asked.add(request.stream)
        return await complete(self, request)

    monkeypatch.setattr(loop, "score", scored)
    monkeypatch.setattr(loop, "hand_over_weights", handed_over)
    monkeypatch.setattr(stretch._Valve, "complete", completed)
    folder = train(tmp_path, "a", *streamed(way))
    every = [row[:2] for step in said(folder) for row in step]
    assert every == [(f"{n:06d}-{i:04d}", m) for n in range(1, STEPS + 1) for i in range(4) for m in range(4)]
    for episode in episodes[1]:
        first, *later = [versions_of(episode, turn) for turn in episode.turns if turn.role == "model"]
        assert set(first) == {0} and all(set(versions) == {1} for versions in later)
    assert any(sum(turn.role == "model" for turn in episode.turns) > 1 for episode in episodes[1])
    (updates,) = {row["updates"] for row in RunReader(folder).metrics() if "updates" in row}
    assert updates == 1 and RunReader(folder).metrics_by_step()[2]["staleness/max"] == 1


def versions_of(episode: Any, turn: Any) -> list[int]:
    return [episode.policy_version] * len(turn.token_ids) if turn.versions is None else turn.versions.tolist()
