"""The controller: who is lost is named and started again, a signal reaches rank 0, and nothing is left running."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from posted import Posts, alive, job

from gropius.distributed import controller
from gropius.distributed.controller import Controller
from gropius.distributed.keeper import BOUND
from gropius.distributed.parts import Job
from gropius.errors import RunHalted


class Ran:
    """A controller's run, with a thread that acts on it when files appear."""

    def __init__(self, folder: Path, what: Job, act: Callable[[Ran], None], lease_s: float = 60.0) -> None:
        self.folder, self.cluster = folder, Posts(folder, lease_s)
        self.notes: list[str] = []
        self.shown: list[str] = []
        self.controller = Controller(self.cluster, what, self.notes.append, lambda text, _: self.shown.append(text))
        thread = threading.Thread(target=act, args=(self,), daemon=True)
        thread.start()
        try:
            self.code: int | str = self.controller.run()
        except RunHalted as error:
            self.code = str(error)
        thread.join(10)
        self.pids = [int(path.read_text()) for path in folder.glob("[0-9].[0-9]")]

    def pid(self, rank: int, attempt: int) -> int:
        """The process of a rank, once it is there."""
        path = self.folder / f"{rank}.{attempt}"
        while not path.is_file() or not path.read_text():
            time.sleep(0.01)
        return int(path.read_text())

    def finish(self, attempt: int, rank: int = 0, code: int = 0) -> None:
        """Have a rank end."""
        (self.folder / f"end.{rank}.{attempt}").write_text(str(code))


def test_a_killed_rank_is_named_with_machine_process_and_signal_and_all_start_again(tmp_path: Path) -> None:
    def act(run: Ran) -> None:
        run.pid(0, 0)
        os.kill(run.pid(1, 0), signal.SIGKILL)
        run.pid(0, 1), run.pid(1, 1)
        run.finish(1)

    run = Ran(tmp_path, job(), act)
    killed = (tmp_path / "1.0").read_text()
    host = os.uname().nodename
    assert run.code == 0
    assert f"rank 1 (process {killed} on {host}) was ended by SIGKILL; all ranks start again" in " ".join(run.notes)
    assert "rank 0 attempt 1" in "".join(run.shown)
    assert len(run.pids) == 4 and not any(map(alive, run.pids))


def test_who_only_lost_sight_of_another_is_not_who_is_named(tmp_path: Path) -> None:
    def act(run: Ran) -> None:
        run.pid(0, 0), run.pid(1, 0)
        run.finish(0, rank=0, code=75)
        time.sleep(0.6)
        run.finish(0, rank=1, code=3)

    run = Ran(tmp_path, job(restarts=0), act)
    assert "rank 1 (process" in str(run.code) and "ended with exit code 3" in str(run.code)
    assert "cluster.restarts = 0" in str(run.code) and not any(map(alive, run.pids))


def test_a_rank_that_leaves_word_of_the_end_ends_the_run_and_none_is_started_again(tmp_path: Path) -> None:
    """As one does whose memory ran out: it would again."""

    def act(run: Ran) -> None:
        run.pid(0, 0), run.pid(1, 0)
        (run.folder / "word.1.0").touch()
        run.finish(0, rank=1, code=1)
        run.finish(0, rank=0, code=75)

    run = Ran(tmp_path, job(), act)
    assert run.code == 1 and len(run.pids) == 2 and not any(map(alive, run.pids))


def test_a_machine_that_falls_silent_is_named_and_ends_its_own_process(tmp_path: Path) -> None:
    def act(run: Ran) -> None:
        run.pid(0, 0), run.pid(1, 0)
        run.cluster.posts[1].silent = True
        run.pid(0, 1), run.pid(1, 1)
        run.finish(1)

    run = Ran(tmp_path, job(lost_after_s=1.0), act, lease_s=0.6)
    assert run.code == 0 and "has not answered for 1 s" in " ".join(run.notes)
    assert not any(map(alive, run.pids))


def test_a_signal_is_rank_0_s_and_its_exit_code_the_run_s(tmp_path: Path) -> None:
    def act(run: Ran) -> None:
        run.pid(0, 0), run.pid(1, 0)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.5)
        run.finish(0, rank=1)

    run = Ran(tmp_path, job(), act)
    assert run.code == 130 and not any(map(alive, run.pids))
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_without_room_the_run_ends_by_its_deadline_and_says_what_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(controller, "GRACE_S", 0.5)
    cluster = Posts(tmp_path)
    cluster.room = False
    short = dataclasses.replace(job(), deadline_s=0.5)
    with pytest.raises(RunHalted, match=r"no room for rank 0 within cluster\.deadline_s = 0\.5 s.*there is nothing"):
        Controller(cluster, short, lambda text: None, lambda text, error: None).run()


