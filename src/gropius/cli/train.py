"""`gropius train RECIPE`: the main job."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gropius.cli.console import Console
from gropius.cli.options import Cluster, Name, Out, Overwrite, Recipe, Settings, TrustCode
from gropius.cli.ranks import over_ranks
from gropius.cli.target import for_run, setting_words
from gropius.distributed.seat import seat
from gropius.errors import RunFolderError, UsageError

if TYPE_CHECKING:
    from gropius.recipe import Resolved
    from gropius.train.team import Team


def command(
    recipe: Recipe,
    settings: Settings = [],  # noqa: B006
    name: Name = None,
    out: Out = None,
    overwrite: Overwrite = False,
    fork: Annotated[
        str | None, typer.Option("--fork", metavar="RUN[@N]", help="Start from the whole state of a run, after step N.")
    ] = None,
    cluster: Cluster = None,
    trust_code: TrustCode = False,
) -> None:
    """Train by group-relative policy optimisation, measure before and after, and record everything in a run folder."""
    resolved = for_run(recipe, settings, (name, out), trust_code)
    from gropius.records.writer import RESOLVED, delete_run, refuse_taken

    source = None if fork is None else run_and_step(fork)
    if source is not None and source[0].resolve() == resolved.folder.resolve():
        raise UsageError(f"--fork {fork}: the new run needs a folder of its own; write --name NAME")
    where = seat()
    if where is None:  # a rank's folder was looked at by whoever started it
        if overwrite:
            delete_run(resolved.folder)
        refuse_unfinished(resolved)
        refuse_taken(resolved.folder)

    def work(console: Console, team: Team) -> Path:
        """The run, in the process that owns its folder."""
        from gropius import build

        for note in resolved.notes:
            console.note(note)
        if where is not None and where.attempt and (resolved.folder / RESOLVED).is_file():
            return build.resume(resolved.folder, None, console, (), team)
        if source is not None:
            return build.fork(resolved, source, console, team)
        return build.train(resolved, console, team)

    words = ["train", recipe, *setting_words(settings, name=resolved.name, out=resolved.out)]
    words += [*(["--fork", fork] if fork else []), *(["--trust-code"] if trust_code else [])]
    over_ranks(resolved, words, work, trusted=trust_code, cluster=cluster)


def run_and_step(text: str) -> tuple[Path, int | None]:
    """Split `RUN` or `RUN@N`.

    >>> run_and_step("runs/a@20")
    (PosixPath('runs/a'), 20)
    """
    name, at, number = text.rpartition("@")
    if not at or Path(text).is_dir():
        return Path(text), None
    if not number.isdecimal():
        raise UsageError(f"{text}: after @ goes the number of a step, for example {name}@20")
    return Path(name), int(number)


def refuse_unfinished(resolved: Resolved) -> None:
    """The same command line again, on a run that is not over: say how far it is and how to go on.

    Errors: RunFolderError. Every other taken folder is left to `refuse_taken`.
    """
    from gropius.records.reader import RunReader
    from gropius.records.writer import RESOLVED, lock_holder

    folder = resolved.folder
    if not (folder / RESOLVED).is_file() or lock_holder(folder) is not None:
        return
    reader = RunReader(folder)
    document = reader.resolved()
    if document.get("sha256") != resolved.sha256:
        return
    done, saved = (reader.steps() or [0])[-1], reader.checkpoints()
    if saved[-1:] == [resolved.train.steps]:
        return
    raise RunFolderError(
        f"{folder}: this run was begun and is not over: step {done} of {resolved.train.steps} is recorded, "
        f"{f'step {saved[-1]} is saved' if saved else 'no checkpoint is saved'}. Go on with: gropius resume {folder}   "
        "(or begin anew with --overwrite, or another --name)"
    )
