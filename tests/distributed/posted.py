"""A cluster in a test: keepers of this process, whose "machines" fall silent when the test says so."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gropius.distributed.keeper import Keeper
from gropius.distributed.parts import Job, Need

# A rank in a few lines: it says who it is, waits for its orders in a file, and leaves word as rank 0 does.
PROGRAM = """
import json, os, signal, sys, time
folder, rank, attempt = sys.argv[1], os.environ["RANK"], os.environ["GROPIUS_ATTEMPT"]
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
open(os.environ["GROPIUS_LEADER"], "w").write(str(os.getpid()))
print(f"rank {rank} attempt {attempt}", file=sys.stderr)
open(f"{folder}/{rank}.{attempt}", "w").write(str(os.getpid()))
while True:
    time.sleep(0.02)
    if asked and rank == "0":
        json.dump({"exit_code": 130}, open(os.environ["GROPIUS_OUTCOME"], "w"))
        break
    if os.path.exists(f"{folder}/end.{rank}.{attempt}"):
        code = int(open(f"{folder}/end.{rank}.{attempt}").read() or 0)
        if os.path.exists(f"{folder}/word.{rank}.{attempt}"):
            json.dump({"exit_code": code}, open(os.environ["GROPIUS_OUTCOME"], "w"))
        if code == 0 and rank == "0" and not os.path.exists(f"{folder}/silent.0.{attempt}"):
            json.dump({"exit_code": 0}, open(os.environ["GROPIUS_OUTCOME"], "w"))
        sys.exit(code)
    if rank != "0" and os.path.exists(f"{folder}/end.0.{attempt}") and open(f"{folder}/end.0.{attempt}").read() == "0":
        break
"""
# An engine or a reward host in a few lines; an engine reports as the keeper asks it to.
HELPER = """
import json, sys, time
if len(sys.argv) > 1:
    json.dump({"port": 7, "describes": "a stub"}, open(sys.argv[1], "w"))
time.sleep(60)
"""


class Here:
    """A keeper of this process."""

    def __init__(self, cluster: Posts, lease_s: float) -> None:
        self.cluster, self.keeper, self.silent = cluster, Keeper(lease_s), False

    def ask(self, method: str, *arguments: Any) -> int:
        """See `Post.ask`."""
        token = next(self.cluster.numbers)
        if method == "start":
            program = ["-c", PROGRAM, str(self.cluster.folder)] if "gropius" in arguments[0] else ["-c", HELPER]
            arguments = (program, *arguments[1:])
        if not self.silent:
            self.cluster.given[token] = getattr(self.keeper, method)(*arguments)
        return token


class Posts:
    """A cluster of such keepers."""

    def __init__(self, folder: Path, lease_s: float = 60.0) -> None:
        self.folder, self.lease_s = folder, lease_s
        self.numbers, self.given = itertools.count(), dict[int, Any]()
        self.posts: list[Here] = []
        self.room = True
        self.released: set[int] = set()

    def place(self, needs: Sequence[Need], spread: bool) -> list[Here]:
        """See `Cluster.place`."""
        new = [Here(self, self.lease_s) for _ in needs]
        for post in new:
            post.silent = not self.room
        self.posts += new
        return new

    def answers(self, tokens: Sequence[int], wait_s: float) -> dict[int, Any]:
        """See `Cluster.answers`."""
        return {token: self.given.pop(token) for token in tokens if token in self.given}

    def release(self, posts: Sequence[Any]) -> None:
        """See `Cluster.release`."""
        self.released |= set(map(id, posts))

    def describe(self) -> str:
        """See `Cluster.describe`."""
        return "there is nothing"


def job(ranks: int = 2, restarts: int = 1, lost_after_s: float = 30.0, rewards: int = 0, engines: int = 0) -> Job:
    """A job of such ranks."""
    one = Need()
    return Job(
        words=["train", "x"], ranks=ranks, engines=engines, rewards=rewards,
        needs={"rank": one, "engine": one, "reward host": one}, recipe={}, restarts=restarts, deadline_s=30.0,
        lost_after_s=lost_after_s, secret="s", folder=str(Path.cwd()), environment={},
    )  # fmt: skip


def alive(pid: int) -> bool:
    """True while a process runs."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
