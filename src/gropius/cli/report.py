"""`gropius report RUN`: one HTML file that opens offline and can be mailed; `--png` for the plots alone."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gropius.cli.output import print_text


def command(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, or a log of TRL, verl or OpenRLHF.")],
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Where to write it; RUN's name with .html here.")
    ] = None,
    groups: Annotated[
        list[str] | None,
        typer.Option("--group", metavar="ID", help="A group to show; repeatable. Else some are chosen."),
    ] = None,
    png: Annotated[
        Path | None, typer.Option("--png", metavar="FOLDER", help="Write the plots as PNG files there, and no page.")
    ] = None,
) -> None:
    """Write a run's curves, findings, objective and some groups as one self-contained HTML file."""
    from gropius.errors import UsageError
    from gropius.viewer.foreign import opened
    from gropius.viewer.report import report, write_pictures

    with opened(run) as store:
        if png is not None:
            print_text(*(str(path) for path in write_pictures(store, png)))
            return
        document = report(store, groups or ())
    target = out or Path(f"{run.resolve().name}.html")
    try:
        target.write_text(document, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{target}: cannot be written: {error.strerror}; write --out FILE") from error
    print_text(str(target))
