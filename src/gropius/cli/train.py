"""`gropius train RECIPE`: the main job."""

from __future__ import annotations

from typing import Annotated

import typer

from gropius.cli.console import Console, print_outcome
from gropius.cli.options import Name, Out, Recipe, Settings, TrustCode
from gropius.cli.target import for_run


def command(
    recipe: Recipe,
    settings: Settings = [],  # noqa: B006
    name: Name = None,
    out: Out = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Delete the run of this name first.")] = False,
    trust_code: TrustCode = False,
) -> None:
    """Train by group-relative policy optimisation, measure before and after, and record everything in a run folder."""
    resolved = for_run(recipe, settings, (name, out), trust_code)
    if overwrite:
        from gropius.records.writer import delete_run

        delete_run(resolved.folder)
    from gropius import build

    with Console() as console:
        for note in resolved.notes:
            console.note(note)
        folder = build.train(resolved, console)
    print_outcome(console, folder)
