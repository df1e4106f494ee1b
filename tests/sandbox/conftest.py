"""The sandboxes that the tests of this room run in: every tier that this machine offers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from gropius.sandbox.base import Limits
from gropius.sandbox.tiers import Sandbox, probe

LIMITS = Limits(wall_s=10.0, memory_bytes=256 << 20, processes=8)


@pytest.fixture(params=["bubblewrap", "landlock"])
def sandbox(request: pytest.FixtureRequest) -> Sandbox:
    problem = probe(request.param)
    if problem:
        pytest.skip(f"the tier {request.param} is not offered here: {problem}")
    return Sandbox(request.param, LIMITS, slots=4)


def inner_processes() -> set[str]:
    """Every process on this machine that runs our inner side, or was forked from one (it keeps the command line)."""
    found = set()
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and b"marshal.loads(binascii" in (entry / "cmdline").read_bytes():
                found.add(entry.name)
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
    return found


@pytest.fixture
def no_survivor() -> Iterator[None]:
    before = inner_processes()
    yield
    assert inner_processes() - before == set()
