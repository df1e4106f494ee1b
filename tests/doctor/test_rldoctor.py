"""The package `rldoctor` reads our metrics.jsonl as it is, and agrees with us where both look at the same thing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from sick import BOTH_ENDS, SICK, train

from gropius.doctor import examine, read_log

rl_doctor = pytest.importorskip("rl_doctor", reason="pip install --no-deps rldoctor")


def theirs(folder: Path) -> dict[str, Any]:
    run = rl_doctor.load_run(str(folder / "metrics.jsonl"))
    return {finding.detector: finding for finding in rl_doctor.diagnose(run).findings}


def severe(folder: Path) -> set[str]:
    return {name for name, finding in theirs(folder).items() if finding.severity >= rl_doctor.Severity.WARNING}


def test_it_reads_our_metrics_unchanged_by_their_names(warm: Path, tmp_path: Path) -> None:
    folder = train(tmp_path, warm, BOTH_ENDS)
    run = rl_doctor.load_run(str(folder / "metrics.jsonl"))
    wanted = {"reward_mean", "reward_std", "zero_var_group_frac", "entropy", "kl", "grad_norm", "response_len_mean"}
    assert wanted <= set(run.available_fields)
    assert len(run.steps) >= 24


# A fault of ours, what we call it, and the detector of theirs that must see it too.
SHARED = {
    "no right answer": "advantage_collapse",
    "short of tokens": "length_pathology",
    "no leash": "kl_drift",
    "too many updates": "clip_saturation",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SHARED)
def test_a_fault_that_shows_in_the_metrics_is_found_by_both(name: str, warm: Path, tmp_path: Path) -> None:
    sick = SICK[name]
    folder = train(tmp_path, warm, sick.settings, sick.faults)
    assert SHARED[name] in severe(folder)
    assert [finding.name for finding in examine(read_log(folder)).alarms] == [sick.finding]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["a silent part", "rounding"])
def test_a_fault_that_shows_only_in_the_rows_is_found_only_by_us(name: str, warm: Path, tmp_path: Path) -> None:
    sick = SICK[name]
    folder = train(tmp_path, warm, sick.settings, sick.faults)
    assert severe(folder) <= {"plateau", "advantage_collapse", "gradient_pathology"}
    assert [finding.name for finding in examine(read_log(folder)).alarms] == [sick.finding]
