"""`gropius rescore RUN`: what another reward would have said of a run's recorded responses. Nothing is written."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from gropius.cli.options import Json, Settings, TrustCode
from gropius.cli.output import number, print_json, print_table, print_text
from gropius.errors import RunFolderError

if TYPE_CHECKING:
    from gropius.recipe import Resolved
    from gropius.records.reader import RunReader
    from gropius.rewards.rescore import StepChange


def command(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run folder with recorded rollouts.")],
    rewards: Annotated[
        list[str], typer.Option("--reward", metavar="NAME", help="A reward in place of the run's own. Repeatable.")
    ] = [],  # noqa: B006  (typer copies the default)
    settings: Settings = [],  # noqa: B006
    steps: Annotated[list[int], typer.Option("--step", metavar="N", help="This step only. Repeatable.")] = [],  # noqa: B006
    trust_code: TrustCode = False,
    as_json: Json = False,
) -> None:
    """Score a run's recorded responses again (with --reward, or --set reward=[…]) and show what would have changed."""
    from gropius.cli.target import of_run
    from gropius.recipe import refuse_user_code
    from gropius.records.reader import RunReader

    reader = RunReader(run)
    words = ["reward=[" + ",".join(f"{{name={json.dumps(name)}}}" for name in rewards) + "]"] if rewards else []
    resolved = of_run(reader, [*words, *settings])
    refuse_user_code(resolved, trusted=trust_code)
    chosen = steps or reader.steps()
    unknown = sorted(set(chosen) - set(reader.steps()))
    if unknown or not chosen:
        raise RunFolderError(f"{run}: no recorded rollouts" + (f" of step {unknown[0]}" if unknown else ""))
    changes, lines = compare(reader, resolved, chosen)
    if as_json:
        print_json({"run": run, "rewards": list(lines), "steps": [change.as_dict() for change in changes]})
    else:
        _show(lines, changes)


def compare(reader: RunReader, resolved: Resolved, steps: list[int]) -> tuple[list[StepChange], tuple[str, ...]]:
    """Every step under both rewards, and the parts of the new one."""
    import asyncio

    from gropius import build
    from gropius.rewards.rescore import rescore

    tasks = build.tasks(resolved)
    build.isolation(resolved, tasks)
    scorer = build.scorer(resolved, tasks)
    try:
        found = [
            asyncio.run(rescore(reader.rollouts(step), tasks, (scorer, scorer.parts), resolved.objective))
            for step in steps
        ]
    finally:
        scorer.close()
    return found, scorer.describe()


def _show(lines: tuple[str, ...], changes: list[StepChange]) -> None:
    print_text(*lines, "")
    header = ("step", "responses", "changed", "reward", "was", "void", "was", "informative", "was", "turned", "moved")
    print_table(
        header,
        [
            (
                str(c.step),
                str(c.responses),
                str(len(c.changes)),
                number(c.reward_after),
                number(c.reward_before),
                str(c.void_after),
                str(c.void_before),
                f"{c.informative_after}/{c.groups}",
                f"{c.informative_before}/{c.groups}",
                str(c.turned),
                number(c.moved),
            )
            for c in changes
        ],
    )
    print_text("", "informative: groups whose siblings differ. turned: responses whose advantage has another sign.")
    shown = [change for step in changes for change in step.changes][:10]
    for change in shown:
        where = f"step {change.step}, group {change.group_id}, member {change.member} ({change.task_key})"
        print_text(
            f"{where}: {change.before.status} {number(change.before.value)} → "
            f"{change.after.status} {number(change.after.value)}"
            + (f" ({change.after.reason})" if change.after.reason else ""),
            f"  …{change.reply[-120:]!r}",
        )
    if not shown:
        print_text("no verdict changed")
