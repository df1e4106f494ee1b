"""`gropius resolve RECIPE`: what would run, with nothing left implicit."""

from __future__ import annotations

from gropius.cli.options import Json, Recipe, Settings
from gropius.cli.output import print_json, print_text


def command(recipe: Recipe, settings: Settings = [], as_json: Json = False) -> None:  # noqa: B006
    """Print the resolved recipe: every key, the objective's formula and the derived numbers. Runs nothing."""
    from gropius.objective.formula import formula
    from gropius.recipe import resolve
    from gropius.recipe.text import as_toml

    resolved = resolve(recipe, settings)
    if as_json:
        print_json(resolved.as_dict() | {"formula": formula(resolved.objective)})
    else:
        print_text(as_toml(resolved).rstrip("\n"))
