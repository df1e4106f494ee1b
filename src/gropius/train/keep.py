"""Keeping a run: one saved state holds everything that decides what comes next, and nothing else does.

Weights, optimiser, reference and torch's generators are tensors; counters, data position, the other generators, the
recipe, the digests of data, code and tokenizer, and the length of metrics.jsonl are facts.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from torch import Tensor

from gropius.errors import RunFolderError
from gropius.models.load import LoadedModel
from gropius.records.writer import CHECKPOINTS
from gropius.train import ahead_kept, checkpoint, randomness
from gropius.train.checkpoint import Snapshot
from gropius.train.gathered import read
from gropius.train.hand_over import digest_of
from gropius.train.randomness import Randomness
from gropius.train.retention import Retention
from gropius.train.team import POLICY, SAVED, moments_of

if TYPE_CHECKING:
    from gropius.train.loop import Run


class Keeper:
    """Writes the checkpoints of one run, one at a time: in the caller's time, or in a thread from a copy."""

    def __init__(self, *, background: bool = False) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint") if background else None
        self._writing: Future[object] | None = None

    def save(self, run: Run, snapshot: Snapshot) -> None:
        """Save, or begin to; waits for a save before it. Errors: RunHalted of this one, or of the one before."""
        self.wait()
        root = run.writer.folder / CHECKPOINTS
        plan = run.plan.checkpoint
        retention = Retention(plan.keep_last, plan.keep_every, plan.best)
        if self._pool is None:
            checkpoint.save(root, snapshot, run.loaded, retention)
            return
        still, loaded = apart(snapshot), loaded_copy(run.loaded)
        self._writing = self._pool.submit(lambda: checkpoint.save(root, still, loaded, retention))

    def wait(self) -> None:
        """Until nothing is being written. Errors: whatever that writing raised, once."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()


def apart(snapshot: Snapshot) -> Snapshot:
    """A copy whose tensors no later step can reach."""
    tensors = {
        name: {key: value.detach().clone() for key, value in read(inner)} for name, inner in snapshot.tensors.items()
    }
    return dataclasses.replace(snapshot, tensors=tensors)


def loaded_copy(loaded: LoadedModel) -> LoadedModel:
    """A model that no later step can reach: all of it, or of one with an adapter the adapter's tensors."""
    if loaded.adapter is not None:
        kept = {name: tensor.clone() for name, tensor in loaded.adapter.state().items()}
        return dataclasses.replace(loaded, adapter=dataclasses.replace(loaded.adapter, kept=kept))
    return dataclasses.replace(loaded, model=copy.deepcopy(loaded.model))


def when_due(run: Run) -> None:
    """Save after a step that the recipe names, after the last, and at a new best held-out mean where that is asked."""
    plan, state = run.plan.checkpoint, run.state
    last = state.step == run.plan.train.steps
    best = state.held_out is not None and (state.best is None or state.held_out > state.best)
    if best:
        state.best = state.held_out
    if (plan.every and state.step % plan.every == 0) or (last and plan.final) or (plan.best and best):
        now(run)


def now(run: Run) -> None:
    """Save the state as it is after the last step taken."""
    run.keeper.save(run, snapshot_of(run))


def unless_kept(run: Run) -> None:
    """Save the state after the last step taken, where it is not on the disk yet."""
    run.keeper.wait()
    folder = run.writer.folder / CHECKPOINTS / f"step-{run.state.step:06d}"
    if not folder.is_dir() or checkpoint.damage(folder):
        now(run)


def snapshot_of(run: Run) -> Snapshot:
    """Everything that decides what comes next, beside the weights."""
    tensors: dict[str, Mapping[str, Tensor]]
    tensors = {"optimiser": run.learner.team.gathered(moments_of(POLICY)), "random": run.randomness.tensors}
    if run.reference is not None and (kept := run.reference.tensors()):
        tensors["reference"] = kept
    if ahead := ahead_kept.as_tensors(run.ahead):
        tensors["ahead"] = ahead
    run.state.scorer = run.judge.memory() if run.judge is not None else {}
    if run.critic is not None:
        tensors |= run.critic.tensors()
    facts = {
        "state": dataclasses.asdict(run.state),
        "held_out": run.state.held_out,
        "optimiser_steps": run.learner.optimiser.steps,
        "critic_steps": 0 if run.critic is None else run.critic.optimiser.steps,
        "random": run.randomness.facts,
        "metrics_bytes": run.writer.metrics_bytes,
        "weights": run.digest or digest_of(run),
        "recipe": run.plan.sha256,
        "tables": run.plan.tables(),
        "origin": run.origin,
    }
    weights = run.learner.team.gathered(SAVED) if run.learner.team.divided else None
    return Snapshot(run.state.step, facts, tensors, weights)


def put_back(run: Run, snapshot: Snapshot) -> None:
    """Make a run's optimiser, reference and generators those of a snapshot; the weights were loaded with the model.

    Errors: RunFolderError when the weights that were loaded are not those that were saved, or do not fit the recipe.
    """
    facts: dict[str, Any] = dict(snapshot.facts)
    digest = digest_of(run)
    if digest != facts["weights"]:
        raise RunFolderError(
            f"step {snapshot.step}: the weights that were loaded ({digest[:12]}) are not those that were saved "
            f"({facts['weights'][:12]})"
        )
    try:
        run.learner.team.restore(POLICY, run.learner.optimiser, snapshot.tensors["optimiser"], facts["optimiser_steps"])
        if run.critic is not None and not run.critic.put_back(snapshot):
            run.progress.note("the critic begins anew: what this goes on from had none")
    except ValueError as error:
        raise RunFolderError(f"step {snapshot.step}: {error}") from error
    saved = snapshot.tensors.get("reference")
    if run.reference is not None and saved is not None:
        run.reference.restore(saved)
    run.ahead = ahead_kept.from_tensors(snapshot.tensors.get("ahead", {}), run.tasks)
    run.randomness = Randomness(facts["random"], dict(snapshot.tensors["random"]))
    randomness.restore(run.randomness)
