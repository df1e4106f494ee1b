"""Refill and grow on scripted policies of known pass rates: counts, bounds, and the accounts of what it cost."""

import asyncio
import itertools
from dataclasses import replace

import pytest
from tests.rollout.scripted import EOS, TOKENIZER, N, V, Y, plan, player

from gropius.models.tiny import tiny_tokenizer
from gropius.rollout.engine import pass_rate_policy
from gropius.rollout.select import (
    SelectionRule,
    chance_of_signal,
    collect_selected,
    duplicates,
    pass_rate_histogram,
    state_of,
)
from gropius.types import Task, Verdict, scored


def select(rate, rule, prompts=8, tasks=None, **changes):
    def of_prompt(prompt_ids):
        return rate(TOKENIZER.decode(list(prompt_ids))) if callable(rate) else rate

    numbers = itertools.count()
    made = []

    def draw(n):
        fresh = [Task(f"t{i}", f"{i}?", "y") for i in itertools.islice(numbers, n)]
        made.extend(fresh)
        return fresh[: max(0, tasks - len(made) + n)] if tasks is not None else fresh

    the_player = player(pass_rate_policy(of_prompt, (Y, EOS), (N, EOS), V))
    return asyncio.run(collect_selected(draw, prompts, plan(**changes), the_player, rule))


def even_is_hard(text):
    return 0.0 if int(text.split(">")[-3].split("?")[0]) % 2 == 0 else 0.5


def test_keep_and_drop_take_one_round_and_leave_dead_groups_to_the_weights():
    for dead in ("keep", "drop"):
        chosen = select(0.0, SelectionRule(dead))
        assert len(chosen.groups) == 8 and not chosen.dropped and chosen.shortfall is None
        assert chosen.budget.states == {"all_failed": 8} and chosen.budget.attempts == 1
        assert chosen.budget.responses_per_informative == float("inf")
        metrics = chosen.budget.metrics()
        assert metrics["responses_per_informative"] is None and metrics["refill_rounds"] == 0


def test_refill_draws_fresh_tasks_until_the_batch_carries_signal():
    chosen = select(0.5, SelectionRule("refill", refill_attempts=20), prompts=30)
    assert len(chosen.groups) == 30 and chosen.shortfall is None
    assert {state_of(group) for group in chosen.groups} == {"informative"}
    assert {state_of(group) for group in chosen.dropped} <= {"all_failed", "all_solved"}
    everything = [*chosen.groups, *chosen.dropped]
    assert len({group.task.key for group in everything}) == len(everything)
    assert sorted(group.group_id for group in everything) == [f"000012-{i:04d}" for i in range(len(everything))]
    assert chosen.budget.attempts > 1


def test_refill_needs_as_many_groups_as_the_chance_of_signal_says():
    """Geometric sampling: 60 informative groups at p = 0.5, G = 3 take 60 / 0.75 = 80 on average, within 5 sigma."""
    chosen = select(0.5, SelectionRule("refill", refill_attempts=50), prompts=60)
    expected, sigma = 60 / 0.75, (60 * 0.25) ** 0.5 / 0.75
    assert abs(chosen.budget.groups - expected) < 5 * sigma


def test_refill_gives_up_at_its_bound_and_says_why_and_what_it_would_take():
    chosen = select(0.0, SelectionRule("refill", refill_attempts=3), prompts=4)
    assert not chosen.groups and len(chosen.dropped) == 16
    shortfall = chosen.shortfall
    assert (shortfall.wanted, shortfall.found, shortfall.attempts) == (4, 0, 4)
    assert shortfall.pass_rates["0"] == 16 and shortfall.over_sampling == float("inf")
    assert "0 of 4 groups carry signal after 4 rounds" in str(shortfall) and "0: 16" in str(shortfall)
    some = select(even_is_hard, SelectionRule("refill", refill_attempts=0), prompts=40)
    assert "no number of groups" in str(shortfall) and "groups drawn for each one" in str(some.shortfall)
    assert 2 < some.shortfall.over_sampling < 6  # half the tasks at p = 0.5, G = 3: 1 / (0.5 · 0.75) = 2.7


def test_refill_stops_when_the_tasks_run_out():
    chosen = select(0.0, SelectionRule("refill", refill_attempts=9), prompts=4, tasks=6)
    assert len(chosen.dropped) == 6 and chosen.shortfall is not None


