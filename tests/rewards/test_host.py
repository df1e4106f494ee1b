"""Reward workers behind a host: their verdicts are those of here, one that dies is passed over, a stranger refused."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from gropius.distributed.keeper import BOOK
from gropius.rewards import remote_worker
from gropius.rewards.pool import PooledScorer
from gropius.rewards.remote_worker import CODEC, RemoteWorker, receive
from gropius.rewards.worker import WorkerLost
from gropius.types import Episode, Task, Turn

FUNCTION = """
def length(completions, **_):
    return [float(len(text)) for text in completions]
"""


def episode(member: int, text: str) -> Episode:
    """One response."""
    ids = np.arange(3)
    return Episode(
        Task(f"t{member}", "a question", "4", {"level": 2, "tags": ["x"]}), "g", member, ids,
        (Turn("model", ids, text, np.zeros(3, np.float32), None, "stop"),),
        ({"role": "user", "content": "a question"}, {"role": "assistant", "content": text}), "stop",
    )  # fmt: skip


class Hosts:
    """Reward hosts of this machine, and the book that names them."""

    def __init__(self, folder: Path) -> None:
        self.book, self.ports, self.processes = folder / "book", list[int](), list[subprocess.Popen[bytes]]()

    def start(self) -> subprocess.Popen[bytes]:
        """One more, listed."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        words = [sys.executable, "-m", "gropius.rewards.host", "127.0.0.1", str(port)]
        process = subprocess.Popen(words, env=os.environ | {"GROPIUS_SECRET": "s"})
        self.processes.append(process)
        self.ports.append(port)
        rewards = [["127.0.0.1", port, f"reward host {n}"] for n, port in enumerate(self.ports)]
        self.book.write_text(json.dumps({"hosts": len(rewards), "rewards": rewards, "engines": {}}))
        return process


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hosts]:
    (tmp_path / "own.py").write_text(FUNCTION)
    found = Hosts(tmp_path)
    monkeypatch.setenv(BOOK, str(found.book))
    monkeypatch.setenv("GROPIUS_SECRET", "s")
    yield found
    for process in found.processes:
        process.kill()
        process.wait()


def pool(folder: Path) -> PooledScorer:
    """One worker for the person's function."""
    return PooledScorer([{"name": "own:length"}], folder, workers=1, deadline_s=30.0)


def values(scorer: PooledScorer, *texts: str) -> list[float | None]:
    """What texts are worth."""
    found = asyncio.run(scorer.score([episode(n, text) for n, text in enumerate(texts)]))
    return [verdict.outcome.value for verdict in found]


def test_a_host_that_is_killed_costs_nothing_but_one_more_question(hosts: Hosts, tmp_path: Path) -> None:
    first = hosts.start()
    scorer = pool(tmp_path)
    try:
        assert values(scorer, "a", "bbb") == [1.0, 3.0]
        first.send_signal(signal.SIGKILL)
        first.wait()
        hosts.start()
        assert values(scorer, "cc") == [2.0]
        assert scorer.counts.crashes == 1 and scorer.counts.calls == 3 and scorer.counts.timeouts == 0
    finally:
        scorer.close()


def test_a_host_that_is_cut_off_and_no_longer_listed_costs_one_more_question_and_voids_nothing(
    hosts: Hosts, tmp_path: Path
) -> None:
    """Stopped, it keeps its connections and answers nothing, as behind a cable that is pulled."""
    first = hosts.start()
    scorer = pool(tmp_path)
    try:
        assert values(scorer, "a") == [1.0]
        first.send_signal(signal.SIGSTOP)
        hosts.ports.clear()
        hosts.start()
        assert values(scorer, "cc") == [2.0]
        assert scorer.counts.crashes == 1 and scorer.counts.timeouts == 0
    finally:
        scorer.close()


def test_a_host_that_is_listed_and_silent_is_lost_and_its_question_is_not_late(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Late is what the host itself says of a function; only that is not asked again."""
    place = ["127.0.0.1", 1, "reward host 0"]
    hosts.book.write_text(json.dumps({"hosts": 1, "rewards": [place], "engines": {}}))
    monkeypatch.setattr(remote_worker, "START_S", -1e6)
    here, there = socket.socketpair()
    with here, there, pytest.raises(WorkerLost, match="reward host 0 was lost: it does not answer") as found:
        RemoteWorker(here, place).ask([episode(0, "a")], 1.0)
    assert not found.value.timeout


def test_a_stranger_is_not_heard(hosts: Hosts, tmp_path: Path) -> None:
    hosts.start()
    for _ in range(200):
        try:
            line = socket.create_connection(("127.0.0.1", hosts.ports[0]), 1.0)
            break
        except OSError:
            time.sleep(0.05)
    with line:
        line.settimeout(20.0)
        line.sendall(CODEC.encode("another secret") + CODEC.encode({"settings": {}}))
        with pytest.raises((EOFError, ConnectionError)):
            receive(line)
