"""The ways to isolate a process, strongest first, and the sandbox that hands out slots.

    bubblewrap   namespaces (processes, network, mounts, IPC), a file system with only the Python installation, no
                 /proc, seccomp, limits; as root a user id of its own for every run
    landlock     Landlock and seccomp applied by the process to itself, limits; as root a user id of its own likewise
    none         limits only; refused unless it is explicitly allowed

The strongest tier that passes its own probe is used. Nothing falls back below the demanded minimum.
"""

from __future__ import annotations

import itertools
import os
import platform
import queue
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from gropius.sandbox.base import TIERS, Limits, SandboxUnavailable, Tier
from gropius.sandbox.confine import landlock_version
from gropius.sandbox.seccomp import build_filter, supported
from gropius.sandbox.session import Launch, Mode, ProgramFailed, Session

FIRST_UID = 50_000
UIDS = 15_000
PYTHON = os.path.realpath(sys.executable)
FLAGS = ("-S", "-s", "-P", "-B", "-c")
_RUNS = itertools.count()
_WORKING: set[Tier] = set()
LIBRARIES = ("/usr/lib", "/usr/lib64", "/lib", "/lib64", "/usr/local/lib")


@dataclass
class Sandbox:
    """A number of slots at one tier. Thread-safe; `session` blocks while all slots are busy."""

    tier: Tier
    limits: Limits = field(default_factory=Limits)
    slots: int = 0
    _free: queue.SimpleQueue[None] = field(default_factory=queue.SimpleQueue)
    _free_for_tests: queue.SimpleQueue[None] = field(default_factory=queue.SimpleQueue)

    def __post_init__(self) -> None:
        self.slots = self.slots or 2 * (os.cpu_count() or 1)
        for _ in range(self.slots):  # tests have slots of their own: a program waits for its tests while it holds one
            self._free.put(None)
            self._free_for_tests.put(None)

    @contextmanager
    def session(self, mode: Mode, limits: Limits | None = None) -> Iterator[Session]:
        """An isolated process, not yet started. Everything in it is dead and its files are gone afterwards."""
        free = self._free_for_tests if mode == "tests" else self._free
        free.get()
        folder = ""
        try:
            uid = _fresh_uid()
            if self.tier != "bubblewrap":
                folder = _own_folder(uid)
            with Session(
                _LAUNCHERS[self.tier](uid, folder, limits or self.limits), limits or self.limits, mode
            ) as session:
                yield session
        finally:
            if folder:
                shutil.rmtree(folder, ignore_errors=True)
            free.put(None)

    def judge(self, limits: Limits) -> AbstractContextManager[Session]:
        """A process for tests that run themselves, in slots of their own."""
        return self.session("tests", limits)


def open_sandbox(minimum: Tier = "landlock", limits: Limits | None = None, slots: int = 0) -> Sandbox:
    """The strongest sandbox this machine offers, at least `minimum`. Raises SandboxUnavailable, never weakens silently.

    minimum: "bubblewrap", "landlock", or "none" (explicitly unsafe: programs run with your rights).
    """
    allowed = TIERS[: TIERS.index(minimum) + 1]
    problems = {tier: probe(tier) for tier in allowed}
    for tier in allowed:
        if not problems[tier]:
            return Sandbox(tier, limits or Limits(), slots)
    tried = "; ".join(f"{tier}: {problem}" for tier, problem in problems.items())
    raise SandboxUnavailable(
        f"programs cannot be isolated here ({tried}). "
        "Install bubblewrap, or allow a weaker tier: landlock, or none (unsafe)."
    )


def probe(tier: Tier) -> str:
    """The reason why this tier cannot be used here; "" when a process started at it answers (never asked again)."""
    if tier in _WORKING:
        return ""
    problem = _try(tier)
    if not problem:
        _WORKING.add(tier)
    return problem


