"""One batch drawn, scored and compared as training would, without a step being taken: what checks are made on."""

from __future__ import annotations

from gropius.models.load import LoadedModel
from gropius.recipe.resolve import Resolved
from gropius.rollout.collect import Player
from gropius.rollout.select import collect_selected
from gropius.train.advance import energies_of
from gropius.train.credit import Known, compare, needs_anchor_pass
from gropius.train.critic import Critic
from gropius.train.invariance import Batch
from gropius.train.loop import collecting
from gropius.train.order import TaskOrder
from gropius.train.sequences import cut
from gropius.train.step import Learner


async def one_batch(
    plan: Resolved, loaded: LoadedModel, player: Player, learner: Learner, critic: Critic | None = None
) -> Batch:
    """The first optimiser batch of a recipe. The policy stands in for the reference, which it is at the start."""
    objective = plan.objective
    drawn, rule = collecting(plan, loaded, step=1)
    order = TaskOrder(player.tasks.train, plan.seed)
    selected = await collect_selected(order.take, plan.rollout.prompts, drawn, player, rule)
    rows = cut(selected.groups)
    scores = learner.score(rows, entropy=objective.selection.entropy_top < 1)
    needed = needs_anchor_pass(objective, plan.train.updates * plan.train.epochs)
    known = Known(
        anchor=scores.logprobs if needed else None,
        entropy=scores.entropies if objective.selection.entropy_top < 1 else None,
        reference=scores.logprobs if objective.needs_reference else None,
        values=None if critic is None else critic.values(rows),
        energy=energies_of(learner, rows) if objective.advantage.baseline == "optimal_token" else None,
    )
    weights = {part.name: part.weight for part in getattr(player.scorer, "parts", ())}
    part = compare(objective, selected.groups, known, plan.train.updates, weights).parts[0]
    arrays = (known.anchor, known.reference, known.values)
    return Batch(part.sequences, *(None if values is None else [values[i] for i in part.rows] for values in arrays))
