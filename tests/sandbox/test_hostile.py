# ruff: noqa: E501 (each hostile program is one string)
"""Hostile programs: each is rejected for its own reason, nothing survives it, and the next honest program scores."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from gropius.sandbox.base import Grade
from gropius.sandbox.grade import FunctionTests, InputTests, grade, grade_all
from gropius.sandbox.tiers import Sandbox

HONEST = "def f(x):\n    return x + 1\n"
TESTS = FunctionTests("f", ("assert f(1) == 2", "assert f(41) == 42"))
PROGRAMS: dict[str, tuple[str, tuple[str, ...]]] = {
    "C02 wrong": ("def f(x):\n    return x", ("wrong",)),
    "C03 exit at the top": ("import sys\nsys.exit(0)\ndef f(x): return x + 1", ("exited early",)),
    "C04 exit in the function": ("import os\ndef f(x): os._exit(0)", ("exited early",)),
    "C04 exit by exception": ("def f(x): raise SystemExit(0)", ("exited early",)),
    "C05 equal to all": ("class E:\n    def __eq__(s, o): return True\n    def __hash__(s): return 2\ndef f(x): return E()", ("type",)),
    "C05 an int equal to all": ("class E(int):\n    def __eq__(s, o): return True\n    __hash__ = int.__hash__\ndef f(x): return E(0)", ("type",)),
    "C07 looks for handles": ("import gc\ndef f(x):\n    for o in gc.get_objects():\n        if 'expected' in str(type(o)): return o\n    return None", ("type",)),
    "C09 prints success": ("print('=== 1 passed ===')\ndef f(x):\n    print('{\"i\":0,\"value\":[\"i\",\"2\"]}')\n    return 0", ("wrong",)),
    "C10 forges answers": ("import os\ndef f(x):\n    for fd in range(3, 64):\n        try: os.write(fd, b'{\"i\":1,\"value\":[\"i\",\"2\"]}\\n' * 3)\n        except OSError: pass\n    return x + 1", ("protocol",)),
    "C10 forges an extra answer": ("import os\nn = 0\ndef f(x):\n    global n\n    n += 1\n    if n == 2:\n        for fd in range(3, 64):\n            try: os.write(fd, b'{\"i\":2,\"value\":[\"i\",\"42\"]}\\n{\"i\":3}\\n')\n            except OSError: pass\n    return x + 1", ("protocol",)),
    "C16 fork bomb": ("import os\ndef f(x):\n    while True: os.fork()", ("limit", "time", "protocol", "exited early")),
    "C16 thread bomb": ("import threading, time\ndef f(x):\n    while True: threading.Thread(target=time.sleep, args=(9,)).start()", ("limit",)),
    "C17 endless loop": ("def f(x):\n    while True: pass", ("time",)),
    "C17 sleep": ("import time\ntime.sleep(1000)\ndef f(x): return x + 1", ("time",)),
    "C17 reads standard input": ("def f(x): return input()", ("error: EOFError",)),
    "C19 daemon": ("import os, time\ndef f(x):\n    if os.fork() == 0:\n        try: os.setsid()\n        except OSError: pass\n        if os.fork() == 0:\n            while True: time.sleep(1)\n        os._exit(0)\n    return 0", ("wrong",)),
    "C20 bytearray": ("def f(x): return len(bytearray(1 << 33))", ("memory",)),
    "C20 lists": ("def f(x):\n    a = []\n    while True: a.append([0] * 1_000_000)", ("memory",)),
    "C20 power": ("def f(x): return 9**9**9", ("time", "memory")),
    "C20 a big file": ("def f(x):\n    with open('big', 'wb') as b:\n        for _ in range(200): b.write(b'x' * (1 << 20))\n    return x + 1", ("limit",)),
    "C21 endless output": ("import sys\ndef f(x):\n    while True: sys.stdout.write('x' * 65536)", ("output",)),
    "C21 endless errors": ("import sys\ndef f(x):\n    while True: sys.stderr.write('x' * 65536)", ("output",)),
    "C21 endless answer": ("def f(x): return 'x' * (1 << 26)", ("output", "memory")),
    "C23 deep recursion": ("def f(x): return f(x)", ("error: RecursionError",)),
    "C23 segfault": ("import ctypes\ndef f(x): return ctypes.string_at(0)", ("crash: SIGSEGV",)),
    "C23 abort": ("import os\ndef f(x): os.abort()", ("crash: SIGABRT",)),
    "C23 smashed stack": ("import sys\nsys.setrecursionlimit(1 << 30)\ndef f(x):\n    class A:\n        def __repr__(s): return repr(s)\n    return repr(A())", ("crash: SIGSEGV", "memory", "time")),
    "C27 nul": ("def f(x):\n    return x + 1\x00", ("syntax",)),
    "C27 lone surrogate": ("def f(x):\n    return '\ud800'", ("syntax",)),
    "C28 too long": ("x = 1\n" * 1_000_000, ("limit",)),
    "C28 parentheses": ("x = " + "(" * 100_000 + ")" * 100_000, ("syntax", "memory")),
    "C28 bomb at compile time": ("x = " + "(1<<" * 50 + "9" + ")" * 50 + "\ny = ((((1,)*99999)*99999)*99999)", ("memory", "error: ValueError", "error: OverflowError", "time")),
    "C29 nan": ("def f(x): return float('nan')", ("wrong",)),
    "C29 generator": ("def f(x): return (i for i in range(x))", ("type",)),
    "C29 cyclic": ("def f(x):\n    a = []\n    a.append(a)\n    return a", ("type",)),
    "C29 huge integer": ("def f(x): return 1 << 100_000", ("error: ValueError",)),
    "C35 missing": ("def g(x): return x + 1", ("function missing",)),
    "C35 not callable": ("f = 2", ("function missing",)),
}  # fmt: skip


def hurried(sandbox: Sandbox) -> Sandbox:
    """The same tier with one second for each program."""
    return Sandbox(sandbox.tier, replace(sandbox.limits, wall_s=1.0), slots=1)


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.usefixtures("no_survivor")
def test_a_hostile_program_is_rejected_and_the_next_honest_one_scores(sandbox: Sandbox, name: str) -> None:
    program, reasons = PROGRAMS[name]
    result = grade(hurried(sandbox) if "time" in reasons else sandbox, program, TESTS)
    assert (result.status, result.reason in reasons) == ("failed", True), result
    assert grade(sandbox, HONEST, TESTS).status == "passed"


@pytest.mark.parametrize(
    "program",
    [
        HONEST,
        "\ufeff" + HONEST,
        HONEST.replace("\n", "\r\n"),
        "print('x' * 1_000_000)\n" + HONEST,
        "import math, json, collections, itertools, re, functools, heapq, decimal\n" + HONEST,
        "if __name__ == '__main__':\n    raise SystemExit(1)\n" + HONEST,
        "from dataclasses import dataclass\n@dataclass\nclass A:\n    b: int\ndef f(x): return A(x).b + 1",
    ],
)
def test_an_honest_program_scores(sandbox: Sandbox, program: str) -> None:
    assert grade(sandbox, program, TESTS).status == "passed"


@pytest.fixture
def decoy() -> Iterator[tuple[int, bytes, list[int]]]:
    """Servers that count who connects: TCP on the loopback, and a UNIX socket without a path."""
    connections: list[int] = []
    tcp, unix = socket.create_server(("127.0.0.1", 0)), socket.socket(socket.AF_UNIX)
    unix.bind("")  # the kernel picks a free name
    name = unix.getsockname()
    unix.listen()

    def accept(server: socket.socket) -> None:
        while True:
            try:
                server.accept()
            except OSError:
                return
            connections.append(1)

    for server in (tcp, unix):
        threading.Thread(target=accept, args=(server,), daemon=True).start()
    yield tcp.getsockname()[1], name, connections
    for server in (tcp, unix):
        server.shutdown(socket.SHUT_RDWR)
        server.close()


def test_no_connection_leaves_the_sandbox(sandbox: Sandbox, decoy: tuple[int, bytes, list[int]]) -> None:
    port, name, connections = decoy
    program = f"""
