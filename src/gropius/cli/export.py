"""`gropius export RUN[@N] OUT [--merged]`: a Hugging Face folder, or an adapter, with a model card."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gropius.cli.output import print_text, say
from gropius.cli.train import run_and_step


def command(
    run: Annotated[str, typer.Argument(metavar="RUN[@N]", help="A run folder, and which step; the newest whole one.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A new folder.")],
    merged: Annotated[
        bool, typer.Option("--merged", help="Of a run that trained an adapter: the base with the adapter merged in.")
    ] = False,
) -> None:
    """Write a run's model as transformers and vLLM load it, with a card of recipe, data, objective and results.

    A run that trained a LoRA adapter gives the adapter in peft's layout; with --merged a whole model, whose logits are
    compared with those of base and adapter.
    """
    from gropius.train.export import export

    folder, step = run_and_step(run)
    for note in export(folder, step, out, merged=merged):
        say(f"· {note}")
    print_text(str(out))
