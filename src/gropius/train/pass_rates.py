"""How often a recipe's model solves its own tasks: groups drawn and scored as training would, and no step taken."""

from __future__ import annotations

import numpy as np

from gropius.errors import DataError
from gropius.models.load import LoadedModel
from gropius.plan.counts import PassCounts
from gropius.recipe.resolve import Resolved
from gropius.rollout.collect import Player, collect, raw_metric
from gropius.train.loop import collecting
from gropius.train.order import TaskOrder
from gropius.types import Group

SOLVED = 1.0


async def pass_counts(plan: Resolved, loaded: LoadedModel, player: Player, prompts: int) -> PassCounts:
    """Counts of solved responses to the first `prompts` tasks of training, `rollout.group_size` responses each.

    All tasks where there are fewer, each once. `rollout.prompts` are drawn at a time, so memory is that of training.
    A response counts as solved when its unshaped metric (its reward where there is none) is at least 1; void ones
    leave. Errors: DataError when nothing could be scored.
    """
    order = TaskOrder(player.tasks.train, plan.seed)
    wanted = min(prompts, len(player.tasks.train))
    groups: list[Group] = []
    for step, first in enumerate(range(0, wanted, plan.rollout.prompts), start=1):
        drawn, _ = collecting(plan, loaded, step)
        groups += await collect(order.take(min(plan.rollout.prompts, wanted - first)), drawn, player)
    return counted(groups)


def counted(groups: list[Group]) -> PassCounts:
    """Counts of groups at hand, those without a verdict left out. Errors: DataError when none is left."""
    rows, tokens, responses = [], 0, 0
    for group in groups:
        values = [value for episode in group.episodes if (value := raw_metric(episode)) is not None]
        if values:
            rows.append((sum(value >= SOLVED for value in values), len(values)))
        responses += len(group.episodes)
        tokens += sum(int(episode.loss_mask.sum()) for episode in group.episodes)
    if not rows:
        raise DataError("no response of the probe has a verdict, so there is no pass rate: see that the reward runs")
    table = np.asarray(rows, np.int64)
    step = np.zeros(len(table), np.int64)
    return PassCounts(table[:, 0], table[:, 1], step, "probe", tokens / responses)
