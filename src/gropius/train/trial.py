"""One batch drawn, scored and compared as training would, without a step being taken: what checks are made on."""

from __future__ import annotations

from gropius.models.load import LoadedModel
from gropius.recipe.resolve import Resolved
from gropius.rollout.collect import Player
from gropius.rollout.select import collect_selected
from gropius.train.credit import Known, compare, needs_anchor_pass
from gropius.train.invariance import Batch
from gropius.train.loop import collecting
from gropius.train.order import TaskOrder
from gropius.train.sequences import cut
from gropius.train.step import Learner


async def one_batch(plan: Resolved, loaded: LoadedModel, player: Player, learner: Learner) -> Batch:
    """The first optimiser batch of a recipe. The policy stands in for the reference, which it is at the start."""
    objective = plan.objective
    drawn, rule = collecting(plan, loaded, step=1)
    order = TaskOrder(player.tasks.train, plan.seed)
    selected = await collect_selected(order.take, plan.rollout.prompts, drawn, player, rule)
    scores = learner.score(cut(selected.groups), entropy=objective.selection.entropy_top < 1)
    needed = needs_anchor_pass(objective, plan.train.updates * plan.train.epochs)
    known = Known(
        anchor=scores.logprobs if needed else None,
        entropy=scores.entropies if objective.selection.entropy_top < 1 else None,
        reference=scores.logprobs if objective.needs_reference else None,
    )
    weights = {part.name: part.weight for part in getattr(player.scorer, "parts", ())}
    part = compare(objective, selected.groups, known, plan.train.updates, weights).parts[0]
    anchor = None if known.anchor is None else [known.anchor[i] for i in part.rows]
    reference = None if known.reference is None else [known.reference[i] for i in part.rows]
    return Batch(part.sequences, anchor, reference)
