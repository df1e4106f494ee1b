"""An engine process of this machine: how it is started, what it is told, and how it ends with the run.

It is told the recipe, and where to listen, in one line of its standard input, which then stays open: when it is closed,
by this process or by its end, however it comes, the engine ends too.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from gropius.errors import EngineError
from gropius.rollout.child import Child
from gropius.rollout.remote import Address

PROGRAM = "gropius.hosting"
LOOK_S = 0.1


@dataclass(frozen=True)
class Told:
    """What an engine process is told. recipe: a resolved one, as `resolved.json` holds it. device: "" is the recipe's.

    bind: the address it listens on. threads: of its CPU. deadline_s: seconds until it must be ready.
    """

    recipe: Mapping[str, Any]
    secret: str
    bind: str
    device: str
    threads: int
    deadline_s: float


class EngineProcess:
    """The n-th engine, in a process. Errors: EngineError with its last words when it does not come up."""

    def __init__(self, number: int, told: Told) -> None:
        report, theirs = os.pipe()
        environment = os.environ | {"OMP_NUM_THREADS": str(told.threads)}
        command = [sys.executable, "-P", "-m", PROGRAM, str(theirs)]
        try:
            self._child = Child(command, environment, stdin=subprocess.PIPE, pass_fds=[theirs])
        except OSError as error:
            os.close(report)
            raise EngineError(f"engine {number} cannot be started: {error.strerror}") from error
        finally:
            os.close(theirs)
        try:
            self._tell(told)
            said = _read(report, told.deadline_s)
        finally:
            os.close(report)
        if not said:
            how = self.ended() or f"it was not ready after {told.deadline_s:g} s (cluster.deadline_s)"
            self.end()
            raise EngineError(f"engine {number} did not start: {how}")
        found = json.loads(said)
        self.address = Address(told.bind, found["port"], f"engine {number} (process {self._child.process.pid})")
        self.describes = str(found["describes"])

    def ended(self) -> str:
        """How the process ended, and its last words."""
        how, words = self._child.ended(), self._child.last_words()
        return how + (f"; its last words:\n{words}" if how and words else "")

    def end(self) -> None:
        """Close its input, and kill what is left of it."""
        stream = self._child.process.stdin
        if stream is not None:
            with suppress(OSError):
                stream.close()
        self._child.end(grace_s=2.0)

    def _tell(self, told: Told) -> None:
        words = {"recipe": told.recipe, "secret": told.secret, "bind": told.bind, "device": told.device}
        stream = self._child.process.stdin
        assert stream is not None
        with suppress(OSError):  # it is gone already, and `ended` says how
            stream.write(json.dumps(words).encode() + b"\n")
            stream.flush()


def _read(report: int, deadline_s: float) -> bytes:
    """What a pipe brings until its other end is closed; nothing when that takes too long."""
    end, said = time.monotonic() + deadline_s, b""
    while time.monotonic() < end:
        if not select.select([report], [], [], LOOK_S)[0]:
            continue
        part = os.read(report, 1 << 16)
        if not part:
            return said
        said += part
    return b""
