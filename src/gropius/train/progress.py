"""What a run tells a person while it goes on. The command line shows it; tests collect it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from gropius.train.evaluate import HeldOut


class Progress(Protocol):
    """A listener of one run."""

    def note(self, text: str) -> None:
        """Something a person should know: what was recognised, assumed, skipped or saved."""
        ...

    def step(self, step: int, steps: int, metrics: Mapping[str, float | int | None]) -> None:
        """A step is over and recorded. step: 1 … steps; metrics: what metrics.jsonl holds of it."""
        ...

    def held_out(self, label: str, found: HeldOut) -> None:
        """An evaluation is over. label: "before", "step 20", "after"."""
        ...


class Silent:
    """A listener that keeps everything and shows nothing."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.steps: list[Mapping[str, float | int | None]] = []
        self.evaluations: dict[str, HeldOut] = {}

    def note(self, text: str) -> None:
        """Keep a note."""
        self.notes.append(text)

    def step(self, step: int, steps: int, metrics: Mapping[str, float | int | None]) -> None:
        """Keep a step's metrics."""
        self.steps.append(metrics)

    def held_out(self, label: str, found: HeldOut) -> None:
        """Keep an evaluation."""
        self.evaluations[label] = found
