"""`gropius presets [NAME]`: the named objectives; of one, every field, the formula, and what others call so."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from gropius.cli.options import Json
from gropius.cli.output import number, print_json, print_table, print_text


def command(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="One preset; without it, the list.")] = None,
    as_json: Json = False,
) -> None:
    """List the objectives by name; of one, print every field, its formula, and how others differ."""
    from gropius.objective.presets import PRESETS

    if name is None:
        rows = {preset.name: {"title": preset.title, "citation": preset.citation} for preset in PRESETS.values()}
        if as_json:
            print_json(rows)
        else:
            print_table(
                ("preset", "what it is", "source"), [(n, r["title"], r["citation"]) for n, r in rows.items()], left=3
            )
        return
    report = describe(name)
    if as_json:
        print_json(report)
    else:
        _print(report)


def describe(name: str) -> dict[str, Any]:
    """One preset with everything known of it. Errors: ObjectiveError for an unknown name."""
    from gropius.objective.formula import formula
    from gropius.objective.presets import PRESETS
    from gropius.objective.spec import Objective

    if name not in PRESETS:
        from gropius.errors import ObjectiveError, did_you_mean

        raise ObjectiveError(f"there is no preset {name!r}; {did_you_mean(name, PRESETS)}")
    preset = PRESETS[name]
    fields, default = preset.objective.as_dict(), Objective().as_dict()
    return {
        "name": preset.name,
        "title": preset.title,
        "citation": preset.citation,
        "formula": formula(preset.objective),
        "fields": fields,
        "differs_from_grpo": [
            f"{axis}.{key}"
            for axis, values in fields.items()
            for key, value in values.items()
            if default[axis][key] != value
        ],
        "print_difference": preset.print_difference,
        "elsewhere": dict(preset.elsewhere),
    }


def _print(report: dict[str, Any]) -> None:
    print_text(f"{report['name']}: {report['title']}", report["citation"], "", *report["formula"].splitlines(), "")
    changed = set(report["differs_from_grpo"])
    for axis, values in report["fields"].items():
        print_text(f"[objective.{axis}]")
        for key, value in values.items():
            shown = f'"{value}"' if isinstance(value, str) and value != "inf" else number(value, 8)
            shown = str(value).lower() if isinstance(value, bool) else shown
            print_text(f"{key} = {shown}" + ("    # not as in grpo" if f"{axis}.{key}" in changed else ""))
        print_text("")
    print_text(f"Against the paper's print: {report['print_difference']}")
    for framework, words in report["elsewhere"].items():
        print_text(f"{framework}: {words}")
