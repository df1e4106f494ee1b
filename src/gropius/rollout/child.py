"""A process of this run: what it prints is read, so that it never blocks, and all it started ends with it.

It is a session of its own. Its last lines are kept: they are the cause when it dies.
"""

from __future__ import annotations

import collections
import os
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

KEPT_LINES = 40
LAST_WORDS = 2000
END_S = 10.0
MOMENT_S = 1.0  # for an end that is under way


class Child:
    """A process that runs `command`. stdin: what it reads; pass_fds: what it is given open. Errors: OSError."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        stdin: int = subprocess.DEVNULL,
        pass_fds: Sequence[int] = (),
    ) -> None:
        self.process = subprocess.Popen(
            command,
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=pass_fds,
            start_new_session=True,
            env=dict(environment),
        )
        self._lines: collections.deque[str] = collections.deque(maxlen=KEPT_LINES)
        self._listener = threading.Thread(target=self._listen, daemon=True, name="gropius-words")
        self._listener.start()

    def ended(self) -> str:
        """How the process ended, after a moment for an end that is under way."""
        try:
            code = self.process.wait(timeout=MOMENT_S)
        except subprocess.TimeoutExpired:
            return ""
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    def last_words(self) -> str:
        """The last lines, at most LAST_WORDS characters."""
        if self.process.poll() is not None:
            self._listener.join(timeout=1.0)
        return "\n".join(self._lines)[-LAST_WORDS:].strip()

    def end(self, grace_s: float = END_S) -> None:
        """Wait, then kill the session, and children that left it."""
        if grace_s:
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=grace_s)
        strays = descendants(self.process.pid)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        for pid in strays:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        self.process.kill()
        self.process.wait()
        self._listener.join(timeout=1.0)

    def _listen(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as stream:
            for line in stream:
                text = line.decode("utf-8", "replace").rstrip()
                if text:
                    self._lines.append(text[-LAST_WORDS:])


def descendants(pid: int) -> Sequence[int]:
    """Processes below `pid` (Linux; elsewhere none), so that those in sessions of their own are found too."""
    found: list[int] = []
    pending = [pid]
    while pending:
        parent = pending.pop()
        for children in Path(f"/proc/{parent}/task").glob("*/children"):
            with suppress(OSError):
                below = [int(word) for word in children.read_text().split()]
                found += below
                pending += below
    return found
