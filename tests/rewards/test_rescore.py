"""Laws of scoring a finished run again: the same reward changes nothing, another one shows what it would have done."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gropius.cli.main import main
from gropius.errors import RunFolderError
from gropius.objective.presets import resolve as resolve_objective
from gropius.records.schema import records_of
from gropius.rewards import load_scorer
from gropius.rewards.rescore import StepChange, rescore
from gropius.tasks import load_tasks
from gropius.tasks.base import TaskSet
from gropius.types import Episode, Group, Turn

sys.path.insert(0, str(Path(__file__).parents[1] / "train"))
HERE = Path(".")
OBJECTIVE = resolve_objective("grpo", {"kl": {"estimator": "none"}})


def tasks() -> TaskSet:
    return load_tasks("times_table", {"high": 4, "held_out": 2}, 0, {}, None, HERE)


def recorded(found: TaskSet, replies: list[list[str]], name: str) -> Any:
    scorer = load_scorer([{"name": name}], HERE)
    groups = []
    for number, (task, said) in enumerate(zip(found.train, replies, strict=False)):
        episodes = [
            Episode(
                task, f"000001-{number:04d}", member, np.zeros(2, np.int64),
                (Turn("model", np.arange(3), text, np.full(3, -1.0, np.float32), np.full(3, -1.0, np.float32)),),
                (*task.messages(), {"role": "assistant", "content": text}), "stop",
            )
            for member, text in enumerate(said)
        ]  # fmt: skip
        verdicts = asyncio.run(scorer.score(episodes))
        judged = tuple(replace(e, verdict=v) for e, v in zip(episodes, verdicts, strict=True))
        groups.append(Group(judged[0].group_id, task, judged))
    return records_of(1, groups, {}, lambda ids: "")


def again(records: Any, found: TaskSet, name: str) -> StepChange:
    scorer = load_scorer([{"name": name}], HERE)
    return asyncio.run(rescore(records, found, (scorer, scorer.parts), OBJECTIVE))


def test_the_same_reward_changes_nothing() -> None:
    found = tasks()
    gold = [t.answer for t in found.train[:2]]
    records = recorded(found, [[gold[0], "0"], ["not " + gold[1], gold[1]]], "math")
    change = again(records, found, "math")
    assert change.changes == [] and (change.turned, change.moved) == (0, 0.0)
    assert change.reward_before == change.reward_after == 0.5


def test_a_stricter_reward_shows_the_responses_and_groups_it_would_have_changed() -> None:
    found = tasks()
    gold = [t.answer for t in found.train[:2]]
    records = recorded(found, [[f"It is not {gold[0]}.", "0"], [gold[1], "0"]], "last_number")
    change = again(records, found, "math")
    assert [(c.group_id, c.member, c.before.value, c.after.value) for c in change.changes] == [
        ("000001-0000", 0, 1.0, 0.0)
    ]
    assert (change.informative_before, change.informative_after, change.groups) == (2, 1, 2)
    assert change.turned == 2 and change.moved == pytest.approx(0.5)  # advantages ±1 of one group become 0
    assert (change.reward_before, change.reward_after) == (0.5, 0.25)
    assert json.loads(json.dumps(change.as_dict()))["changed"] == 1


def test_a_response_of_another_data_set_is_refused() -> None:
    found = tasks()
    records = recorded(found, [["1", "2"]], "math")
    other = load_tasks("arithmetic", {"rows": [5, 2]}, 0, {}, None, HERE)
    with pytest.raises(RunFolderError, match="no task times_table"):
        again(records, other, "exact")


@pytest.mark.parametrize("source", ["arithmetic", "guess_number"])
def test_a_real_run_rescored_by_its_own_reward_is_unchanged(
    source: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from small import run_small

    quiet = ["train.steps=1", "eval.before=false", "eval.after=false", f"data.source={source}"]
    game = ["data.options={rows=[8,4]}", 'reward=[{name="environment"}]', "rollout.max_turns=3", "rollout.max_tokens=3"]
    folder, _ = run_small(tmp_path, *quiet, *(game if source == "guess_number" else []))
    with pytest.raises(SystemExit) as caught:
        main(["rescore", str(folder), "--json"])
    report = json.loads(capsys.readouterr().out)
    assert caught.value.code in (0, None)
    assert report["steps"][0]["changed"] == 0 and report["steps"][0]["responses"] == 16
    with pytest.raises(SystemExit):
        main(["rescore", str(folder), "--reward", "length", "--set", "reward.0.options={minimum=1}"])
    assert "turned" in capsys.readouterr().out


def test_a_missing_step_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from small import run_small

    folder, _ = run_small(tmp_path, "train.steps=1", "eval.before=false", "eval.after=false")
    with pytest.raises(SystemExit) as caught:
        main(["rescore", str(folder), "--step", "7"])
    assert caught.value.code == 2 and "step 7" in capsys.readouterr().err
