"""`gropius check RECIPE`: what it will take here; with --resume, --invariance: prove what is promised of every run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gropius.cli.options import Json, Recipe, Settings, TrustCode
from gropius.cli.output import print_json, print_text, say
from gropius.errors import GropiusError

if TYPE_CHECKING:
    from gropius.recipe import Resolved


@dataclass(frozen=True)
class Question:
    """What a check is asked about. words: recipe and settings as a command line has them. steps: k."""

    resolved: Resolved
    words: tuple[str, ...]
    steps: int
    folder: Path


@dataclass(frozen=True)
class Answer:
    """What a check found. held: False makes the exit code 1."""

    check: str
    held: bool
    text: str


def command(
    recipe: Recipe,
    settings: Settings = [],  # noqa: B006
    resume: Annotated[
        bool, typer.Option("--resume", help="2k steps straight against k, kill -9, and k more: bit by bit.")
    ] = False,
    invariance: Annotated[
        bool, typer.Option("--invariance", help="One real batch: the gradient under every layout of the work.")
    ] = False,
    steps: Annotated[int, typer.Option("--steps", min=1, metavar="K", help="k of --resume.")] = 2,
    keep: Annotated[
        Path | None, typer.Option("--keep", metavar="FOLDER", help="Leave the run folders of the check there.")
    ] = None,
    trust_code: TrustCode = False,
    as_json: Json = False,
) -> None:
    """Estimate time and memory of a recipe on this machine, or prove a promise with it.

    Exit code 1 when a promise does not hold, or when the run would not fit into the memory.
    """
    from gropius.recipe import refuse_user_code, resolve

    resolved = resolve(recipe, settings)
    refuse_user_code(resolved, trusted=trust_code)
    asked = [name for name, wanted in (("resume", resume), ("invariance", invariance)) if wanted]
    if not asked:
        _estimate(resolved, as_json)
        return
    words = [recipe, *(word for setting in settings for word in ("--set", setting))]
    words += ["--trust-code"] if trust_code else []
    with tempfile.TemporaryDirectory(prefix="gropius-check-") as temporary:
        question = Question(resolved, tuple(words), steps, keep or Path(temporary))
        answers = [CHECKS[name](question) for name in asked]
    if as_json:
        print_json([vars(answer) for answer in answers])
    else:
        print_text(*(f"{'ok    ' if answer.held else 'FAILED'}  {answer.check}: {answer.text}" for answer in answers))
    if not all(answer.held for answer in answers):
        raise typer.Exit(1)


def _estimate(resolved: Resolved, as_json: bool) -> None:
    """Time of a step and peak memory, by a probe of ten seconds or two and a few groups of the recipe's own tasks."""
    from gropius import survey
    from gropius.cli.console import Console
    from gropius.cli.plan import print_cost

    with Console() as console:
        found = survey.estimate(resolved, console)
    report = found.report
    if as_json:
        print_json(report.as_dict() | {"notes": list(found.notes), "load": vars(found.load)})
    else:
        print_text(*found.notes)
        print_cost(report)
    if not report.fits:
        raise typer.Exit(1)


def check_resume(question: Question) -> Answer:
    """A run of 2k steps against one that is killed in step k + 1, after its responses are written, and resumed."""
    from gropius.train.sameness import compare

    k = question.steps
    plan = [
        *("--out", str(question.folder), "--set", f"train.steps={2 * k}", "--set", f"checkpoint.every={k}"),
        *("--set", "checkpoint.final=true", "--set", "record.rollouts=true"),
    ]
    measured = question.resolved.eval
    if measured.before or measured.after or measured.every:
        plan += ["--set", f"eval.tasks={min(8, measured.tasks or 8)}"]
    straight, broken = question.folder / "straight", question.folder / "killed"
    say(f"· {2 * k} steps straight")
    _gropius("train", *question.words, *plan, "--name", straight.name)
    say(f"· {k} steps, then kill -9 in step {k + 1}")
    _gropius("train", *question.words, *plan, "--name", broken.name, fault=f"rollouts.written:{k + 1}")
    say(f"· resumed for {k} steps")
    trusted = ["--trust-code"] if "--trust-code" in question.words else []
    _gropius("resume", str(broken), *trusted)
    found = compare(straight, broken)
    if found.difference:
        return Answer("resume", False, f"the first difference: {found.difference}")
    return Answer("resume", True, f"{2 * k} steps = {k} + kill -9 + {k}, bit by bit: {found}")


def check_invariance(question: Question) -> Answer:
    """A batch drawn and scored as training would, and its gradient under every way of laying the work out."""
    from gropius import survey
    from gropius.cli.console import Console

    with Console() as console:
        rows = survey.invariance(question.resolved, console)
    lines = [f"{row.name:<40} bound {row.bound:.0e}   found {row.found:.1e}   {_word(row.held)}" for row in rows]
    held = all(row.held for row in rows)
    return Answer("invariance", held, "relative difference of the gradient\n  " + "\n  ".join(lines))


def _word(held: bool) -> str:
    return "ok" if held else "OUT OF BOUND"


def _gropius(*words: str, fault: str = "") -> None:
    """Run a verb in a process of its own. fault: where it must die by SIGKILL.

    Errors: GropiusError with its last words when it ends otherwise than it should.
    """
    environment = {key: value for key, value in os.environ.items() if key != "GROPIUS_FAULT"}
    if fault:
        environment["GROPIUS_FAULT"] = fault
    ended = subprocess.run(
        [sys.executable, "-m", "gropius", *words],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    if ended.returncode != (-signal.SIGKILL if fault else 0):
        raise GropiusError(f"gropius {words[0]} ended with {ended.returncode}: {_last_words(ended.stderr)}")


def _last_words(text: str) -> str:
    lines: Sequence[str] = text.strip().splitlines()
    return " / ".join(lines[-3:]) or "without a word"


CHECKS: dict[str, Callable[[Question], Answer]] = {"resume": check_resume, "invariance": check_invariance}
