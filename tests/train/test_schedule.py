"""Group sizes over a run: whole groups, a constant number of responses, and a place that follows from what was seen."""

from __future__ import annotations

from pathlib import Path

import pytest
from small import RECIPE, run_small

from gropius.errors import RecipeError
from gropius.recipe import resolve
from gropius.records.reader import RunReader
from gropius.train.schedule import Stage, groups_of, measured

SIZES = "rollout.group_schedule.sizes=[4,2]"


def rollout(*settings: str):
    return resolve(RECIPE, settings).rollout


def test_without_a_schedule_a_step_is_what_the_recipe_says() -> None:
    assert groups_of(rollout(), 99, Stage()) == (4, 4)
    assert measured(rollout(), Stage(), {"groups/all_failed": 1.0}) == Stage()


def test_by_step_each_size_begins_at_its_step_and_the_responses_stay() -> None:
    r = rollout("rollout.group_schedule.sizes=[4,2,8,1]", "rollout.group_schedule.steps=[3,5,9]",
                'objective.preset="reinforce"')  # fmt: skip
    found = [groups_of(r, step, Stage()) for step in (1, 2, 3, 4, 5, 8, 9, 100)]
    assert found == [(4, 4), (4, 4), (8, 2), (8, 2), (2, 8), (2, 8), (16, 1), (16, 1)]


def test_by_share_few_dead_groups_lead_to_the_next_size_and_many_back() -> None:
    r = rollout(SIZES, "rollout.group_schedule.dead_share=[0.25,0.75]", "rollout.group_schedule.window=2")
    shares = ((0, 0.125), (0.25, 0.25), (0.5, 0.5))
    few, half, many = ({"groups/all_failed": a, "groups/all_solved": b} for a, b in shares)
    stage = measured(r, Stage(), few)
    assert stage == Stage(0, [0.125])  # the window is not full
    stage = measured(r, stage, few)
    assert stage == Stage(1)
    assert groups_of(r, 1, stage) == (8, 2)
    stage = measured(r, measured(r, stage, half), half)
    assert stage == Stage(1, [0.5, 0.5])
    stage = measured(r, stage, many)
    assert stage == Stage(1, [0.5, 1.0])  # exactly on the mark stays
    stage = measured(r, stage, many)
    assert stage == Stage(0)
    assert measured(r, measured(r, stage, many), many) == Stage(0, [1.0, 1.0])  # there is no size before the first


def test_a_run_changes_its_groups_as_scheduled(tmp_path: Path) -> None:
    folder, _ = run_small(tmp_path, SIZES, "rollout.group_schedule.steps=[2]", "eval.before=false", "train.steps=2")
    sizes = []
    for step in (1, 2):
        rows = RunReader(folder).rollouts(step)
        groups = {row.group_id for row in rows}
        sizes.append((len(groups), len(rows)))
    assert sizes == [(4, 16), (8, 16)]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (["rollout.group_schedule.sizes=[8,2]", "rollout.group_schedule.steps=[3]"], "begins with rollout.group_size"),
        (["rollout.group_schedule.sizes=[4]", "rollout.group_schedule.steps=[]"], "at least two"),
        (["rollout.group_schedule.sizes=[4,3]", "rollout.group_schedule.steps=[3]"], "no whole number of groups of 3"),
        ([SIZES, "rollout.group_schedule.steps=[3]", "rollout.prompts=3", "train.updates=3",
          "rollout.group_schedule.sizes=[4,6]"], "for each of 3 updates"),
        (["rollout.group_schedule.sizes=[4,1]", "rollout.group_schedule.steps=[3]"], "no sibling"),
        ([SIZES], "write one of the two"),
        ([SIZES, "rollout.group_schedule.steps=[3]", "rollout.group_schedule.dead_share=[0.1,0.2]"], "one of the two"),
        ([SIZES, "rollout.group_schedule.steps=[3,9]"], "each of the 1 further sizes"),
        ([SIZES, "rollout.group_schedule.dead_share=[0.5,0.5]"], "low below high"),
        (["rollout.group_schedule.steps=[3]"], "sizes: is missing"),
        ([SIZES, "rollout.group_schedule.steps=[3]", "rollout.group_schedule.window=3"], "would do nothing"),
        (['rollout.cut="resume"'], "rollout.oversample above 1"),
        (["rollout.oversample=1.5", 'objective.selection.dead="grow"'], "no early stop"),
        (["rollout.oversample=1.5", 'rollout.cut="resume"', 'rollout.stop_strings=["x"]'], "across the cut"),
    ],
)  # fmt: skip
def test_a_schedule_that_cannot_hold_is_refused_with_what_to_write(settings: list[str], says: str) -> None:
    with pytest.raises(RecipeError, match=says):
        resolve(RECIPE, settings)
