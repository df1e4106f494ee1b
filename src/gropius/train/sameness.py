"""Are two runs the same run? Compared bit by bit; of all there is only clock readings are left out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from safetensors.torch import load_file

from gropius.records.metrics import METRICS
from gropius.records.reader import RunReader
from gropius.train import checkpoint
from gropius.train.differences import differences

CLOCKS = ("sampling_time_s", "scoring_time_s")  # columns of the responses
# Facts of a checkpoint that name the run itself.
OWN = ("tables.name", "tables.out", "metrics_bytes", "recipe")


@dataclass(frozen=True)
class Compared:
    """What was compared, counted; difference: the first one in words, or ""."""

    counts: dict[str, int]
    difference: str

    def __str__(self) -> str:
        return ", ".join(f"{count} {name}" for name, count in self.counts.items())


def compare(left: Path, right: Path) -> Compared:
    """Compare two finished runs: the last checkpoint's tensors and facts, every response and every metric.

    Facts hold the counters, the data position and the random generators; responses hold the order of the data.
    Errors: RunFolderError where one has no whole checkpoint.
    """
    readers = RunReader(left), RunReader(right)
    steps = [reader.checkpoints()[-1:] for reader in readers]
    if steps[0] != steps[1] or not steps[0]:
        return Compared({}, f"last checkpoints: step {steps[0] or None} and step {steps[1] or None}")
    folders = [folder / "checkpoints" / f"step-{steps[0][0]:06d}" for folder in (left, right)]
    counts: dict[str, int] = {}
    for words in (
        *_tensors(folders[0], folders[1], counts),
        *_facts(folders[0], folders[1], counts),
        *_responses(*readers, counts),
        *_metrics(*readers, counts),
    ):
        return Compared(counts, words)
    return Compared(counts, "")


def _tensors(left: Path, right: Path, counts: dict[str, int]) -> Iterator[str]:
    names = [path.relative_to(left) for path in sorted(left.rglob("*.safetensors"))]
    if names != [path.relative_to(right) for path in sorted(right.rglob("*.safetensors"))]:
        yield f"{left.name}: other files of tensors"
        return
    for name in names:
        kind = "weights" if name.parts[0] == "model" else f"tensors of {name.stem}"
        first, second = load_file(left / name), load_file(right / name)
        counts[kind] = counts.get(kind, 0) + len(first)
        for key in dict.fromkeys((*first, *second)):
            if words := _apart(first.get(key), second.get(key)):
                yield f"{kind}, {key}: {words}"


def _apart(first: torch.Tensor | None, second: torch.Tensor | None) -> str:
    """The first element of two tensors whose bits differ, in words; NaNs of equal bits are equal."""
    if first is None or second is None:
        return "on one side only"
    if first.shape != second.shape or first.dtype != second.dtype:
        return f"{first.dtype} {tuple(first.shape)} and {second.dtype} {tuple(second.shape)}"
    left, right = (tensor.contiguous().flatten() for tensor in (first, second))
    size = left.element_size()
    unequal = (left.view(torch.uint8) != right.view(torch.uint8)).nonzero() if left.numel() else torch.empty(0)
    if not unequal.numel():
        return ""
    place = int(unequal[0]) // size
    return f"element {place} is {left[place].item()!r} and {right[place].item()!r}"


def _facts(left: Path, right: Path, counts: dict[str, int]) -> Iterator[str]:
    first, second = (dict(checkpoint.load(folder).facts) for folder in (left, right))
    counts["facts of state"] = len(first)
    for key, pair in differences(first, second).items():
        if key not in OWN:
            yield f"state, {key}: {str(pair[0])[:80]} and {str(pair[1])[:80]}"


def _responses(left: RunReader, right: RunReader, counts: dict[str, int]) -> Iterator[str]:
    if left.steps() != right.steps():
        yield f"recorded steps: {left.steps()} and {right.steps()}"
        return
    for step in left.steps():
        tables = [reader.table(step) for reader in (left, right)]
        first, second = tables
        if first is None or second is None:
            yield f"step {step}: responses cannot be read"
            return
        counts["responses"] = counts.get("responses", 0) + first.num_rows
        if words := _rows_apart(first, second):
            yield f"step {step}, responses: {words}"


def _rows_apart(first: pa.Table, second: pa.Table) -> str:
    if first.num_rows != second.num_rows:
        return f"{first.num_rows} and {second.num_rows}"
    for name in first.column_names:
        if name in CLOCKS or first.column(name).equals(second.column(name)):
            continue
        for row, (one, other) in enumerate(
            zip(first.column(name).to_pylist(), second.column(name).to_pylist(), strict=True)
        ):
            if repr(one) != repr(other):
                return f"row {row}, {name}: {str(one)[:80]} and {str(other)[:80]}"
    return ""


def _metrics(left: RunReader, right: RunReader, counts: dict[str, int]) -> Iterator[str]:
    first, second = ([_without_clocks(row) for row in reader.metrics()] for reader in (left, right))
    counts["rows of metrics"] = len(first)
    if len(first) != len(second):
        yield f"metrics: {len(first)} rows and {len(second)}"
    for one, other in zip(first, second, strict=False):
        for key in dict.fromkeys((*one, *other)):
            if repr(one.get(key)) != repr(other.get(key)):
                yield f"step {one['step']}, metric {key}: {one.get(key)!r} and {other.get(key)!r}"


def _without_clocks(row: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key not in METRICS or not METRICS[key].timing}
