"""GRPO as the papers write it: sample groups, score, compare siblings, update, record, go on.

Everything here is order and bookkeeping. What a number means is in `objective/`, how it is computed fast in `pack`,
`forward` and `step`, how responses are drawn in `rollout/`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from gropius.errors import Interrupted, RunHalted
from gropius.models.load import LoadedModel
from gropius.recipe.resolve import Resolved
from gropius.records.metrics import step_metrics
from gropius.records.writer import RunWriter
from gropius.rollout.collect import CollectPlan, Player
from gropius.rollout.select import Selected, SelectionRule, collect_selected
from gropius.tasks.base import TaskSet
from gropius.train import checkpoint, keep, mismatch, trained
from gropius.train.credit import Credit, Known, compare, needs_anchor_pass
from gropius.train.evaluate import HeldOut, Limits, evaluate
from gropius.train.forward import Forward
from gropius.train.interrupt import StopRequest
from gropius.train.order import TaskOrder
from gropius.train.progress import Progress
from gropius.train.sequences import cut
from gropius.train.step import Learner, UpdateReport
from gropius.train.trained import Work
from gropius.types import Sampling

HALT_AFTER_SKIPS = 3


@dataclass
class State:
    """What a run has done so far; with weights, optimiser and reference, all that decides what comes next."""

    step: int = 0
    position: int = 0
    num_tokens: int = 0
    tokens_sampled: int = 0
    tokens_trained: int = 0
    skipped_in_a_row: int = 0
    agreed: bool = False
    measured: dict[str, float] = field(default_factory=dict)


@dataclass(eq=False)
class Run:
    """Everything one run is made of; `build` makes it."""

    plan: Resolved
    loaded: LoadedModel
    tasks: TaskSet
    player: Player
    learner: Learner
    reference: Forward | None
    part_weights: dict[str, float]
    writer: RunWriter
    progress: Progress
    state: State
    stop: StopRequest


def sampling_of(plan: Resolved, loaded: LoadedModel) -> Sampling:
    """How training responses are drawn: what the recipe says, and the model's own stop tokens."""
    r = plan.rollout
    stops = loaded.stop_token_ids
    return Sampling(r.max_tokens, r.temperature, r.top_p, r.top_k, r.min_p, stops, r.stop_strings)


def train(run: Run) -> Path:
    """Run all remaining rounds; the folder of the run.

    Errors: RunHalted and its kinds at a safe point; Interrupted when asked to stop (the state is saved first).
    """
    plan, state = run.plan, run.state
    order = TaskOrder(run.tasks.train, plan.seed, state.position)
    began = time.monotonic()
    hand_over_weights(run)
    measure_at_the_ends(run, "before")
    for step in range(state.step + 1, plan.train.steps + 1):
        start = time.perf_counter()
        batch = asyncio.run(sample(run, order, step))
        drawn = time.perf_counter()
        known = score(run, batch, check_sampler=not state.agreed)
        credit = compare(plan.objective, batch.groups, known, plan.train.updates, run.part_weights)
        reports = update(run, credit, known)
        hand_over_weights(run)
        refresh_reference(run, step)
        state.step, state.position = step, order.position
        end = time.perf_counter()
        times = {"step_time": end - start, "sampling_time_s": drawn - start, "training_time_s": end - drawn}
        record(run, batch, credit, Work(known, reports), times)
        keep.when_due(run)
        if run.stop.asked or (plan.train.max_time_s and time.monotonic() - began > plan.train.max_time_s):
            raise interrupted(run)
    measure_at_the_ends(run, "after")
    return run.writer.folder


async def sample(run: Run, order: TaskOrder, step: int) -> Selected:
    """G answers to each prompt from the current policy, scored; dead groups treated as the objective says."""
    rollout, objective = run.plan.rollout, run.plan.objective
    plan = CollectPlan(
        sampling=sampling_of(run.plan, run.loaded),
        group_size=rollout.group_size,
        seed=run.plan.seed,
        step=step,
        max_turns=rollout.max_turns,
        max_episode_tokens=rollout.max_episode_tokens,
        greedy_baseline=objective.advantage.baseline == "greedy",
    )
    rule = SelectionRule(objective.selection.dead, rollout.refill_attempts, rollout.grow_limit)
    selected = await collect_selected(order.take, rollout.prompts, plan, run.player, rule)
    if selected.shortfall is not None:
        run.progress.note(f"step {step}: {selected.shortfall}")
    return selected


def score(run: Run, batch: Selected, check_sampler: bool) -> Known:
    """Log-probabilities that must be known before the first update: the anchor's, the reference's, or neither.

    check_sampler: compare the policy with what the sampler reported, and stop before a weight has moved.
    """
    objective, plan = run.plan.objective, run.plan.train
    rows = cut(batch.groups)
    anchor = entropy = reference = None
    needed = needs_anchor_pass(objective, plan.updates * plan.epochs)
    if needed or check_sampler:
        scores = run.learner.score(rows, entropy=objective.selection.entropy_top < 1)
        if check_sampler:
            require_agreement(run, batch, scores.logprobs)
        if needed:
            anchor, entropy = scores.logprobs, scores.entropies
    if run.reference is not None:
        reference = run.learner.score(rows, forward=run.reference).logprobs
    return Known(anchor, entropy if objective.selection.entropy_top < 1 else None, reference)


def update(run: Run, credit: Credit, known: Known) -> list[list[UpdateReport]]:
    """Optimiser steps: `epochs` passes over the parts of the batch, the anchor fixed for all of them."""
    reports: list[list[UpdateReport]] = []
    for _ in range(run.plan.train.epochs):
        reports.append([])
        for part in credit.parts:
            anchor, reference = pick(known.anchor, part.rows), pick(known.reference, part.rows)
            report = run.learner.update(part.sequences, anchor, reference)
            reports[-1].append(report)
            watch(run, report)
    return reports


