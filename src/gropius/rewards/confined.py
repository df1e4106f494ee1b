"""One answer judged by somebody else's library, which may evaluate it: a confined fork of a pool worker. No torch.

The fork has Landlock (no file can be written, only the Python installation read), seccomp (no sockets, no signals),
limits on memory and time, and is killed at its deadline. What it says is one JSON object of at most 4 kB.
"""

from __future__ import annotations

import json
import math
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gropius.sandbox.confine import ConfinementFailed, confine
from gropius.sandbox.seccomp import build_filter
from gropius.sandbox.tiers import LIBRARIES

MOST_ANSWER_BYTES = 4096
NO_NUMBER = "the scorer gave no number"


def apart(work: Callable[[], float], wall_s: float, memory_mb: int, library: str) -> Mapping[str, Any]:
    """Run `work` in a confined fork: {"score": number}, {"failed": why} (the answer's fault) or {"void": why}.

    library: the imported module whose folder stays readable. Linux only, as confinement is; elsewhere void.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        _child(work, writing, (wall_s, memory_mb), library)
    os.close(writing)
    data, until = b"", time.monotonic() + wall_s
    try:
        while len(data) < MOST_ANSWER_BYTES:
            left = until - time.monotonic()
            if left <= 0 or not select.select([reading], [], [], left)[0]:
                return {"failed": "time"}
            if not (more := os.read(reading, 4096)):
                break
            data += more
    finally:
        os.close(reading)
        os.kill(child, signal.SIGKILL)
        status = os.waitpid(child, 0)[1]
    try:
        said = json.loads(data)
    except ValueError:
        ended = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        return {"failed": f"crash: {signal.Signals(ended).name}" if ended and data == b"" else NO_NUMBER}
    return said if isinstance(said, dict) else {"failed": NO_NUMBER}


def _child(work: Callable[[], float], writing: int, limits: tuple[float, int], library: str) -> None:
    """Never returns."""
    try:
        try:
            _limit(*limits)
            confine(_readable(library), [], ["/dev/null", "/dev/urandom"], build_filter(own_pids=False))
        except (ConfinementFailed, OSError, ValueError) as fault:
            said: dict[str, Any] = {"void": f"the scorer cannot be confined here: {fault}"}
        else:
            said = _said(work)
        os.write(writing, json.dumps(said).encode())
    finally:
        os._exit(0)


def _said(work: Callable[[], float]) -> dict[str, Any]:
    try:
        return {"score": work()}
    except MemoryError:
        return {"failed": "memory"}
    except (Exception, SystemExit) as fault:  # the boundary: a scorer fed with what a model wrote
        return {"failed": f"error: {type(fault).__name__}"}


def _limit(wall_s: float, memory_mb: int) -> None:
    seconds = math.ceil(wall_s) + 1
    for what, value in (
        (resource.RLIMIT_AS, memory_mb << 20),
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(what, (value, value))


def _readable(library: str) -> list[str]:
    """The Python installation, its environment, and where the library lies; nothing of a home or of data."""
    place = sys.modules[library].__file__ or ""
    places = [sys.base_prefix, sys.prefix, str(Path(place).parent.parent), str(Path(__file__).parents[1]), *LIBRARIES]
    return [os.path.realpath(place) for place in places if os.path.exists(place)]
