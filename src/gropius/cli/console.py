"""What a run shows while it goes on: one line a step on stderr, with a progress bar on a terminal."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TextIO

from gropius.cli.output import inert, number, print_text

if TYPE_CHECKING:
    from gropius.train.evaluate import HeldOut

Number = float | int | None


class Console:
    """The listener of a run (`gropius.train.progress.Progress`) that a person reads. A context manager.

    stream: where lines go. live: draw a progress bar under the lines; None = when the stream is a terminal.
    `evaluations` keeps what was measured, by label.
    """

    def __init__(self, stream: TextIO | None = None, *, live: bool | None = None) -> None:
        self._stream = stream or sys.stderr
        self._live = self._stream.isatty() if live is None else live
        self._bar: Any = None
        self._task: Any = None
        self._durations: list[float] = []
        self.evaluations: dict[str, HeldOut] = {}
        self._ids: dict[str, float] = {}

    @property
    def on_terminal(self) -> bool:
        """True when a person sees the lines as they come."""
        return self._stream.isatty()

    def note(self, text: str) -> None:
        """Show something a person should know."""
        self._line(f"· {text}")

    def step(self, step: int, steps: int, metrics: Mapping[str, Number]) -> None:
        """Show one step and move the bar."""
        duration = metrics.get("step_time")
        if duration is not None:
            self._durations.append(float(duration))
        left = sum(self._durations) / len(self._durations) * (steps - step) if self._durations else None
        for name in WORK:
            self._ids[name] = self._ids.get(name, 0) + (metrics.get(f"compute/{name}") or 0)
        held_out = metrics.get("held_out/mean")
        self._line(step_line(step, steps, metrics, None if held_out is None else float(held_out), left))
        self._move(step, steps)

    def held_out(self, label: str, found: HeldOut) -> None:
        """Show an evaluation and keep it."""
        self.evaluations[label] = found
        self._line(held_out_line(label, found))

    def saving_line(self) -> str:
        """What all steps ran against padded rows, in one line; "" where nothing was run."""
        ids = self._ids
        if not ids.get("padded"):
            return ""
        left_out = ", ".join(f"{words} {ids[name]:,.0f}" for name, words in WORK.items() if words)
        return f"ran {ids['run']:,.0f} of the {ids['padded']:,.0f} ids of padded rows; left out: {left_out}"

    def close(self) -> None:
        """Take the bar away; the lines stay."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def __enter__(self) -> Console:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _line(self, text: str) -> None:
        if self._bar is not None:
            from rich.text import Text

            self._bar.console.print(Text(inert(text)))
            return
        self._stream.write(inert(text) + "\n")
        self._stream.flush()

    def _move(self, step: int, steps: int) -> None:
        if not self._live:
            return
        if self._bar is None:
            from rich.console import Console as Terminal
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn, TimeRemainingColumn

            columns = (BarColumn(bar_width=None), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
            self._bar = Progress(
                *columns, console=Terminal(file=self._stream), transient=True, expand=True, refresh_per_second=2
            )
            self._task = self._bar.add_task("steps", total=steps)
            self._bar.start()
        self._bar.update(self._task, completed=step)


# The `compute/…` metrics that are summed up at the end, and how what was left out is called.
WORK = {"run": "", "padded": "", "shared": "shared beginnings", "dead": "dead rows", "padding": "padding"}


def step_line(
    step: int, steps: int, metrics: Mapping[str, Number], held_out: float | None, left_s: float | None
) -> str:
    """One step in one line; what was not measured is left out.

    >>> step_line(3, 10, {"reward": 0.5, "loss": 0.01, "groups/count": 8, "groups/all_failed": 0.25}, None, 70.0)
    'step  3/10  reward 0.500  no signal in 2 failed + 0 solved of 8 groups  loss +0.01  left 1:10'
    """
    parts = [f"step {step:>{len(str(steps))}}/{steps}"]
    if (reward := metrics.get("reward")) is not None:
        parts.append(f"reward {reward:.3f}")
    if held_out is not None:
        parts.append(f"held-out {held_out:.3f}")
    if count := metrics.get("groups/count"):
        failed, solved = (round((metrics.get(f"groups/all_{end}") or 0) * count) for end in ("failed", "solved"))
        parts.append(f"no signal in {failed} failed + {solved} solved of {count} groups")
    if (loss := metrics.get("loss")) is not None:
        parts.append(f"loss {loss:+.3g}")
    if (norm := metrics.get("grad_norm")) is not None:
        parts.append(f"grad {norm:.3g}")
    if (speed := metrics.get("tokens_per_s")) is not None and math.isfinite(speed):
        parts.append(f"{speed:,.0f} tok/s")
    if (saved := metrics.get("compute/saved")) is not None:
        parts.append(f"ran {1 - saved:.0%} of padded")
    if left_s is not None:
        parts.append(f"left {clock(left_s)}")
    return "  ".join(parts)


def held_out_line(label: str, found: HeldOut) -> str:
    """An evaluation in one line: mean@k, and with several responses pass@k and maj@k, with 95 % intervals."""
    shares = [("mean", found.mean)]
    if found.k > 1:
        shares += [("pass", found.passed), ("maj", found.majority)]
    text = "  ".join(f"{name}@{found.k} {share}" for name, share in shares)
    return f"held-out {label}: {text}  ({found.mean.tasks} tasks, {number(found.mean_length_tokens, 3)} tokens)"


def clock(seconds: float) -> str:
    """Seconds as h:mm:ss or m:ss.

    >>> clock(59.6), clock(3661)
    ('1:00', '1:01:01')
    """
    whole = round(seconds)
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"


def budget_lines(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What a run's sampling cost, from its metrics: tokens by what became of them, responses and groups by their worth.

    Nothing of a run without a recorded step, or of one recorded before these metrics were.
    """
    steps = [row for row in rows if row.get("responses") is not None]
    if not steps:
        return []

    def total(name: str, weight: str = "") -> int:
        return round(sum((row.get(name) or 0) * ((row.get(weight) or 0) if weight else 1) for row in steps))

    responses, informative = total("responses"), total("groups/informative", "groups/count")
    per = f"{responses / informative:.1f} for each group that carries signal" if informative else "no group had signal"
    lines = [
        f"tokens      {total('tokens_sampled'):,} sampled, {total('tokens_trained'):,} trained; thrown away: "
        f"{total('tokens_dropped'):,} of dropped groups, {total('tokens_aborted'):,} aborted",
        f"responses   {responses:,}, {per}; {total('duplicates', 'responses'):,} equal to an earlier sibling",
        f"groups      {informative:,} of {total('groups/count'):,} carry signal "
        f"({total('groups/all_failed', 'groups/count'):,} all failed, "
        f"{total('groups/all_solved', 'groups/count'):,} all solved)",
    ]
    if total("responses_aborted") or total("responses_resumed") or total("responses_waiting"):
        lines.append(
            f"cut         {total('groups_begun'):,} groups begun; {total('responses_aborted'):,} responses aborted, "
            f"{total('responses_resumed'):,} gone on with in a later step"
        )
    return lines


def print_outcome(console: Console, folder: object) -> None:
    """Print on stdout what a finished run found: before and after with intervals, and where to look next.

    A terminal that shows stderr too has the evaluations already.
    """
    from gropius.records.reader import RunReader

    path = Path(str(folder))
    if not (sys.stdout.isatty() and console.on_terminal):
        for label, found in console.evaluations.items():
            if label in ("before", "after"):
                print_text(held_out_line(label, found))
    if line := console.saving_line():
        print_text(line)
    print_text(
        *(budget_lines(RunReader(path).metrics()) if path.is_dir() else ()),
        f"run folder  {folder}",
        f"next        gropius eval {folder}    gropius play {folder}    less {folder}/metrics.jsonl",
    )
