"""A run that takes seconds: a very small model paid for writing a small letter, which noise does now and then."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gropius import build
from gropius.recipe import resolve
from gropius.train.progress import Silent

RECIPE: dict[str, Any] = {
    "name": "small",
    "seed": 3,
    "model": {"source": "tiny", "tiny": {"hidden": 32, "layers": 2, "heads": 2, "kv_heads": 2, "mlp": 64}},
    "data": {"source": "arithmetic", "options": {"digits": 1, "rows": [60, 8]}},
    "reward": [{"name": "format", "options": {"pattern": "[^a-z]*[a-z](.|\\n)*"}}],
    "rollout": {"prompts": 4, "group_size": 4, "max_tokens": 4},
    "train": {"steps": 3, "learning_rate": 1e-3, "threads": 1},
    "eval": {"tasks": 4, "samples": 2},
}


def small_recipe(out: Path, *settings: str) -> Any:
    """The small recipe, resolved, with settings on top."""
    return resolve(RECIPE, [f'out="{out}"', *settings])


def run_small(out: Path, *settings: str) -> tuple[Path, Silent]:
    """Train it; the run folder and what it told."""
    progress = Silent()
    return build.train(small_recipe(out, *settings), progress), progress
