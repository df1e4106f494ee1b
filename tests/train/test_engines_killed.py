"""Engine processes as they are: one killed is named and changes no response; none outlives its run."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from killed import Killable, killable
from small import RECIPE
from test_ahead import drawn, weights

pytestmark = pytest.mark.slow
BASE = ("train.steps=4", "eval.before=false", "eval.after=false", "train.learning_rate=3e-3")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("server")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Killable]:
    with killable(folder) as process:
        yield process


@pytest.mark.parametrize("staleness", [0, 1])
def test_an_engine_killed_in_the_middle_is_named_and_the_run_has_the_same_bits(
    staleness: int, server: Killable, folder: Path, tmp_path: Path
) -> None:
    settings = [f'out="{tmp_path}"', *BASE, f"train.max_staleness={staleness}"]
    assert server.run("train", recipe=RECIPE, settings=[*settings, "name=own"])["code"] == 0
    apart = [*settings, "name=apart", "cluster.engines=1"]
    ended = server.run("train", recipe=RECIPE, settings=apart, arm=["step.updated", 2, "kill-children"])
    assert ended["code"] == 0, ended
    notes = (folder / "notes").read_text()
    assert "engine 0 (process " in notes and "signal SIGKILL; it is started again (1 of 3)" in notes
    assert drawn(tmp_path / "own") == drawn(tmp_path / "apart")
    assert weights(tmp_path / "own") == weights(tmp_path / "apart")


def test_no_engine_outlives_a_run_that_is_killed(server: Killable, tmp_path: Path) -> None:
    settings = [f'out="{tmp_path}"', *BASE, "cluster.engines=2", "train.max_staleness=1"]
    file = tmp_path / "children"
    ended = server.run("train", recipe=RECIPE, settings=settings, arm=["step.updated", 2, f"children:{file}:9"])
    assert ended["killed"] == 9
    children = [int(word) for word in file.read_text().split()]
    assert len(children) == 2
    for _ in range(300):
        if not any(Path(f"/proc/{child}/cmdline").exists() and _command(child) for child in children):
            return
        time.sleep(0.1)
    pytest.fail(f"still there: {children}")


def _command(child: int) -> bytes:
    try:
        return Path(f"/proc/{child}/cmdline").read_bytes()  # nothing of one that ended and waits to be looked at
    except OSError:
        return b""


def test_an_engine_that_does_not_come_up_says_why(server: Killable, tmp_path: Path) -> None:
    settings = [f'out="{tmp_path}"', *BASE, "cluster.engines=1", "cluster.bind=203.0.113.1"]
    ended = server.run("train", recipe=RECIPE, settings=settings)
    assert ended["code"] not in (0, 99), ended
    assert "engine 0 did not start: exit code" in ended["error"] and "cannot listen on 203.0.113.1" in ended["error"]
