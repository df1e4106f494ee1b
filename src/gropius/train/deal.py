"""Dealing work out: items of unlike cost to ranks that must all run the same number of them. No model, no process."""

from __future__ import annotations

import math
from collections.abc import Sequence


def deal(costs: Sequence[float], bins: int) -> list[list[int]]:
    """Indices of `costs` dealt into `bins` lists whose lengths differ by at most one and whose sums are near.

    In rounds of `bins` items, dearest first, the dearest of a round goes to the list that has cost least so far. The
    sums of two lists then differ by no more than the dearest item (by induction over the rounds: a round turns an order
    of sums around, and adds at most its first cost less its last). Equal input, equal answer; a list holds its indices
    ascending.

    Where the number of items is no multiple of `bins`, the last lists may be one shorter: ranks that synchronise on
    every item then run an empty one. More bins than items: empty lists. Raises ValueError for less than one bin, or a
    cost that is negative or not finite.

    >>> deal([5.0, 1.0, 1.0, 3.0], 2)
    [[0, 2], [1, 3]]
    """
    if bins < 1:
        raise ValueError(f"bins = {bins}: there must be at least one to deal to")
    for index, cost in enumerate(costs):
        if not (math.isfinite(cost) and cost >= 0):
            raise ValueError(f"the cost of item {index} is {cost}; a cost is a finite number, 0 or more")
    order = sorted(range(len(costs)), key=lambda i: (-costs[i], i))
    dealt: list[list[int]] = [[] for _ in range(bins)]
    spent = [0.0] * bins
    for start in range(0, len(order), bins):
        cheapest_first = sorted(range(bins), key=lambda k: (spent[k], k))
        for item, k in zip(order[start : start + bins], cheapest_first, strict=False):
            dealt[k].append(item)
            spent[k] += costs[item]
    return [sorted(items) for items in dealt]
