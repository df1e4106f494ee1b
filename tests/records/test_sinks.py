"""A copy of the metrics may fail in every way there is, and the run does not notice."""

from __future__ import annotations

import sys
import threading
import types
from pathlib import Path
from typing import Any

import pytest

from gropius.errors import RecipeError
from gropius.records import sinks
from gropius.records.sinks import SINKS, Open, Place, Sinks


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path, {"seed": 0})


def fake(name: str, monkeypatch: pytest.MonkeyPatch, got: list[tuple[int, dict[str, float]]], ended: list[str]) -> None:
    """A client of that name as far as it is used."""
    module: Any = types.ModuleType(name)

    def log(row: dict[str, float], step: int) -> None:
        got.append((step, row))

    def init(**_: Any) -> Any:
        return types.SimpleNamespace(log=log, finish=lambda: ended.append(name))

    class Writer:
        def __init__(self, folder: str) -> None:
            self.rows: dict[int, dict[str, float]] = {}

        def add_scalar(self, key: str, value: float, step: int) -> None:
            self.rows.setdefault(step, {})[key] = value

        def flush(self) -> None:
            got.append(self.rows.popitem())

        def close(self) -> None:
            ended.append(name)

    module.init, module.log, module.finish, module.Writer = init, log, lambda: ended.append(name), Writer
    module.start_run, module.log_dict = lambda run_name: None, lambda document, file: None
    module.log_metrics, module.end_run = log, lambda: ended.append(name)
    monkeypatch.setitem(sys.modules, "tensorboard.summary" if name == "tensorboard" else name, module)


@pytest.mark.parametrize("name", SINKS)
def test_every_sink_gets_every_row_and_is_ended(name: str, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    got: list[tuple[int, dict[str, float]]] = []
    ended: list[str] = []
    fake(name, monkeypatch, got, ended)
    notes: list[str] = []
    with Sinks([name], place, notes.append) as copies:
        copies.write(1, {"reward": 0.5, "kl": None})
        copies.write(2, {"reward": 1})
    assert got == [(1, {"reward": 0.5}), (2, {"reward": 1.0})] and ended == [name] and notes == []


@pytest.mark.parametrize("name", SINKS)
def test_the_real_client_takes_every_row(name: str, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip(name, reason=f"{name} is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("TRACKIO_DIR", str(place.folder / "trackio"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{place.folder}/mlflow.db")
    notes: list[str] = []
    copies = Sinks([name], place, notes.append)
    for step in (1, 2, 3):
        copies.write(step, {"reward": step / 4, "held_out/mean@4": 0.5, "kl": None})
    copies.close(60)
    assert notes == []
    if name == "tensorboard":
        module = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
        events = module.EventAccumulator(str(place.folder / "logs" / "tensorboard"))
        events.Reload()
        assert events.Tags()["tensors"] == ["reward", "held_out/mean@4"]
        assert [event.step for event in events.Tensors("reward")] == [1, 2, 3]


def test_one_that_is_not_installed_or_fails_is_switched_off_once_and_the_others_go_on(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    got: list[int] = []

    def failing(step: int, row: dict[str, float]) -> None:
        raise ConnectionError("no route\nto the service")

    monkeypatch.setitem(SINKS, "bad", lambda _: Open(failing, lambda: None))
    monkeypatch.setitem(SINKS, "exits", lambda _: sys.exit(3))
    monkeypatch.setitem(SINKS, "good", lambda _: Open(lambda step, row: got.append(step), lambda: None))
    monkeypatch.setitem(sys.modules, "wandb", None)
    notes: list[str] = []
    copies = Sinks(["bad", "wandb", "exits", "good"], place, notes.append)
    for step in (1, 2, 3):
        copies.write(step, {"reward": 0.0})
    copies.close()
    copies.write(4, {"reward": 0.0})
    copies.close()
    assert got == [1, 2, 3] and len(notes) == 3
    assert any(note.startswith("bad is switched off: ConnectionError: no route. metrics.jsonl") for note in notes)


def test_one_that_hangs_holds_nothing_up(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    forever = threading.Event()
    monkeypatch.setattr(sinks, "QUEUE_ROWS", 2)
    monkeypatch.setitem(SINKS, "hangs", lambda _: Open(lambda step, row: forever.wait(60), lambda: None))
    notes: list[str] = []
    copies = Sinks(["hangs"], place, notes.append)
    for step in range(5):
        copies.write(step, {"reward": 0.0})
    copies.close(0.01)
    assert len(notes) == 1 and "2 rows behind" in notes[0]
    slow = Sinks(["hangs"], place, notes.append)
    slow.write(1, {"reward": 0.0})
    slow.close(0.01)
    assert len(notes) == 2 and "did not finish within 0.01 s" in notes[1]
    forever.set()


def test_an_unknown_one_is_refused(place: Place) -> None:
    with pytest.raises(RecipeError, match='did you mean "wandb"'):
        Sinks(["wand"], place, print)
