"""Rewards that see all siblings of a group: diversity and rank. No torch.

A group-wise function gets the siblings in the order of their members and returns one value each. A person's own is any
function of one argument named `siblings`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from gropius.errors import RecipeError
from gropius.rewards.base import BatchedReward
from gropius.types import Episode, Outcome, rejected, scored


def diversity(*, words: int = 2) -> BatchedReward:
    """Mean distance to the siblings: 1 − |A ∩ B| / |A ∪ B| over the runs of `words` words of the last replies.

    In 0..1; 0 for equal replies. An empty reply is rejected; one sibling alone has nobody to differ from and gets 0.
    Pay little for it: noise is diverse too.
    """
    if words < 1:
        raise RecipeError(f"reward diversity: words = {words}; write 1 or more")

    def _score(siblings: Sequence[Episode]) -> list[Outcome]:
        runs = [_runs(episode.last_reply, words) for episode in siblings]
        return [
            rejected("empty reply") if not own else scored(_distance(own, [*runs[:place], *runs[place + 1 :]]))
            for place, own in enumerate(runs)
        ]

    return BatchedReward(_score, siblings=True)


def brevity() -> BatchedReward:
    """Rank by length: 1 for the shortest sibling, 0 for the longest, (n − 1 − rank) / (n − 1) between, ties averaged.

    Length in tokens that the model wrote. One sibling alone gets 0.5. An empty reply is rejected, and has no rank.
    """

    def _score(siblings: Sequence[Episode]) -> list[Outcome]:
        lengths = [int(e.loss_mask.sum()) if e.last_reply.strip() else None for e in siblings]
        ranked = [length for length in lengths if length is not None]
        return [rejected("empty reply") if n is None else scored(_rank(n, ranked)) for n in lengths]

    return BatchedReward(_score, siblings=True)


def _runs(text: str, words: int) -> frozenset[tuple[str, ...]]:
    found = text.split()
    if len(found) <= words:
        return frozenset({tuple(found)} if found else ())
    if words == 2:
        return frozenset(pairwise(found))
    return frozenset(tuple(found[start : start + words]) for start in range(len(found) - words + 1))


def _distance(own: frozenset[tuple[str, ...]], others: Sequence[frozenset[tuple[str, ...]]]) -> float:
    if not others:
        return 0.0
    return sum(1.0 - len(own & other) / len(own | other) for other in others) / len(others)


def _rank(length: int, lengths: Sequence[int]) -> float:
    if len(lengths) < 2:
        return 0.5
    longer = sum(other > length for other in lengths)
    equal = sum(other == length for other in lengths) - 1
    return (longer + equal / 2) / (len(lengths) - 1)