def book_of(run: Ran, number: int) -> dict:
    """What a keeper was told to write down for its process; empty before."""
    try:
        return json.loads((run.cluster.posts[number].keeper._scratch / "book").read_text())
    except (OSError, ValueError, IndexError):
        return {}


def until(what: Callable[[], object]) -> None:
    """Wait for it, for half a minute."""
    end = time.monotonic() + 30
    while not what() and time.monotonic() < end:
        time.sleep(0.01)


def test_an_engine_and_a_reward_host_that_are_lost_are_started_again_alone_and_rank_0_is_told(tmp_path: Path) -> None:
    books: list[dict] = []

    def told(run: Ran, started: int, host: int) -> None:
        """Keep the book once it names an engine of so many starts and a reward host of this process."""

        def there() -> bool:
            book = book_of(run, 2)
            engine, hosts = book.get("engines", {}).get("0"), book.get("rewards", [])
            return bool(engine and engine[4] == started and hosts and f"(process {host} on" in hosts[0][2])

        until(there)
        books.append(book_of(run, 2))

    def act(run: Ran) -> None:
        run.pid(0, 0), run.pid(1, 0)
        host, engine = run.controller.others
        told(run, 1, host.pid)
        os.kill(engine.pid, signal.SIGKILL)
        told(run, 2, host.pid)
        os.kill(host.pid, signal.SIGTERM)
        until(lambda: run.controller.others[0].pid not in (0, host.pid))
        told(run, 2, run.controller.others[0].pid)
        run.finish(0)

    run = Ran(tmp_path, job(engines=1, rewards=1), act)
    notes = " ".join(run.notes)
    assert run.code == 0 and len(run.pids) == 2  # the ranks were started once
    first, second, third = (book["engines"]["0"] for book in books)
    assert (first[4], second[4], third[4]) == (1, 2, 2) and first[1] == 7 and first[3] == "a stub"
    assert f"{first[2]} was ended by SIGKILL; it is started again, and what it had under way" in notes
    assert f"{books[0]['rewards'][0][2]} was ended by SIGTERM; it is started again" in notes
    assert books[2]["hosts"] == 1 and books[2]["rewards"][0][2] != books[0]["rewards"][0][2]
    assert not any(alive(post.keeper._process.pid) for post in run.cluster.posts if post.keeper._process)
    assert len(run.cluster.released) == len(run.cluster.posts)  # every place was given back


def test_an_engine_that_is_lost_too_often_ends_the_run_with_its_name(tmp_path: Path) -> None:
    def act(run: Ran) -> None:
        run.pid(0, 0), run.pid(1, 0)
        for started in (1, 2):
            until(lambda: run.controller.others[0].started == started and run.controller.others[0].pid)  # noqa: B023
            os.kill(run.controller.others[0].pid, signal.SIGKILL)

    run = Ran(tmp_path, job(engines=1), act)
    assert "was ended by SIGKILL; it was started 2 times (cluster.restarts = 1)" in str(run.code)
    assert not any(map(alive, run.pids))


def test_ranks_that_all_end_without_a_word_are_a_loss_and_not_a_success(tmp_path: Path) -> None:
    def act(run: Ran) -> None:
        run.pid(0, 0), run.pid(1, 0)
        (tmp_path / "silent.0.0").touch()
        run.finish(0, rank=1), run.finish(0)

    run = Ran(tmp_path, job(restarts=0), act)
    assert "every rank ended, and rank 0 left no word of how" in str(run.code)


def test_a_process_whose_keeper_is_killed_ends_with_it(tmp_path: Path) -> None:
    script = (
        "import subprocess, sys, os, time\n"
        f"words = ['-c', {BOUND!r}, str(os.getpid()), '-c', 'import time; time.sleep(60)']\n"
        "p = subprocess.Popen([sys.executable, *words])\n"
        "print(p.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    keeper = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert keeper.stdout is not None
    child = int(keeper.stdout.readline())
    assert alive(child)
    keeper.kill()
    keeper.wait()
    for _ in range(500):
        if not alive(child):
            return
        time.sleep(0.01)
    raise AssertionError("it lives on")
