"""A training log as the diagnostics read it, whoever wrote it: responses in columns, metrics by step, a few facts.

Everything optional is either there or named as missing; nothing is guessed. No torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gropius.doctor.finding import Row

Column = NDArray[Any]

# Columns of responses, one value a response, with the value that stands for "not known of this row".
COLUMNS: dict[str, str] = {
    "step": "training step",
    "group_id": "identity of the group",
    "member": "number of the sibling",
    "task": "identity of the task",
    "reward": "what was trained on; NaN when void",
    "raw": "the unshaped task metric; NaN where there is none",
    "status": "scored, rejected or void",
    "reason": "of the verdict",
    "tokens": "tokens that the model wrote",
    "truncated": "a length limit ended it",
    "skipped": "never run forward",
    "advantage": "of the response; NaN without one",
    "version": "optimiser steps of the policy that drew it",
    "identity": "equal numbers are equal responses",
    "repetition": "share of the text's 3-word (or 3-letter) runs that occurred before in it",
    "excerpt": "how the text begins",
}
PART = "part:"


@dataclass(frozen=True, eq=False)
class TokenRow:
    """Per-token numbers of one response, environment tokens left out. Absent lists are None.

    update: which optimiser step of its batch trained it first. temperature is that of the recipe.
    """

    step: int
    group_id: str
    member: int
    update: int
    sampler: Column | None
    anchor: Column | None
    policy: Column | None
    reference: Column | None
    entropy: Column | None

    @property
    def trainer(self) -> Column | None:
        """What the trainer gave the tokens before the weights moved: the anchor, or the policy at the first update."""
        return self.anchor if self.anchor is not None else (self.policy if self.update == 0 else None)


@dataclass(frozen=True)
class Series:
    """A metric where it was measured: steps and values of the same length, finite, ascending."""

    steps: NDArray[np.int64]
    values: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.steps)


@dataclass(frozen=True, eq=False)
class Log:
    """One run's log. hints: missing field → where it would come from. settings: recipe keys, dotted.

    metrics: step → name → number. responses: columns of COLUMNS and `part:NAME`, all of one length.
    """

    source: str
    metrics: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    responses: Mapping[str, Column] = field(default_factory=dict)
    tokens: Sequence[TokenRow] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    hints: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @cached_property
    def steps(self) -> list[int]:
        """Steps with responses, else with metrics; ascending."""
        if "step" in self.responses:
            return [int(step) for step in np.unique(self.responses["step"])]
        return sorted(self.metrics)

    @property
    def parts(self) -> list[str]:
        """Names of the reward parts."""
        return [name.removeprefix(PART) for name in self.responses if name.startswith(PART)]

    def lacks(self, needs: Sequence[str]) -> tuple[str, ...]:
        """Those of `responses.X`, `metrics.X`, `tokens.X`, `settings.X` that the log does not have."""
        return tuple(need for need in needs if not self._has(need))

    def hint(self, missing: Sequence[str]) -> str:
        """Where the first of the missing fields would come from."""
        kinds = [need for name in missing for need in (name, name.partition(".")[0])]
        return next((self.hints[name] for name in kinds if name in self.hints), "")

    def _has(self, need: str) -> bool:
        room, _, name = need.partition(".")
        if need == "responses.parts":
            return bool(self.parts)
        if room == "responses":
            column = self.responses.get(name)
            return column is not None and (column.dtype.kind != "f" or bool(np.isfinite(column).any()))
        if room == "metrics":
            return len(self.series(name)) > 0
        if need == "tokens.later_updates":
            return any(row.update > 0 and row.policy is not None and row.anchor is not None for row in self.tokens)
        if room == "tokens":
            return any(getattr(row, name) is not None for row in self.tokens)
        return name in self.settings

    def series(self, name: str) -> Series:
        """A metric where it is a finite number."""
        found = [(s, float(row[name])) for s, row in self.metrics.items() if _finite(row.get(name))]
        found.sort()
        return Series(np.array([s for s, _ in found], np.int64), np.array([v for _, v in found], np.float64))

    @cached_property
    def metric_of_task(self) -> Column:
        """The unshaped metric where the log has one, else the reward."""
        raw = self.responses.get("raw")
        if raw is not None and bool(np.isfinite(raw).any()):
            return raw
        return self.responses["reward"]

    @cached_property
    def groups(self) -> list[Members]:
        """The groups in order of first appearance, with the positions of their members."""
        ids = self.responses["group_id"]
        steps = self.responses["step"]
        places: dict[tuple[int, str], list[int]] = {}
        for place, (step, name) in enumerate(zip(steps.tolist(), ids.tolist(), strict=True)):
            places.setdefault((step, name), []).append(place)
        return [Members(step, name, np.array(rows)) for (step, name), rows in places.items()]

    def rows(self, places: Sequence[int]) -> tuple[Row, ...]:
        """Evidence rows of responses."""
        return tuple(self._row(place) for place in places)

    def _row(self, place: int) -> Row:
        columns = self.responses
        excerpt = columns.get("excerpt")
        return Row(
            int(columns["step"][place]),
            str(columns["group_id"][place]),
            int(columns["member"][place]) if "member" in columns else None,
            str(excerpt[place]) if excerpt is not None else "",
        )

    def per_step(self) -> Iterator[tuple[int, NDArray[np.bool_]]]:
        """Each step with the mask of its responses."""
        steps = self.responses["step"]
        for step in self.steps:
            yield step, steps == step


@dataclass(frozen=True, eq=False)
class Members:
    """One group: its step, its id and where its members stand in the columns."""

    step: int
    group_id: str
    places: NDArray[np.int64]

    def row(self) -> Row:
        """The group as evidence."""
        return Row(self.step, self.group_id)


def known_mean(values: Column) -> float | None:
    """The mean of the values that are known; None when none is."""
    known = values[np.isfinite(values)]
    return float(known.mean()) if len(known) else None


def repetition(text: str) -> float:
    """Share of the runs of three words (letters, when there are fewer than six words) that occurred before.

    >>> repetition("a b c a b c a b c")
    0.5714285714285714
    >>> repetition("12")
    0.0
    """
    words: Sequence[str] = text.split()
    if len(words) < 6:
        words = text
    runs = [tuple(words[i : i + 3]) for i in range(len(words) - 2)]
    return 1 - len(set(runs)) / len(runs) if runs else 0.0


def _finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
