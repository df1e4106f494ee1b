"""One isolated process: start it, ask it, and see it dead, whatever the program inside does.

All waiting is one `poll` over the question pipe, the answer pipe, the printed text and the death of the process,
against a deadline that starts when the program starts. No signals, no threads: any thread may use a session.
"""

from __future__ import annotations

import binascii
import json
import marshal
import os
import select
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from gropius.sandbox.base import (
    CRASH,
    ERROR,
    EXITED,
    LIMIT,
    MEMORY,
    OUTPUT,
    PROTOCOL,
    SYNTAX,
    TIME,
    TYPE,
    Limits,
    SandboxUnavailable,
)

Mode = Literal["function", "stdin", "tests"]
START_S = 30.0  # from the start of the process to its first word: ours, not the program's
CHUNK = 1 << 16


@dataclass(frozen=True)
class Launch:
    """How a tier starts a process: the command, the user it runs as, the folder that is its own.

    uid: the user id of the slot, 0 when there is none of its own. drop_in_driver: the driver changes to it; else the
    prelude does. own_pids: it has a process namespace.
    prelude: Python source that runs before the driver. inherit: file descriptors to pass and then close here.
    """

    command: Sequence[str]
    uid: int = 0
    drop_in_driver: bool = False
    own_pids: bool = True
    prelude: str = ""
    folder: str = ""
    inherit: tuple[int, ...] = ()


