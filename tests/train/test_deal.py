"""Dealing by cost: every item once, equal numbers, sums that differ by no more than one item."""

from __future__ import annotations

import doctest

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gropius.train import deal as room
from gropius.train.deal import deal

costs_of = st.lists(st.integers(0, 50).map(float), max_size=40)


@given(costs_of, st.integers(1, 9))
@settings(max_examples=200, deadline=None)
def test_every_item_is_dealt_once_in_equal_numbers_and_no_two_sums_differ_by_more_than_one_item(costs, bins):
    dealt = deal(costs, bins)
    assert len(dealt) == bins
    assert sorted(i for items in dealt for i in items) == list(range(len(costs)))
    numbers = [len(items) for items in dealt]
    assert max(numbers) - min(numbers) <= 1
    sums = [sum(costs[i] for i in items) for items in dealt]
    assert max(sums) - min(sums) <= max(costs, default=0.0)


def test_it_deals_by_cost_and_not_by_place_or_number():
    costs = [100.0, 90.0, 1.0, 1.0, 80.0, 70.0, 1.0, 1.0]
    sums = sorted(sum(costs[i] for i in items) for items in deal(costs, 2))
    assert sums == [172.0, 172.0]


def test_no_bin_and_costs_that_are_none_are_refused():
    with pytest.raises(ValueError, match="bins = 0"):
        deal([1.0], 0)
    for cost in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="item 1"):
            deal([1.0, cost], 2)


def test_the_example_of_the_docstring_holds():
    assert doctest.testmod(room).failed == 0
