"""`gropius resume RUN`: go on from the last complete checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gropius.cli.console import Console, print_outcome
from gropius.cli.options import TrustCode
from gropius.cli.target import of_run
from gropius.errors import RunFolderError


def command(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
    step: Annotated[
        int | None, typer.Option("--step", metavar="N", help="Which checkpoint; the newest whole one.")
    ] = None,
    trust_code: TrustCode = False,
) -> None:
    """Continue a run from its last complete checkpoint, with the recipe it began with."""
    from gropius.recipe import refuse_user_code
    from gropius.records.reader import RunReader

    reader = RunReader(run)
    resolved = of_run(reader)
    checkpoints = reader.checkpoints()
    if not checkpoints:
        raise RunFolderError(
            f"{run}: no complete checkpoint, and a run goes on from one; train anew under another name "
            "(--set name=…), with --set checkpoint.every=10 to have one on the way"
        )
    if step is not None and step not in checkpoints:
        raise RunFolderError(
            f"{run}: no complete checkpoint of step {step}; there are {', '.join(map(str, checkpoints))}"
        )
    if (checkpoints[-1] if step is None else step) >= resolved.train.steps:
        raise RunFolderError(f"{run}: all {resolved.train.steps} steps are done; there is nothing to continue")
    refuse_user_code(resolved, trusted=trust_code)
    from gropius import build

    with Console() as console:
        folder = build.resume(run, step, console)
    print_outcome(console, folder)
