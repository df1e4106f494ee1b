"""One row a group, made from the light columns of each step and kept beside the runs, not in them. No torch.

A run of a million responses has some hundred thousand groups: a table of that size is filtered and sorted at once,
while prompts, texts and token lists stay on the disk until one response is looked at.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from gropius.records.schema import GREEDY_MEMBER
from gropius.viewer.store import RunStore

LIGHT = (
    "group_id", "member", "task_key", "status", "reward", "raw", "state", "advantage", "skipped", "duplicate",
    "truncated", "loss_mask",
)  # fmt: skip
GROUPS: pa.Schema = pa.schema(
    [
        ("step", pa.int32()),
        ("order", pa.int32()),
        ("group_id", pa.string()),
        ("task_key", pa.string()),
        ("state", pa.string()),
        ("size", pa.int32()),
        ("mean", pa.float64()),
        ("std", pa.float64()),
        ("rewards", pa.list_(pa.float32())),
        ("advantages", pa.list_(pa.float32())),
        ("largest_advantage", pa.float64()),
        ("tokens", pa.list_(pa.int32())),
        ("longest", pa.int32()),
        ("duplicates", pa.int32()),
        ("truncated", pa.int32()),
        ("void", pa.int32()),
        ("rejected", pa.int32()),
        ("skipped", pa.int32()),
        ("outlier", pa.bool_()),
        ("paid_wrong", pa.int32()),
        ("file_size", pa.int64()),
        ("file_time", pa.int64()),
    ]
)
SAVE_EVERY_S = 30.0
FORMAT = "2"


def step_groups(store: RunStore, step: int) -> pa.Table | None:
    """[groups] one row a group of the step, in order of first appearance; None when the file cannot be read.

    mean, std: of the rewards that are not void; std is the population's. rewards, advantages: NaN where there is none.
    outlier: a response more than three quartile ranges longer than the step's upper quartile, or |advantage| > 2.5.
    paid_wrong: responses that the task metric rejects (at or below 0) and whose advantage is above 0 all the same.
    """
    light = store.table(step, LIGHT)
    if light is None or light.num_rows == 0:
        return None if light is None else GROUPS.empty_table()
    light = light.filter(pc.not_equal(light.column("member"), GREEDY_MEMBER))
    encoded = light.column("group_id").combine_chunks().dictionary_encode()
    code = encoded.indices.to_numpy()
    order = np.argsort(code, kind="stable")
    starts = np.searchsorted(code[order], np.arange(len(encoded.dictionary)))
    ends = np.append(starts[1:], len(order))
    first = order[starts]
    columns: dict[str, Any] = {
        "step": np.full(len(starts), step, np.int32),
        "order": np.arange(len(starts), dtype=np.int32),
        "group_id": encoded.dictionary,
        "task_key": light.column("task_key").take(pa.array(first)),
        "state": light.column("state").take(pa.array(first)),
        "size": (ends - starts).astype(np.int32),
    }
    columns |= _numbers(light, order, starts, len(order))
    size, changed = store.signature(step)
    columns["file_size"] = np.full(len(starts), size, np.int64)
    columns["file_time"] = np.full(len(starts), changed, np.int64)
    return pa.table([_column(columns[field.name], field.type) for field in GROUPS], schema=GROUPS)


def _numbers(light: pa.Table, order: NDArray[Any], starts: NDArray[Any], rows: int) -> dict[str, Any]:
    def values(name: str) -> NDArray[np.float64]:
        found = light.column(name).to_numpy(zero_copy_only=False)
        ordered: NDArray[np.float64] = np.asarray(found, np.float64)[order]
        return ordered

    reward, advantage = values("reward"), values("advantage")
    status: Any = light.column("status").fill_null("").to_numpy(zero_copy_only=False)[order]
    counted = np.isfinite(reward)
    count = np.add.reduceat(counted.astype(np.int64), starts)
    total = np.add.reduceat(np.where(counted, reward, 0.0), starts)
    mean = np.divide(total, count, out=np.full(len(starts), np.nan), where=count > 0)
    group = np.repeat(np.arange(len(starts)), np.diff(np.append(starts, rows)))
    squares = np.add.reduceat(np.where(counted, (reward - mean[group]) ** 2, 0.0), starts)
    variance = np.divide(squares, count, out=np.full(len(starts), np.nan), where=count > 0)
    tokens = written_tokens(light)[order]
    offsets = pa.array(np.append(starts, rows).astype(np.int32))
    strength = np.where(np.isfinite(advantage), np.abs(advantage), 0.0)
    low, high = np.quantile(tokens, [0.25, 0.75]) if rows else (0.0, 0.0)
    odd = (tokens > high + 3 * max(high - low, 1)) | (strength > 2.5)
    return {
        "mean": mean,
        "std": np.sqrt(variance),
        "rewards": pa.ListArray.from_arrays(offsets, pa.array(reward.astype(np.float32))),
        "advantages": pa.ListArray.from_arrays(offsets, pa.array(advantage.astype(np.float32))),
        "largest_advantage": np.maximum.reduceat(strength, starts),
        "tokens": pa.ListArray.from_arrays(offsets, pa.array(tokens.astype(np.int32))),
        "longest": np.maximum.reduceat(tokens, starts).astype(np.int32),
        "duplicates": _tally(values("duplicate"), starts),
        "truncated": _tally(values("truncated"), starts),
        "void": _tally(status == "void", starts),
        "rejected": _tally(status == "rejected", starts),
        "skipped": _tally(values("skipped"), starts),
        "outlier": np.maximum.reduceat(odd, starts),
        "paid_wrong": _tally((values("raw") <= 0) & (advantage > 0), starts),
    }


def _tally(flags: NDArray[Any], starts: NDArray[Any]) -> NDArray[np.int32]:
    return np.add.reduceat(flags.astype(np.int32), starts)


def _column(values: Any, kind: pa.DataType) -> Any:
    return values if isinstance(values, pa.Array | pa.ChunkedArray) else pa.array(values, type=kind)


def written_tokens(table: pa.Table) -> NDArray[np.int64]:
    """[rows] tokens that the model wrote, from the loss masks."""
    masks = table.column("loss_mask").combine_chunks()
    if isinstance(masks, pa.ChunkedArray):
        masks = masks.chunk(0) if masks.num_chunks else pa.array([], pa.list_(pa.bool_()))
    offsets = masks.offsets.to_numpy()
    running = np.concatenate([[0], np.cumsum(masks.values.to_numpy(zero_copy_only=False), dtype=np.int64)])
    return np.asarray(running[offsets[1:]] - running[offsets[:-1]], np.int64)


class RunIndex:
    """All groups of a run. Built by a thread, saved in the cache folder, and brought up to date when asked.

    cache: where indexes are kept; None keeps this one in memory only.
    """

    def __init__(self, store: RunStore, cache: Path | None) -> None:
        self.store = store
        name = hashlib.sha256(f"{FORMAT}:{store.reader.folder.resolve()}".encode()).hexdigest()[:32]
        self._file = cache / f"{name}.parquet" if cache else None
        self._parts: dict[int, pa.Table] = {}
        self._whole: pa.Table | None = None
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._skipped: dict[int, tuple[int, int]] = {}
        self._load()

    def refresh(self) -> None:
        """Start reading what is new; returns at once."""
        with self._lock:
            if self._thread is None or not self._thread.is_alive():
                missing = self._missing()
                if missing:
                    self._thread = threading.Thread(target=self._build, args=(missing,), daemon=True)
                    self._thread.start()

    def wait(self) -> None:
        """Return when everything present now is indexed."""
        self.refresh()
        thread = self._thread
        if thread is not None:
            thread.join()

    def progress(self) -> tuple[int, int]:
        """(steps indexed, steps present)."""
        steps = self.store.steps()
        return sum(step in self._parts or step in self._skipped for step in steps), len(steps)

    def groups(self) -> pa.Table:
        """Every group indexed so far, by step and order."""
        with self._lock:
            if self._whole is None:
                parts = [self._parts[step] for step in sorted(self._parts)]
                self._whole = pa.concat_tables(parts).combine_chunks() if parts else GROUPS.empty_table()
            return self._whole

    def _missing(self) -> list[int]:
        out = []
        for step in self.store.steps():
            signature = self.store.signature(step)
            part = self._parts.get(step)
            if part is not None and part.num_rows:
                known = part.column("file_size")[0].as_py(), part.column("file_time")[0].as_py()
            else:
                known = self._skipped.get(step, (-1, -1))
            if known != signature:
                out.append(step)
        return out

    def _build(self, steps: list[int]) -> None:
        saved = time.monotonic()
        for step in steps:
            part = step_groups(self.store, step)
            with self._lock:
                if part is None or part.num_rows == 0:
                    self._skipped[step] = self.store.signature(step)
                    self._parts.pop(step, None)
                else:
                    self._parts[step] = part
                self._whole = None
            if time.monotonic() - saved > SAVE_EVERY_S:
                self._save()
                saved = time.monotonic()
        self._save()

    def _save(self) -> None:
        """Write the index whole; a cache that cannot be written is no reason to stop."""
        if self._file is None:
            return
        temporary = self._file.with_suffix(f".tmp-{os.getpid()}")
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            pq.write_table(self.groups(), temporary, compression="zstd")
            temporary.replace(self._file)
        except OSError:
            temporary.unlink(missing_ok=True)

    def _load(self) -> None:
        """Take over the saved rows of steps whose files are unchanged; a damaged cache is built anew."""
        if self._file is None or not self._file.is_file():
            return
        try:
            saved = pq.read_table(self._file)
        except (OSError, ValueError, pa.ArrowException):
            return
        if saved.schema != GROUPS or saved.num_rows == 0:
            return
        step = saved.column("step").to_numpy()
        starts = np.flatnonzero(np.append(True, step[1:] != step[:-1]))
        for start, end in zip(starts, np.append(starts[1:], len(step)), strict=True):
            part = saved.slice(int(start), int(end - start))
            known = part.column("file_size")[0].as_py(), part.column("file_time")[0].as_py()
            if known == self.store.signature(int(step[start])):
                self._parts[int(step[start])] = part
