"""`gropius export RUN[@N] OUT`: a Hugging Face folder with a model card."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gropius.cli.output import print_text, say
from gropius.cli.train import run_and_step


def command(
    run: Annotated[str, typer.Argument(metavar="RUN[@N]", help="A run folder, and which step; the newest whole one.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A new folder.")],
) -> None:
    """Write a run's model as transformers and vLLM load it, with a card of recipe, data, objective and results."""
    from gropius.train.export import export

    folder, step = run_and_step(run)
    for note in export(folder, step, out):
        say(f"· {note}")
    print_text(str(out))
