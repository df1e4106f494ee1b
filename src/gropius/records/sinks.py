"""Copies of metrics.jsonl elsewhere: wandb, trackio, tensorboard, mlflow. The file is the truth. No torch.

Every sink is fed by a thread of its own from a bounded queue, so a service that hangs holds nothing up. A sink that
fails, or lags too far behind, is switched off, and that is said once.
"""

from __future__ import annotations

import importlib
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gropius.errors import RecipeError, did_you_mean

QUEUE_ROWS = 1000
DEADLINE_S = 10.0
Number = float | int | None


@dataclass(frozen=True)
class Place:
    """Which run a sink is told of. document: what resolved.json holds."""

    folder: Path
    document: Mapping[str, Any]

    @property
    def name(self) -> str:
        """The name of the run."""
        return self.folder.name


class Open:
    """A sink in use: `log` one step, `close` at the end. Both may raise anything, and then the sink is switched off."""

    def __init__(self, log: Callable[[int, dict[str, float]], object], close: Callable[[], object]) -> None:
        self.log, self.close = log, close


def _wandb(place: Place) -> Open:
    module = importlib.import_module("wandb")
    run = module.init(project="gropius", name=place.name, dir=str(place.folder / "logs"), config=dict(place.document))
    return Open(lambda step, row: run.log(row, step=step), run.finish)


def _trackio(place: Place) -> Open:
    module = importlib.import_module("trackio")
    module.init(project="gropius", name=place.name, config=dict(place.document))
    return Open(lambda step, row: module.log(row, step=step), module.finish)


def _tensorboard(place: Place) -> Open:
    module = importlib.import_module("tensorboard.summary")
    writer = module.Writer(str(place.folder / "logs" / "tensorboard"))

    def log(step: int, row: dict[str, float]) -> None:
        for name, value in row.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    return Open(log, writer.close)


def _mlflow(place: Place) -> Open:
    module = importlib.import_module("mlflow")
    module.start_run(run_name=place.name)
    module.log_dict(dict(place.document), "resolved.json")
    # mlflow allows few characters in a name
    return Open(
        lambda step, row: module.log_metrics({name.replace("@", "_at_"): v for name, v in row.items()}, step=step),
        module.end_run,
    )


class Sink:
    """One sink and its thread."""

    def __init__(self, name: str, place: Place) -> None:
        self.name = name
        self.fault = ""
        self._place = place
        self._rows: queue.Queue[tuple[int, dict[str, float]] | None] = queue.Queue(QUEUE_ROWS)
        self._thread = threading.Thread(target=self._serve, name=f"sink-{name}", daemon=True)
        self._thread.start()

    def put(self, step: int, row: dict[str, float]) -> None:
        """Hand a row over; never waits."""
        try:
            self._rows.put_nowait((step, row))
        except queue.Full:
            self.fault = self.fault or f"it is {QUEUE_ROWS} rows behind"

    def close(self, deadline_s: float) -> None:
        """Let it write what is waiting, for so long at most."""
        try:
            self._rows.put_nowait(None)
        except queue.Full:
            self.fault = self.fault or f"it is {QUEUE_ROWS} rows behind"
            return
        self._thread.join(deadline_s)
        if self._thread.is_alive():
            self.fault = self.fault or f"it did not finish within {deadline_s:g} s"

    def _serve(self) -> None:
        try:
            sink = SINKS[self.name](self._place)
            while (item := self._rows.get()) is not None:
                sink.log(*item)
            sink.close()
        except (Exception, SystemExit) as fault:  # the boundary: another program's client, which may raise anything
            first = str(fault).strip().splitlines()
            self.fault = f"{type(fault).__name__}: {first[0][:200] if first else ''}"


class Sinks:
    """The sinks of one run; a context manager. note: where a person hears that one was switched off."""

    def __init__(self, names: Sequence[str], place: Place, note: Callable[[str], None]) -> None:
        for name in names:
            if name not in SINKS:
                raise RecipeError(f'record.sinks: "{name}" is no sink; {did_you_mean(name, SINKS)}')
        self._note = note
        self._sinks = [Sink(name, place) for name in names]

    def write(self, step: int, metrics: Mapping[str, Number]) -> None:
        """Copy a row: its numbers, without those that are absent."""
        row = {name: float(value) for name, value in metrics.items() if value is not None}
        for sink in self._sinks:
            sink.put(step, dict(row))
        self._switch_off()

    def close(self, deadline_s: float = DEADLINE_S) -> None:
        """Finish them all; what does not finish in time is left behind. May be called twice."""
        for sink in self._sinks:
            sink.close(deadline_s)
        self._switch_off()
        self._sinks = []

    def __enter__(self) -> Sinks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _switch_off(self) -> None:
        for sink in [sink for sink in self._sinks if sink.fault]:
            self._sinks.remove(sink)
            self._note(f"{sink.name} is switched off: {sink.fault}. metrics.jsonl has everything")


SINKS: dict[str, Callable[[Place], Open]] = {
    "wandb": _wandb,
    "trackio": _trackio,
    "tensorboard": _tensorboard,
    "mlflow": _mlflow,
}
