"""Runs in processes of their own that can be killed: one warm process forks a child for each, so each starts at once.

The warm process never computes a gradient, so a fork of it may. It reads one JSON job a line and answers with one line.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any


class Killable:
    """The warm process, seen from a test."""

    def __init__(self, folder: Path) -> None:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=folder,
            env=environment,
        )

    def run(self, action: str, **job: Any) -> dict[str, Any]:
        """action: train, resume, fork. The child's end: {"killed": signal or 0, "code": exit code, "error": text}."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps({"action": action, **job}) + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)


@contextlib.contextmanager
def killable(folder: Path) -> Iterator[Killable]:
    """A warm process for as long as it is needed."""
    server = Killable(folder)
    try:
        yield server
    finally:
        server.close()


def fill(folder: str) -> None:
    """Leave no byte of a small disk."""
    with open(Path(folder) / "filler", "wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(b"\0" * 4096):
            pass


def name_children(file: str, signal_number: int) -> None:
    """Write down the processes that this one started, and send itself a signal."""
    own = Path(f"/proc/{os.getpid()}/task")
    Path(file).write_text(" ".join((thread / "children").read_text() for thread in own.iterdir()))
    os.kill(os.getpid(), signal_number)


def kill_children() -> None:
    """End every process that this one started, and go on."""
    for thread in Path(f"/proc/{os.getpid()}/task").iterdir():
        for child in (thread / "children").read_text().split():
            os.kill(int(child), signal.SIGKILL)


def _action(text: str) -> Callable[[], None]:
    """`FOLDER`: fill its disk. `children:FILE:N`: name the children in a file, then signal N to itself.

    `kill-children`: end them, and go on.
    """
    if text == "kill-children":
        return kill_children
    if not text.startswith("children:"):
        return lambda: fill(text)
    _, file, number = text.split(":")
    return lambda: name_children(file, int(number))


class _Frugal:
    """A listener that writes down what the process holds, every ten steps."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def note(self, text: str) -> None:
        """Let a note pass."""

    def held_out(self, label: str, found: object) -> None:
        """Let a measurement pass."""

    def step(self, step: int, steps: int, metrics: object) -> None:
        """Resident bytes, open files and threads."""
        if step % 10 == 0:
            gc.collect()
            status = Path("/proc/self/status").read_text()
            row = {
                "step": step,
                "memory": int(status.partition("VmRSS:")[2].split()[0]) * 1024,
                "files": len(os.listdir("/proc/self/fd")),
                "threads": int(status.partition("Threads:")[2].split()[0]),
            }
            with self._file.open("a") as file:
                file.write(json.dumps(row) + "\n")


def _serve() -> None:
    import peft  # noqa: F401

    from gropius import build  # noqa: F401
    from gropius.models.load import load_model
    from gropius.models.tiny import TinyShape

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    load_model("tiny", tiny=TinyShape(hidden=16, layers=1, heads=2, kv_heads=2, mlp=16))
    for line in sys.stdin:
        said = Path(f"said-{os.getpid()}")
        said.unlink(missing_ok=True)
        child = os.fork()
        if child == 0:
            _child(json.loads(line), said)
        _, status = os.waitpid(child, 0)
        answer = {
            "killed": os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0,
            "code": os.WEXITSTATUS(status) if os.WIFEXITED(status) else None,
            "error": said.read_text() if said.exists() else "",
        }
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _child(job: dict[str, Any], said: Path) -> None:
    from gropius import build
    from gropius.errors import GropiusError
    from gropius.recipe import resolve
    from gropius.records import faults
    from gropius.train.progress import Silent

    code = 99
    try:
        point: Sequence[Any] = job.get("arm") or ()
        if point:
            faults.arm(point[0], point[1], _action(str(point[2])) if len(point) > 2 else faults.kill)
        if job["action"] == "train":
            progress = _Frugal(Path(job["usage"])) if "usage" in job else Silent()
            build.train(resolve(job["recipe"], job["settings"]), progress)
            Path("notes").write_text("\n".join(getattr(progress, "notes", ())))
        elif job["action"] == "fork":
            build.fork(resolve(job["recipe"], job["settings"]), (Path(job["folder"]), job.get("step")), Silent())
        else:
            build.resume(Path(job["folder"]), job.get("step"), Silent(), job.get("settings", ()))
        code = 0
    except GropiusError as error:
        said.write_text(str(error))
        code = error.exit_code
    except BaseException:
        said.write_text(traceback.format_exc())
    finally:
        os._exit(code)


if __name__ == "__main__":
    _serve()
