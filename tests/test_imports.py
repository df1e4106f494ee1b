"""The law of the rooms: what is marked torch-free brings nothing heavy into a fresh interpreter."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import gropius

ROOT = Path(gropius.__file__).parent
HEAVY = ("torch", "transformers", "vllm", "ray", "peft", "datasets")
TORCH_FREE_FILES = (
    "__init__", "__main__", "types", "errors", "naming", "objective/__init__", "objective/spec", "objective/presets",
    "objective/advantage", "objective/aggregate", "objective/selection", "objective/formula", "objective/validate",
    "objective/batch", "objective/explain", "distributed/__init__", "distributed/wire", "distributed/seat",
    "distributed/launch",
)  # fmt: skip
TORCH_FREE_ROOMS = (
    "records", "rewards", "tasks", "envs", "sandbox", "doctor", "compare", "plan", "audit", "recipe", "viewer", "cli",
)  # fmt: skip


def modules() -> list[str]:
    """Every module of a torch-free room, by walking the files: a new one is covered on the day it is written."""
    files = [ROOT / f"{name}.py" for name in TORCH_FREE_FILES]
    files += [path for room in TORCH_FREE_ROOMS for path in sorted((ROOT / room).rglob("*.py"))]
    names = [".".join(("gropius", *path.relative_to(ROOT).with_suffix("").parts)) for path in files if path.is_file()]
    return [name.removesuffix(".__init__") for name in names]


def brought(names: list[str]) -> dict[str, list[str]]:
    """Heavy packages in `sys.modules` after each import, in one fresh interpreter; the first culprit is named."""
    script = (
        "import importlib, json, sys\n"
        "found = {}\n"
        "for name in json.loads(sys.argv[1]):\n"
        "    importlib.import_module(name)\n"
        f"    heavy = [package for package in {HEAVY!r} if package in sys.modules]\n"
        "    if heavy:\n"
        "        found[name] = heavy\n"
        "        break\n"
        "print(json.dumps(found))"
    )
    command = [sys.executable, "-c", script, json.dumps(names)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, list[str]] = json.loads(done.stdout)
    return found


def test_no_torch_free_module_brings_anything_heavy() -> None:
    names = modules()
    assert len(names) > 30 and "gropius.recipe.resolve" in names
    assert brought(names) == {}


def test_the_check_sees_a_heavy_import() -> None:
    assert brought(["gropius.objective.loss"]) == {"gropius.objective.loss": ["torch"]}


@pytest.mark.parametrize("folder", sorted(path for path in ROOT.iterdir() if path.is_dir()))
def test_no_room_is_called_what_has_no_meaning(folder: Path) -> None:
    names = {path.stem for path in folder.rglob("*.py")} | {folder.name}
    assert not names & {"utils", "common", "helpers", "util", "misc"}
