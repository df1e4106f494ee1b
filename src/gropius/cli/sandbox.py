"""`gropius sandbox`: which isolation this machine offers for programs of a model, tried from the inside."""

from __future__ import annotations

import typer

from gropius.cli.options import Json
from gropius.cli.output import print_json, print_text


def command(as_json: Json = False) -> None:
    """Try the isolation for programs of a model. Exit 0: everything held; 1: a check failed; 3: no isolation here."""
    from gropius.sandbox.check import report_text, self_test

    report = self_test()
    if as_json:
        print_json(report)
    else:
        print_text(*report_text(report).splitlines())
    if report["tier"] is None:
        raise typer.Exit(3)
    if not report["holds"]:
        raise typer.Exit(1)
