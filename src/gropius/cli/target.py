"""What a verb works on: a recipe, or a run folder with its recipe and last checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
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

    words = written(dict(zip(("name", "out"), place, strict=True)))
    resolved = resolve(recipe, [*settings, *words])
    refuse_user_code(resolved, trusted=trusted)
    return resolved


def written(values: Mapping[str, str | None]) -> list[str]:
    """Settings `key="value"` of those that are given."""
    return [f"{key}={json.dumps(value)}" for key, value in values.items() if value is not None]


def setting_words(settings: Sequence[str], **values: str) -> list[str]:
    """Settings as a command line has them.

    >>> setting_words(["train.steps=3"], name="a")
    ['--set', 'train.steps=3', '--set', 'name="a"']
    """
    return [word for setting in (*settings, *written(values)) for word in ("--set", setting)]


def find(target: str, settings: Sequence[str], trusted: bool, *, model: bool = True) -> Found:
    """A run folder's recipe and its trained model, or a recipe with its own model.

    model: False when only the recipe is wanted, which a run without a checkpoint has too.
    Errors: RecipeError, RunFolderError; SafetyRefusal when it names code that was not trusted.
    """
    from gropius.recipe import refuse_user_code, resolve

    if not Path(target).is_dir():
        found = Found(resolve(target, settings), None, target)
    else:
        from gropius.records.reader import RunReader

        reader = RunReader(target)
        folder, label = _trained_model(reader) if model else (None, target)
        found = Found(of_run(reader, settings), folder, label)
    refuse_user_code(found.resolved, trusted=trusted)
    return found


def _trained_model(reader: RunReader) -> tuple[Path, str]:
    """The model of the last complete checkpoint, or of a warm start alone, and what to call it."""
    from gropius.errors import RunFolderError
    from gropius.records.writer import CHECKPOINTS, MODEL

    if checkpoints := reader.checkpoints():
        model = reader.folder / CHECKPOINTS / f"step-{checkpoints[-1]:06d}" / "model"
        return model, f"{reader.folder} at step {checkpoints[-1]}"
    if (reader.folder / MODEL).is_dir():
        return reader.folder / MODEL, f"{reader.folder} after the warm start"
    raise RunFolderError(
        f"{reader.folder}: has no complete checkpoint to use; give the recipe instead for the untrained model"
    )


def of_run(reader: RunReader, settings: Sequence[str] = ()) -> Resolved:
    """The recipe a run began with, with settings on top. Errors: RunFolderError, RecipeError."""
    from gropius.recipe import from_dict

    return from_dict(reader.resolved(), settings)
