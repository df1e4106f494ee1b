"""`gropius sft RECIPE`: the supervised warm start alone."""

from __future__ import annotations

from gropius.cli.console import Console, print_outcome
from gropius.cli.options import Name, Out, Overwrite, Recipe, Settings, TrustCode
from gropius.cli.target import for_run
from gropius.errors import RecipeError


def command(
    recipe: Recipe,
    settings: Settings = [],  # noqa: B006
    name: Name = None,
    out: Out = None,
    overwrite: Overwrite = False,
    trust_code: TrustCode = False,
) -> None:
    """Imitate the tasks' own solutions for sft.steps steps and save the model, so that a cold model has a start."""
    resolved = for_run(recipe, settings, (name, out), trust_code)
    if resolved.sft.steps == 0:
        raise RecipeError("sft.steps = 0: there is nothing to do; write --set sft.steps=200")
    from gropius.records.writer import delete_run, refuse_taken

    if overwrite:
        delete_run(resolved.folder)
    refuse_taken(resolved.folder)
    from gropius import build

    with Console() as console:
        folder = build.sft(resolved, console)
    print_outcome(console, folder)
