"""Gropius: group-relative policy optimisation of language models; exact, fast on what you have, clear to the token."""

from __future__ import annotations

from typing import Any

__version__ = "0.1.0"
__all__ = ["__version__", "explain", "explain_rewards", "open_run"]

_HOMES = {
    "explain": ("gropius.objective.explain", "explain"),
    "explain_rewards": ("gropius.objective.explain", "explain_rewards"),
    "open_run": ("gropius.viewer.notebook", "RunView"),
}


def __getattr__(name: str) -> Any:
    """Load the public functions when they are first used, so that importing the package stays instant."""
    if name in _HOMES:
        import importlib

        module, found = _HOMES[name]
        return getattr(importlib.import_module(module), found)
    raise AttributeError(f"module 'gropius' has no attribute {name!r}")
