"""`gropius resolve RECIPE`: what would run, with nothing left implicit; with --check, what would stop it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from gropius.cli.options import Json, Recipe, Settings, TrustCode
from gropius.cli.output import print_json, print_text, say

if TYPE_CHECKING:
    from gropius.tasks.preflight import Finding


def command(
    recipe: Recipe,
    settings: Settings = [],  # noqa: B006  (typer copies the default)
    check: Annotated[
        bool, typer.Option("--check", help="Also open the data and the rewards, and look them over.")
    ] = False,
    model: Annotated[
        bool, typer.Option("--model", help="With --check: load the model too, to measure prompts.")
    ] = False,
    trust_code: TrustCode = False,
    as_json: Json = False,
) -> None:
    """Print the resolved recipe: every key, the objective's formula and the derived numbers. Runs nothing.

    --check exits with 1 when something was found.
    """
    from gropius.errors import UsageError
    from gropius.objective.formula import formula
    from gropius.recipe import refuse_user_code, resolve
    from gropius.recipe.text import as_toml

    if model and not check:
        raise UsageError("--model does nothing without --check")
    resolved = resolve(recipe, settings)
    findings: list[Finding] = []
    if check:
        from gropius import survey

        refuse_user_code(resolved, trusted=trust_code)
        findings = survey.preflight(resolved, measure=model)
    if as_json:
        checked = {"findings": [found.as_dict() for found in findings]} if check else {}
        print_json(resolved.as_dict() | {"formula": formula(resolved.objective)} | checked)
    else:
        print_text(as_toml(resolved).rstrip("\n"))
    for found in findings:
        say(f"{found.severity}: {found.name}: {found.message}; {found.change}")
        if found.rows:
            say(
                f"  {', '.join(found.rows)}"
                + (f" and {found.count - len(found.rows)} more" * (found.count > len(found.rows)))
            )
    if check and not findings:
        say("nothing was found")
    if any(found.severity == "finding" for found in findings):
        raise typer.Exit(1)
