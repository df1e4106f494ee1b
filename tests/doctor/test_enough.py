"""Silence on too little data is not called health, and a long run is examined in bounded memory."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import numpy as np
import pytest

from gropius.cli.main import main
from gropius.doctor import DIAGNOSTICS, examine, read_log
from gropius.doctor import run as run_log
from gropius.doctor.log import Log, TokenRow
from gropius.doctor.run import RunLog
from gropius.doctor.sample import MOST_RESPONSES, TOKEN_ROWS, by_lot, chosen, within_tokens
from gropius.records import ResponseRecord, RunWriter
from gropius.records.reader import RunReader
from gropius.types import rejected, scored


def record(step: int, group: int, member: int, right: bool, length: int = 3) -> ResponseRecord:
    numbers = np.full(length, -0.5 - 0.01 * member, np.float32)
    outcome = scored(1.0) if right else rejected("wrong")
    return ResponseRecord(
        step=step, group_id=f"{step:06d}-{group:04d}", member=member, task_key=f"t/{group}", prompt_ids=np.arange(3),
        response_ids=np.arange(length) + member, prompt_text="q", response_text=f"answer {member} {group}",
        messages="[]", loss_mask=np.ones(length, np.bool_), parts={"exact": outcome}, status=outcome.status,
        reward=outcome.value, reason="", raw=outcome.value, state="", advantage=1.0 if right else -1.0,
        token_advantages=None, skipped=False, update=0, duplicate=False, truncated=False, finish_reason="stop",
        error="", policy_version=step - 1, weight_digest="", sampling_time_s=0.1, scoring_time_s=0.1, sampler=numbers,
        drawn=numbers, anchor=numbers, policy=numbers, reference=numbers, entropy=numbers, weight=None,
        contribution=None,
    )  # fmt: skip


def write(folder: Path, steps: int, groups: int, dead: float, length: int = 3) -> Path:
    """A run in which this share of the groups fails as a whole."""
    with RunWriter.create(folder, {"objective": {"ratio": {"level": "token"}}}) as writer:
        for step in range(1, steps + 1):
            rows = [
                record(step, g, m, right=m < 2 and g >= dead * groups, length=length)
                for g in range(groups)
                for m in range(4)
            ]
            writer.write_rollouts(step, rows)
            writer.write_metrics(step, {"loss": 0.0, "grad_norm": 1.0, "updates": 1, "entropy": 0.5, "kl": 0.0})
    return folder


def test_a_short_run_passes_nothing_that_it_is_too_short_for(tmp_path: Path) -> None:
    found = examine(read_log(write(tmp_path / "run", steps=3, groups=4, dead=1.0)))
    assert found.findings == ()
    waiting = {w.name: str(w) for w in found.waiting}
    assert "needs 5 steps (there are 3) and 24 scored groups (there are 12)" in waiting["all_failed_groups"]
    assert "10 steps" in waiting["policy_collapse"] and "two ends" not in waiting["policy_collapse"]
    assert set(found.passed) <= {"kl_estimator", "sampler_trainer_mismatch"}


def test_the_same_run_goes_on_and_the_finding_comes_in_place_of_the_waiting(tmp_path: Path) -> None:
    found = examine(read_log(write(tmp_path / "run", steps=6, groups=4, dead=1.0)))
    assert "all_failed_groups" in [f.name for f in found.findings]
    assert "all_failed_groups" not in [w.name for w in found.waiting]


def test_exactly_as_much_as_is_asked_for_is_enough(tmp_path: Path) -> None:
    found = examine(read_log(write(tmp_path / "run", steps=12, groups=8, dead=0.25, length=60)))
    assert found.findings == ()
    assert {w.name for w in found.waiting} <= {"identical_siblings", "reward_without_held_out"}
    assert {"all_failed_groups", "policy_collapse", "gradient_spikes", "kl_estimator"} <= set(found.passed)


def test_every_diagnostic_says_how_much_it_needs_and_waits_on_an_empty_run(tmp_path: Path) -> None:
    log = read_log(write(tmp_path / "run", steps=1, groups=1, dead=1.0))
    nothing = dataclasses.replace(
        log, metrics={}, tokens=[], responses={name: column[:0] for name, column in log.responses.items()}
    )
    for name, row in DIAGNOSTICS.items():
        assert row.least, name
        amounts = [need(nothing) for need in row.least]
        assert any(amount.there < amount.least for amount in amounts), name


def test_the_verb_says_that_nothing_can_be_said_yet(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write(tmp_path / "run", steps=1, groups=1, dead=1.0)
    with pytest.raises(SystemExit) as ended:
        main(["doctor", str(folder), "--only", "truncation"])
    told = capsys.readouterr().out
    assert ended.value.code == 0 and "nothing found" not in told
    assert "too little is recorded to say anything" in told and "truncation: needs 5 steps (there is 1)" in told


def test_a_long_run_is_sampled_by_group_every_step_stays_and_the_share_is_still_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write(tmp_path / "run", steps=12, groups=32, dead=0.9)
    whole = examine(read_log(folder))
    monkeypatch.setattr(run_log, "MOST_RESPONSES", 600)
    log = read_log(folder)
    assert log.steps == list(range(1, 13)) and 300 < len(log.responses["step"]) <= 600
    assert all(len(group.places) == 4 for group in log.groups)
    assert any("at most 8 groups of a step" in note for note in log.notes)
    shares = [
        next(f for f in found.findings if f.name == "all_failed_groups").measured for found in (whole, examine(log))
    ]
    assert shares[1].low <= shares[0].value <= shares[1].high


def test_a_run_read_as_it_grows_is_the_sample_that_is_read_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_log, "MOST_RESPONSES", 100)
    folder = tmp_path / "run"
    with RunWriter.create(folder, {}) as writer:
        growing = RunLog(RunReader(folder))
        for step in range(1, 9):
            writer.write_rollouts(step, [record(step, g, m, m == 0) for g in range(16) for m in range(4)])
            log = growing.read()
    fresh = read_log(folder)
    assert log.responses["group_id"].tolist() == fresh.responses["group_id"].tolist()
    assert len(fresh.responses["step"]) <= 100


def test_of_two_samples_the_smaller_is_part_of_the_larger() -> None:
    ids = [f"g{i // 4}" for i in range(400)]
    masks = [chosen(ids, count) for count in (100, 25, 12, 1)]
    for larger, smaller in itertools.pairwise(masks):
        assert (larger >= smaller).all() and smaller.sum() % 4 == 0
    assert masks[0].all() and masks[-1].sum() == 4
    assert by_lot(ids) == by_lot(ids[::-1])


def test_tokens_of_a_step_are_bounded_and_at_least_32_responses_of_it_are_kept() -> None:
    ids = [f"g{i // 8}" for i in range(800)]
    lengths = np.full(800, 100)
    assert within_tokens(ids, lengths, most=8000).sum() == 80
    assert within_tokens(ids, lengths, most=10).sum() == TOKEN_ROWS == 32
    assert within_tokens(ids, lengths, most=10**6).all() and MOST_RESPONSES == 200_000


def test_a_token_row_is_the_recorded_numbers_without_the_environment(tmp_path: Path) -> None:
    own = record(1, 0, 0, True, length=4)
    mask = np.array([True, False, True, True])
    numbers = np.array([-0.25, np.nan, -0.5, -0.75], np.float32)
    own = dataclasses.replace(own, loss_mask=mask, sampler=numbers, reference=None)
    with RunWriter.create(tmp_path / "run", {}) as writer:
        writer.write_rollouts(1, [own, record(1, 0, 1, False)])
    log: Log = read_log(tmp_path / "run")
    row: TokenRow = log.tokens[0]
    assert row.sampler is not None and row.sampler.tolist() == [-0.25, -0.5, -0.75]
    assert row.reference is None and log.responses["tokens"].tolist() == [3, 3]


def test_collapse_is_not_called_where_the_reward_rises_instead(tmp_path: Path) -> None:
    from gropius.doctor.policy import policy_collapse

    log = read_log(write(tmp_path / "run", steps=12, groups=8, dead=0.0))
    fallen = log.responses["raw"].copy()
    fallen[log.responses["step"] > 4] = 0.0
    paid = np.where(log.responses["step"] > 4, 1.0, log.responses["reward"])
    as_paid = dataclasses.replace(log, responses={**log.responses, "raw": fallen, "reward": fallen})
    hacked = dataclasses.replace(log, responses={**log.responses, "raw": fallen, "reward": paid})
    found = policy_collapse(as_paid)
    assert found is not None and found.step == 5
    assert policy_collapse(hacked) is None


def test_of_two_collapses_the_earlier_one_is_the_root() -> None:
    from gropius.doctor.finding import Finding, Interval
    from gropius.doctor.table import _explained

    def finding(name: str, step: int) -> Finding:
        return Finding(name, "critical", step, "", "", "", "", Interval("", 0, 0, 0))

    for first, second in (("policy_collapse", "entropy_collapse"), ("entropy_collapse", "policy_collapse")):
        found = {f.name: f.explained_by for f in _explained([finding(first, 2), finding(second, 9)], slack=20)}
        assert found == {first: "", second: first}
