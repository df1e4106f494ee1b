"""One process of a run, kept on the machine where it runs: started, watched, ended. No torch, no Ray.

The controller asks; nothing here waits. What the process prints goes to files beside it and is handed on in pieces. A
keeper that is not asked for `lease_s` seconds has lost its controller and ends the process; a keeper that dies takes
the process with it (Linux: the kernel sees to it).
"""

from __future__ import annotations

import codecs
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gropius.distributed.launch import LEADER, OUTCOME

BOOK = "GROPIUS_BOOK"  # the file in which rank 0 finds where others listen
PIECE_BYTES = 1 << 16
# Between fork and the program: whoever is left without its keeper is ended by the kernel; Ray's processes block SIGINT.
BOUND = (
    "import ctypes, os, signal, sys\n"
    "signal.pthread_sigmask(signal.SIG_SETMASK, ())\n"
    "signal.signal(signal.SIGINT, signal.SIG_DFL)\n"
    "sys.platform == 'linux' and ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)\n"
    "os.getppid() == int(sys.argv[1]) or sys.exit(9)\n"
    "os.execv(sys.executable, [sys.executable, *sys.argv[2:]])"
)


class Keeper:
    """Keeps at most one process. Methods answer at once, in plain values."""

    def __init__(self, lease_s: float) -> None:
        self._lease_s, self._asked_at = lease_s, time.monotonic()
        self._scratch = Path(tempfile.mkdtemp(prefix="gropius-part-"))
        self._process: subprocess.Popen[bytes] | None = None
        self._printed = {name: (0, codecs.getincrementaldecoder("utf-8")("replace")) for name in ("out", "err")}
        threading.Thread(target=self._lapse, name="lease", daemon=True).start()

    def address(self) -> str:
        """Where the others of the run reach this machine."""
        return "127.0.0.1"

    def here(self) -> dict[str, Any]:
        """Which machine this is, its address, and a port that is free there now."""
        self._asked_at = time.monotonic()
        address = self.address()
        with socket.socket() as free:
            free.bind((address, 0))
            port = free.getsockname()[1]
        return {"host": socket.gethostname(), "address": address, "port": port}

    def start(
        self, words: Sequence[str], environment: Mapping[str, str], folder: str, told: Mapping[str, Any] | None = None
    ) -> int:
        """Run `python words` in a folder (where there is one of that name); the process' number.

        told: what it reads, as a line of JSON, from its standard input, which then stays open; it is given one word
        more, the file that it reports to.
        """
        self._asked_at = time.monotonic()
        inherited = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
        report = str(self._scratch / "report")
        own = {name: str(self._scratch / file) for name, file in self._files.items()}
        with (self._scratch / "out").open("wb") as out, (self._scratch / "err").open("wb") as err:
            self._process = subprocess.Popen(
                [sys.executable, "-c", BOUND, str(os.getpid()), *words, *([] if told is None else [report])],
                stdin=subprocess.DEVNULL if told is None else subprocess.PIPE,
                stdout=out,
                stderr=err,
                cwd=folder if Path(folder).is_dir() else None,
                env={**inherited, **environment, **own, "PYTHONUNBUFFERED": "1"},
                start_new_session=True,
            )
        if told is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError):  # it is gone already, and `look` says how
                self._process.stdin.write(json.dumps(told).encode() + b"\n")
                self._process.stdin.flush()
        return self._process.pid

    @property
    def _files(self) -> dict[str, str]:
        return {OUTCOME: "outcome", LEADER: "leader", BOOK: "book"}

    def look(self) -> dict[str, Any]:
        """How the process is. code: of its exit, minus the signal's number, None while it runs. out, err: what it
        printed since the last look. word: the exit code that rank 0 left; report: what an engine said; None before.
        """
        self._asked_at = time.monotonic()
        code = None if self._process is None else self._process.poll()
        pid = 0 if self._process is None else self._process.pid
        found: dict[str, Any] = {"code": code, "pid": pid, "out": self._new("out"), "err": self._new("err")}
        found["word"] = (self._read("outcome") or {}).get("exit_code")
        found["report"] = self._read("report")
        return found

    def note(self, book: Mapping[str, Any]) -> bool:
        """Write down where others listen, for the process to read. True."""
        self._asked_at = time.monotonic()
        new = self._scratch / "book.new"
        new.write_text(json.dumps(book), encoding="utf-8")
        new.replace(self._scratch / "book")
        return True

    def _read(self, name: str) -> Any:
        """A file that the process wrote; None where there is none, or not yet whole."""
        try:
            return json.loads((self._scratch / name).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None

    def signal(self, number: int) -> bool:
        """Hand a signal to the process. False before it is ready for one."""
        self._asked_at = time.monotonic()
        if self._process is None or not (self._scratch / "leader").is_file():
            return False
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)
        return True

    def end(self) -> None:
        """Kill the process and what belongs to it, and clear up."""
        self._asked_at = time.monotonic()
        self._kill()
        shutil.rmtree(self._scratch, ignore_errors=True)

    def _new(self, name: str) -> str:
        """What was printed since the last look: whole characters, at most PIECE_BYTES at once."""
        at, decoder = self._printed[name]
        try:
            with (self._scratch / name).open("rb") as file:
                file.seek(at)
                data = file.read(PIECE_BYTES)
        except OSError:
            return ""
        self._printed[name] = (at + len(data), decoder)
        return decoder.decode(data)

    def _kill(self) -> None:
        if self._process is not None and self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def _lapse(self) -> None:
        while True:
            time.sleep(min(1.0, self._lease_s / 4))
            if time.monotonic() - self._asked_at > self._lease_s:
                self._kill()


def book() -> dict[str, Any]:
    """Where others listen, as the controller last wrote it. hosts: of reward workers, when none is lost.

    rewards: address, port and name of each. engines: by number, these and what it says of itself, and times started.
    """
    nobody: dict[str, Any] = {"hosts": 0, "rewards": [], "engines": {}}
    with contextlib.suppress(OSError, KeyError, ValueError):
        nobody |= json.loads(Path(os.environ[BOOK]).read_text(encoding="utf-8"))
    return nobody
