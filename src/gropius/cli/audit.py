"""`gropius audit CONFIG --from FRAMEWORK`: the exact objective that another framework's configuration runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gropius.cli.options import Json
from gropius.cli.output import number, print_json, print_table, print_text
from gropius.errors import ObjectiveError, UsageError

if TYPE_CHECKING:
    from gropius.audit.report import Audit

AXES = ("advantage", "ratio", "surrogate", "kl", "aggregate", "selection", "terms")


def command(
    config: Annotated[
        Path, typer.Argument(metavar="CONFIG", help="YAML, JSON, Python, a script or a list of overrides.")
    ],
    framework: Annotated[str, typer.Option("--from", metavar="NAME", help="trl, verl or openrlhf.")],
    against: Annotated[
        str | None, typer.Option("--against", metavar="[NAME:]FILE", help="A second one, e.g. verl:run.sh.")
    ] = None,
    processes: Annotated[
        int, typer.Option("--processes", min=1, help="Data-parallel ranks, where the file does not say (trl).")
    ] = 1,
    recipe_only: Annotated[bool, typer.Option("--recipe", help="Print the equivalent recipe alone.")] = False,
    as_json: Json = False,
) -> None:
    """State the objective a configuration runs, what has no effect, and the recipe that runs the same."""
    from gropius.audit import audit_file
    from gropius.audit.report import recipe

    first = audit_file(config, framework, processes)
    if against is not None:
        if recipe_only:
            raise UsageError("--recipe prints one recipe and --against compares two; give one of them")
        name, path = _second(against, framework)
        raise typer.Exit(_compare(first, audit_file(path, name, processes), as_json))
    if as_json:
        print_json(first.as_dict())
    elif recipe_only:
        print_text(recipe(first).rstrip("\n"))
    else:
        _print(first)
        if first.objective is not None:
            print_text("", recipe(first).rstrip("\n"))
    raise typer.Exit(1 if first.findings else 0)


def _second(text: str, framework: str) -> tuple[str, Path]:
    from gropius.audit import DIALECTS

    name, colon, path = text.partition(":")
    return (name, Path(path)) if colon and name in DIALECTS else (framework, Path(text))


def _print(read: Audit) -> None:
    d = read.dialect
    print_text(f"{read.source}: {d.title} {d.version}", "", *read.formula.splitlines(), "")
    if not read.exact and read.objective is not None:
        print_text("the formula leaves out what is marked inexpressible below", "")
    for axis in AXES:
        for statement in (s for s in read.statements if s.axis == axis):
            print_text(f"{axis}: {statement.text}  [{statement.where}]")
    print_text("", *(f"batch: {line}" for line in read.units.words))
    u = read.units
    print_text(
        f"batch: {number(u.prompts)} prompts x {u.group_size}, {number(u.updates)} update(s) x {u.epochs} pass(es), "
        + (f"{number(u.micro_batches)} micro-batch(es) of {u.micro_responses} a rank" if u.micro_batches
           else "cut by tokens"),
        "",
    )  # fmt: skip
    for remark in read.remarks:
        print_text(f"{remark.kind.replace('_', ' ')}: {remark.text}  [{remark.where}]")
    if read.strangers:
        print_text(f"not looked at: {', '.join(read.strangers)}")
    print_text(f"places: {'; '.join(f'{k} = {x}' for k, x in d.files.items())}")


def _compare(first: Audit, second: Audit, as_json: bool) -> int:
    """Print two configurations side by side; 1 when the objectives differ, 0 when no token's gradient does."""
    report = side_by_side(first, second)
    if as_json:
        print_json(report)
    else:
        _print_pair(first, second, report)
    numbers = report["numbers"]
    return 0 if numbers is not None and numbers["equal"] else 1


def side_by_side(first: Audit, second: Audit) -> dict[str, Any]:
    """Two audits, the fields in which they differ, and the numbers on the fixture (None where they have none).

    numbers_on_policy: the same with every ratio at 1, when one of the two runs uses each batch for one update only.
    """
    from gropius.audit.against import difference, fields_apart, fixture

    numbers, fresh, why = None, None, ""
    try:
        numbers = difference(first.objective, second.objective)
        if first.on_policy or second.on_policy:
            fresh = difference(first.objective, second.objective, fixture(on_policy=True))
    except (UsageError, ObjectiveError) as error:
        why = str(error)
    both = first.objective is not None and second.objective is not None
    apart = fields_apart(first.objective, second.objective) if first.objective and second.objective else []
    return {
        "first": first.as_dict(),
        "second": second.as_dict(),
        "fields": [{"key": k, "first": a, "second": b} for k, a, b in apart],
        "comparable": both,
        "numbers": numbers,
        "numbers_on_policy": fresh,
        "no_numbers": why,
    }


def _print_pair(first: Audit, second: Audit, report: dict[str, Any]) -> None:
    for mark, read in (("A", first), ("B", second)):
        print_text(f"{mark}  {read.source}: {read.dialect.title} {read.dialect.version}")
        print_text(*(f"   {line}" for line in read.formula.splitlines()), "")
    rows = [(axis, _words(first, axis), _words(second, axis)) for axis in AXES]
    for axis, a, b in rows:
        print_text(f"{axis}" + ("" if a != b else " (the same)"), f"  A {a}", *([f"  B {b}"] if a != b else []))
    if report["fields"]:
        print_text("")
        cells = [(f["key"], str(f["first"]), str(f["second"])) for f in report["fields"]]
        print_table(("objective.", "A", "B"), cells, left=3)
    numbers = report["numbers"]
    print_text("", f"no numbers: {report['no_numbers']}" if numbers is None else "on a fixture of four prompts x four")
    if numbers is not None:
        _print_numbers(numbers)
    if report["numbers_on_policy"] is not None:
        once = " and ".join(m for m, read in (("A", first), ("B", second)) if read.on_policy)
        print_text("", f"{once} uses a batch for one update only, so that every ratio is 1; the same fixture then:")
        _print_numbers(report["numbers_on_policy"], rows=False)
    for mark, read in (("A", first), ("B", second)):
        print_text(*(f"{mark} {r.kind.replace('_', ' ')}: {r.text}  [{r.where}]" for r in read.findings))


def _print_numbers(numbers: dict[str, Any], rows: bool = True) -> None:
    loss = numbers["loss"]
    print_text(
        f"  loss A {number(loss[0], 6)}, B {number(loss[1], 6)}",
        f"  gradient of a token: differs by at most {number(numbers['gradient_largest'], 3)}, "
        f"{number(numbers['gradient_share'], 3)} of A's norm",
        f"  cosine {number(numbers['cosine'], 6)}, norm of B over A {number(numbers['scale'], 4)}",
        "",
    )
    table = [
        (f"{r['group']}/{r['response']}", number(r["reward"]), number(r["first"], 4), number(r["second"], 4))
        for r in numbers["responses"]
    ]
    if rows:
        print_table(("response", "reward", "gradient A", "gradient B"), table)


def _words(read: Audit, axis: str) -> str:
    return "; ".join(s.text for s in read.statements if s.axis == axis) or "as by default"
