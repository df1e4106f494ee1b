"""Keeping a run: a checkpoint holds weights, optimiser, reference, counters and data position; nothing else decides."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from gropius.train import checkpoint
from gropius.train.checkpoint import Snapshot

if TYPE_CHECKING:
    from gropius.train.loop import Run


def when_due(run: Run) -> None:
    """Save after a step that the recipe names, and after the last."""
    plan, step = run.plan.checkpoint, run.state.step
    last = step == run.plan.train.steps
    if (plan.every and step % plan.every == 0) or (last and plan.final):
        now(run)


def now(run: Run) -> None:
    """Save the state as it is after the last step taken."""
    tensors = {"optimiser": run.learner.optimiser.tensors()}
    if run.reference is not None:
        tensors["reference"] = dict(run.reference.model.named_parameters())
    facts = {
        "state": dataclasses.asdict(run.state),
        "optimiser_steps": run.learner.optimiser.steps,
        "recipe": run.plan.sha256,
        "tasks": run.tasks.fingerprint,
        "weights": checkpoint.weight_digest(run.loaded.model),
    }
    snapshot = Snapshot(run.state.step, facts, tensors)
    checkpoint.save(run.writer.folder / "checkpoints", snapshot, run.loaded, run.plan.checkpoint.keep_last)
