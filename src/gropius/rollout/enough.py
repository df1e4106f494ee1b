"""Over-sampling with an early stop: begin more groups than are needed, and stop when enough of them are complete.

"When" is not a matter of the clock: a group is complete at the number of tokens that its longest sibling drew in this
collection, its decode steps in one wide batch. The batch is full at the smallest such number by which enough groups
that count are complete; what is longer is cut at exactly that number of tokens. So the outcome depends on what was
drawn and scored, never on how fast engine or reward were.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from gropius.rollout.collect import Begun, CollectPlan, Played, Player, play, seats
from gropius.types import Bound, Group, Task

Seating = tuple[Sequence[Task], CollectPlan, Player, Sequence[Begun]]


def begin(wanted: int, oversample: float) -> int:
    """Groups to begin where `wanted` are needed.

    >>> begin(8, 1.0), begin(8, 1.25), begin(10, 1.1)
    (8, 10, 11)
    """
    return max(wanted, math.ceil(wanted * oversample - 1e-9))


async def play_until_enough(
    seating: Seating, wanted: int, counts: Callable[[Group], bool]
) -> tuple[list[Group], list[Begun]]:
    """Play until `wanted` groups that count are complete: the complete groups, and those that were cut.

    Both in the order of their seats: begun groups first, then tasks. No more than `wanted` that count are among the
    complete; further ones that end at the same token are cut too, the last seats first.
    """
    tasks, plan, player, begun = seating
    if len(tasks) + len(begun) <= wanted:
        everything = await play(seats(tasks, plan, player, None, begun), lambda played: None)
        return [played.group for played in everything if played.group is not None], []
    bound, times = Bound(), list[int]()

    def ended(played: Played) -> None:
        if played.group is not None and counts(played.group):
            times.append(played.spent)
            if len(times) >= wanted:
                bound.limit = sorted(times)[wanted - 1]

    everything = await play(seats(tasks, plan, player, bound, begun), ended)
    right = sorted(
        (played.spent, place)
        for place, played in enumerate(everything)
        if played.group is not None and counts(played.group)
    )
    if len(right) < wanted:
        return [played.group for played in everything if played.group is not None], []
    at, chosen = right[wanted - 1][0], {place for _, place in right[:wanted]}
    complete, cut = [], []
    for place, played in enumerate(everything):
        dead = played.group is not None and not counts(played.group) and played.spent <= at
        if played.group is not None and (place in chosen or dead):
            complete.append(played.group)
        else:
            cut.append(played.begun(at))
    return complete, cut
