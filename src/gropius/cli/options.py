"""Options that several verbs share, each declared once."""

from __future__ import annotations

from typing import Annotated

import typer

Recipe = Annotated[str, typer.Argument(metavar="RECIPE", help="A recipe: a TOML file, or the name of a built-in one.")]
Target = Annotated[str, typer.Argument(metavar="RECIPE|RUN", help="A recipe (file or built-in name) or a run folder.")]
Name = Annotated[str | None, typer.Option("--name", help="Name of the run folder (--set name=…).")]
Out = Annotated[str | None, typer.Option("--out", help="Folder of run folders (--set out=…).")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Delete the run of this name first.")]
Settings = Annotated[
    list[str],
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Set any key of the recipe, e.g. --set train.steps=10. Repeatable."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
TrustCode = Annotated[
    bool,
    typer.Option("--trust-code", help="Let module:function names in the recipe be imported and run with your rights."),
]
Cluster = Annotated[
    str | None,
    typer.Option(
        "--cluster",
        metavar="RAY",
        help="Run on a Ray: ray://HOST:PORT, HOST:PORT of its GCS, auto (the one here), or local (one for this run).",
    ),
]
