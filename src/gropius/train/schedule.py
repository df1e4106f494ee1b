"""The size of groups over a run: early large, later small, at a constant number of responses in a step.

By step, or by what was measured: when few groups are dead, fewer siblings still differ, and more prompts can be tried
for the same price; when many are dead, more siblings find the one that differs. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from gropius.recipe.resolve import ResolvedRollout

DEAD = ("groups/all_failed", "groups/all_solved", "groups/all_equal")


@dataclass
class Stage:
    """Where a run is in its schedule. place: index of the size; shares: of dead groups, of the last steps with it."""

    place: int = 0
    shares: list[float] = field(default_factory=list)


def groups_of(rollout: ResolvedRollout, step: int, stage: Stage) -> tuple[int, int]:
    """(prompts, siblings) of a step; without a schedule those of the recipe.

    By step: the size whose step was reached last. By the share of dead groups: the size of the stage.
    """
    schedule = rollout.group_schedule
    if not schedule.sizes:
        return rollout.prompts, rollout.group_size
    place = sum(step >= begins for begins in schedule.steps) if schedule.steps else stage.place
    size = schedule.sizes[place]
    return rollout.prompts * rollout.group_size // size, size


def measured(rollout: ResolvedRollout, stage: Stage, metrics: Mapping[str, float | int | None]) -> Stage:
    """The stage after a step: the next size when the mean share of dead groups over the window is below the low mark,
    the one before when it is above the high one; the window then begins anew.
    """
    schedule = rollout.group_schedule
    if schedule.dead_share is None:
        return stage
    shares = [*stage.shares, sum(metrics.get(name) or 0.0 for name in DEAD)][-schedule.window :]
    if len(shares) < schedule.window:
        return Stage(stage.place, shares)
    mean, (low, high) = sum(shares) / len(shares), schedule.dead_share
    place = stage.place + (mean < low) - (mean > high)
    place = min(max(place, 0), len(schedule.sizes) - 1)
    return Stage(stage.place, shares) if place == stage.place else Stage(place)
