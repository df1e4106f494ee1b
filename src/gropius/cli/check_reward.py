"""`gropius check-reward TASK|RECIPE`: try a reward on gold, nothing, noise, hedges and attacks before any training."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gropius.cli.options import Json, Settings, TrustCode
from gropius.cli.output import number, print_json, print_table, print_text

if TYPE_CHECKING:
    from gropius.recipe import Resolved
    from gropius.rewards.check import Report


def command(
    target: Annotated[
        str, typer.Argument(metavar="TASK|RECIPE", help="A task set, a file with rows, a recipe, or a run folder.")
    ],
    settings: Settings = [],  # noqa: B006  (typer copies the default)
    tasks: Annotated[int, typer.Option("--tasks", min=1, metavar="N", help="Rows tried with every policy.")] = 16,
    every: Annotated[bool, typer.Option("--all", help="Try the gold answer of every row, not of a sample.")] = False,
    trust_code: TrustCode = False,
    as_json: Json = False,
) -> None:
    """Try the reward: gold must score full, everything else must not. Exit code 1 when something was found."""
    import asyncio

    from gropius import build
    from gropius.recipe import refuse_user_code
    from gropius.rewards.check import Plan, check

    resolved = recipe_of(target, settings)
    refuse_user_code(resolved, trusted=trust_code)
    found = build.tasks(resolved)
    build.isolation(resolved, found)
    scorer = build.scorer(resolved, found)
    width = 1 if resolved.model.source == "tiny" else 4
    plan = Plan(tasks, 0 if every else 4 * tasks, resolved.seed, width)
    try:
        report = asyncio.run(check(found, scorer, scorer.parts, plan))
    finally:
        scorer.close()
    notes = (*found.notes, *scorer.describe())
    print_json({"target": target, "notes": list(notes), **report.as_dict()}) if as_json else _show(notes, report)
    if report.failed:
        raise typer.Exit(1)


def recipe_of(target: str, settings: list[str]) -> Resolved:
    """The recipe that a target names: a recipe or a run's, else one around a task set or a file with rows.

    A name that is both (`arithmetic`) is the recipe. Errors: RecipeError, RunFolderError.
    """
    from gropius.cli.target import of_run
    from gropius.recipe import resolve
    from gropius.recipe.load import built_in_recipes
    from gropius.records.reader import RunReader
    from gropius.records.writer import RESOLVED

    path = Path(target)
    if (path / RESOLVED).is_file():
        return of_run(RunReader(target), settings)
    if target in built_in_recipes() or path.suffix == ".toml":
        return resolve(target, settings)
    tables: dict[str, Any] = {"data": {"source": target}, "eval": {"before": False, "after": False}}
    return resolve(tables, settings)


def _show(notes: tuple[str, ...], report: Report) -> None:
    print_text(*notes, "")
    rows = [
        (
            name,
            score.trial.does,
            str(len(score.rows)),
            str(len(score.full())),
            str(len(score.void())),
            number(score.paid),
        )
        for name, score in report.scores.items()
    ]
    print_table(("policy", "what it does", "rows", "full", "void", "reward"), rows, left=2)
    print_text("")
    for found in sorted(report.findings, key=lambda found: found.severity):
        print_text(f"{found.severity}: {found.name}: {found.message}", f"  {found.change}")
        if found.rows:
            more = f" and {found.count - len(found.rows)} more" if found.count > len(found.rows) else ""
            print_text(f"  {', '.join(found.rows)}{more}")
    if not report.findings:
        print_text("nothing was found")
