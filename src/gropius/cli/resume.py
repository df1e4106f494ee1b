"""`gropius resume RUN`: go on from the last complete checkpoint, to the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gropius.cli.console import Console
from gropius.cli.options import Cluster, Settings, TrustCode
from gropius.cli.ranks import over_ranks
from gropius.cli.target import of_run, setting_words

if TYPE_CHECKING:
    from gropius.train.team import Team


def command(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
    step: Annotated[
        int | None, typer.Option("--step", metavar="N", help="Which checkpoint; the newest whole one.")
    ] = None,
    settings: Settings = [],  # noqa: B006
    cluster: Cluster = None,
    trust_code: TrustCode = False,
) -> None:
    """Continue a run from its last complete checkpoint, or from its beginning where it has none yet.

    Its recipe, data, code and tokenizer must be those it began with; --set changes the few keys that are harmless (how
    many steps, what is measured, logged and kept).
    """
    from gropius.recipe import refuse_user_code
    from gropius.records.reader import RunReader

    resolved = of_run(RunReader(run), settings)
    refuse_user_code(resolved, trusted=trust_code)

    def work(console: Console, team: Team) -> Path:
        """The run, in the process that owns its folder."""
        from gropius import build

        return build.resume(run, step, console, settings, team)

    words = ["resume", str(run), *([] if step is None else ["--step", str(step)]), *setting_words(settings)]
    words += ["--trust-code"] if trust_code else []
    over_ranks(resolved, words, work, trusted=trust_code, cluster=cluster)
