"""Where a worker runs: in a process of another interpreter, a thread of this one, or a server that is there."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from gropius.errors import EngineError
from gropius.rollout.child import END_S, Child
from gropius.rollout.vllm.wire import Wire


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
            self._child = Child(
                [python, "-P", str(program), "--socket", str(theirs.fileno()), "--parent", str(os.getpid())],
                _environment(environment or {}),
                pass_fds=[theirs.fileno()],
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
        self.process = self._child.process

    def ended(self) -> str:
        """See `Child.ended`."""
        return self._child.ended()

    def last_words(self) -> str:
        """See `Child.last_words`."""
        return self._child.last_words()

    def end(self, grace_s: float = END_S) -> None:
        """See `Child.end`."""
        self._child.end(grace_s)
        self.wire.close()


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
