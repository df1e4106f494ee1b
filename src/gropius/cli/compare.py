"""`gropius compare A B … --seeds N`: train recipes on several seeds and say which difference is real."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gropius.cli.options import Json, Settings, TrustCode
from gropius.cli.output import print_json, print_table, print_text, say

if TYPE_CHECKING:
    from gropius.compare import Comparison, Curve
    from gropius.recipe import Resolved

PAGE = "comparison.html"
# Keys that decide what is asked and how it is measured: where they differ, held-out results are not comparable.
SAME = ("data", "eval.tasks", "eval.samples", "eval.temperature", "model.source")


def command(
    recipes: Annotated[
        list[str],
        typer.Argument(metavar="RECIPE[,KEY=VALUE…]…", help="Recipes, each with its own settings after commas."),
    ],
    seeds: Annotated[int, typer.Option("--seeds", metavar="N", help="Seeds of each recipe: 0 … N-1.")] = 3,
    settings: Settings = [],  # noqa: B006
    out: Annotated[
        Path, typer.Option("--out", metavar="FOLDER", help="Runs go there; finished ones are reused.")
    ] = Path("comparison"),
    trust_code: TrustCode = False,
    as_json: Json = False,
) -> None:
    """Compare recipes at equal sampled tokens over several seeds, with intervals and how many seeds would settle it."""
    from gropius.compare import compare
    from gropius.errors import UsageError

    if seeds < 1 or len(recipes) < 2:
        raise UsageError("compare takes two recipes or more and --seeds of at least 1")
    plans = {name: [plan(text, settings, out, name, s) for s in range(seeds)] for text, name in names(recipes).items()}
    _refuse_incomparable({name: own[0] for name, own in plans.items()}, trust_code)
    curves = {name: [_curve(resolved) for resolved in own] for name, own in plans.items()}
    found = compare(curves)
    _write_page(out / PAGE, found, curves, (recipes, seeds, settings))
    if as_json:
        print_json(found.as_dict())
    else:
        _print(found)


def names(recipes: list[str]) -> dict[str, str]:
    """A short name for each recipe text: what is its own, the last part of each key.

    >>> names(["a,objective.preset=grpo", "a,objective.preset=dapo"])
    {'a,objective.preset=grpo': 'a-grpo', 'a,objective.preset=dapo': 'a-dapo'}
    """
    found: dict[str, str] = {}
    for text in recipes:
        head, *own = split(text)
        parts = [
            value if key.endswith("preset") else f"{key.rpartition('.')[2]}-{value}" for key, value in map(_pair, own)
        ]
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", "-".join([Path(head).stem, *parts])).strip("-")
        count = sum(other == name or other.startswith(f"{name}.") for other in found.values())
        found[text] = f"{name}.{count + 1}" if count else name
    return found


def split(text: str) -> list[str]:
    """A recipe and its settings: commas before `key=` separate.

    >>> split("a,train.steps=3,data.options.rows=[1,2]")
    ['a', 'train.steps=3', 'data.options.rows=[1,2]']
    """
    return re.split(r",(?=[A-Za-z_][\w.]*=)", text)


def _pair(setting: str) -> tuple[str, str]:
    key, _, value = setting.partition("=")
    return key, value.strip("\"'")


def plan(text: str, settings: list[str], out: Path, name: str, seed: int) -> Resolved:
    """One run of a recipe: its settings, then those for all, then its place and seed."""
    from gropius.recipe import resolve

    head, *own = split(text)
    place = [f"name={json.dumps(f'{name}-{seed}')}", f"out={json.dumps(str(out))}", f"seed={seed}"]
    return resolve(head, [*own, *settings, *place])


def _refuse_incomparable(plans: dict[str, Resolved], trusted: bool) -> None:
    from gropius.errors import UsageError
    from gropius.recipe import refuse_user_code

    (first, one), *others = plans.items()
    for name, other in others:
        for key in SAME:
            left, right = (_at(p.tables(), key) for p in (one, other))
            if left != right:
                raise UsageError(
                    f"{first} and {name} differ in {key} ({left!r} and {right!r}): what they are measured on "
                    "is not the same, so nothing could be said; set it alike with --set"
                )
    for resolved in plans.values():
        refuse_user_code(resolved, trusted=trusted)


def _at(tables: object, key: str) -> object:
    for part in key.split("."):
        tables = tables.get(part) if isinstance(tables, dict) else None
    return tables


def _curve(resolved: Resolved) -> Curve:
    """Train the run, unless its folder holds it finished, and read its curve."""
    from gropius.compare import curve
    from gropius.errors import UsageError
    from gropius.records.reader import RunReader

    folder = resolved.folder
    if folder.is_dir():
        reader = RunReader(folder)
        if reader.resolved().get("sha256") != resolved.sha256:
            raise UsageError(f"{folder}: holds a run of another recipe; write another --out")
        if max(reader.metrics_by_step(), default=0) >= resolved.train.steps and len(reader.steps()) >= 1:
            say(f"{folder}: finished before, reused")
            return curve(reader)
        raise UsageError(f"{folder}: was begun and not finished; gropius resume {folder}, or delete it")
    from gropius import build
    from gropius.train.progress import Silent

    say(f"{folder}: training")
    return curve(RunReader(build.train(resolved, Silent())))


def _write_page(
    page: Path, found: Comparison, curves: dict[str, list[Curve]], asked: tuple[list[str], int, list[str]]
) -> None:
    from gropius.compare.page import page as html
    from gropius.errors import UsageError

    recipes, seeds, settings = asked
    words = ["gropius", "compare", *recipes, "--seeds", str(seeds), *(w for s in settings for w in ("--set", s))]
    try:
        page.write_text(html(found, curves, shlex.join(words)), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{page}: cannot be written: {error.strerror}") from error
    say(f"page: {page}")


def _print(found: Comparison) -> None:
    print_text(f"held-out after {found.budget:,} sampled tokens, {len(found.seeds)} seeds", "")
    print_table(
        ("recipe", "held-out", "95 %", "gain", "steps"),
        [
            (s.name, f"{s.mean:.3f}", "one seed" if s.low is None else f"[{s.low:.3f}, {s.high:.3f}]", f"{s.gain:+.3f}",
             f"{s.steps:.0f}")
            for s in found.standings
        ],
    )  # fmt: skip
    print_text("", *(d.sentence(len(found.seeds)) for d in found.differences))
