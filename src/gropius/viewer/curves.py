"""The curves of a run: every metric as a series, thinned without losing a peak, with what it means. No torch."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from gropius.objective.formula import formula
from gropius.records.intervals import Z95
from gropius.records.metrics import describe
from gropius.records.writer import lock_holder
from gropius.viewer.index import RunIndex
from gropius.viewer.store import RunStore, strict

MOST_POINTS = 1500


def run_head(store: RunStore) -> dict[str, Any]:
    """What a list of runs shows of one."""
    resolved = store.resolved()
    steps = store.metrics()
    asked = resolved.get("train", {}).get("steps") if isinstance(resolved.get("train"), dict) else None
    last = max(steps, default=0)
    latest = steps.get(last, {})
    return {
        "id": store.run_id,
        "name": str(resolved.get("name") or store.run_id),
        "live": store.reader.live,
        "imported": store.imported_from,
        "holder": lock_holder(store.reader.folder),
        "revision": store.revision(),
        "steps": last,
        "asked_steps": asked if isinstance(asked, int) else None,
        "preset": resolved.get("preset"),
        "reward": _finite(latest.get("reward")),
        "held_out": _finite(_last(steps, "held_out/mean")),
        "notes": store.notes,
        "problems": store.problems,
    }


def run_page(store: RunStore) -> dict[str, Any]:
    """Everything the run's page shows but its curves."""
    resolved = store.resolved()
    objective = store.objective()
    return {
        **run_head(store),
        "objective": objective.as_dict() if objective else None,
        "formula": formula(objective) if objective else None,
        "recipe": strict({key: value for key, value in resolved.items() if key not in ("objective", "base_dir")}),
        "rollout_steps": store.steps(),
        "checkpoints": store.reader.checkpoints(),
        "findings": strict(store.findings()),
    }


def series(store: RunStore, index: RunIndex | None = None) -> dict[str, Any]:
    """Every metric by name: steps, values (null where missing or not finite), unit and meaning.

    More than 1,500 steps are thinned: of each stretch the first, the lowest, the highest and the last value stay.
    Added to what is logged: `tokens_per_s`, and `reward/low`, `reward/high` where every step with a reward is indexed.
    """
    rows = {step: {**_speed(row), **row} for step, row in store.metrics().items()}
    bands = _bands(index, {step for step, row in rows.items() if row.get("reward") is not None}) if index else {}
    for step, (low, high) in bands.items():
        rows[step] |= {"reward/low": low, "reward/high": high}
    names = list(dict.fromkeys(name for row in rows.values() for name in row if name != "step"))
    out = {}
    for name in names:
        points = [(step, row[name]) for step, row in rows.items() if isinstance(row.get(name), int | float)]
        odd = [step for step, value in points if not math.isfinite(value)]
        kept = thin([(step, float(value)) for step, value in points if math.isfinite(value)])
        known = describe(name)
        out[name] = {
            "steps": [step for step, _ in kept],
            "values": [value for _, value in kept],
            "non_finite": odd,
            "unit": known.unit if known else "",
            "meaning": known.meaning if known else "",
            "made_by": known.made_by if known else "",
            "thinned": len(kept) < len(points) - len(odd),
        }
    done, present = index.progress() if index else (0, 0)
    return {
        "revision": store.revision(),
        "live": store.reader.live,
        "indexed": done >= present,
        "series": out,
        "problems": store.problems,
    }


def _speed(row: dict[str, Any]) -> dict[str, float]:
    tokens, seconds = row.get("tokens_sampled"), row.get("step_time")
    usable = isinstance(tokens, int | float) and isinstance(seconds, int | float) and seconds > 0
    return {"tokens_per_s": tokens / seconds} if usable else {}  # type: ignore[operator]


def _bands(index: RunIndex, steps: set[int]) -> dict[int, tuple[float, float]]:
    """Mean reward ± z · standard error over groups, z of 95 %; groups are the sample. Empty while steps are missing."""
    index.refresh()
    table = index.groups()
    step, mean = table.column("step").to_numpy(), table.column("mean").to_numpy()
    kept = np.isfinite(mean)
    step, mean = step[kept], mean[kept]
    if not steps or len(step) == 0 or not steps <= set(step.tolist()) or len(steps) > MOST_POINTS:
        return {}
    order = np.argsort(step, kind="stable")
    names, starts = np.unique(step[order], return_index=True)
    parts = np.split(mean[order], starts[1:])
    out = {}
    for name, values in zip(names.tolist(), parts, strict=True):
        if name in steps:
            half = Z95 * float(values.std(ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else 0.0
            out[name] = (float(values.mean()) - half, float(values.mean()) + half)
    return out


def thin(points: list[tuple[int, float]], most: int = MOST_POINTS) -> list[tuple[int, float]]:
    """At most about `most` points; the first, lowest, highest and last of every stretch, in order.

    >>> len(thin([(i, float(i)) for i in range(100)], 40)) <= 44
    True
    """
    if len(points) <= most:
        return points
    stretch = math.ceil(len(points) / (most / 4))
    out: list[tuple[int, float]] = []
    for start in range(0, len(points), stretch):
        part = points[start : start + stretch]
        chosen = {part[0], part[-1], min(part, key=lambda p: p[1]), max(part, key=lambda p: p[1])}
        out.extend(sorted(chosen))
    return out


def _last(rows: dict[int, dict[str, Any]], name: str) -> Any:
    return next((row[name] for row in reversed(rows.values()) if row.get(name) is not None), None)


def _finite(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None
