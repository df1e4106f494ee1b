"""Shares with their 95 % intervals, from k responses to each of n held-out tasks. No torch.

The tasks are the sample; responses to one task are not independent, so the interval is widened by how much they agree.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

Z95 = 1.959963984540054


@dataclass(frozen=True)
class Share:
    """A share in [0, 1] with a 95 % interval; `tasks` and `samples` say what it was measured on."""

    value: float
    low: float
    high: float
    tasks: int
    samples: int

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"

    def apart_from(self, other: Share) -> bool:
        """True when the two intervals do not touch."""
        return self.low > other.high or other.low > self.high


def wilson(share: float, count: float) -> tuple[float, float]:
    """Wilson's 95 % interval of a share measured on `count` independent trials (not necessarily a whole number).

    (p + z²/2n ± z √(p(1−p)/n + z²/4n²)) / (1 + z²/n). With no trials: (0, 1). Source: Wilson 1927.

    >>> low, high = wilson(0.5, 100)
    >>> round(low, 4), round(high, 4)
    (0.4038, 0.5962)
    """
    if count <= 0:
        return 0.0, 1.0
    shrink = 1 + Z95**2 / count
    centre = (share + Z95**2 / (2 * count)) / shrink
    half = Z95 * math.sqrt(share * (1 - share) / count + Z95**2 / (4 * count**2)) / shrink
    return max(0.0, centre - half), min(1.0, centre + half)


def mean_at_k(scores: Sequence[Sequence[float]]) -> Share:
    """The mean over tasks of the mean over a task's responses; scores in [0, 1].

    Interval: Wilson's with an effective number of trials, p(1−p) over the variance of the mean across tasks, kept
    between the number of tasks and the number of responses. Errors: ValueError without a scored response.
    """
    means = [math.fsum(row) / len(row) for row in scores if row]
    if not means:
        raise ValueError("no held-out task has a scored response")
    value = math.fsum(means) / len(means)
    samples = sum(len(row) for row in scores)
    effective = float(len(means))
    if len(means) > 1 and 0 < value < 1:
        variance = math.fsum((m - value) ** 2 for m in means) / (len(means) - 1) / len(means)
        effective = value * (1 - value) / variance if variance > 0 else float(samples)
        effective = min(max(effective, len(means)), samples)
    low, high = wilson(value, effective)
    return Share(value, min(low, value), max(high, value), len(means), samples)


def pass_at_k(scores: Sequence[Sequence[float]], k: int) -> Share:
    """Mean over tasks of 1 − C(n−c, k)/C(n, k), c of n responses right (a score of 1). Source: Chen et al. 2021, eq. 1.

    Tasks with fewer than k scored responses are left out. Errors: ValueError when none is left.

    >>> pass_at_k([[1, 0, 0, 0]], 2).value
    0.5
    """
    rows = [row for row in scores if len(row) >= k]
    values = [1 - math.comb(len(row) - _right(row), k) / math.comb(len(row), k) for row in rows]
    return mean_at_k([[value] for value in values])


def maj_at_k(answers: Sequence[Sequence[str]], scores: Sequence[Sequence[float]]) -> Share:
    """Mean over tasks of whether the most frequent answer is right; ties share the vote equally.

    answers[i][j] is what response j to task i concluded; equal texts vote together.

    >>> maj_at_k([["4", "4", "5"]], [[1, 1, 0]]).value
    1.0
    """
    values = []
    for row, marks in zip(answers, scores, strict=True):
        if not row:
            continue
        votes = Counter(row)
        most = max(votes.values())
        winners = [answer for answer, count in votes.items() if count == most]
        right = {answer for answer, mark in zip(row, marks, strict=True) if mark == 1}
        values.append(sum(answer in right for answer in winners) / len(winners))
    return mean_at_k([[value] for value in values])


def _right(row: Sequence[float]) -> int:
    return sum(score == 1 for score in row)
