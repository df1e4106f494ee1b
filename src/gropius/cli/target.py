"""What a verb works on: a recipe, or a run folder with its recipe and last checkpoint."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gropius.recipe import Resolved
    from gropius.records.reader import RunReader


@dataclass(frozen=True)
class Found:
    """A resolved recipe, the folder of a trained model (None: the recipe's own), and what to call it."""

    resolved: Resolved
    model: Path | None
    label: str


def for_run(recipe: str, settings: Sequence[str], place: tuple[str | None, str | None], trusted: bool) -> Resolved:
    """Resolve a recipe for a run. place: (--name, --out), which stand for --set name and --set out.

    Errors: RecipeError; SafetyRefusal when it names code that was not trusted.
    """
    from gropius.recipe import refuse_user_code, resolve

    words = [
        f"{key}={json.dumps(value)}" for key, value in zip(("name", "out"), place, strict=True) if value is not None
    ]
    resolved = resolve(recipe, [*settings, *words])
    refuse_user_code(resolved, trusted=trusted)
    return resolved


def find(target: str, settings: Sequence[str], trusted: bool) -> Found:
    """A run folder's recipe and last complete checkpoint, or a recipe with its own model.

    Errors: RecipeError, RunFolderError; SafetyRefusal when it names code that was not trusted.
    """
    from gropius.errors import RunFolderError
    from gropius.recipe import refuse_user_code, resolve

    if not Path(target).is_dir():
        found = Found(resolve(target, settings), None, target)
    else:
        from gropius.records.reader import RunReader

        reader = RunReader(target)
        checkpoints = reader.checkpoints()
        if not checkpoints:
            raise RunFolderError(
                f"{target}: has no complete checkpoint to use; give the recipe for the untrained model"
            )
        model = reader.folder / "checkpoints" / f"step-{checkpoints[-1]:06d}" / "model"
        found = Found(of_run(reader, settings), model, f"{target} at step {checkpoints[-1]}")
    refuse_user_code(found.resolved, trusted=trusted)
    return found


def find_recipe_of(target: str, settings: Sequence[str], trusted: bool) -> Resolved:
    """The recipe of a run folder, or a recipe; no model is needed. Errors: as `find`."""
    from gropius.recipe import refuse_user_code, resolve
    from gropius.records.reader import RunReader

    resolved = of_run(RunReader(target), settings) if Path(target).is_dir() else resolve(target, settings)
    refuse_user_code(resolved, trusted=trusted)
    return resolved


def of_run(reader: RunReader, settings: Sequence[str] = ()) -> Resolved:
    """The recipe a run began with, with settings on top. Errors: RunFolderError, RecipeError."""
    from gropius.recipe import from_dict

    return from_dict(reader.resolved(), settings)