def pick(values: Sequence[Any] | None, rows: Sequence[int]) -> list[Any] | None:
    """The rows of a list, or None of none."""
    return None if values is None else [values[i] for i in rows]


def watch(run: Run, report: UpdateReport) -> None:
    """Say when a step was not taken because a number was not finite; halt when that goes on."""
    if report.taken or not report.culprits:
        run.state.skipped_in_a_row = 0
        return
    run.state.skipped_in_a_row += 1
    run.progress.note(f"step {run.state.step + 1}: {report.refused}; the weights were not touched")
    if run.state.skipped_in_a_row >= HALT_AFTER_SKIPS:
        raise RunHalted(
            f"{report.refused} in {HALT_AFTER_SKIPS} updates in a row; the weights are those before them. Lower "
            f"train.learning_rate or set train.grad_clip; `gropius resume {run.writer.folder}` goes on from the last "
            "checkpoint"
        )


def hand_over_weights(run: Run) -> None:
    """The engine samples from the policy as it is now; its completions carry the version and digest."""
    run.player.engine.set_policy(run.learner.optimiser.steps, checkpoint.weight_digest(run.loaded.model))


def refresh_reference(run: Run, step: int) -> None:
    """Every `train.reference_refresh` steps the reference becomes the policy as it is now; 0 leaves it fixed."""
    every = run.plan.train.reference_refresh
    if run.reference is not None and every and step % every == 0:
        policy = dict(run.loaded.model.named_parameters())
        with torch.no_grad():
            for name, parameter in run.reference.model.named_parameters():
                parameter.copy_(policy[name])


def require_agreement(run: Run, batch: Selected, logprobs: Sequence[Any]) -> None:
    """Stop the run when trainer and sampler give one token two log-probabilities, and say why."""
    episodes = [episode for group in batch.groups for episode in group.episodes]
    rows = cut(batch.groups)

    def rescore(temperature: float) -> Sequence[Any]:
        learner = run.learner
        settings = dataclasses.replace(learner.settings, temperature=temperature)
        return Learner(learner.forward, learner.objective, learner.optimiser, settings).score(rows).logprobs

    sampling, digest = sampling_of(run.plan, run.loaded), checkpoint.weight_digest(run.loaded.model)
    found = mismatch.require_agreement(
        episodes, logprobs, mismatch.Expected(run.plan.train.mismatch_bound, sampling, digest), rescore
    )
    run.state.agreed = True
    run.progress.note(
        f"sampler and trainer agree: |difference| mean {found.mean:.2g}, largest {found.largest:.2g} nats over "
        f"{found.tokens} tokens (bound {run.plan.train.mismatch_bound:g})"
    )


def record(run: Run, batch: Selected, credit: Credit, work: Work, times: dict[str, float]) -> None:
    """Write the step's rollouts and metrics, and show the line."""
    plan, state = run.plan, run.state
    rows = trained.records(state.step, batch.groups, batch.dropped, credit, work, run.player.chat.decode)
    metrics = step_metrics(rows, state.num_tokens)
    metrics |= trained.metrics(work, batch.groups, times)
    metrics["tokens_per_s"] = (metrics["tokens_sampled"] or 0) / max(times["step_time"], 1e-9)
    if plan.eval.every and state.step % plan.eval.every == 0 and state.step < plan.train.steps:
        metrics |= measure(run, f"step {state.step}").metrics()
    state.num_tokens = int(metrics["num_tokens"] or 0)
    state.tokens_sampled += int(metrics["tokens_sampled"] or 0)
    state.tokens_trained += int(metrics["tokens_trained"] or 0)
    if plan.record.rollouts:
        run.writer.write_rollouts(state.step, rows, token_lists=plan.record.token_logprobs)
    run.writer.write_metrics(state.step, metrics)
    run.progress.step(state.step, plan.train.steps, metrics)


def measure(run: Run, label: str) -> HeldOut:
    """Evaluate on the held-out tasks and show it."""
    found = asyncio.run(evaluate_held_out(run.plan, run.loaded, run.player))
    run.progress.held_out(label, found)
    return found


async def evaluate_held_out(plan: Resolved, loaded: LoadedModel, player: Player) -> HeldOut:
    """mean@k, pass@k and maj@k of a policy on the recipe's held-out tasks, at the evaluation's temperature."""
    held_out = player.tasks.held_out[: plan.eval.tasks or None]
    sampling = dataclasses.replace(sampling_of(plan, loaded), temperature=plan.eval.temperature)
    limits = Limits(plan.seed, plan.rollout.max_turns, plan.rollout.max_episode_tokens)
    found, _ = await evaluate(held_out, player, sampling, plan.eval.samples, limits)
    return found


def measure_at_the_ends(run: Run, label: Literal["before", "after"]) -> None:
    """Evaluate before the first step or after the last, once each, and keep it in metrics.jsonl."""
    state, wanted = run.state, getattr(run.plan.eval, label)
    if not wanted or not run.tasks.held_out or label in state.measured:
        return
    found = measure(run, label).metrics()
    state.measured[label] = found["held_out/mean"]
    run.writer.write_metrics(state.step, found)


def interrupted(run: Run) -> Interrupted:
    """What a person reads who stopped a run: that it is saved, and how to go on."""
    keep.now(run)
    state, folder = run.state, run.writer.folder
    error = Interrupted(
        f"stopped after step {state.step} of {run.plan.train.steps}, as asked; everything is saved. "
        f"Go on with: gropius resume {folder}"
    )
    error.exit_code = 128 + run.stop.asked
    return error
