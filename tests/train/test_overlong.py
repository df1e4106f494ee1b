"""Prompts are measured after the template, at the exact limit, and dropped or refused as declared (corpus row D02)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from small import run_small, small_recipe

from gropius import build
from gropius.errors import DataError
from gropius.models.chat import ChatFormat

LENGTHS = (3, 4, 5, 6, 7, 8)
QUIET = ("eval.before=false", "eval.after=false", "train.steps=1", "rollout.max_tokens=1", "rollout.prompts=2")


def settings(folder: Path, longest: int) -> list[str]:
    """The small recipe over rows of these lengths, in a context that a prompt of `longest` characters just fits."""
    rows = [{"prompt": "1" * length, "answer": "1"} for length in LENGTHS]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    held = f'{{held_out_path="{folder}/rows.jsonl"}}'
    chosen = [*QUIET, f'data.source="{folder}/rows.jsonl"', f"data.options={held}"]
    loaded = build.model(small_recipe(folder, *chosen))
    template = len(ChatFormat.for_model(loaded).prompt_ids(({"role": "user", "content": "1" * 5},))) - 5
    return [*chosen, f"model.tiny.context={longest + template + 1}"]


def test_a_prompt_at_the_exact_limit_stays_and_one_token_more_is_dropped_and_counted(tmp_path: Path) -> None:
    _, progress = run_small(tmp_path, *settings(tmp_path, 6), 'data.overlong="drop"')
    assert any(note.startswith("2 train rows dropped") for note in progress.notes), progress.notes


def test_refusing_names_the_row_and_both_numbers(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"rows.jsonl:6: the prompt has \d+ tokens after the template .*context is \d+"):
        run_small(tmp_path, *settings(tmp_path, 7))


def test_nothing_is_dropped_where_everything_fits(tmp_path: Path) -> None:
    _, progress = run_small(tmp_path, *settings(tmp_path, 8))
    assert not any("dropped" in note for note in progress.notes)
