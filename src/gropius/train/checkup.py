"""The doctor's looks at a run under way: new findings are told, all are stored, and a serious one may pause the run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gropius.doctor.watch import Checkup
from gropius.errors import RunHalted
from gropius.train import keep

if TYPE_CHECKING:
    from gropius.train.loop import Run


def when_due(run: Run) -> None:
    """Every `doctor.every` steps. Errors: RunHalted, the state saved, when a new finding is as `doctor.pause_on`."""
    every, step = run.plan.doctor.every, run.state.step
    if not every or step % every or step == run.plan.train.steps:
        return
    found = _look(run)
    if found is not None and found.pause:
        keep.unless_kept(run)
        raise RunHalted(
            f"paused after step {step} by doctor.pause_on = {run.plan.doctor.pause_on}: {found.pause}. Everything is "
            f"saved. See: gropius doctor {run.writer.folder}. Go on all the same with: gropius resume "
            f"{run.writer.folder}"
        )


def at_the_end(run: Run) -> None:
    """After the last step and the last evaluation."""
    if run.plan.doctor.every:
        _look(run)


def _look(run: Run) -> Checkup | None:
    if run.watch is None:
        return None
    found = run.watch.look()
    for line in found.lines:
        run.progress.note(line)
    run.writer.write_findings(found.rows)
    return found
