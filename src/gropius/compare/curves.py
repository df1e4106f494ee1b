"""The held-out curve of one run against the tokens it had sampled. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gropius.errors import RunFolderError
from gropius.records.reader import RunReader


@dataclass(frozen=True)
class Curve:
    """Held-out mean of one run. tokens: sampled before each evaluation, ascending; steps: of each evaluation.

    total: tokens sampled in the whole run. low, high: 95 % interval of each evaluation. resolution: what one response
    more or less moves the mean by.
    """

    seed: int
    tokens: tuple[int, ...]
    steps: tuple[int, ...]
    values: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    total: int
    resolution: float = 0.0

    def at(self, budget: float) -> float:
        """The held-out mean after `budget` tokens: on the line between the evaluations around it, the ends held.

        >>> Curve(0, (0, 100), (0, 4), (0.2, 0.4), (0.1, 0.3), (0.3, 0.5), 100).at(50)
        0.30000000000000004
        """
        return _interpolated(self.tokens, self.values, budget)

    def step_at(self, budget: float) -> float:
        """The (fractional) step after `budget` tokens."""
        return _interpolated(self.tokens, self.steps, budget)


def _interpolated(xs: Sequence[float], ys: Sequence[float], x: float) -> float:
    if x <= xs[0]:
        return float(ys[0])
    for (x0, y0), (x1, y1) in zip(zip(xs, ys, strict=True), list(zip(xs, ys, strict=True))[1:], strict=False):
        if x <= x1:
            return float(y0 + (y1 - y0) * (x - x0) / (x1 - x0)) if x1 > x0 else float(y1)
    return float(ys[-1])


def curve(reader: RunReader) -> Curve:
    """The curve of a run folder. Errors: RunFolderError when it was measured on held-out tasks less than twice."""
    rows, sampled, points = reader.metrics_by_step(), 0, []
    for step, row in rows.items():
        sampled += int(row.get("tokens_sampled") or 0)
        if all(isinstance(row.get(f"held_out/mean{end}"), int | float) for end in ("", "_low", "_high")):
            points.append((sampled, step, row["held_out/mean"], row["held_out/mean_low"], row["held_out/mean_high"]))
    if len(points) < 2:
        raise RunFolderError(
            f"{reader.folder}: measured on held-out tasks {len(points)} times; a curve needs two: leave eval.before "
            "and eval.after on, or set eval.every"
        )
    tokens, steps, values, low, high = zip(*points, strict=True)
    last = rows[steps[-1]]
    responses = int(last.get("held_out/tasks") or 0) * int(last.get("held_out/samples") or 1)
    seed = int(reader.resolved().get("seed", 0))
    return Curve(seed, tokens, steps, values, low, high, sampled, 1 / responses if responses else 0.0)
