"""A person's own reward functions, looked at and run in other processes only. No torch.

`look` asks a child what the functions are (which signature, whether they see whole groups), so that importing a
person's module never touches the trainer's process. A function is imported here by `load` in a worker, not before.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gropius.errors import GropiusError, RecipeError, did_you_mean
from gropius.naming import load_function
from gropius.rewards.base import BatchedReward, Signature
from gropius.rewards.foreign import adapt

LOOK_S = 120.0


@dataclass(frozen=True)
class Look:
    """What a child found out about a function. refused: why it cannot be used, "" when it can."""

    signature: Signature = "episode"
    refused: str = ""


def load(name: str, options: Mapping[str, Any], base_dir: Path) -> tuple[Signature, Callable[..., Any] | BatchedReward]:
    """Import a function and adapt it, its options bound. Raises RecipeError naming it."""
    function = load_function(name, base_dir, RecipeError)
    if options:
        known = inspect.signature(function).parameters
        unknown = [key for key in options if key not in known]
        if unknown:
            raise RecipeError(
                f"reward {name}: the function has no parameter {unknown[0]}; {did_you_mean(unknown[0], known)}"
            )
        function = functools.partial(function, **options)
    return adapt(name, function)


def look(functions: Sequence[tuple[str, Mapping[str, Any]]], base_dir: Path) -> list[Look]:
    """What each (name, options) is, found out in a child that is killed after two minutes.

    Raises RecipeError when the child says nothing, with its last words.
    """
    question = json.dumps({"functions": [[name, dict(options)] for name, options in functions], "base": str(base_dir)})
    try:
        child = subprocess.run(
            [sys.executable, "-c", "from gropius.rewards.own import answer; answer()"],
            input=question.encode(),
            capture_output=True,
            timeout=LOOK_S,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
            start_new_session=True,
        )
    except subprocess.TimeoutExpired:
        raise RecipeError(f"{_names(functions)}: importing did not end within {LOOK_S:g} s") from None
    try:
        found = json.loads(child.stdout)
        return [Look(**row) for row in found]
    except (ValueError, TypeError):
        words = child.stderr.decode("utf-8", "replace").strip().splitlines()[-1:] or ["no last words"]
        raise RecipeError(f"{_names(functions)}: importing ended its process: {words[0][:500]}") from None


def answer() -> None:
    """The child: read the question, look at every function, answer on the pipe that was standard output."""
    said = os.dup(1)
    os.dup2(2, 1)  # what a module prints is not the answer
    question = json.load(sys.stdin)
    rows = [_looked(name, options, Path(question["base"])) for name, options in question["functions"]]
    os.write(said, json.dumps(rows).encode())


def _looked(name: str, options: Mapping[str, Any], base_dir: Path) -> dict[str, str]:
    try:
        return {"signature": load(name, options, base_dir)[0]}
    except GropiusError as refusal:
        return {"refused": str(refusal)}


def _names(functions: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    return "reward " + ", ".join(name for name, _ in functions)
