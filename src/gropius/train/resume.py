"""Where a run goes on: which checkpoint, whether it may, and what is told about it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gropius.errors import RunFolderError
from gropius.models.lora import CONFIG as ADAPTER_CONFIG
from gropius.recipe.resolve import Resolved
from gropius.recipe.stored import completed
from gropius.records.reader import RunReader
from gropius.records.writer import CHECKPOINTS, MODEL
from gropius.train import checkpoint
from gropius.train.checkpoint import Snapshot
from gropius.train.differences import differences, harmless, in_words
from gropius.train.origin import changed, other_machine

COMPUTED = ("dtype", "device")  # keys of [model] that leave the weights what they are


@dataclass(frozen=True, eq=False)
class Start:
    """From where a run goes on. folder, snapshot: of a checkpoint, or both None: from its beginning, to the same bits.

    began: what the run began with, as `origin.origin` gave it.
    """

    folder: Path | None
    snapshot: Snapshot | None
    began: Mapping[str, Any]

    @property
    def step(self) -> int:
        """Steps done; -1 from the beginning, where nothing recorded stays."""
        return -1 if self.snapshot is None else self.snapshot.step

    @property
    def model(self) -> Path | None:
        """The folder of the weights and the tokenizer; None: those of the recipe."""
        return None if self.folder is None else self.folder / "model"

    @property
    def metrics_bytes(self) -> int | None:
        """The length of metrics.jsonl at the checkpoint."""
        return 0 if self.snapshot is None else self.snapshot.facts.get("metrics_bytes")

    @property
    def resumed(self) -> Mapping[str, Any] | None:
        """What the run began with where it goes on from a checkpoint; None where all is read again."""
        return None if self.snapshot is None else self.began

    def describe(self) -> str:
        """One line for a person."""
        return "no checkpoint yet: from the beginning" if self.folder is None else f"going on from {self.folder.name}"


def choose(run: Path, step: int | None, document: Mapping[str, Any]) -> tuple[Start, tuple[str, ...]]:
    """The checkpoint of `step`, or the newest whole one (None), or the beginning; and what was passed over.

    Call it with the run folder locked. Errors: RunFolderError when the step has no whole checkpoint, when every one is
    damaged, or when the run is a warm start alone.
    """
    root = run / CHECKPOINTS
    if root.is_dir():
        checkpoint.recover(root)
    if step is not None:
        folder = root / f"step-{step:06d}"
        if not folder.is_dir():
            raise RunFolderError(f"{run}: no complete checkpoint of step {step}; there are {_there(run)}")
        snapshot = checkpoint.load(folder)
        return Start(folder, snapshot, snapshot.facts["origin"]), ()
    newest = checkpoint.newest(root)
    if newest.folder is not None:
        snapshot = checkpoint.load(newest.folder)
        return Start(newest.folder, snapshot, snapshot.facts["origin"]), newest.notes
    if newest.notes:
        raise RunFolderError("\n".join([f"{run}: no checkpoint is whole; train anew", *newest.notes]))
    return Start(None, None, beginning(run, document)), ()


def beginning(run: Path, document: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a run without a checkpoint began with. Errors: RunFolderError when it cannot begin again."""
    if (run / MODEL).is_dir():
        key = "model.lora.adapter" if (run / MODEL / ADAPTER_CONFIG).is_file() else "model.source"
        raise RunFolderError(f'{run}: is a warm start alone and is done; train with {key} = "{run / MODEL}"')
    if "origin" not in document:
        raise RunFolderError(
            f"{run}: no complete checkpoint to go on from, and what it began with is not known; train anew under "
            "another name (--set name=…), with --set checkpoint.every=10 to have checkpoints on the way"
        )
    if "fork" in document:
        raise RunFolderError(f"{run}: this fork was ended before its first checkpoint; give the --fork command again")
    found: Mapping[str, Any] = document["origin"]
    return found


