"""Relations between the keys of branches, demonstrations and the critic: rows for `rules`. No torch."""

from __future__ import annotations

from gropius.recipe.draft import Contradiction, Effect, divisor

CONTRADICTIONS: tuple[Contradiction, ...] = (
    Contradiction(
        "rollout.branches",
        lambda d: d.recipe.rollout.group_size % d.recipe.rollout.branches != 0,
        lambda d: (
            f"{d.recipe.rollout.group_size} siblings do not divide into trunks of {d.recipe.rollout.branches}; "
            f"write branches = {divisor(d.recipe.rollout.group_size, d.recipe.rollout.branches)}"
        ),
    ),
    Contradiction(
        "rollout.branch_at",
        lambda d: (
            d.recipe.rollout.branches > 1 and d.recipe.rollout.branch_at == "turn" and d.recipe.rollout.max_turns == 1
        ),
        lambda d: 'one turn has no later one to branch before; write branch_at = "token", or max_turns above 1',
    ),
    Contradiction(
        "rollout.stop_strings",
        lambda d: (
            d.recipe.rollout.branches > 1
            and d.recipe.rollout.branch_at == "token"
            and bool(d.recipe.rollout.stop_strings)
        ),
        lambda d: 'a stop string could begin in the trunk and end in a branch; write branch_at = "turn", or remove it',
    ),
    Contradiction(
        "rollout.demonstrations",
        lambda d: d.recipe.rollout.demonstrations >= d.recipe.rollout.group_size,
        lambda d: (
            f"a group of {d.recipe.rollout.group_size} would have no sampled sibling; "
            f"write demonstrations = 1 or a larger group_size"
        ),
    ),
    Contradiction(
        "rollout.demonstrations",
        lambda d: d.recipe.rollout.demonstrations > 0 and (d.recipe.rollout.branches > 1 or d.reads_sampler),
        lambda d: (
            "a teacher's tokens have no log-probability under the sampler; write branches = 1, "
            'objective.ratio.anchor = "snapshot" and objective.ratio.correction = "none"'
        ),
    ),
    Contradiction(
        "rollout.oversample",
        lambda d: (
            d.recipe.rollout.oversample > 1 and (d.recipe.rollout.branches > 1 or d.recipe.rollout.demonstrations > 0)
        ),
        lambda d: (
            "a group with branches or demonstrations is not cut; write oversample = 1.0, or branches = 1 and "
            "demonstrations = 0"
        ),
    ),
    Contradiction(
        "rollout.group_schedule.sizes",
        lambda d: any(size % d.recipe.rollout.branches for size in d.recipe.rollout.group_schedule.sizes),
        lambda d: f"every size divides into trunks of {d.recipe.rollout.branches}; write multiples of it",
    ),
    Contradiction(
        "critic.epochs",
        lambda d: (
            d.objective.needs_critic
            and d.recipe.critic.trunk == "shared"
            and d.recipe.critic.coefficient > 0
            and d.recipe.critic.epochs > 1
        ),
        lambda d: (
            "a value loss in the policy's own gradient has as many passes as the policy; "
            "write epochs = 1, or coefficient = 0"
        ),
    ),
    Contradiction(
        "critic.pretrain_steps",
        lambda d: d.objective.needs_critic and d.recipe.critic.pretrain_steps >= d.recipe.train.steps,
        lambda d: (
            f"the policy would never move in train.steps = {d.recipe.train.steps}; write pretrain_steps below that"
        ),
    ),
    Contradiction(
        "objective.advantage.k",
        lambda d: d.objective.advantage.k > d.recipe.rollout.group_size,
        lambda d: (
            f"the best of {d.objective.advantage.k} needs a group of as many; write rollout.group_size = "
            f"{2 * d.objective.advantage.k} or a smaller k"
        ),
    ),
)

EFFECTS: tuple[Effect, ...] = (
    Effect("rollout.branch_at", lambda d: d.recipe.rollout.branches > 1, "rollout.branches above 1"),
    Effect("rollout.branch_choice", lambda d: d.recipe.rollout.branches > 1, "rollout.branches above 1"),
    Effect("critic.", lambda d: d.objective.needs_critic, 'objective.advantage.baseline = "critic"'),
    Effect("critic.coefficient", lambda d: d.recipe.critic.trunk == "shared", 'critic.trunk = "shared"'),
    Effect(
        "critic.final_ratio", lambda d: d.recipe.critic.schedule != "constant", 'critic.schedule = "linear" or "cosine"'
    ),
)
