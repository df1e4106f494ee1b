"""Laws of the metrics: hand-worked numbers, every name declared, order of rows without effect."""

from __future__ import annotations

import random

import pytest

from gropius.records import METRICS, ResponseRecord, step_metrics
from gropius.records.metrics import SHOWN_ONLY, describe
from gropius.types import rejected, scored, void


def test_hand_worked_numbers(records: list[ResponseRecord]) -> None:
    metrics = step_metrics(records, num_tokens_before=100)
    expected = {
        "reward": 5 / 7,
        "reward_std": ((1 / 3) ** 0.5 + 0) / 2,
        "frac_reward_zero_std": 0.5,
        "raw": 5 / 7,
        "void_rate": 1 / 8,
        "rejected_rate": 2 / 8,
        "rewards/exact/mean": 5 / 7,
        "rewards/format/mean": 1.0,
        "rewards/format/std": 0.0,
        "groups/count": 2,
        "groups/informative": 0.5,
        "groups/all_solved": 0.5,
        "groups/all_failed": 0.0,
        "effective_groups": 1,
        "duplicates": 1 / 8,
        "completions/mean_length": (4 + 2 + 2 + 1 + 4) / 8,
        "completions/max_length": 4,
        "completions/min_length": 1,
        "completions/mean_terminated_length": 11 / 7,
        "completions/clipped_ratio": 1 / 8,
        "tokens_sampled": 14,
        "tokens_trained": 8,
        "tokens_skipped": 6,
        "skipped_compute": (3 + 4 * 3 + 3) / (8 + 4 + 4 + 3 + 4 * 3 + 3),
        "num_tokens": 100 + 34,
    }
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(value), name


def test_every_metric_is_declared(records: list[ResponseRecord]) -> None:
    made = step_metrics(records)
    assert all(describe(name) for name in made)
    declared = {name for name, metric in METRICS.items() if metric.made_by == "records" and "PART" not in name}
    assert declared <= made.keys()
    assert describe("rewards/x") is None and describe("no_such") is None


def test_a_second_opinion_is_counted_where_both_verifiers_judged(records: list[ResponseRecord]) -> None:
    pairs = [
        (scored(1.0), scored(1.0)),
        (rejected("wrong"), scored(1.0)),
        (scored(1.0), rejected("wrong")),
        (rejected("several answers"), rejected("wrong")),
        (rejected("wrong"), rejected("time")),
        (void("no gold"), void("no gold")),
    ]
    rows = records[: len(pairs)]
    for record, (ours, other) in zip(rows, pairs, strict=True):
        object.__setattr__(record, "parts", {"math": ours, "math_verify": other})
    metrics = step_metrics(rows)
    assert metrics["second_opinion/disagreement"] == 2 / 4
    assert metrics["second_opinion/missing"] == pytest.approx(1 / 5)
    assert step_metrics([])["second_opinion/missing"] is None


def test_the_gap_between_shown_and_hidden_tests_is_a_share_of_the_programs(records: list[ResponseRecord]) -> None:
    outcomes = [scored(1.0), rejected("wrong"), rejected(f"wrong{SHOWN_ONLY}"), void("no isolation")]
    rows = records[:4]
    for record, outcome in zip(rows, outcomes, strict=True):
        object.__setattr__(record, "parts", {"code": outcome})
    assert step_metrics(rows)["shown_tests_only"] == pytest.approx(1 / 3)
    assert step_metrics([])["shown_tests_only"] is None


def test_the_order_of_rows_has_no_effect(records: list[ResponseRecord]) -> None:
    shuffled = list(records)
    random.Random(1).shuffle(shuffled)
    assert step_metrics(shuffled) == step_metrics(records)


def test_nothing_sampled_gives_no_number_and_no_fault() -> None:
    metrics = step_metrics([])
    assert metrics["reward"] is None and metrics["skipped_compute"] is None and metrics["tokens_sampled"] == 0


def test_a_group_of_equal_rewards_has_exactly_no_spread(records: list[ResponseRecord]) -> None:
    third = [record for record in records if record.group_id.endswith("1") and record.member >= 0]
    for record in third:
        object.__setattr__(record, "reward", 0.1)
    metrics = step_metrics(third)
    assert metrics["reward_std"] == 0.0 and metrics["frac_reward_zero_std"] == 1.0
