"""`gropius doctor RUN`: what is wrong with a run, ours or another trainer's, from its records alone."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gropius.cli.options import Json
from gropius.cli.output import print_json, print_text

if TYPE_CHECKING:
    from gropius.doctor import Examination, Finding

MARKS = {"critical": "!!", "warning": " !", "note": " ·"}


def command(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="A run folder, or a log of TRL, verl, prime-rl, OpenRLHF.")
    ],
    kind: Annotated[
        str,
        typer.Option("--from", metavar="NAME", help="Whose log it is: auto, gropius, trl, verifiers, verl, openrlhf."),
    ] = "auto",
    only: Annotated[
        list[str] | None, typer.Option("--only", metavar="NAME", help="Only this diagnostic; repeatable.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Find what is wrong with a run: rows, interval, likely cause and the key to change. Exit code 1 with a finding."""
    from gropius.doctor import DIAGNOSTICS, examine, read_log
    from gropius.errors import UsageError, did_you_mean

    for name in only or ():
        if name not in DIAGNOSTICS:
            raise UsageError(f"--only {name}: {did_you_mean(name, DIAGNOSTICS)}")
    found = examine(read_log(run, kind), only or ())
    if as_json:
        print_json(found.as_dict())
    else:
        _print(found)
    raise typer.Exit(1 if found.alarms else 0)


def _print(found: Examination) -> None:
    print_text(f"{found.source}: {found.steps} steps", *(f"note: {note}" for note in found.notes), "")
    roots = [finding for finding in found.findings if not finding.explained_by]
    for finding in roots:
        print_text(*finding_lines(finding))
        follows = [other.name for other in found.findings if other.explained_by == finding.name]
        print_text(*([f"     it explains {', '.join(follows)}"] if follows else []), "")
    if not roots:
        print_text("nothing found" if found.passed else "too little is recorded to say anything", "")
    print_text(f"looked for and not found: {', '.join(found.passed) or 'nothing'}")
    if found.waiting:
        print_text("not enough data yet to say:", *(f"  {waiting}" for waiting in found.waiting))
    if found.skipped:
        print_text("skipped:", *(f"  {skipped}" for skipped in found.skipped))


def finding_lines(finding: Finding) -> list[str]:
    """A finding in lines: what is seen, since when, with which interval; why; what to change; on which rows."""
    rows = []
    for row in finding.evidence[:4]:
        member = "" if row.member is None else f" #{row.member}"
        place = f"step {row.step}" if row.group_id is None else f"group {row.group_id}{member}"
        rows.append(f"     {place}" + (f": {row.text!r}" if row.text else ""))
    more = len(finding.evidence) - len(rows)
    return [
        f"{MARKS[finding.severity]} {finding.name} ({finding.severity}, since step {finding.step})",
        f"     {finding.message}",
        f"     measured: {finding.measured}",
        f"     likely cause: {finding.cause}",
        f"     change {finding.key}: {finding.change}",
        *rows,
        *([f"     … and {more} more rows (--json)"] if more > 0 else []),
    ]
