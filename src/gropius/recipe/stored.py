"""Recipes read back from what a run stored, by whichever version. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gropius.errors import ObjectiveError, RecipeError, RunFolderError
from gropius.objective.spec import Objective, override
from gropius.objective.validate import check as check_objective
from gropius.recipe.draft import Draft
from gropius.recipe.load import Source, dotted, from_mapping, parse_setting
from gropius.recipe.resolve import RECIPE_KEYS, Resolved, decisive_hash, made_explicit, refuse_broken


def from_dict(document: Mapping[str, Any], settings: Sequence[str] = ()) -> Resolved:
    """Read back what `Resolved.as_dict` wrote (a run's resolved.json); other keys are ignored.

    Keys that its version did not know have their defaults; the hash is that of the keys it has. settings: `a.b=value`,
    put on top of what was stored; the objective's are `objective.axis.key`.
    Errors: RunFolderError when it is not one, or when its hash says it was changed; RecipeError for a setting.
    """
    missing = [key for key in ("model", "data", "objective", "train", "sha256", "base_dir") if key not in document]
    if missing:
        raise RunFolderError(f"resolved.json: {', '.join(missing)} missing; this is not a run's resolved recipe")
    try:
        stored = _stored(document, (), {})
    except (RecipeError, ObjectiveError) as error:
        raise RunFolderError(f"resolved.json is of another version, or damaged: {error}") from error
    if decisive_hash(document) != document["sha256"]:
        raise RunFolderError("resolved.json was changed after the run began: its hash is not that of its keys")
    if not settings:
        return stored
    changes = {dotted(path[1:]): value for path, value in map(parse_setting, settings) if path[0] == "objective"}
    return _stored(document, [text for text in settings if parse_setting(text)[0][0] != "objective"], changes)


def _stored(document: Mapping[str, Any], settings: Sequence[str], changes: Mapping[str, Any]) -> Resolved:
    tables = {key: document[key] for key in RECIPE_KEYS if key != "objective" and key in document}
    source = Source("resolved.json", Path(document["base_dir"]))
    loaded = from_mapping(_without_none(tables), settings, source)
    objective = override(override(Objective(), document["objective"]), changes)
    check_objective(objective, changes)
    draft = Draft(loaded.recipe, objective, frozenset(dotted(path) for path in loaded.source.settings))
    refuse_broken(draft, loaded.source)
    return made_explicit(draft, source, str(document.get("preset", "grpo")))


def completed(tables: Mapping[str, Any]) -> dict[str, Any]:
    """Stored `tables()` of an earlier version, with the keys that it did not know at their defaults.

    A default never changes what a recipe without the key did, so these are the tables of the same run.
    Errors: RecipeError, ObjectiveError for keys that this version does not know.
    """
    return _stored({"base_dir": ".", **tables}, (), {}).tables()


def _without_none(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_none(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [_without_none(inner) for inner in value]
    return value
