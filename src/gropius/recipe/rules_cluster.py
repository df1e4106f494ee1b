"""Rules about the processes of a run, in the form of `rules`. No torch."""

from __future__ import annotations

from gropius.naming import names_a_function
from gropius.recipe.draft import Contradiction, Draft, Effect

CONTRADICTIONS: tuple[Contradiction, ...] = (
    Contradiction(
        "cluster.trainer_ranks",
        lambda d: d.recipe.cluster.trainer_ranks > 1 and d.recipe.train.optimiser == "adamw_8bit",
        lambda d: (
            "moments in 8 bits are blocks of a whole parameter, a rank holds a part of each, and bitsandbytes, which "
            'computes them, knows no divided parameter; write train.optimiser = "adamw" (each rank holds its share '
            "of the moments), or trainer_ranks = 1"
        ),
    ),
    Contradiction(
        "cluster.trainer_ranks",
        lambda d: d.recipe.cluster.trainer_ranks > 1 and d.recipe.train.offload,
        lambda d: (
            "paged moments are bitsandbytes', which knows no divided parameter; write train.offload = false (each rank "
            "holds its share of the moments), or trainer_ranks = 1"
        ),
    ),
    Contradiction(
        "checkpoint.background",
        lambda d: (
            d.recipe.checkpoint.background and d.recipe.cluster.trainer_ranks > 1 and d.recipe.cluster.engines > 0
        ),
        lambda d: (
            "it saves from a copy of the whole model, and here no process holds one: ranks put it together a part at a "
            "time; write background = false"
        ),
    ),
    Contradiction(
        "cluster.engines",
        lambda d: d.recipe.cluster.engines > 0 and d.recipe.rollout.engine != "torch",
        lambda d: (
            'vLLM is a process of its own already (rollout.vllm.mode = "server"); write cluster.engines = 0, or '
            'rollout.engine = "torch"'
        ),
    ),
    Contradiction(
        "train.max_staleness",
        lambda d: d.recipe.train.max_staleness > 0 and d.recipe.rollout.cut == "resume",
        lambda d: (
            'a response that is cut and gone on with has tokens older than its batch; write rollout.cut = "abort", or '
            "train.max_staleness = 0"
        ),
    ),
    Contradiction(
        "train.stream",
        lambda d: d.recipe.train.stream != "off" and bool(_not_streamed(d)),
        lambda d: f'a stream of groups needs {", ".join(_not_streamed(d))}; or write train.stream = "off"',
    ),
    Contradiction(
        "train.max_staleness",
        lambda d: d.recipe.train.max_staleness >= d.recipe.train.steps,
        lambda d: (
            f"all {d.recipe.train.steps} steps would be drawn from the first weights; write less than train.steps"
        ),
    ),
)


def _not_streamed(draft: Draft) -> list[str]:
    """What a stream of groups does not go with, as it should be written."""
    recipe, rollout = draft.recipe, draft.recipe.rollout
    wanted = {
        'rollout.engine = "torch"': rollout.engine == "torch",
        "cluster.engines = 1 or more, or trainer_ranks = 1": (
            recipe.cluster.trainer_ranks == 1 or recipe.cluster.engines > 0
        ),
        'objective.selection.dead = "keep" or "drop"': draft.objective.selection.dead in ("keep", "drop"),
        'another objective.advantage.baseline than "greedy"': draft.objective.advantage.baseline != "greedy",
        'rollout.oversample = 1.0 (train.stale = "drop" trains on the groups that are complete first)': (
            rollout.oversample == 1
        ),
        "rollout.branches = 1": rollout.branches == 1,
        "rollout.demonstrations = 0": rollout.demonstrations == 0,
        "rollout.group_schedule.sizes = []": not rollout.group_schedule.sizes,
        "rollout.stop_strings = []": not rollout.stop_strings or recipe.train.stream == "between_responses",
    }
    return [write for write, holds in wanted.items() if not holds]


def _several(draft: Draft) -> bool:
    return draft.recipe.cluster.trainer_ranks > 1 or draft.recipe.cluster.engines > 0


EFFECTS: tuple[Effect, ...] = (
    Effect("train.stale", lambda d: d.recipe.train.stream != "off", 'train.stream other than "off"'),
    Effect(
        "cluster.reward_hosts",
        lambda d: any(names_a_function(part.name) for part in d.recipe.reward),
        'a [[reward]] of your own ("module:function"), which is what a pool runs',
    ),
    Effect("cluster.shard", lambda d: d.recipe.cluster.trainer_ranks > 1, "cluster.trainer_ranks above 1"),
    Effect("cluster.engine_devices", lambda d: d.recipe.cluster.engines > 0, "cluster.engines above 0"),
    *(
        Effect(f"cluster.{key}", _several, "cluster.trainer_ranks above 1, or cluster.engines above 0")
        for key in ("restarts", "deadline_s", "bind")
    ),
)
