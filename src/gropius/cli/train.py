"""`gropius train RECIPE`: the main job."""

from __future__ import annotations

from gropius.cli.console import Console, print_outcome
from gropius.cli.options import Name, Out, Overwrite, Recipe, Settings, TrustCode
from gropius.cli.target import for_run


def command(
    recipe: Recipe,
    settings: Settings = [],  # noqa: B006
    name: Name = None,
    out: Out = None,
    overwrite: Overwrite = False,
    trust_code: TrustCode = False,
) -> None:
    """Train by group-relative policy optimisation, measure before and after, and record everything in a run folder."""
    resolved = for_run(recipe, settings, (name, out), trust_code)
    from gropius.records.writer import delete_run, refuse_taken

    if overwrite:
        delete_run(resolved.folder)
    refuse_taken(resolved.folder)
    from gropius import build

    with Console() as console:
        for note in resolved.notes:
            console.note(note)
        folder = build.train(resolved, console)
    print_outcome(console, folder)
