"""One part of a batch: what is made fresh for it, the policy's update, and the critic's beside it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from gropius.errors import RunHalted
from gropius.rollout.apart import Engines
from gropius.train import aside, memory
from gropius.train.credit import Known, Part, fresh
from gropius.train.energy import energies
from gropius.train.pack import pack
from gropius.train.resources import resources
from gropius.train.sequences import TrainSequence
from gropius.train.shares import filled
from gropius.train.step import Learner, UpdateReport
from gropius.train.trained import Work

if TYPE_CHECKING:
    from gropius.train.loop import Run

HALT_AFTER_SKIPS = 3


def looked_at(run: Run, known: Known, rows: Sequence[TrainSequence]) -> Known:
    """What the objective needs beside log-probabilities: the critic's values, the tokens' energies."""
    critic, baseline = run.critic, run.plan.objective.advantage.baseline
    if critic is not None:
        known = dataclasses.replace(known, values=memory.with_less(run, lambda: critic.values(rows)))
    if baseline == "optimal_token":
        known = dataclasses.replace(known, energy=memory.with_less(run, lambda: energies_of(run.learner, rows)))
    return known


def energies_of(learner: Learner, rows: Sequence[TrainSequence]) -> list[Any]:
    """[_T] the energy of every token of every row under the policy as it is."""
    settings, team, way = learner.settings, learner.team, learner.forward
    team.lead("energies", dataclasses.asdict(settings), list(rows))
    shared = team.share(lambda tokens: pack(rows, budget_tokens=tokens, skip=False), settings.pack_tokens)
    mine = energies(way, [one for one, _ in shared.rounds()], count=len(rows), temperature=settings.temperature)
    if way.sharded is None:
        return mine
    way.sharded.let_go()
    return filled([one["energies"] for one in team.merged({"energies": mine})])


def made_fresh(run: Run, part: Part, first: bool) -> Part:
    """The part as the policy is now, where its own log-probabilities decide something; `first`: nothing moved yet."""
    objective = run.plan.objective
    if not objective.needs_fresh or first:
        return part
    rows = [dataclasses.replace(s, skipped=False) for s in part.sequences]
    scores = memory.with_less(run, lambda: run.learner.score(rows))
    return fresh(objective, part, scores.logprobs, run.part_weights)


def update(run: Run, part: Part, known: Known) -> UpdateReport | None:
    """The policy's optimiser step on a part and the critic's; None while only the critic is being trained."""
    anchor, reference, old = (_pick(v, part.rows) for v in (known.anchor, known.reference, known.values))
    critic = run.critic
    also: Callable[[], Any] | None = None
    if critic is not None and old is not None:
        if run.state.step < critic.settings.pretrain_steps:
            memory.with_less(run, lambda: critic.update(part.sequences, old))
            return None
        if critic.moves_trunk:
            also = functools.partial(critic.accumulate, part.sequences, old)
    report = memory.with_less(run, functools.partial(run.learner.update, part.sequences, anchor, reference, also))
    if critic is not None and old is not None:
        if critic.moves_trunk:
            critic.step()
        else:
            memory.with_less(run, lambda: critic.update(part.sequences, old))
    return report


def _pick(values: Sequence[Any] | None, rows: Sequence[int]) -> list[Any] | None:
    return None if values is None else [values[i] for i in rows]


def adapt_bonus(run: Run, reports: Sequence[Sequence[UpdateReport]]) -> None:
    """Move the entropy coefficient toward the target, and say whether it is in force in the next step.

    η ± entropy_step a training step, up while the measured entropy is below the target, never below 0; it is 0 in force
    while the entropy is above. Source: Skywork-OR1, arXiv 2505.22312.
    """
    axis, state = run.plan.objective.terms, run.state
    found = [(r.metrics["entropy"], r.all_tokens) for one in reports for r in one if "entropy" in r.metrics]
    if not axis.entropy_target or not found:
        return
    entropy = sum(e * n for e, n in found) / sum(n for _, n in found)
    below = entropy <= axis.entropy_target
    step = axis.entropy_step if below else -axis.entropy_step
    state.entropy_coefficient = max(0.0, coefficient(run) + step)
    state.entropy_in_force = below
    set_bonus(run)


def coefficient(run: Run) -> float:
    """η as it is now, in force or not."""
    kept = run.state.entropy_coefficient
    return run.plan.objective.terms.entropy if kept is None else kept


def set_bonus(run: Run) -> None:
    """Hand the coefficient in force to the learner."""
    if run.plan.objective.terms.entropy_target:
        run.learner.bonus = coefficient(run) if run.state.entropy_in_force else 0.0


def work_of(run: Run, known: Known, reports: Sequence[Sequence[UpdateReport]], in_force: float | None) -> Work:
    """What was computed on a batch, with what the critic did, the coefficient in force, and the memory there is."""
    found = dict(run.critic.metrics) if run.critic is not None else {}
    handed = run.player.engine.transfer if isinstance(run.player.engine, Engines) else run.learner.team.transfer
    if handed is not None:
        found |= {"weights/version": handed.version, "weights/bytes": handed.bytes, "weights/time_s": handed.seconds}
    found |= {} if in_force is None else {"entropy_bonus": in_force}
    return Work(known, reports, run.plan.objective.entropy_in_loss, found | resources(run))


def refresh_reference(run: Run, step: int) -> None:
    """Every `train.reference_refresh` steps the reference becomes the policy as it is now; 0 leaves it fixed."""
    every = run.plan.train.reference_refresh
    if run.reference is not None and every and step % every == 0:
        run.reference.refresh()


def watch(run: Run, report: UpdateReport, rows: Sequence[TrainSequence]) -> None:
    """Say when a step was not taken because a number was not finite, keep its batch; halt when that goes on."""
    if report.taken or not report.culprits:
        run.state.skipped_in_a_row = 0
        return
    run.state.skipped_in_a_row += 1
    file = aside.write(run.writer.folder, run.state.step + 1, rows, report, run.player.chat.decode)
    run.progress.note(f"step {run.state.step + 1}: {report.refused}; the weights were not touched; batch in {file}")
    if run.state.skipped_in_a_row >= HALT_AFTER_SKIPS:
        raise RunHalted(
            f"{report.refused} in {HALT_AFTER_SKIPS} updates in a row; the weights are those before them, the rows "
            f"that caused it are in {file}. Lower train.learning_rate or set train.grad_clip; "
            f"`gropius resume {run.writer.folder}` goes on from the last checkpoint"
        )
