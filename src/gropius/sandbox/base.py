"""What a sandboxed run is limited to, and what can become of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gropius.errors import SafetyRefusal

Tier = Literal["bubblewrap", "landlock", "none"]
TIERS: tuple[Tier, ...] = ("bubblewrap", "landlock", "none")  # strongest first

SYNTAX = "syntax"
MISSING = "function missing"
EXITED = "exited early"
WRONG = "wrong"
TYPE = "type"
ERROR = "error"  # followed by the exception's class
TIME = "time"
MEMORY = "memory"
OUTPUT = "output"
LIMIT = "limit"
CRASH = "crash"  # followed by the signal's name
PROTOCOL = "protocol"


class SandboxUnavailable(SafetyRefusal):
    """No isolation of the demanded strength could be set up: our fault, never the program's; its score is void."""


@dataclass(frozen=True)
class Limits:
    """What one program may use.

    wall_s: for all its tests together, from the moment the program starts, not from when it was queued. cpu_s: of each
    process; 0 is wall_s. memory_bytes: address space of each process, so a program can hold up to processes times as
    much. processes: processes and threads together. file_bytes: of one file, and of all files together. output_bytes:
    printed text. answer_bytes: all answers together. source_bytes: of the program.
    """

    wall_s: float = 10.0
    cpu_s: float = 0.0
    memory_bytes: int = 512 << 20
    processes: int = 8
    file_bytes: int = 32 << 20
    output_bytes: int = 4 << 20
    answer_bytes: int = 4 << 20
    source_bytes: int = 512 << 10


@dataclass(frozen=True)
class Grade:
    """What became of a program.

    status: "passed" (every test), "failed" (the program's fault) or "unavailable" (ours). reason: "" when passed, else
    one of the words above. passed, total: tests. detail: for people, model text inside. wall_s: of the program.
    shown: all tests that the author of the program was shown pass; None when none was shown.
    """

    status: Literal["passed", "failed", "unavailable"]
    reason: str = ""
    passed: int = 0
    total: int = 0
    detail: str = ""
    tier: str = ""
    wall_s: float = 0.0
    shown: bool | None = None
