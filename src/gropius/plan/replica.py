"""One simulated engine and the groups that its rows belong to. No torch.

Every running row gets one token a decode step, so a row that starts when the engine has made v steps and has n tokens
to go is over at v + n: a heap of those numbers is the whole state of a batch. Between two events the pace of a step is
that of the mean number of cached positions.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right

from gropius.plan.cluster import Engine

NEAR = 1e-6  # of a decode step: rows that end together


class Group:
    """Siblings that are trained together. begun: the version that drew its first token; -1 before.

    drawn: Σ tokens · version over its tokens. left: siblings that are not over.
    """

    __slots__ = ("begun", "drawn", "left", "longest", "tokens")

    def __init__(self, left: int):
        self.begun, self.left = -1, left
        self.tokens, self.longest, self.drawn = 0.0, 0.0, 0.0


class Row:
    """One response: its group, its tokens, and the engine's step and version when it was begun."""

    __slots__ = ("group", "start", "tokens", "version")

    def __init__(self, group: Group, tokens: int):
        self.group, self.tokens = group, tokens
        self.start, self.version = 0.0, 0


class Replica:
    """The state of one engine. Times in seconds; `now` never goes back.

    rows: heap of (step at which it is over, number, row). debt: seconds of prefill and scoring before the next decode
    step. busy_s, row_s: time with a row, and its integral over rows.
    """

    __slots__ = (
        "at", "busy_s", "cached", "debt", "down", "marks", "on", "pace", "peak", "prompt", "row_s", "rows", "serial",
        "speed", "stamp", "step", "versions",
    )  # fmt: skip

    def __init__(self, speed: Engine, prompt_tokens: float):
        self.speed, self.prompt = speed, prompt_tokens
        self.rows: list[tuple[float, int, Row]] = []
        self.step, self.cached, self.at, self.debt, self.pace = 0.0, 0.0, 0.0, 0.0, 0.0
        self.busy_s, self.row_s, self.peak = 0.0, 0.0, 0
        self.on, self.down, self.stamp, self.serial = True, False, 0, 0
        self.marks: list[float] = [0.0]
        self.versions: list[int] = [0]

    @property
    def room(self) -> int:
        """Rows that it could take now."""
        return self.speed.slots - len(self.rows) if self.on and not self.down else 0

    def advance(self, now: float) -> None:
        """Decode until `now`, at the pace that `next_end` found."""
        spent, count = now - self.at, len(self.rows)
        self.at = now
        if not count or not self.on or spent <= 0:
            return
        self.busy_s += spent
        self.row_s += spent * count
        if self.debt:
            paid = min(self.debt, spent)
            self.debt -= paid
            spent -= paid
        if spent > 0:
            steps = spent / self.pace
            self.step += steps
            self.cached += steps * count

    def add(self, row: Row, version: int, prefill: bool) -> None:
        """Begin a response. prefill: its prompt is read (a sibling's prompt is read once)."""
        if not self.rows:
            self.marks, self.versions = [self.step], [version]
        row.start, row.version = self.step, version
        if row.group.begun < 0:
            row.group.begun = version
        self.serial += 1
        heapq.heappush(self.rows, (self.step + row.tokens, self.serial, row))
        self.cached += self.prompt
        self.peak = max(self.peak, len(self.rows))
        self.debt += self.speed.response_s + (self.prompt * self.speed.prefill_s if prefill else 0.0)

    def next_end(self) -> float:
        """When the next row is over; inf without one. Fixes the pace until then."""
        self.stamp += 1
        if not self.rows or not self.on or self.down:
            return float("inf")
        count = len(self.rows)
        steps = max(self.rows[0][0] - self.step, 0.0)
        self.pace = self.speed.pace(count, self.cached + count * steps / 2)
        return self.at + self.debt + steps * self.pace

    def ended(self, now: float) -> list[Group]:
        """Decode until `now`, when a row is over; take out all that are. Groups that are complete by it, once each."""
        self.advance(now)
        self.step = max(self.step, self.rows[0][0])  # a clock that reads 1e5 s cannot tell 1e-12 s
        complete: list[Group] = []
        while self.rows and self.rows[0][0] <= self.step + NEAR:
            row = heapq.heappop(self.rows)[2]
            self.cached -= self.prompt + row.tokens
            group = row.group
            group.left -= 1
            group.tokens += row.tokens
            group.longest = max(group.longest, row.tokens)
            group.drawn += self._versions_of(row)
            if not group.left:
                complete.append(group)
        return complete

    def _versions_of(self, row: Row) -> float:
        """Σ over the row's tokens of the version that drew each."""
        first = bisect_right(self.marks, row.start)
        if first == len(self.marks):
            return row.tokens * row.version
        edges = [row.start, *self.marks[first:], row.start + row.tokens]
        held = [row.version, *self.versions[first:]]
        return sum(max(b - a, 0.0) * v for a, b, v in zip(edges, edges[1:], held, strict=False))

    def swap(self, version: int, recompute: bool) -> None:
        """New weights for running rows. recompute: their cache is filled anew."""
        self.marks.append(self.step)
        self.versions.append(version)
        if recompute:
            self.debt += self.cached * self.speed.prefill_s

    def lose(self) -> list[Row]:
        """All running rows: they have been begun for nothing."""
        lost = [row for _, _, row in sorted(self.rows)]
        self.rows, self.cached, self.debt = [], 0.0, 0.0
        return lost

    def drop(self, late: set[int]) -> None:
        """Cut the rows of groups that those versions began."""
        cut = [row for _, _, row in self.rows if row.group.begun in late]
        if cut:
            self.cached -= sum(self.prompt + self.step - row.start for row in cut)
            self.rows = [item for item in self.rows if item[2].group.begun not in late]
            heapq.heapify(self.rows)
