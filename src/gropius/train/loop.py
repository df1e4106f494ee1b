"""GRPO as the papers write it: sample groups, score, compare siblings, update, record, go on.

Everything here is order and bookkeeping. What a number means is in `objective/`, how it is computed fast in `pack`,
`forward` and `step`, how responses are drawn in `rollout/`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from gropius.doctor.watch import Watch
from gropius.models.load import LoadedModel
from gropius.recipe.resolve import Resolved
from gropius.records.faults import reached
from gropius.records.metrics import step_metrics
from gropius.records.sinks import Sinks
from gropius.records.writer import RunWriter
from gropius.rewards import InProcessScorer, MixedScorer
from gropius.rollout import waiting
from gropius.rollout.branch import Branching
from gropius.rollout.collect import CollectPlan, Player
from gropius.rollout.select import Selected, SelectionRule, collect_selected
from gropius.tasks.base import TaskSet
from gropius.train import advance, checkup, ending, keep, memory, randomness, schedule, trained
from gropius.train.ahead import Ahead, Drawn
from gropius.train.credit import Credit, Known, compare, needs_anchor_pass
from gropius.train.critic import Critic
from gropius.train.deadline import within
from gropius.train.evaluate import HeldOut, Limits, evaluate
from gropius.train.hand_over import hand_over
from gropius.train.interrupt import StopRequest
from gropius.train.keep import Keeper
from gropius.train.order import TaskOrder
from gropius.train.progress import Progress
from gropius.train.randomness import Randomness
from gropius.train.reference import Reference, refer, score_reference
from gropius.train.require import require_agreement, sampling_of
from gropius.train.sequences import cut
from gropius.train.step import Learner, UpdateReport
from gropius.train.stream import Stream
from gropius.train.trained import Work


@dataclass
class State:
    """What a run has done so far; with weights, optimiser and reference, all that decides what comes next.

    held_out: the mean measured on exactly these weights, None where none was; best: the highest so far. pack_tokens:
    the budget of a micro-batch where memory made it smaller than the recipe's, else 0. scorer: its counts.
    waiting: groups that were begun and are gone on with in the next step. stage: the place in the group schedule.
    stream: what a stream of groups remembers.
    entropy_coefficient: η where a target moves it, None before it moved; entropy_in_force: added in the next step.
    """

    step: int = 0
    position: int = 0
    num_tokens: int = 0
    tokens_sampled: int = 0
    tokens_trained: int = 0
    skipped_in_a_row: int = 0
    agreed: bool = False
    measured: dict[str, float] = field(default_factory=dict)
    held_out: float | None = None
    best: float | None = None
    pack_tokens: int = 0
    scorer: dict[str, Any] = field(default_factory=dict)
    waiting: list[dict[str, Any]] = field(default_factory=list)
    stage: dict[str, Any] = field(default_factory=dict)
    stream: dict[str, Any] = field(default_factory=dict)
    entropy_coefficient: float | None = None
    entropy_in_force: bool = True


@dataclass(eq=False)
class Run:
    """Everything one run is made of; `build` makes it."""

    plan: Resolved
    loaded: LoadedModel
    tasks: TaskSet
    player: Player
    learner: Learner
    reference: Reference | None
    part_weights: dict[str, float]
    writer: RunWriter
    progress: Progress
    state: State
    stop: StopRequest
    keeper: Keeper
    copies: Sinks
    origin: dict[str, Any]
    randomness: Randomness
    digest: str = ""
    watch: Watch | None = None
    judge: InProcessScorer | MixedScorer | None = None
    critic: Critic | None = None
    ahead: tuple[Drawn, ...] = ()


def train(run: Run) -> Path:
    """Run all remaining rounds; the folder of the run.

    Errors: RunHalted and its kinds at a safe point; Interrupted when asked to stop (the state is saved first).
    """
    try:
        return all_rounds(run)
    except KeyboardInterrupt:
        raise ending.stopped_at_once(run) from None
    finally:
        run.copies.close()
        run.keeper.wait()


def all_rounds(run: Run) -> Path:
    """The rounds themselves, between the two measurements."""
    plan, state = run.plan, run.state
    order = TaskOrder(run.tasks.train, plan.seed, state.position)
    began = time.monotonic()
    ahead = batches(run, order)
    hand_over_weights(run)
    measure_at_the_ends(run, "before")
    if plan.sft.steps and plan.checkpoint.every and state.step == 0:
        keep.unless_kept(run)  # a warm start is not cheap
    if run.stop.asked and state.step < plan.train.steps:
        raise ending.interrupted(run)
    try:
        for step in range(state.step + 1, plan.train.steps + 1):
            one_round(run, ahead, order, (step, began))
    finally:
        ahead.close()
    run.keeper.wait()
    reached("run.trained")
    measure_at_the_ends(run, "after")
    reached("run.measured")
    checkup.at_the_end(run)
    return run.writer.folder


def batches(run: Run, order: TaskOrder) -> Ahead | Stream:
    """Where the batches come from; a stream of groups where one is asked for and may be older than its step."""
    if run.plan.train.stream != "off" and run.plan.train.max_staleness:
        return Stream(run, order, lambda step: collecting(run.plan, run.loaded, step)[0])
    return Ahead(run, order, lambda step: sample(run, order, step))


def one_round(run: Run, ahead: Ahead | Stream, order: TaskOrder, at: tuple[int, float]) -> None:
    """One step: a batch, what is known of it, the updates, the hand-over, and what is written down.

    at: the step, and when the first of this program began. Errors: Interrupted when it was asked to be the last.
    """
    plan, state, (step, began) = run.plan, run.state, at
    start, cpu_start = time.perf_counter(), time.process_time()
    drawn = ahead.take(step)
    batch, taken = drawn.batch, time.perf_counter()
    ahead.begin(step)
    reached("step.sampled")
    known = score(run, batch, check_sampler=shows_agreement(run, drawn, ahead))
    credit = compare(plan.objective, batch.groups, known, plan.train.updates, run.part_weights)
    known = refer(run, credit, known)
    with run.stop.held():
        in_force = run.learner.bonus
        reports = update(run, credit, known)
        advance.adapt_bonus(run, reports)
        ahead.settle()
        hand_over_weights(run)
        advance.refresh_reference(run, step)
        reached("step.updated")
        state.step, state.position, run.ahead = step, order.position, ahead.waiting()
        state.waiting = [waiting.as_json(group) for group in ahead.begun(batch)]
        state.stream = ahead.memory()
        run.randomness = randomness.capture()
        end = time.perf_counter()
        times = {"step_time": end - start, "sampling_time_s": taken - start, "training_time_s": end - taken}
        times |= ahead.measured(drawn, end - start) | {"cpu_time_s": time.process_time() - cpu_start}
        record(run, batch, credit, advance.work_of(run, known, reports, in_force), times)
        reached("step.recorded")
        keep.when_due(run)
        checkup.when_due(run)
        if run.stop.asked or (plan.train.max_time_s and time.monotonic() - began > plan.train.max_time_s):
            raise ending.interrupted(run)


def collecting(plan: Resolved, loaded: LoadedModel, step: int, siblings: int = 0) -> tuple[CollectPlan, SelectionRule]:
    """How a step's groups are drawn, and what becomes of those without signal. siblings: 0 is the recipe's number."""
    rollout, objective = plan.rollout, plan.objective
    drawn = CollectPlan(
        sampling=sampling_of(plan, loaded),
        group_size=siblings or rollout.group_size,
        seed=plan.seed,
        step=step,
        max_turns=rollout.max_turns,
        max_episode_tokens=rollout.max_episode_tokens,
        greedy_baseline=objective.advantage.baseline == "greedy",
        branching=Branching.of(rollout.branches, rollout.branch_at, rollout.branch_choice),
        demonstrations=rollout.demonstrations,
    )
    return drawn, SelectionRule(
        objective.selection.dead, rollout.refill_attempts, rollout.grow_limit, rollout.oversample, rollout.cut
    )


async def sample(run: Run, order: TaskOrder, step: int) -> Selected:
    """G answers to each prompt from the current policy, scored; dead groups treated as the objective says."""
    prompts, siblings = schedule.groups_of(run.plan.rollout, step, schedule.Stage(**run.state.stage))
    plan, rule = collecting(run.plan, run.loaded, step, siblings)
    begun = waiting.from_json(run.state.waiting, run.tasks)
    selected = await within(
        run.player,
        run.plan.train.deadline_s,
        lambda player: collect_selected(order.take, prompts, plan, player, rule, begun),
    )
    if selected.shortfall is not None:
        run.progress.note(f"step {step}: {selected.shortfall}")
    return selected


def score(run: Run, batch: Selected, check_sampler: bool) -> Known:
    """Log-probabilities that must be known before advantages: the anchor's; the reference's for a KL in the reward.

    check_sampler: compare the policy with what the sampler reported, and stop before a weight has moved.
    """
    objective, plan = run.plan.objective, run.plan.train
    rows = cut(batch.groups)
    anchor = entropy = reference = None
    needed = needs_anchor_pass(objective, plan.updates * plan.epochs)
    if needed or check_sampler:
        entropies = objective.selection.entropy_top < 1
        scores = memory.with_less(run, lambda: run.learner.score(rows, entropy=entropies))
        if check_sampler:
            require_agreement(run, batch, scores.logprobs)
        if needed:
            anchor, entropy = scores.logprobs, scores.entropies
    if run.reference is not None and objective.kl.place == "reward":
        reference = score_reference(run, run.reference, rows)
    found = Known(anchor, entropy if objective.selection.entropy_top < 1 else None, reference)
    return advance.looked_at(run, found, rows)


def shows_agreement(run: Run, drawn: Drawn, ahead: Ahead | Stream) -> bool:
    """Must this batch show that sampler and trainer agree? One of older weights cannot; another is looked at for it,
    and where the run draws no more there is nothing left to agree on. In a stream, what is of the weights as they are.
    """
    if run.state.agreed or drawn.digest == run.digest or isinstance(ahead, Stream):
        return not run.state.agreed
    fresh = ahead.fresh()
    run.state.agreed = fresh is None
    if fresh is not None:
        rows = cut(fresh.batch.groups)
        require_agreement(run, fresh.batch, memory.with_less(run, lambda: run.learner.score(rows)).logprobs)
    return False


def update(run: Run, credit: Credit, known: Known) -> list[list[UpdateReport]]:
    """Optimiser steps: `epochs` passes over the parts of the batch, the anchor fixed for all of them."""
    reports: list[list[UpdateReport]] = []
    for _ in range(run.plan.train.epochs):
        reports.append([])
        for k, whole in enumerate(credit.parts):
            part = advance.made_fresh(run, whole, first=not any(map(bool, reports)))
            if len(reports) == 1:
                credit.parts[k] = part
            report = advance.update(run, part, known)
            if report is not None:
                reports[-1].append(report)
                advance.watch(run, report, part.sequences)
    return reports


def hand_over_weights(run: Run) -> None:
    """The engine samples from the policy as it is now; its completions carry the version and digest."""
    run.digest = hand_over(run)


def record(run: Run, batch: Selected, credit: Credit, work: Work, times: dict[str, float]) -> None:
    """Write the step's rollouts and metrics, and show the line."""
    plan, state = run.plan, run.state
    rows = trained.records(state.step, batch.groups, batch.dropped, credit, work, run.player.chat.decode)
    metrics = step_metrics(rows, state.num_tokens)
    metrics |= trained.metrics(work, batch.groups, times) | batch.budget.metrics()
    stage = schedule.measured(plan.rollout, schedule.Stage(**state.stage), metrics)
    state.stage = dataclasses.asdict(stage)
    for name in ("tokens_sampled", "tokens_skipped"):  # what was cut and thrown away is in no record
        metrics[name] = (metrics[name] or 0) + batch.budget.aborted_tokens
    metrics["tokens_per_s"] = (metrics["tokens_sampled"] or 0) / max(times["step_time"], 1e-9)
    state.held_out = None
    if plan.eval.every and state.step % plan.eval.every == 0 and state.step < plan.train.steps:
        found = measure(run, f"step {state.step}")
        metrics |= found.metrics()
        state.held_out = found.mean.value
    state.num_tokens = int(metrics["num_tokens"] or 0)
    state.tokens_sampled += int(metrics["tokens_sampled"] or 0)
    state.tokens_trained += int(metrics["tokens_trained"] or 0)
    if plan.record.rollouts:
        run.writer.write_rollouts(state.step, rows, token_lists=plan.record.token_logprobs)
    run.writer.write_metrics(state.step, metrics)
    run.copies.write(state.step, metrics)
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
    found, _ = await within(
        player,
        plan.train.deadline_s,
        lambda watched: evaluate(held_out, watched, sampling, plan.eval.samples, limits),
    )
    return found


def measure_at_the_ends(run: Run, label: Literal["before", "after"]) -> None:
    """Evaluate before the first step or after the last, once each, and keep it in metrics.jsonl."""
    state, wanted = run.state, getattr(run.plan.eval, label)
    if not wanted or not run.tasks.held_out or label in state.measured:
        return
    found = measure(run, label).metrics()
    state.measured[label] = found["held_out/mean"]
    run.writer.write_metrics(state.step, found)
    run.copies.write(state.step, found)