import socket
def f(x):
    opened = 0
    for family, address in ((socket.AF_INET, ("127.0.0.1", {port})), (socket.AF_UNIX, {name!r}), (socket.AF_INET6, ("::1", {port}))):
        for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
            try:
                with socket.socket(family, kind) as s:
                    s.connect(address)
                    opened += 1
            except OSError:
                pass
    try:
        socket.getaddrinfo("localhost.invalid", 80)
        opened += 1
    except OSError:
        pass
    return opened
"""
    assert grade(sandbox, program, FunctionTests("f", ("assert f(1) == 0",))).status == "passed"
    assert connections == []


def test_nothing_of_the_host_can_be_read(sandbox: Sandbox, tmp_path: Path) -> None:
    secret = tmp_path / "answers.json"
    secret.write_text("2")
    os.chmod(tmp_path, 0o755)
    places = [
        str(secret),
        str(tmp_path),
        "/proc/self/environ",
        "/proc/1/cmdline",
        f"/proc/{os.getpid()}/environ",
        "/proc/self/maps",
    ]
    places += [
        "/etc/passwd",
        "/etc/hostname",
        "/root/.bashrc",
        os.getcwd(),
        str(Path(__file__)),
        "/sys/class",
        "/var/log",
        "/home",
    ]
    program = f"""
