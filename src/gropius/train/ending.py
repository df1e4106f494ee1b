"""How a run that is asked to stop ends: with what is saved, and with the line that goes on from it."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import TYPE_CHECKING

from gropius.errors import Interrupted
from gropius.train import keep

if TYPE_CHECKING:
    from gropius.train.loop import Run


def interrupted(run: Run) -> Interrupted:
    """What a person reads who stopped a run: that it is saved, and how to go on."""
    keep.unless_kept(run)
    state, folder = run.state, run.writer.folder
    why = "as asked" if run.stop.asked else f"after train.max_time_s = {run.plan.train.max_time_s:g} s"
    error = Interrupted(
        f"stopped after step {state.step} of {run.plan.train.steps}, {why}; everything is saved. "
        f"Go on with: gropius resume {folder}"
    )
    error.exit_code = 128 + run.stop.asked if run.stop.asked else error.exit_code
    return error


def stopped_before_a_step(folder: Path, number: int) -> Interrupted:
    """What is told when a run is stopped before there is anything to save."""
    error = Interrupted(f"stopped before step 1, nothing was saved; gropius resume {folder} begins again")
    error.exit_code = 128 + number
    return error


def stopped_at_once(run: Run) -> Interrupted:
    """What is told at a second signal; the step under way is lost, the one before saved if the weights are its own."""
    where = "from the last checkpoint"
    if not run.stop.moving:
        keep.unless_kept(run)
        where = f"from step {run.state.step}"
    error = Interrupted(f"stopped at once; gropius resume {run.writer.folder} goes on {where}")
    error.exit_code = 128 + (run.stop.asked or signal.SIGINT)
    return error