def test_refill_looks_at_the_raw_metric_not_at_the_shaped_reward():
    from gropius.types import Verdict, scored

    class Shaped:
        unit = "episode"

        async def score(self, episodes):
            return [Verdict(scored(e.member / 10), {}, 0.0) for e in episodes]

    the_player = player(pass_rate_policy(0.5, (Y, EOS), (N, EOS), V), scorer=Shaped())
    rule = SelectionRule("refill", refill_attempts=0)
    chosen = asyncio.run(collect_selected(lambda n: [Task("a", "1?")] * n, 1, plan(), the_player, rule))
    assert not chosen.groups and state_of(chosen.dropped[0]) == "all_failed"


def test_grow_gives_all_failed_groups_more_siblings_up_to_the_bound():
    chosen = select(even_is_hard, SelectionRule("grow", grow_limit=9), prompts=6)
    sizes = [len(group.episodes) for group in chosen.groups]
    assert sizes[::2] == [9, 9, 9] and chosen.shortfall is None
    for group in chosen.groups[1::2]:
        assert state_of(group) != "all_failed" or len(group.episodes) == 9


def test_the_budget_counts_every_token_and_what_was_thrown_away():
    chosen = select(0.5, SelectionRule("refill", refill_attempts=20), greedy_baseline=True)
    budget = chosen.budget
    assert budget.groups == len(chosen.groups) + len(chosen.dropped)
    assert budget.responses == budget.groups * 4
    assert budget.tokens == budget.responses * 2
    assert budget.tokens_dropped == len(chosen.dropped) * 8
    assert sum(budget.states.values()) == budget.groups
    assert budget.duplicates == sum(duplicates(g) for g in (*chosen.groups, *chosen.dropped))
    assert budget.responses_per_informative == budget.responses / 8


def test_duplicates_are_siblings_whose_ids_were_there_before():
    chosen = select(1.0, SelectionRule())
    assert all(duplicates(group) == 2 for group in chosen.groups)


def test_the_histogram_counts_groups_by_pass_rate():
    groups = [*select(0.0, SelectionRule(), 2).groups, *select(1.0, SelectionRule(), 3).groups]
    histogram = pass_rate_histogram(groups)
    assert histogram["0"] == 2 and histogram["100 %"] == 3 and sum(histogram.values()) == 5


def solved(count):
    """A group of eight of which so many succeeded."""
    (group,) = select(1.0, SelectionRule(), prompts=1, group_size=8).groups
    verdicts = [Verdict(scored(float(i < count)), {}, float(i < count)) for i in range(8)]
    return replace(group, episodes=tuple(map(lambda e, v: replace(e, verdict=v), group.episodes, verdicts)))


def test_a_pass_rate_falls_into_the_bin_whose_lower_edge_it_has_reached():
    counts = pass_rate_histogram([solved(count) for count in range(9)])
    assert list(counts.values()) == [1, 1, 2, 2, 2, 1]  # 0 | 1/8 | 2, 3 | 4, 5 | 6, 7 | 8
    assert pass_rate_histogram([solved(2)])["25-50 %"] == pass_rate_histogram([solved(6)])["75-100 %"] == 1


def test_a_dead_group_counts_unless_it_is_replaced_or_others_were_begun_for_it():
    dead, live = solved(0), solved(3)
    for rule, counts in (
        (SelectionRule("keep", oversample=2.0), True), (SelectionRule("grow", oversample=2.0), True),
        (SelectionRule("drop"), True), (SelectionRule("drop", oversample=2.0), False),
        (SelectionRule("refill"), False),
    ):  # fmt: skip
        assert rule.counts(dead) == counts and rule.counts(live)


def test_dropped_groups_fill_what_is_missing_and_no_more():
    chosen = select(even_is_hard, SelectionRule("drop", oversample=1.5), prompts=8)
    live = [group for group in chosen.groups if state_of(group) == "informative"]
    assert len(chosen.groups) == 8 and 0 < len(live) < 8 and chosen.dropped
    assert not any(state_of(group) == "informative" for group in chosen.dropped)


@pytest.mark.parametrize(("p", "size", "chance"), [(0.5, 2, 0.5), (0.1, 8, 1 - 0.1**8 - 0.9**8), (1.0, 4, 0.0)])
def test_the_chance_of_signal_is_that_of_siblings_that_differ(p, size, chance):
    assert chance_of_signal(p, size) == pytest.approx(chance)


def test_tokens_of_the_tiny_tokenizer_are_what_these_tests_take_them_for():
    assert tiny_tokenizer().decode([Y, N]) == "yn"