class ProgramFailed(Exception):
    """The program can answer no more: `reason` as in base.py, `detail` for people."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason)
        self.reason, self.detail = reason, detail


@dataclass
class Session:
    """A running program. `ask` until it raises, then `close`; use it as a context manager."""

    launch: Launch
    limits: Limits
    mode: Mode
    process: subprocess.Popen[bytes] = field(init=False)
    printed_bytes: int = 0
    printed_tail: bytes = b""
    started_at: float = 0.0
    deadline: float = 0.0
    _received: bytearray = field(default_factory=bytearray)
    _received_bytes: int = 0
    _pidfd: int = -1
    _asked: int = 0
    _ended: bool = False

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self, source: str) -> None:
        """Start the process and run the program's top level. Raises ProgramFailed; SandboxUnavailable is our fault."""
        data = source.encode("utf-8", "surrogatepass")
        if len(data) > self.limits.source_bytes:
            raise ProgramFailed(LIMIT, f"the program has {len(data)} bytes, {self.limits.source_bytes} are allowed")
        self._spawn()
        self.deadline = time.monotonic() + START_S
        first = self._exchange(frame(repr(self._settings()).encode()) + frame(data))
        if "hello" not in first:
            raise SandboxUnavailable(f"the sandbox did not start: {first}")
        self.started_at = time.monotonic()
        self.deadline = self.started_at + self.limits.wall_s
        failure_of_start(self._exchange(b""), "ready")

    def ask(self, question: str) -> dict[str, Any]:
        """Send one question (an expression, or one standard input) and return its answer, an object with "i"."""
        answer = self._exchange(frame(question.encode("utf-8", "surrogatepass")))
        if "exited" in answer:
            raise ProgramFailed(EXITED)
        if answer.get("i") != self._asked:
            raise ProgramFailed(PROTOCOL, str(answer)[:200])
        self._asked += 1
        return answer

    def foresee(self, questions: Sequence[str]) -> None:
        """Nothing to prepare: the process is here."""

    def send(self, text: str) -> dict[str, Any]:
        """Send any frame and return whatever comes back next (the dialogue of a test process)."""
        return self._exchange(frame(text.encode("utf-8", "surrogatepass")))

    def quiet(self) -> None:
        """Refuse answers to questions that were not asked."""
        self._pump_once(0.0)
        if self._received:
            raise ProgramFailed(PROTOCOL, bytes(self._received[:200]).decode("utf-8", "replace"))

    @property
    def wall_s(self) -> float:
        """Seconds since the program started."""
        return time.monotonic() - self.started_at if self.started_at else 0.0

    def close(self) -> None:
        """Kill everything that still runs, and wait until nothing of it is left."""
        if not hasattr(self, "process"):
            return
        self._kill()
        self.process.wait()
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()
        if self.launch.uid and not self.launch.own_pids:
            sweep(self.launch.uid)

    # inner workings

    def _settings(self) -> dict[str, object]:
        limits = self.limits
        return {
            "mode": self.mode,
            "uid": self.launch.uid if self.launch.drop_in_driver else 0,
            "memory_bytes": limits.memory_bytes,
            "cpu_s": int(limits.cpu_s or limits.wall_s) + 1,
            "file_bytes": limits.file_bytes,
            "processes": limits.processes + (0 if self.launch.uid or self.launch.own_pids else _own_threads() + 64),
        }

    def _spawn(self) -> None:
        launch = self.launch
        try:
            self.process = subprocess.Popen(
                [*launch.command, _inner_source(launch.prelude)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=launch.inherit,
                env={"PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1"},
                cwd=launch.folder or "/",
                start_new_session=True,
                bufsize=0,
            )
            self._pidfd = os.pidfd_open(self.process.pid)
        except OSError as problem:
            raise SandboxUnavailable(f"the sandbox process cannot be started: {problem}") from problem
        finally:
            for fd in launch.inherit:
                os.close(fd)
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            assert stream is not None
            os.set_blocking(stream.fileno(), False)

    def _exchange(self, outgoing: bytes) -> dict[str, Any]:
        """Write everything, read one line. Raises ProgramFailed at the deadline, a limit, or the end of the process."""
        pending = memoryview(outgoing)
        while True:
            line = self._line()
            if line is not None and not pending:
                return object_of(line)
            if self._ended:
                self._raise_end()
            left = self.deadline - time.monotonic()
            if left <= 0:
                raise (
                    ProgramFailed(TIME) if self.started_at else SandboxUnavailable("the sandbox did not start in time")
                )
            if line is not None:
                raise ProgramFailed(PROTOCOL, line[:200].decode("utf-8", "replace"))
            pending = pending[self._pump_once(left, pending) :]

    def _pump_once(self, timeout_s: float, pending: memoryview | bytes = b"") -> int:
        """Wait for something to happen and take it in; how many bytes of `pending` were written."""
        process = self.process
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        poller = select.poll()
        poller.register(self._pidfd, select.POLLIN)
        for stream in (process.stdout, process.stderr):
            if not stream.closed:
                poller.register(stream.fileno(), select.POLLIN)
        if pending:
            poller.register(process.stdin.fileno(), select.POLLOUT)
        written = 0
        ready = dict(poller.poll(timeout_s * 1000))
        if pending and process.stdin.fileno() in ready:
            try:
                written = os.write(process.stdin.fileno(), pending[:CHUNK])
            except BlockingIOError:
                written = 0
            except BrokenPipeError:
                self._ended = True
        if not process.stdout.closed and process.stdout.fileno() in ready:
            data = _read(process.stdout.fileno())
            if data == b"":
                self._ended = True
            self._received += data or b""
            self._received_bytes += len(data or b"")
            if self._received_bytes > self.limits.answer_bytes:
                raise ProgramFailed(OUTPUT, "the answers are too long")
        if not process.stderr.closed and process.stderr.fileno() in ready:
            data = _read(process.stderr.fileno())
            if data == b"":
                process.stderr.close()
            self.printed_bytes += len(data or b"")
            self.printed_tail = (self.printed_tail + (data or b""))[-2000:]
            if self.printed_bytes > self.limits.output_bytes:
                raise ProgramFailed(OUTPUT, "the program printed too much")
        if self._pidfd in ready and process.stdout.fileno() not in ready:
            self._ended = True
        return written

    def _line(self) -> bytes | None:
        at = self._received.find(b"\n")
        if at < 0:
            return None
        line = bytes(self._received[:at])
        del self._received[: at + 1]
        return line

    def _raise_end(self) -> None:
        """The process is gone, or its end of the pipe is: name the cause."""
        code = self._exit_code(2.0)
        if not self.started_at:
            tail = self.printed_tail.decode("utf-8", "replace").strip()[-500:]
            raise SandboxUnavailable(f"the sandbox did not start (exit code {code}): {tail}")
        number = -code if code < 0 else code - 128 if code > 128 else 0
        if not number:
            raise ProgramFailed(EXITED)
        try:
            name = signal.Signals(number).name
        except ValueError:
            raise ProgramFailed(EXITED) from None
        if name == "SIGXCPU":
            raise ProgramFailed(TIME, "processor time")
        if name == "SIGXFSZ":
            raise ProgramFailed(LIMIT, "file size")
        raise ProgramFailed(f"{CRASH}: {name}")

    def _exit_code(self, timeout_s: float) -> int:
        """The exit code, negative for a signal, 0 when the process is still there. It is not reaped: as long as it is
        not, its process group cannot become another's."""
        if not select.select([self._pidfd], [], [], timeout_s)[0]:
            return 0
        ended = os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
        if ended is None:
            return 0
        return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status

    def _kill(self) -> None:
        """Kill the process and its group until both pipes say that nobody holds them any more. It is reaped later."""
        give_up = time.monotonic() + 10.0
        while True:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(self.process.pid, signal.SIGKILL)
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
            if self.launch.uid and not self.launch.own_pids:
                sweep(self.launch.uid)
            if self._all_closed(0.05) or time.monotonic() > give_up:
                return

    def _all_closed(self, timeout_s: float) -> bool:
        """Read and drop what is left; True when every writer is gone."""
        until = time.monotonic() + timeout_s
        streams = [s for s in (self.process.stdout, self.process.stderr) if s is not None and not s.closed]
        while streams:
            left = until - time.monotonic()
            if left <= 0:
                return False
            select.select(streams, [], [], left)
            streams = [s for s in streams if _read(s.fileno()) != b""]
        return True


def _own_threads() -> int:
    """How many processes and threads our user has: where runs share our user id, its limit counts them as well."""
    found = 0
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if entry.name.isdigit() and entry.stat().st_uid == os.getuid():
                found += sum(1 for _ in (entry / "task").iterdir())
    return found


def sweep(uid: int) -> int:
    """Kill every process of a slot's user id (root only); how many there were."""
    found = 0
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and entry.stat().st_uid == uid:
                os.kill(int(entry.name), signal.SIGKILL)
                found += 1
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
    return found


def failure_of_start(answer: dict[str, Any], expected: str) -> None:
    """Raise ProgramFailed for what the driver says in place of `expected` once the program's top level ran."""
    if expected in answer:
        return
    for key, reason in (("syntax", SYNTAX), ("memory", MEMORY), ("limit", LIMIT)):
        if key in answer:
            raise ProgramFailed(reason, str(answer.get("text", answer[key]))[:300])
    if "exited" in answer:
        raise ProgramFailed(EXITED)
    if "error" in answer:
        raise ProgramFailed(f"{ERROR}: {answer['error']}"[:80], str(answer.get("text", ""))[:300])
    raise ProgramFailed(PROTOCOL, str(answer)[:200])


def answer_failure(answer: dict[str, Any]) -> ProgramFailed | None:
    """What went wrong inside one question; None when it has a value."""
    if "unserialisable" in answer:
        return ProgramFailed(TYPE, str(answer["unserialisable"]))
    for key, reason in (("memory", MEMORY), ("limit", LIMIT)):
        if key in answer:
            return ProgramFailed(reason, str(answer[key])[:300])
    if "error" in answer:
        return ProgramFailed(f"{ERROR}: {answer['error']}"[:80], str(answer.get("text", ""))[:300])
    return None


def _read(fd: int) -> bytes | None:
    """What there is to read, b"" at the end, None when there is nothing yet."""
    try:
        return os.read(fd, CHUNK)
    except BlockingIOError:
        return None


def frame(data: bytes) -> bytes:
    """Bytes as the driver reads them: a length, a line end, the bytes."""
    return str(len(data)).encode() + b"\n" + data


def object_of(line: bytes) -> dict[str, Any]:
    """One line of answers. Raises ProgramFailed (protocol) for anything but a JSON object."""
    try:
        parsed = json.loads(line)
    except (ValueError, RecursionError):
        raise ProgramFailed(PROTOCOL, line[:200].decode("utf-8", "replace")) from None
    if not isinstance(parsed, dict):
        raise ProgramFailed(PROTOCOL, line[:200].decode("utf-8", "replace"))
    return parsed


@lru_cache(maxsize=64)
def _inner_source(prelude: str) -> str:
    """The driver after a prelude, compiled here once: compiling it at every start would cost milliseconds each."""
    driver = (Path(__file__).parent / "driver.py").read_text(encoding="utf-8")
    packed = [
        binascii.b2a_base64(marshal.dumps(compile(part, "<driver>", "exec")), newline=False).decode()
        for part in (prelude, driver)
        if part
    ]
    run = "".join(f"exec(marshal.loads(binascii.a2b_base64('{part}')))\n" for part in packed)
    return f"import marshal, binascii\n{run}"
