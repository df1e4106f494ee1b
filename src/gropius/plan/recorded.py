"""Pass rates of a recorded run: one count for each group of each step. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from gropius.errors import DataError
from gropius.plan.counts import PassCounts
from gropius.records.reader import RunReader

COLUMNS = ("step", "group_id", "member", "status", "raw", "reward", "loss_mask")


def from_run(folder: Path, solved_at: float = 1.0) -> tuple[PassCounts, list[str]]:
    """Counts of a run folder, and what was left out or taken for the metric, in words.

    A response counts as solved when its unshaped metric (its reward where there is none) reaches `solved_at`. Void and
    unscored responses leave, and so do greedy ones of a baseline.
    Errors: RunFolderError for no run folder; DataError when no group is left.
    """
    reader = RunReader(folder)
    solved: dict[str, list[int]] = {}
    tokens, responses, shaped = 0, 0, 0
    for step in reader.steps():
        table = reader.table(step, COLUMNS)
        if table is None:
            continue
        for row in table.to_pylist():
            metric = row["raw"] if row["raw"] is not None else row["reward"]
            if row["member"] < 0 or row["status"] in (None, "void") or metric is None:
                continue
            shaped += row["raw"] is None
            tokens, responses = tokens + sum(row["loss_mask"]), responses + 1
            count = solved.setdefault(row["group_id"], [0, 0, row["step"]])
            count[0] += metric >= solved_at
            count[1] += 1
    if not solved:
        raise DataError(f"{folder}: no scored group is recorded, so there is no pass rate to plan from")
    table_of = np.asarray(list(solved.values()), np.int64)
    notes = list(reader.problems)
    if shaped:
        notes.append(f"{shaped} responses have no raw metric; their reward was taken (solved is >= {solved_at:g})")
    counts = PassCounts(table_of[:, 0], table_of[:, 1], table_of[:, 2], str(folder), tokens / responses)
    return counts, notes


def as_recorded(folder: Path) -> Mapping[str, Any]:
    """What the run's resolved recipe says that a plan starts from: budget and objective; empty when it is absent."""
    reader = RunReader(folder)
    if not (reader.folder / "resolved.json").is_file():
        return {}
    resolved = reader.resolved()
    tables = resolved.get("recipe", resolved)
    rollout, objective = tables.get("rollout", {}), tables.get("objective", {})
    if not isinstance(rollout, Mapping) or not isinstance(objective, Mapping):
        return {}
    size, prompts = rollout.get("group_size"), rollout.get("prompts")
    known = {"budget": size * prompts} if isinstance(size, int) and isinstance(prompts, int) else {}
    return {**known, "objective": objective}
