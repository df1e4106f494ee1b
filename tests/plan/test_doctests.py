"""The examples in the docstrings of the two rooms run."""

from __future__ import annotations

import doctest
import importlib

import pytest

MODULES = (
    "plan.beta", "plan.cluster", "plan.cost", "plan.counts", "plan.lengths", "plan.machines", "plan.question",
    "plan.signal", "audit.dialect", "audit.sources",
)  # fmt: skip


@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name):
    result = doctest.testmod(importlib.import_module(f"gropius.{name}"))
    assert result.attempted and not result.failed
