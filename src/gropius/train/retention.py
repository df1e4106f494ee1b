"""Which checkpoints stay: the last ones, every so many steps, and the best by held-out mean. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Retention:
    """keep_last: the newest so many (0: all). keep_every: also those of every so many steps (0: none).

    best: also the one with the highest held-out mean.
    """

    keep_last: int = 0
    keep_every: int = 0
    best: bool = False


@dataclass(frozen=True)
class Kept:
    """A checkpoint on the disk. held_out: the mean measured on its weights, None where none was."""

    step: int
    held_out: float | None = None


def superfluous(checkpoints: Sequence[Kept], rule: Retention) -> list[int]:
    """The steps of the checkpoints that may go, ascending. The newest always stays; of equal ones the earlier is best.

    >>> found = [Kept(2, 0.5), Kept(4, 0.9), Kept(6, 0.7), Kept(8), Kept(10, 0.8)]
    >>> superfluous(found, Retention(keep_last=1, keep_every=6, best=True))
    [2, 8]
    >>> superfluous(found, Retention())
    []
    """
    if rule.keep_last == 0:
        return []
    stay = set(sorted(kept.step for kept in checkpoints)[-rule.keep_last :])
    if rule.keep_every:
        stay |= {kept.step for kept in checkpoints if kept.step % rule.keep_every == 0}
    measured = [kept for kept in checkpoints if kept.held_out is not None]
    if rule.best and measured:
        stay.add(max(measured, key=lambda kept: (kept.held_out or 0.0, -kept.step)).step)
    return sorted(kept.step for kept in checkpoints if kept.step not in stay)
