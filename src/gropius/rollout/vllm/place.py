"""Where a worker runs, and how it ends: a process of another interpreter, a thread of this one, a server that is there.

A process is a session of its own, so that all it started ends with it. What it prints is read, so that it never blocks,
and its last lines are kept: they are the cause when it dies.
"""

from __future__ import annotations

import collections
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from gropius.errors import EngineError
from gropius.rollout.vllm.wire import Wire

KEPT_LINES = 40
LAST_WORDS = 2000
END_S = 10.0
MOMENT_S = 1.0  # for an end that is under way


class Place(Protocol):
    """A worker that can be talked to."""

    wire: Wire

    def ended(self) -> str:
        """How it ended ("exit code 3", "signal SIGSEGV"), or "" while it lives or nobody knows."""
        ...

    def last_words(self) -> str:
        """The last lines it printed."""
        ...

    def end(self, grace_s: float = END_S) -> None:
        """Let it end by itself for so long, then end it and everything it started."""
        ...


class ProcessPlace:
    """A worker of the interpreter `python`, started here."""

    def __init__(self, python: str, program: Path, environment: Mapping[str, str] | None = None) -> None:
        ours, theirs = socket.socketpair()
        try:
            self.process = subprocess.Popen(
                [python, "-P", str(program), "--socket", str(theirs.fileno()), "--parent", str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                env=_environment(environment or {}),
            )
        except OSError as error:
            ours.close()
            raise EngineError(
                f"rollout.vllm.python = {python!r} cannot be started: {error.strerror}; write the path of the "
                "interpreter of the environment that vLLM is installed in"
            ) from error
        finally:
            theirs.close()
        self.wire = Wire(ours)
        self._lines: collections.deque[str] = collections.deque(maxlen=KEPT_LINES)
        self._listener = threading.Thread(target=self._listen, daemon=True, name="gropius-vllm-words")
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
        strays = _descendants(self.process.pid)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        for pid in strays:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        self.process.kill()
        self.process.wait()
        self.wire.close()
        self._listener.join(timeout=1.0)

    def _listen(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as stream:
            for line in stream:
                text = line.decode("utf-8", "replace").rstrip()
                if text:
                    self._lines.append(text[-LAST_WORDS:])


class ThreadPlace:
    """A worker in a thread of this process. `serve` is given the other end of the wire."""

    def __init__(self, serve: Callable[[Wire], None]) -> None:
        ours, theirs = socket.socketpair()
        self.wire = Wire(ours)
        self._thread = threading.Thread(target=serve, args=(Wire(theirs),), daemon=True, name="gropius-vllm")
        self._thread.start()

    def ended(self) -> str:
        """A thread's end says nothing."""
        return ""

    def last_words(self) -> str:
        """They went to this process's own output."""
        return ""

    def end(self, grace_s: float = END_S) -> None:
        """Close the wire, and wait; a thread that hangs is left to the end of the process."""
        self._thread.join(timeout=grace_s)
        self.wire.close()
        self._thread.join(timeout=1.0)


class ReachedPlace:
    """A worker that somebody started: `program.py --listen ADDRESS` on this machine."""

    def __init__(self, address: str) -> None:
        end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            end.connect(address)
        except OSError as error:
            end.close()
            raise EngineError(
                f"rollout.vllm.address = {address!r}: nobody answers there ({error.strerror or error}); start the "
                "server first (docs/vllm.md), or leave the key out and the run starts its own"
            ) from error
        self.wire = Wire(end)

    def ended(self) -> str:
        """Another's process is not ours to look at."""
        return ""

    def last_words(self) -> str:
        """They are where it was started."""
        return "(printed where the server was started)"

    def end(self, grace_s: float = END_S) -> None:
        """Leave it; it goes on serving others."""
        self.wire.close()


def _environment(more: Mapping[str, str]) -> dict[str, str]:
    """This process's environment without what steers its Python: the worker's interpreter has its own."""
    steering = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__")
    return {name: value for name, value in os.environ.items() if name not in steering} | dict(more)


def _descendants(pid: int) -> Sequence[int]:
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
