"""The examples in the docstrings of the torch-free rooms and of the objective run as written."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

import gropius

_ROOT = Path(gropius.__file__).parent
_ROOMS = (
    "objective", "tasks", "envs", "rewards", "sandbox", "records", "recipe", "doctor", "plan", "audit",
)  # fmt: skip
_FILES = [*_ROOT.glob("*.py"), *(path for room in _ROOMS for path in (_ROOT / room).rglob("*.py"))]
_MODULES = sorted(
    ".".join(("gropius", *path.relative_to(_ROOT).with_suffix("").parts))
    for path in _FILES
    if path.name != "__init__.py" and ">>> " in path.read_text(encoding="utf-8")
)


@pytest.mark.parametrize("name", _MODULES)
def test_the_examples_of_a_module_run_as_written(name: str) -> None:
    failed, attempted = doctest.testmod(importlib.import_module(name))
    assert attempted > 0
    assert failed == 0
