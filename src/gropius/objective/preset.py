"""What a preset is, and the groups of fields that many presets share. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gropius.objective.spec import Objective, override


@dataclass(frozen=True)
class Preset:
    """One named objective: overrides of the default objective, where it comes from, and how others differ.

    print_difference: how this row differs from the paper's printed objective. elsewhere: framework → what the same
    name runs there.
    """

    name: str
    title: str
    citation: str
    values: Mapping[str, Any]
    print_difference: str
    elsewhere: Mapping[str, str] = field(default_factory=dict)

    @property
    def objective(self) -> Objective:
        """The objective with every field filled."""
        return override(Objective(), self.values)


NO_KL: dict[str, Any] = {"kl.estimator": "none", "kl.coefficient": 0.0}
PLAIN: dict[str, Any] = {
    "ratio.level": "none",
    "surrogate.kind": "none",
    "surrogate.low": 0.0,
    "surrogate.high": 0.0,
}
UNSCALED: dict[str, Any] = {"advantage.scale": "none"}


def clip_bounds(low: float, high: float) -> dict[str, Any]:
    return {"surrogate.kind": "clip", "surrogate.low": low, "surrogate.high": high}


def other_surrogate(kind: str, **values: Any) -> dict[str, Any]:
    fields = {"surrogate.kind": kind, "surrogate.low": 0.0, "surrogate.high": 0.0}
    return fields | {f"surrogate.{key}": value for key, value in values.items()}
