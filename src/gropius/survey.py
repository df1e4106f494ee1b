"""What a recipe is asked without training it: held-out quality, invariance, pass rates, cost, and its data's faults."""

from __future__ import annotations

import asyncio
from contextlib import closing
from pathlib import Path

from gropius import build
from gropius.plan.counts import PassCounts
from gropius.recipe.resolve import Resolved
from gropius.rewards.gold import unusable_gold
from gropius.tasks.preflight import Finding, overlong
from gropius.tasks.preflight import preflight as look_over
from gropius.train import estimating, loop, pass_rates, randomness
from gropius.train.conversation import conversation
from gropius.train.critic_checks import critic_invariances
from gropius.train.evaluate import HeldOut
from gropius.train.invariance import Invariance
from gropius.train.optim import OptimiserSettings
from gropius.train.processes import every_invariance
from gropius.train.progress import Progress
from gropius.train.trial import one_batch


def evaluate(resolved: Resolved, progress: Progress, folder: Path | None = None) -> HeldOut:
    """Measure a recipe's model, or the one in `folder`, on the held-out tasks."""
    with closing(build.open_parts(resolved, progress, folder)) as parts:
        parts.player.engine.set_policy(0, parts.loaded.digest())
        return asyncio.run(loop.evaluate_held_out(resolved, parts.loaded, parts.player))


def invariance(resolved: Resolved, progress: Progress) -> list[Invariance]:
    """Draw and score one batch of the recipe, and compare its gradient under every layout of the work."""
    randomness.seed_all(resolved.seed)
    with closing(build.open_parts(resolved, progress)) as parts:
        learner = build.learner_for(resolved, parts, resolved.objective, OptimiserSettings())
        if resolved.sft.steps:
            build.warm_up(resolved, parts, progress)
        parts.player.engine.set_policy(0, parts.loaded.digest())
        critic = build.critic_for(resolved, learner, parts.loaded)
        batch = asyncio.run(one_batch(resolved, parts.loaded, parts.player, learner, critic))
        found = every_invariance(learner.forward, resolved.objective, learner.settings, batch)
        return found if critic is None else [*found, *critic_invariances(critic, batch)]


def pass_counts(resolved: Resolved, prompts: int, progress: Progress) -> PassCounts:
    """How often the recipe's model, warm-started where it says so, solves `prompts` of its own tasks."""
    randomness.seed_all(resolved.seed)
    with closing(build.open_parts(resolved, progress)) as parts:
        if resolved.sft.steps:
            build.warm_up(resolved, parts, progress)
        parts.player.engine.set_policy(0, parts.loaded.digest())
        return asyncio.run(pass_rates.pass_counts(resolved, parts.loaded, parts.player, prompts))


def estimate(resolved: Resolved, progress: Progress, clock: estimating.Clock = estimating.WALL) -> estimating.Estimate:
    """Time of a step and peak memory of a recipe on this machine; no weight moves and no run folder is left."""
    with closing(build.open_parts(resolved, progress)) as parts:
        return estimating.estimate(resolved, estimating.Bench(parts.loaded, parts.player, clock=clock))


def preflight(resolved: Resolved, measure: bool = False) -> list[Finding]:
    """What is wrong with a recipe's data and rewards, without a step. measure: load the model, to measure the prompts.

    Errors: DataError, RecipeError, SafetyRefusal, ModelError for what cannot be opened at all.
    """
    found = build.tasks(resolved)
    build.isolation(resolved, found)
    with closing(build.scorer(resolved, found)) as judge:
        programs = any(part.name == "code" for part in judge.parts)
        findings = [*look_over(found, programs), *unusable_gold(found, judge.parts)]
    if measure:
        chat = conversation(resolved, found, loaded := build.model(resolved))
        length = lambda task: len(chat.prompt_ids(task.messages()))  # noqa: E731
        every = (*found.train, *found.held_out)
        findings += overlong(every, length, loaded.context_length, resolved.rollout.max_tokens)
    return findings