import os
def f(x):
    seen = []
    for place in {places!r}:
        try:
            os.listdir(place) if os.path.isdir(place) else open(place, "rb").read(1)
            seen.append(place)
        except OSError:
            pass
    return seen + sorted(set(os.environ) - {{"PYTHONHASHSEED", "PYTHONDONTWRITEBYTECODE", "PWD", "LC_CTYPE"}})
"""
    result = grade(sandbox, program, FunctionTests("f", ("assert f(1) == []",)))
    assert result.status == "passed", result


def test_calls_that_could_break_out_are_refused(sandbox: Sandbox) -> None:
    calls = {
        "unshare": (272, 97),
        "mount": (165, 40),
        "ptrace": (101, 117),
        "bpf": (321, 280),
        "io_uring_setup": (425, 425),
    }
    calls |= {"keyctl": (250, 219), "setns": (308, 268), "open_by_handle_at": (304, 265), "userfaultfd": (323, 282)}
    program = f"""
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
def f(x):
    column = ("x86_64", "aarch64").index(os.uname().machine)
    allowed = []
    for name, numbers in {calls!r}.items():
        if libc.syscall(numbers[column], 0x10000000, 0, 0, 0, 0) != -1 or ctypes.get_errno() != 1:
            allowed.append((name, ctypes.get_errno()))
    for name in ("setuid", "setgid"):
        if getattr(libc, name)(0) != -1:
            allowed.append((name, os.getuid()))
    flags = {{"x86_64": 56, "aarch64": 220}}[os.uname().machine]
    if libc.syscall(flags, 0x10000000 | 17, 0, 0, 0, 0) != -1:
        allowed.append(("clone", 0))
    return [a for a in allowed if a[0] not in ("setuid", "setgid") or os.getuid() == 0]
"""
    result = grade(sandbox, program, FunctionTests("f", ("assert f(1) == []",)))
    assert result.status == "passed", result


def test_files_that_one_program_leaves_are_not_there_for_the_next(sandbox: Sandbox, tmp_path: Path) -> None:
    names = ["conftest.py", "sitecustomize.py", "usercustomize.py", "pytest.ini", "json.py", "evil.pth"]
    drop = f"""