def _try(tier: Tier) -> str:
    if tier == "bubblewrap" and bubblewrap() is None:
        return "the program bwrap is not installed"
    if tier != "none" and not supported():
        return f"no system call table for {platform.machine()}"
    if tier == "landlock" and landlock_version() < 1:
        return "the kernel has no Landlock"
    try:
        with Sandbox(tier, slots=1).session("function") as session:
            session.start("def f():\n    return 6 * 7\n")
            answer = session.ask("f()")
    except (SandboxUnavailable, ProgramFailed) as problem:
        return str(problem)
    return "" if answer.get("value") == ["i", "42"] else f"wrong answer {answer}"


def bubblewrap() -> str | None:
    """The path of the bwrap program, None when it is not installed."""
    return shutil.which("bwrap")


def _fresh_uid() -> int:
    """A user id for one run, not used by another run for a long time: what a killed program leaves behind in the
    kernel's count of its processes cannot take from the next. 0 when we are not root."""
    if os.geteuid() != 0:
        return 0
    return FIRST_UID + (os.getpid() * 1009 + next(_RUNS)) % UIDS


def _own_folder(uid: int) -> str:
    folder = tempfile.mkdtemp(prefix="gropius-program-")
    if uid:
        os.chown(folder, uid, uid)
    return folder


def _filter_fd(data: bytes) -> int:
    fd = os.memfd_create("filter")
    os.write(fd, data)
    os.lseek(fd, 0, os.SEEK_SET)
    os.set_inheritable(fd, True)
    return fd


def _bubblewrap(uid: int, folder: str, limits: Limits) -> Launch:
    program = bubblewrap()
    if program is None:
        raise SandboxUnavailable("the program bwrap is not installed")
    fd = _filter_fd(build_filter())
    command = [program, "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"]
    command += [
        "--die-with-parent",
        "--new-session",
        "--clearenv",
        "--setenv",
        "PYTHONHASHSEED",
        "0",
        "--seccomp",
        str(fd),
    ]
    if uid:
        command += ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    else:
        command += ["--unshare-user", "--uid", "65534", "--gid", "65534", "--cap-drop", "ALL"]
    for parent in sorted(
        {str(parent) for path in (*_readable(), "/dev/null") for parent in Path(path).parents} - {"/"}
    ):
        command += ["--perms", "0755", "--dir", parent]  # else others than root may not search them
    for path in _readable():
        command += ["--symlink", os.readlink(path), path] if os.path.islink(path) else ["--ro-bind", path, path]
    command += [
        "--dev-bind",
        "/dev/null",
        "/dev/null",
        "--perms",
        "1777",
        "--size",
        str(limits.file_bytes),
        "--tmpfs",
        "/tmp",
    ]
    command += ["--chdir", "/tmp", "--hostname", "sandbox", "--remount-ro", "/", "--", PYTHON, *FLAGS]
    return Launch(command, uid, drop_in_driver=bool(uid), inherit=(fd,))


def _landlock(uid: int, folder: str, limits: Limits) -> Launch:
    arguments = (list(_readable()), [folder], ["/dev/null", "/dev/urandom"], build_filter(own_pids=False))
    source = (Path(__file__).parent / "confine.py").read_text(encoding="utf-8")
    prelude = f"{source}\nos.umask(0o077)\nconfine(*{arguments!r})\n" + (f"change_user({uid})\n" if uid else "")
    return Launch((PYTHON, *FLAGS), uid, own_pids=False, prelude=prelude, folder=folder)


def _none(uid: int, folder: str, limits: Limits) -> Launch:
    return Launch((PYTHON, *FLAGS), own_pids=False, folder=folder)


def _readable() -> list[str]:
    """The Python installation and the libraries it needs; nothing of a home, of data, of /etc."""
    prefix = os.path.realpath(sys.base_prefix)
    paths = [path for path in LIBRARIES if os.path.lexists(path)]
    paths += [PYTHON] if prefix in ("/usr", "/") else [prefix]
    return [p for p in paths if not any(p != other and p.startswith(other + "/") for other in paths)]


_LAUNCHERS = {"bubblewrap": _bubblewrap, "landlock": _landlock, "none": _none}
