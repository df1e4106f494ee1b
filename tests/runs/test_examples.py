"""What a newcomer reads first runs as it stands."""

from __future__ import annotations

import importlib.util
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "loop.py"


def test_the_example_is_short_and_learns() -> None:
    assert len(EXAMPLE.read_text().splitlines()) <= 200
    spec = importlib.util.spec_from_file_location("example_loop", EXAMPLE)
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    assert example.main("grpo") > 0.9
