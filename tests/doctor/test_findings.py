"""The doctor is validated by runs that really train: healthy ones are left alone, each fault is found and only it."""

from __future__ import annotations

from pathlib import Path

import pytest
from sick import BOTH_ENDS, SICK, Sick, train

from gropius.doctor import DIAGNOSTICS, examine, read_log


def cases(quick: bool) -> list[object]:
    return [pytest.param(sick, id=name.replace(" ", "-")) for name, sick in SICK.items() if sick.quick is quick]


def assert_found(sick: Sick, warm: Path, out: Path) -> None:
    found = examine(read_log(train(out, warm, sick.settings, sick.faults)))
    assert [finding.name for finding in found.alarms] == [sick.finding], [f.message for f in found.alarms]
    finding = found.alarms[0]
    assert sick.cause in finding.cause
    assert finding.measured.low <= finding.measured.value <= finding.measured.high
    assert finding.evidence and finding.key and finding.change and finding.step >= 1


@pytest.mark.parametrize("sick", cases(quick=True))
def test_a_seeded_fault_is_found_and_only_it(sick: Sick, warm: Path, tmp_path: Path) -> None:
    assert_found(sick, warm, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("sick", cases(quick=False))
def test_every_other_seeded_fault_is_found_and_only_it(sick: Sick, warm: Path, tmp_path: Path) -> None:
    assert_found(sick, warm, tmp_path)


def test_every_diagnostic_has_a_sick_run() -> None:
    assert {sick.finding for sick in SICK.values()} == set(DIAGNOSTICS)


def test_a_healthy_run_gives_nothing_above_a_note(warm: Path, tmp_path: Path) -> None:
    found = examine(read_log(train(tmp_path, warm, BOTH_ENDS)))
    assert found.alarms == ()
    assert {skipped.name for skipped in found.skipped} <= {
        "dead_reward_part", "dominant_reward_part", "clip_never_reached", "weight_concentration"
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_healthy_runs_of_other_seeds_give_nothing_above_a_note_at_any_look(
    seed: int, warm: Path, tmp_path: Path
) -> None:
    from gropius.doctor.run import RunLog
    from gropius.records.reader import RunReader

    folder = train(tmp_path, warm, (*BOTH_ENDS, f"seed={100 + seed}", "train.steps=30"))
    whole = RunLog(RunReader(folder)).read()
    for last in range(5, 31, 5):
        assert examine(until(whole, last)).alarms == (), last


def until(log, last):  # type: ignore[no-untyped-def]
    """The log as it was after a step."""
    import dataclasses

    kept = log.responses["step"] <= last
    return dataclasses.replace(
        log,
        metrics={step: row for step, row in log.metrics.items() if step <= last},
        responses={name: column[kept] for name, column in log.responses.items()},
        tokens=[row for row in log.tokens if row.step <= last],
    )
