"""`gropius resume RUN`: go on from the last complete checkpoint, to the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gropius.cli.console import Console, print_outcome
from gropius.cli.options import Settings, TrustCode
from gropius.cli.target import of_run


def command(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
    step: Annotated[
        int | None, typer.Option("--step", metavar="N", help="Which checkpoint; the newest whole one.")
    ] = None,
    settings: Settings = [],  # noqa: B006
    trust_code: TrustCode = False,
) -> None:
    """Continue a run from its last complete checkpoint, or from its beginning where it has none yet.

    Its recipe, data, code and tokenizer must be those it began with; --set changes the few keys that are harmless (how
    many steps, what is measured, logged and kept).
    """
    from gropius.recipe import refuse_user_code
    from gropius.records.reader import RunReader

    resolved = of_run(RunReader(run), settings)
    refuse_user_code(resolved, trusted=trust_code)
    from gropius import build

    with Console() as console:
        folder = build.resume(run, step, console, settings)
    print_outcome(console, folder)
