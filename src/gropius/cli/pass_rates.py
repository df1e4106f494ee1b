"""Where a plan's pass rates come from: a recorded run, a file of counts, or a recipe whose tasks are tried now."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gropius.errors import UsageError

if TYPE_CHECKING:
    from gropius.plan.counts import PassCounts


@dataclass(frozen=True)
class Measured:
    """Counts, and what the run or recipe says besides: responses a step (0: unknown), its objective's fields, notes."""

    counts: PassCounts
    budget: int
    objective: Mapping[str, Any]
    notes: list[str]


def divided(settings: Sequence[str]) -> tuple[list[str], list[str]]:
    """Settings of the plan, whose keys are plain names, and of the recipe, whose keys name a table.

    >>> divided(["seed=1", "rollout.group_size=4"])
    (['seed=1'], ['rollout.group_size=4'])
    """
    of_recipe = [text for text in settings if "." in text.partition("=")[0]]
    return [text for text in settings if text not in of_recipe], of_recipe


def measure(source: Path, prompts: int | None, settings: Sequence[str], trusted: bool) -> Measured:
    """Counts from whatever `source` is. Errors: UsageError saying what to write instead; those of what is read."""
    if prompts is not None:
        return _probe(source, prompts, settings, trusted)
    if settings:
        raise UsageError(f"--set {settings[0]}: is a key of a recipe; a recipe is planned for with --probe N")
    if source.is_dir():
        return _recorded(source)
    if source.suffix == ".toml" or not source.exists():
        raise UsageError(
            f"{source}: no run folder and no file of counts. To measure a recipe's pass rates on its own tasks: "
            f"gropius plan {source} --probe 64"
        )
    from gropius.plan.counts import read_counts

    return Measured(read_counts(source), 0, {}, [])


def _recorded(folder: Path) -> Measured:
    from gropius.plan.recorded import as_recorded, from_run

    counts, notes = from_run(folder)
    known = as_recorded(folder)
    return Measured(counts, int(known.get("budget", 0)), known.get("objective", {}), notes)


def _probe(source: Path, prompts: int, settings: Sequence[str], trusted: bool) -> Measured:
    if source.is_dir() or source.suffix == ".json":
        raise UsageError(f"{source}: holds pass rates already; leave --probe out, or name a recipe")
    from gropius.cli.console import Console
    from gropius.recipe import refuse_user_code, resolve

    resolved = resolve(str(source), settings)
    refuse_user_code(resolved, trusted=trusted)
    from gropius import survey

    with Console() as console:
        counts = survey.pass_counts(resolved, prompts, console)
    drawn, size = len(counts.solved), resolved.rollout.group_size
    notes = [f"{drawn} prompts drawn now, {size} responses each, of {counts.response_tokens:.0f} tokens on average"]
    if drawn < prompts:
        notes.append(f"{prompts} were asked for: there are no more training tasks, or some had no verdict")
    return Measured(counts, resolved.rollout.prompts * size, resolved.tables()["objective"], notes)
