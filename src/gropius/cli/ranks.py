"""A verb that may run in several processes: in which of them it is, and what it does there."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gropius.cli.console import Console, print_outcome
from gropius.cli.output import show_error
from gropius.errors import UsageError

if TYPE_CHECKING:
    from gropius.recipe import Resolved
    from gropius.train.team import Team

Work = Callable[[Console, "Team"], Path]


def over_ranks(
    resolved: Resolved, words: Sequence[str], work: Work, *, trusted: bool, cluster: str | None = None
) -> None:
    """Do a run's work: here, when the recipe asks for one process; else start them, lead them, or follow.

    words: the verb with its arguments, for the ranks. cluster: the Ray that they run on. Exits with rank 0's code where
    the ranks were started here.
    """
    if cluster is not None and not is_rank():
        from gropius.cli.cluster import over_cluster

        sys.exit(over_cluster(resolved, words, cluster))
    if resolved.cluster.reward_hosts and not is_rank():
        raise UsageError(
            f"cluster.reward_hosts = {resolved.cluster.reward_hosts} are placed by Ray; write --cluster local (or the "
            "address of a Ray), or --set cluster.reward_hosts=0"
        )
    if resolved.cluster.trainer_ranks > 1 or is_rank():
        from gropius import crew

        if crew.follows(resolved):
            crew.follow(resolved, show_error)
            return
        if crew.starts_ranks(resolved):
            with Console() as console:
                code = crew.start_ranks(resolved, words, console, trusted)
            sys.exit(code)
        with crew.leading(resolved, show_error) as team:
            _lead(work, team)
        return
    from gropius.train.team import Team

    _lead(work, Team())


def is_rank() -> bool:
    """True in a process that torchrun, or this program, started as one of several."""
    from gropius.distributed.seat import seat

    return seat() is not None


def _lead(work: Work, team: Team) -> None:
    with Console() as console:
        folder = work(console, team)
    print_outcome(console, folder)
