"""Signals: one finishes the step and saves it, two stop at once and lose at most the step under way."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from killed import Killable, killable
from small import RECIPE, run_small, small_recipe

from gropius import build
from gropius.errors import Interrupted
from gropius.records import faults
from gropius.records.reader import RunReader
from gropius.train.interrupt import StopRequest
from gropius.train.progress import Silent
from gropius.train.sameness import compare

SETTINGS = ["train.steps=4", "eval.before=false", "train.learning_rate=3e-3"]


@pytest.fixture(scope="module", autouse=True)
def heard() -> Iterator[None]:
    """SIGHUP as a terminal leaves it, also where these tests run under nohup; processes started here inherit that."""
    before = signal.getsignal(signal.SIGHUP)
    if before is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_small(tmp_path_factory.mktemp("straight"), *SETTINGS)[0]


@pytest.fixture
def armed() -> Iterator[Callable[[str, int, list[int]], None]]:
    """Send this process signals when a point is passed for the n-th time."""

    def send(signals: list[int]) -> None:
        for number in signals:
            os.kill(os.getpid(), number)

    yield lambda point, times, signals: faults.arm(point, times, lambda: send(signals))
    faults.disarm()


CASES: list[tuple[str, list[int], int, int]] = [  # point of step 2, signals, exit code, steps saved
    ("step.sampled", [signal.SIGINT], 130, 2),
    ("step.updated", [signal.SIGTERM], 143, 2),
    ("step.sampled", [signal.SIGHUP], 129, 2),
    ("step.sampled", [signal.SIGINT, signal.SIGINT], 130, 1),
    ("step.sampled", [signal.SIGTERM, signal.SIGINT], 143, 1),
    ("step.updated", [signal.SIGINT, signal.SIGINT], 130, 2),
    ("rollouts.written", [signal.SIGTERM, signal.SIGTERM], 143, 2),
]


@pytest.mark.parametrize(("point", "signals", "code", "saved"), CASES)
def test_it_stops_as_asked_says_how_to_go_on_and_goes_on_to_the_same_bits(
    point: str,
    signals: list[int],
    code: int,
    saved: int,
    straight: Path,
    tmp_path: Path,
    armed: Callable[[str, int, list[int]], None],
) -> None:
    armed(point, 2, signals)
    with pytest.raises(Interrupted, match="gropius resume") as stopped:
        run_small(tmp_path, *SETTINGS)
    faults.disarm()
    folder = tmp_path / "small"
    assert stopped.value.exit_code == code and RunReader(folder).checkpoints() == [saved]
    build.resume(folder, None, Silent())
    assert compare(straight, folder).difference == ""


def test_a_third_signal_while_the_weights_move_loses_the_step_and_never_saves_it(
    straight: Path, tmp_path: Path, armed: Callable[[str, int, list[int]], None]
) -> None:
    armed("step.updated", 2, [signal.SIGINT] * 3)
    with pytest.raises(Interrupted, match="from the last checkpoint") as stopped:
        run_small(tmp_path, *SETTINGS)
    faults.disarm()
    folder = tmp_path / "small"
    assert stopped.value.exit_code == 130 and RunReader(folder).checkpoints() == []
    build.resume(folder, None, Silent())
    assert compare(straight, folder).difference == ""


def test_a_time_limit_saves_and_says_so(straight: Path, tmp_path: Path) -> None:
    with pytest.raises(Interrupted, match=r"after train\.max_time_s = 1e-06 s; everything is saved") as stopped:
        run_small(tmp_path, *SETTINGS, "train.max_time_s=1e-6")
    folder = tmp_path / "small"
    assert stopped.value.exit_code == 130 and RunReader(folder).checkpoints() == [1]
    build.resume(folder, None, Silent(), ["train.max_time_s=0.0"])
    difference = compare(straight, folder).difference  # the limit itself is all that is another
    assert difference.startswith("state, tables.train.max_time_s") or difference == ""


def test_a_signal_in_the_warm_start_ends_it_and_the_run_begins_again(tmp_path: Path) -> None:
    class Impatient(Silent):
        def note(self, text: str) -> None:
            super().note(text)
            if text.startswith("warm start 2/"):
                os.kill(os.getpid(), signal.SIGTERM)

    settings = [*SETTINGS, "sft.steps=4", "sft.batch=4", "checkpoint.every=4"]
    with pytest.raises(Interrupted, match=r"before step 1.* begins again") as stopped:
        build.train(small_recipe(tmp_path / "a", *settings), Impatient())
    assert stopped.value.exit_code == 143
    build.resume(tmp_path / "a" / "small", None, Silent())
    straight, _ = run_small(tmp_path / "b", *settings)
    assert compare(straight, tmp_path / "a" / "small").difference == ""


def test_what_was_ignored_stays_ignored_and_handlers_are_put_back() -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopRequest() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert stop.asked == 0 and signal.getsignal(signal.SIGTERM) != before[signal.SIGTERM]
    finally:
        signal.signal(signal.SIGHUP, before[signal.SIGHUP])
    assert {number: signal.getsignal(number) for number in before} == before


def test_a_listener_whose_terminal_is_gone_does_not_stop_the_stop() -> None:
    def gone(text: str) -> None:
        raise OSError(5, "Input/output error")

    with StopRequest(gone) as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.asked == signal.SIGTERM
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Killable]:
    with killable(tmp_path_factory.mktemp("server")) as process:
        yield process


def alive(pid: int) -> bool:
    """True while a process runs; one that is dead and not yet reaped is not running."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="children are found in /proc")
@pytest.mark.parametrize("ending", ["kill -9", "hang up"])
def test_a_trainer_that_dies_leaves_no_child_behind(ending: str, server: Killable, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def score(episode):\n    return float(len(episode.completion) % 2)\n")
    recipe: dict[str, Any] = RECIPE | {"reward": [{"name": f"{tmp_path}/mine.py:score"}]}
    arm = ["step.sampled", 2, f"children:{tmp_path}/children:{9 if ending == 'kill -9' else 1}"]
    ended = server.run("train", recipe=recipe, settings=[f'out="{tmp_path}"', *SETTINGS], arm=arm)
    assert ended["killed"] == 9 if ending == "kill -9" else ended["code"] == 129, ended
    children = [int(word) for word in (tmp_path / "children").read_text().split()]
    assert children, "the reward ran in no process of its own"
    for _ in range(200):
        if not any(map(alive, children)):
            break
        time.sleep(0.05)
    assert not any(map(alive, children))