def refuse_changes(run: Path, start: Start, plan: Resolved, now: Mapping[str, Any]) -> list[str]:
    """Compare what a run was with what it would go on with: notes on harmless changes.

    plan: the recipe that would run. now: its origin. Errors: RunFolderError, one line for every other difference.
    """
    before = plan.tables() if start.snapshot is None else completed(start.snapshot.facts["tables"])
    found = differences(before, plan.tables())
    allowed = {key: pair for key, pair in found.items() if harmless(key, before)}
    faults = in_words({key: pair for key, pair in found.items() if key not in allowed})
    faults += changed(start.began, now)
    if faults:
        raise RunFolderError(
            "\n".join(
                [
                    f"{run}: this would be another run, not its continuation; restore what changed, or "
                    f"`gropius train RECIPE --fork {run}` for a new run from its state",
                    *faults,
                ]
            )
        )
    machine = other_machine(start.began, now)
    return [f"changed: {line}" for line in in_words(allowed)] + ([machine] if machine else [])


def refuse_finished(run: Path, plan: Resolved, done: int) -> None:
    """Refuse to continue a run that is over: zero steps are no success. Errors: RunFolderError."""
    if done > plan.train.steps:
        raise RunFolderError(
            f"{run}: the checkpoint is of step {done} and train.steps = {plan.train.steps}; write --step N, or "
            "more steps"
        )
    if done == plan.train.steps and is_measured(RunReader(run).metrics(), plan):
        raise RunFolderError(
            f"{run}: all {plan.train.steps} steps are done; there is nothing to continue. "
            f"Go further with: gropius resume {run} --set train.steps={2 * plan.train.steps}"
        )


def is_measured(rows: Sequence[Mapping[str, Any]], plan: Resolved) -> bool:
    """True when the measurement after the last step is there, or is not asked for."""
    last = [row for row in rows if row.get("step") == plan.train.steps and "loss" not in row]
    return not plan.eval.after or any("held_out/mean" in row for row in last)


def _there(run: Path) -> str:
    return ", ".join(map(str, RunReader(run).checkpoints())) or "none"


def forked(source: tuple[Path, int | None], plan: Resolved) -> tuple[Path, Snapshot]:
    """The checkpoint that a new run starts from. Errors: RunFolderError when there is none, or it is past the plan."""
    run, step = source
    RunReader(run)
    start, _ = read(run, step)
    model = completed(start.facts["tables"])["model"]
    other = differences(model, plan.tables()["model"])
    if found := {f"model.{key}": pair for key, pair in other.items() if key not in COMPUTED}:
        raise RunFolderError(
            "\n".join([f"{run}: a fork goes on with that run's model; write the same [model]", *in_words(found)])
        )
    if start.step >= plan.train.steps:
        raise RunFolderError(
            f"{run}: the fork begins at step {start.step} and train.steps = {plan.train.steps}, so there is nothing to "
            f"do; write --set train.steps={start.step + plan.train.steps}"
        )
    return run / CHECKPOINTS / f"step-{start.step:06d}", start


def lineage(
    run: Path, snapshot: Snapshot, plan: Resolved, now: Mapping[str, Any]
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """What a fork keeps of where it came from, JSON-ready, and notes for a person on what is another than there."""
    facts = snapshot.facts
    found = in_words(differences(completed(facts["tables"]), plan.tables()), f"in {run}")
    found += changed(facts["origin"], now)
    origin = {"run": str(run), "step": snapshot.step, "weights": facts["weights"], "recipe": facts["recipe"]}
    notes = [f"a fork of {run} at step {snapshot.step}", *(f"changed: {line}" for line in found)]
    if plan.sft.steps:
        notes.append("the warm start is not done again: the weights are those of the fork")
    return origin | {"differences": found}, tuple(notes)


def read(run: Path, step: int | None) -> tuple[Snapshot, tuple[str, ...]]:
    """A checkpoint of a run that may be live: nothing is repaired, nothing is locked."""
    root = run / CHECKPOINTS
    if step is not None:
        if not (root / f"step-{step:06d}").is_dir():
            raise RunFolderError(f"{run}: no complete checkpoint of step {step}; there are {_there(run)}")
        return checkpoint.load(root / f"step-{step:06d}"), ()
    newest = checkpoint.newest(root)
    if newest.folder is None:
        raise RunFolderError("\n".join([f"{run}: no complete checkpoint", *newest.notes]))
    return checkpoint.load(newest.folder), newest.notes