import os
def f(x):
    for folder in (".", "/tmp", "/", {str(tmp_path)!r}, os.path.dirname(os.__file__), os.path.dirname(os.__file__) + "/site-packages"):
        for name in {names!r}:
            try:
                with open(os.path.join(folder, name), "w") as out:
                    out.write("raise SystemExit(0)")
            except OSError:
                pass
    return 0
"""
    look = (
        f"import os, json\ndef f(x): return [n for n in {names!r} if os.path.exists(n) or os.path.exists('/tmp/' + n)]"
    )
    before = sorted(os.listdir(os.path.dirname(os.__file__)))
    assert grade(sandbox, drop, TESTS).reason == "wrong"
    assert grade(sandbox, look, FunctionTests("f", ("assert f(1) == []",))).status == "passed"
    assert os.listdir(tmp_path) == []
    assert sorted(os.listdir(os.path.dirname(os.__file__))) == before


def test_the_hash_seed_is_fixed(sandbox: Sandbox) -> None:
    program = "def f(x): return list({'a', 'b', 'c', 'd', 'e'})"
    results = {grade(sandbox, program, FunctionTests("f", ("assert f(1) == []",))).status for _ in range(2)}
    assert results == {"failed"}
    with sandbox.session("function") as one, sandbox.session("function") as two:
        one.start(program)
        two.start(program)
        assert one.ask("f(1)") == two.ask("f(1)")


def test_a_table_of_the_visible_tests_fails_the_hidden_ones(sandbox: Sandbox) -> None:
    program = "def f(x): return {1: 2, 41: 42}[x]"
    assert grade(sandbox, program, TESTS).status == "passed"
    hidden = FunctionTests("f", (*TESTS.tests, "assert f(7) == 8"))
    result = grade(sandbox, program, hidden, stop_at_first=False)
    assert (result.reason, result.passed, result.total) == ("error: KeyError", 2, 3)


def test_scripts_are_judged_by_what_they_print(sandbox: Sandbox) -> None:
    tests = InputTests((("1 2\n", "3\n"), ("10 20\n", "30")))
    good = "a, b = map(int, input().split())\nprint(a + b)"

    def reason(program: str) -> Grade:
        return grade(sandbox, program, tests)

    assert reason(good).status == "passed"
    assert reason("if __name__ == '__main__':\n    " + good.replace("\n", "\n    ")).status == "passed"
    assert reason("print(3)").reason == "wrong"
    assert reason("import sys\nsys.exit(0)").reason == "exited early"
    assert reason("import os\nos._exit(0)").reason == "exited early"
    assert reason("raise ValueError").reason == "error: exit code 1"
    assert grade(hurried(sandbox), "while True: pass", tests).reason == "time"
    assert grade(hurried(sandbox), "while True: print('x' * 65536)", tests).reason in ("output", "time")
    assert reason("import ctypes\nctypes.string_at(0)").reason == "crash: SIGSEGV"
    assert reason("x = bytearray(1 << 33)").reason == "memory"
    assert reason("def f(:").reason == "syntax"


@pytest.mark.usefixtures("no_survivor")
def test_a_hundred_at_once_do_not_disturb_each_other(sandbox: Sandbox) -> None:
    hostile = [
        PROGRAMS[name]
        for name in ("C04 exit in the function", "C16 fork bomb", "C19 daemon", "C20 bytearray", "C23 segfault")
    ]
    work = [
        (HONEST.replace("+ 1", f"+ {n} + 1 - {n}"), TESTS) if n % 4 else (hostile[n // 4 % 5][0], TESTS)
        for n in range(100)
    ]
    for n, result in enumerate(grade_all(sandbox, work)):
        if n % 4:
            assert result.status == "passed", (n, result)
        else:
            assert (result.status, result.reason in hostile[n // 4 % 5][1]) == ("failed", True), (n, result)
