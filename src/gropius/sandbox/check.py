"""The self-test behind `gropius sandbox`: which tier works here, what was tried from the inside, and what held."""

from __future__ import annotations

import os
import socket
import tempfile
import threading
from dataclasses import replace
from typing import Any

from gropius.sandbox.base import TIERS, Limits, Tier
from gropius.sandbox.grade import FunctionTests, grade
from gropius.sandbox.tiers import Sandbox, probe

_LIMITS = Limits(wall_s=5.0, memory_bytes=256 << 20)

# name → (what is tried, the program, the reasons that mean "held"; "passed" where the program itself reports)
_ATTEMPTS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "memory": ("take 8 GB of memory", "def f(x): return len(bytearray(1 << 33))", ("memory",)),
    "processes": (
        "fork without end",
        "import os\ndef f(x):\n    while True: os.fork()",
        ("limit", "protocol", "time", "exited early"),
    ),
    "time": ("run for ever", "def f(x):\n    while True: pass", ("time",)),
    "output": ("print without end", "def f(x):\n    while True: print('x' * 65536)", ("output",)),
    "files": (
        "fill the disk",
        "def f(x):\n    with open('big', 'wb') as b:\n        for _ in range(200): b.write(b'x' * (1 << 20))",
        ("limit",),
    ),
    "calls": (
        "mount, ptrace, bpf, new namespaces",
        "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\ndef f(x):\n"
        "    column = ('x86_64', 'aarch64').index(os.uname().machine)\n"
        "    return all(libc.syscall(n[column], 0x10000000, 0, 0, 0, 0) == -1 and ctypes.get_errno() == 1\n"
        "               for n in ((165, 40), (101, 117), (321, 280), (272, 97), (308, 268)))",
        ("passed",),
    ),
    "root": ("be the administrator", "import os\ndef f(x): return os.getuid() != 0", ("passed",)),
}


def self_test(tier: Tier | None = None) -> dict[str, Any]:
    """Probe every tier, then attack the strongest that works (or `tier`) from the inside.

    Answer: {"tier": name or null, "tiers": {name: "" or why not}, "checks": [{"name", "tried", "held", "detail"}],
    "holds": bool}. Takes a few seconds; starts only processes of its own.
    """
    problems: dict[str, str] = {name: probe(name) for name in TIERS}
    chosen = tier or next((name for name in ("bubblewrap", "landlock") if not problems[name]), None)
    report: dict[str, Any] = {"tier": chosen, "tiers": problems, "checks": [], "holds": False}
    if chosen is None or problems[chosen]:
        return report
    sandbox = Sandbox(chosen, _LIMITS, slots=2)
    checks = [_attempt(sandbox, name) for name in _ATTEMPTS]
    checks += [_files_of_host(sandbox), _network(sandbox), _honest(sandbox)]
    report["checks"] = checks
    report["holds"] = all(check["held"] for check in checks)
    return report


def report_text(report: dict[str, Any]) -> str:
    """The report for a terminal."""
    lines = []
    for name, problem in report["tiers"].items():
        state = f"not offered: {problem.splitlines()[-1][:150]}" if problem else "works"
        lines.append(f"{name:<11} {state if name != 'none' else 'unsafe; never used unless a recipe allows it'}")
    if report["tier"] is None:
        lines.append("")
        lines.append("Programs that a model wrote will not be run here: their rewards are void. Install bubblewrap.")
        return "\n".join(lines)
    lines += ["", f"attacks from inside {report['tier']}:"]
    for check in report["checks"]:
        held = "held  " if check["held"] else "FAILED"
        lines.append(f"  {held} {check['name']:<10} {check['tried']}  {check['detail']}".rstrip())
    lines += ["", "everything held" if report["holds"] else "not everything held: do not run programs of a model here"]
    return "\n".join(lines)


def _attempt(sandbox: Sandbox, name: str) -> dict[str, Any]:
    tried, program, expected = _ATTEMPTS[name]
    limits = replace(_LIMITS, wall_s=1.0) if name in ("time", "processes") else _LIMITS
    slots = Sandbox(sandbox.tier, limits, slots=1)
    result = grade(slots, program, FunctionTests("f", ("assert f(1) == True",)))
    found = result.reason or result.status
    return {"name": name, "tried": tried, "held": found in expected, "detail": "" if found in expected else found}


def _files_of_host(sandbox: Sandbox) -> dict[str, Any]:
    with tempfile.NamedTemporaryFile(prefix="gropius-check-") as secret:
        os.chmod(secret.name, 0o644)
        places = [
            secret.name,
            os.path.abspath(__file__),
            "/etc/passwd",
            "/proc/self/environ",
            f"/proc/{os.getpid()}/cmdline",
        ]
        program = (
            f"def f(x):\n    seen = []\n    for place in {places!r}:\n        try:\n            open(place).close()\n"
            "            seen.append(place)\n        except OSError:\n            pass\n    return seen"
        )
        result = grade(sandbox, program, FunctionTests("f", ("assert f(1) == []",)))
    return _check(
        "host files", "read files, settings and processes of this machine", result.status == "passed", result.reason
    )


def _network(sandbox: Sandbox) -> dict[str, Any]:
    connections: list[int] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)

        def accept() -> None:
            """Count who connects until the server is closed."""
            while server.fileno() >= 0:
                try:
                    server.accept()
                    connections.append(1)
                except TimeoutError:
                    continue
                except OSError:
                    return

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        program = (
            "import socket\ndef f(x):\n    try:\n"
            f"        socket.create_connection(('127.0.0.1', {server.getsockname()[1]}), 1)\n        return True\n"
            "    except OSError:\n        return False"
        )
        result = grade(sandbox, program, FunctionTests("f", ("assert f(1) == False",)))
    thread.join()
    return _check(
        "network", "connect to a server on this machine", result.status == "passed" and not connections, result.reason
    )


def _honest(sandbox: Sandbox) -> dict[str, Any]:
    result = grade(sandbox, "def f(x):\n    return x + 1", FunctionTests("f", ("assert f(1) == 2",)))
    return _check("honest", "run an honest program after all this", result.status == "passed", result.reason)


def _check(name: str, tried: str, held: bool, detail: str) -> dict[str, Any]:
    return {"name": name, "tried": tried, "held": held, "detail": "" if held else detail}


__all__ = ["report_text", "self_test"]
