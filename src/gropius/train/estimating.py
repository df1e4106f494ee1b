"""What a recipe will take on this machine, before anything is spent: time of a step and peak memory.

The model's speed is probed (`probe`), the recipe's own tasks are played for a few groups to know how long responses
are, how many groups carry signal and what turn-taking, scoring and records cost, and `plan.cost` does the arithmetic.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from gropius.models.chat import ChatFormat
from gropius.models.load import LoadedModel
from gropius.plan.cost import CostReport, Workload, cost
from gropius.plan.machines import Machine
from gropius.recipe.resolve import Resolved
from gropius.records.metrics import step_metrics
from gropius.records.writer import RunWriter
from gropius.rollout.collect import Player
from gropius.rollout.select import SelectionRule, collect_selected
from gropius.tasks.base import TaskSet
from gropius.train import trained
from gropius.train.credit import Known, compare, needs_anchor_pass
from gropius.train.loop import collecting
from gropius.train.order import TaskOrder
from gropius.train.probe import Probe, Settings, resident_bytes
from gropius.train.sequences import cut
from gropius.train.sft import demonstration
from gropius.train.trained import Work
from gropius.types import Group, Task

Clock = Callable[[], float]
WALL: Clock = time.perf_counter
POSITIONS = 16  # the sampler's cache is a multiple of so many positions long


@dataclass(frozen=True)
class Estimate:
    """report: phases, seconds and bytes. load: the step it is of. notes: what was played and what was assumed."""

    report: CostReport
    load: Workload
    machine: Machine
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Bench:
    """What an estimate works with: the parts of a run, and the clock.

    seconds: what probe and play may each take, roughly.
    """

    loaded: LoadedModel
    player: Player
    seconds: float = 10.0
    clock: Clock = WALL


def estimate(plan: Resolved, bench: Bench) -> Estimate:
    """Probe, play a few groups, and count. Nothing is trained; the weights are what they were."""
    tasks = bench.player.tasks
    on_cpu = bench.loaded.model.device.type == "cpu"
    base = resident_bytes() if on_cpu else 0.0  # weights and the sampler's copy of them are in it
    bench.player.engine.set_policy(0, bench.loaded.digest())
    load, notes = _expected(plan, tasks, bench)
    dtype, packs, budget = plan.model.dtype, plan.train.pack_tokens, plan.rollout.token_budget
    probe = Probe(bench.loaded, load, Settings(dtype, dtype, packs, budget, bench.seconds, bench.clock))
    base = max(base - (4 + load.rollout_bytes) * probe.shape.parameters, 0.0)
    machine, footprint = probe.machine(), probe.footprint(base)
    _play(plan, bench, 1)  # what is done once a process is not of a step
    played = _play(plan, bench, _affordable(load, probe, machine, bench.seconds))
    machine = replace(machine, response_s=machine.response_s + played.excess_s(probe, load, machine))
    if plan.sft.steps:
        notes.append("the warm start changes the policy: responses as long as the tasks' solutions, every group live")
    else:
        load = played.measured(plan, load)
        notes.append(
            f"played {len(played.groups)} groups with the policy as it is: responses of "
            f"{load.response_tokens:.1f} tokens (longest {load.response_tokens * load.length_spread:.0f}), "
            f"{load.live_share:.0%} of the groups to train on"
            + (f", {load.drawn:.1f} drawn for one that is kept" if load.drawn > 1 else "")
        )
    return Estimate(cost(probe.shape, load, machine, footprint), load, machine, tuple(notes))


def _expected(plan: Resolved, tasks: TaskSet, bench: Bench) -> tuple[Workload, list[str]]:
    """The step as the recipe alone tells it: responses as long as they may be, or as the solutions of a warm start."""
    rollout, objective, chat = plan.rollout, plan.objective, bench.player.chat
    first = TaskOrder(tasks.train, plan.seed).take(rollout.prompts)
    prompts = [len(chat.prompt_ids(task.messages())) for task in first]
    lengths: Sequence[int] = [rollout.max_tokens]
    if plan.sft.steps:
        lengths = _solutions(tasks, first, chat) or lengths
    mean = sum(lengths) / len(lengths)
    load = Workload(
        prompts=rollout.prompts, group_size=rollout.group_size, prompt_tokens=sum(prompts) / len(prompts),
        response_tokens=mean, epochs=plan.train.epochs, updates=plan.train.updates, steps=plan.train.steps,
        anchor_pass=needs_anchor_pass(objective, plan.train.updates * plan.train.epochs),
        reference=objective.needs_reference, length_spread=max(lengths) / mean, pack_tokens=plan.train.pack_tokens,
        rollout_bytes=4, cached_tokens=_cached(plan, tasks, max(prompts)),
    )  # fmt: skip
    most = max(1, rollout.token_budget // (max(prompts) + rollout.max_tokens))
    return replace(load, rows=min(load.responses, most)), []


def _solutions(tasks: TaskSet, first: Sequence[Task], chat: ChatFormat) -> list[int]:
    """Lengths of what the warm start imitates; none where the tasks have no solutions."""
    if tasks.solution is None:
        return []
    return [len(demonstration(task, tasks, chat).response_ids) for task in first]


def _cached(plan: Resolved, tasks: TaskSet, prompt_tokens: int) -> int:
    """Positions of the sampler's cache: a row has its own prompt; an evaluation may draw more rows than a step."""
    rollout, held = plan.rollout, plan.eval
    rows = rollout.prompts * rollout.group_size
    if held.before or held.after or held.every:
        rows = max(rows, len(tasks.held_out[: held.tasks or None]) * held.samples)
    positions = -(-(prompt_tokens + rollout.max_tokens) // POSITIONS) * POSITIONS
    return min(rows * positions, max(rollout.token_budget, positions))


def _affordable(load: Workload, probe: Probe, machine: Machine, seconds: float) -> int:
    """Groups that can be played in so many seconds, all of the step's at most, two at least where there are two."""
    sampling = cost(probe.shape, load, machine).phases[:2]
    share = seconds / max(sum(phase.time_s for phase in sampling), 1e-9)
    return min(load.prompts, max(2, int(load.prompts * share)))


@dataclass(frozen=True, eq=False)
class _Played:
    """A few groups of the recipe's own. sampling_s, recording_s: of all of them. live: share of them to train on."""

    groups: tuple[Group, ...]
    live: float
    sampling_s: float
    recording_s: float

    @property
    def lengths(self) -> list[int]:
        """Of every response."""
        return [len(episode.response_ids) for group in self.groups for episode in group.episodes]

    def measured(self, plan: Resolved, load: Workload) -> Workload:
        """The load with lengths, the share of groups to train on, and how many are drawn for one that is kept."""
        mean = sum(self.lengths) / len(self.lengths)
        live, drawn = self.live, 1.0
        if plan.objective.selection.dead == "refill":
            rounds = 1.0 + plan.rollout.refill_attempts
            live, drawn = min(1.0, live * rounds), min(1.0 / live, rounds) if live else rounds
        spread = max(self.lengths) / mean
        return replace(load, response_tokens=mean, length_spread=spread, live_share=live, drawn=drawn)

    def excess_s(self, probe: Probe, load: Workload, machine: Machine) -> float:
        """Seconds of a response beyond what the model's part of it should take: turn-taking, scoring, records."""
        mean = sum(self.lengths) / len(self.lengths)
        same = replace(load, prompts=len(self.groups), response_tokens=mean, length_spread=max(self.lengths) / mean)
        phases = cost(probe.shape, same, machine).phases[:2]
        expected = sum(phase.time_s for phase in phases) + same.responses * machine.response_s
        return (self.sampling_s - expected + self.recording_s) / same.responses


def _play(plan: Resolved, bench: Bench, prompts: int) -> _Played:
    """Draw, score, compare and record some groups as a step does; dead ones are kept. The sampler stands in for anchor
    and reference.
    """
    drawn, _ = collecting(plan, bench.loaded, step=1)
    order = TaskOrder(bench.player.tasks.train, plan.seed)
    began = bench.clock()
    batch = asyncio.run(collect_selected(order.take, prompts, drawn, bench.player, SelectionRule()))
    sampled = bench.clock()
    own = [row.sampler_logprobs for row in cut(batch.groups)]
    objective = plan.objective
    spread = [np.ones_like(row) for row in own] if objective.selection.entropy_top < 1 else None
    known = Known(own, spread, own if objective.needs_reference else None)
    credit = compare(objective, batch.groups, known, 1, part_weights(bench.player))
    rows = trained.records(1, batch.groups, batch.dropped, credit, Work(known, []), bench.player.chat.decode)
    step_metrics(rows, 0)
    if plan.record.rollouts:
        with (
            tempfile.TemporaryDirectory(prefix="gropius-check-") as place,
            RunWriter.create(Path(place, "estimate"), {}) as writer,
        ):
            writer.write_rollouts(1, rows, token_lists=plan.record.token_logprobs)
    live = {row.group_id for part in credit.parts for row in part.sequences if not row.skipped}
    return _Played(batch.groups, len(live) / len(batch.groups), sampled - began, bench.clock() - sampled)


def part_weights(player: Player) -> dict[str, float]:
    """The weights of a scorer's parts, by name."""
    return {part.name: part.weight for part in getattr(player.scorer, "parts", ())}
