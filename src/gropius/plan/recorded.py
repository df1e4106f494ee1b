"""Pass rates of a recorded run: one count for each group of each step. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from gropius.errors import DataError, UsageError
from gropius.plan.cost import ModelShape, Workload, cost
from gropius.plan.counts import PassCounts
from gropius.plan.lengths import Recorded, recorded
from gropius.plan.machines import Machine
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


def response_lengths(folder: Path) -> Recorded:
    """Tokens that the model wrote in each recorded response. Errors: UsageError when none is recorded."""
    reader = RunReader(folder)
    tables = [reader.table(step, ("member", "loss_mask")) for step in reader.steps()]
    rows = [row for table in tables if table is not None for row in table.to_pylist()]
    return recorded([sum(row["loss_mask"]) for row in rows if row["member"] >= 0], str(folder))


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


@dataclass(frozen=True)
class Timing:
    """What the steps of a run took: medians over its steps, the first (which warms up) left out where there are more.

    sampling_s, training_s: seconds a step; training_s is 0 when nothing was trained. load: the step's workload. step_s:
    fixed time of a decode step; 0 where the steps are too alike to tell it.
    """

    load: Workload
    sampling_s: float
    training_s: float
    step_s: float = 0.0


def timing(folder: Path, prompt_tokens: float) -> Timing:
    """The workload and the seconds of a recorded run. Errors: UsageError when its metrics or its recipe lack them."""
    reader = RunReader(folder)
    names = ("sampling_time_s", "training_time_s", "tokens_sampled", "tokens_trained")
    rows = [row for row in reader.metrics_by_step().values() if all(n in row for n in names) and row["tokens_sampled"]]
    rows = rows[1:] or rows
    resolved = reader.resolved() if rows else {}
    rollout = resolved.get("rollout", {})
    if not rows or not {"prompts", "group_size"} <= set(rollout):
        raise UsageError(f"{folder}: records no step times, so a machine cannot be taken from it; name one, or probe")
    trained = [row for row in rows if row["tokens_trained"]]
    sampled = median(row["tokens_sampled"] for row in rows)
    responses = rollout["prompts"] * rollout["group_size"]
    live = median(row["tokens_trained"] / row["tokens_sampled"] for row in trained) if trained else 0.0
    mean, longest = (
        sampled / responses,
        [row["completions/max_length"] for row in rows if row.get("completions/max_length")],
    )
    load = Workload(
        rollout["prompts"],
        rollout["group_size"],
        prompt_tokens,
        mean,
        live_share=min(live, 1.0),
        length_spread=max(median(longest) / mean, 1.0) if longest else 1.0,
    )
    return Timing(
        load, median(row["sampling_time_s"] for row in rows),
        median(row["training_time_s"] for row in trained) if trained else 0.0, _step_s(rows),
    )  # fmt: skip


def _step_s(rows: Sequence[Mapping[str, Any]]) -> float:
    """The fixed time of a decode step: seconds of sampling = step_s · longest + token_s · tokens, by least squares.

    0 where it does not stand out by two standard errors, or either would be negative.
    """
    names = ("completions/max_length", "tokens_sampled", "sampling_time_s")
    table = np.asarray([[row[n] for n in names] for row in rows if all(row.get(n) for n in names)], np.float64)
    if len(table) < 6:
        return 0.0
    known, took = table[:, :2], table[:, 2]
    found, _, rank, _ = np.linalg.lstsq(known, took, rcond=None)
    if rank < 2 or found.min() < 0:
        return 0.0
    left = took - known @ found
    error = np.sqrt(left @ left / (len(table) - 2) * np.linalg.inv(known.T @ known)[0, 0])
    return float(found[0]) if found[0] > 2 * error else 0.0


def calibrated(shape: ModelShape, measured: Timing, start: Machine) -> Machine:
    """The machine on which `cost` gives the times that a run of this model measured.

    The share of `start`'s peaks reached in training is set first (kept when nothing was trained), then that of
    decoding, prefill and the fixed time of its steps taken off. Everything a step does besides, Python included, is
    thereby in the shares.
    """

    def phases(machine: Machine) -> dict[str, float]:
        return {p.name: p.time_s for p in cost(shape, measured.load, machine).phases}

    machine = replace(start, bandwidth_efficiency=1.0, step_overhead_s=0.0)
    if measured.training_s:
        update = min(phases(machine)["update"], measured.training_s / 2)
        factor = phases(machine)["training"] / (measured.training_s - update)
        machine = replace(machine, training_efficiency=machine.training_efficiency * factor)
    left = max(measured.sampling_s - phases(machine)["prefill"], measured.sampling_s / 2)
    machine = replace(machine, bandwidth=float("inf"))
    steps = measured.load.response_tokens * measured.load.length_spread
    step_s = min(measured.step_s, 0.9 * left / steps)
    factor = phases(machine)["decode"] / (left - steps * step_s)
    source = f"calibrated on {measured.load.responses} responses a step of the run" + (
        ""
        if step_s
        else ", whose steps are too alike to tell the fixed time of a decode step: small batches may take longer"
    )
    return replace(
        machine, name="as recorded", bandwidth=start.bandwidth, decode_efficiency=machine.decode_efficiency * factor,
        bandwidth_efficiency=1.0, step_overhead_s=step_s, source=source,
    )  # fmt: skip
