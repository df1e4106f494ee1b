"""One run folder as the viewer reads it: cached metrics, some columns of a step, rows by row group. No torch."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from gropius.errors import GropiusError
from gropius.objective.spec import Objective, override
from gropius.records.reader import RunReader
from gropius.records.schema import ResponseRecord, from_table
from gropius.records.writer import FINDINGS, METRICS, RESOLVED, rollout_file

KEPT_TABLES = 32


class RunStore:
    """A run folder with an id for addresses. `problems` says what is damaged and skipped; `said` is put before it."""

    def __init__(self, run_id: str, folder: Path) -> None:
        self.run_id = run_id
        self.said = ""
        self.reader = RunReader(folder)
        self._examined: list[dict[str, Any]] = []
        self._kept: OrderedDict[tuple[Any, ...], Any] = OrderedDict()

    @cached_property
    def notes(self) -> list[str]:
        """Of a log that was imported: whose it is, how it was read, and what it does not hold."""
        told = self._told()
        lacking = told.get("missing") or []
        missing = [f"not in this log: {', '.join(map(str, lacking))}"] if lacking else []
        source = [f"imported from {told.get('from')}: {told.get('source')}"] if told else []
        return [*source, *map(str, told.get("notes") or []), *missing]

    @property
    def problems(self) -> list[str]:
        """What is damaged and skipped, once each, without the folder's own path."""
        prefix, said = f"{self.reader.folder}/", [self.said] if self.said else []
        return [*said, *(text.replace(prefix, "") for text in self.reader.problems)]

    @property
    def imported_from(self) -> str | None:
        """The trainer whose log this is; None for a run of our own."""
        told = self._told()
        return str(told.get("from")) if told else None

    def _told(self) -> dict[str, Any]:
        told = self.resolved().get("imported") if (self.reader.folder / RESOLVED).exists() else None
        return told if isinstance(told, dict) else {}

    def resolved(self) -> dict[str, Any]:
        """The resolved recipe; empty when the folder has none that can be read."""
        try:
            return self.reader.resolved()
        except GropiusError as error:
            self._problem(str(error))
            return {}

    def objective(self) -> Objective | None:
        """The run's objective; None when the folder does not say."""
        document = self.resolved().get("objective")
        if not isinstance(document, dict):
            return None
        try:
            return override(
                Objective(), {axis: fields for axis, fields in document.items() if isinstance(fields, dict)}
            )
        except GropiusError as error:
            self._problem(f"resolved.json: objective not understood: {error}")
            return None

    def metrics(self) -> dict[int, dict[str, Any]]:
        """Metrics by step, re-read only when the file has grown."""
        path = self.reader.folder / METRICS
        rows: dict[int, dict[str, Any]] = self._cached(("metrics",), path, self.reader.metrics_by_step)
        return rows

    def steps(self) -> list[int]:
        """Steps that have a rollout file."""
        return self.reader.steps()

    def signature(self, step: int) -> tuple[int, int]:
        """Size and time of change of a step's file; (0, 0) when there is none."""
        return _signature(rollout_file(self.reader.folder, step))

    def revision(self) -> str:
        """Changes whenever the run has something new to show."""
        steps = self.steps()
        sizes = [_signature(self.reader.folder / name)[0] for name in (METRICS, FINDINGS)]
        parts = [*sizes, len(steps), steps[-1] if steps else 0, self.reader.live]
        return "-".join(str(int(part)) for part in parts)

    def table(self, step: int, columns: Sequence[str]) -> pa.Table | None:
        """Some columns of a step; None when the file is missing or damaged."""
        key = ("table", step, *columns)
        return self._cached(key, rollout_file(self.reader.folder, step), lambda: self.reader.table(step, columns))

    def records(self, step: int, group_id: str, member: int | None = None) -> list[ResponseRecord]:
        """The responses of one group (or one of them): only the row groups that hold them are read.

        Empty when the group is not there, or the file is damaged (said in `problems`).
        """
        path = rollout_file(self.reader.folder, step)
        found: list[pa.Table] = []
        try:
            with pq.ParquetFile(path, page_checksum_verification=True) as file:
                for row_group in range(file.num_row_groups):
                    if not _may_hold(file, row_group, group_id):
                        continue
                    keys = file.read_row_group(row_group, columns=["group_id", "member"])
                    wanted = pc.equal(keys.column("group_id"), group_id)
                    if member is not None:
                        wanted = pc.and_(wanted, pc.equal(keys.column("member"), member))
                    if pc.any(wanted).as_py():
                        found.append(_some_rows(file, row_group, wanted))
            return from_table(pa.concat_tables(found)) if found else []
        except FileNotFoundError:
            return []
        except (OSError, ValueError, KeyError, pa.ArrowException) as error:
            first = str(error).splitlines()[0] if str(error) else type(error).__name__
            self._problem(f"{path}: damaged ({first}); skipped")
            return []

    def findings(self) -> list[dict[str, Any]]:
        """What the doctor found: as stored, else as of the last `examine`."""
        stored = [finding for finding in self.reader.findings() if isinstance(finding, dict)]
        return stored or self._examined

    def examine(self) -> list[dict[str, Any]]:
        """Let the doctor look at the records as they are now; nothing is written."""
        from gropius.doctor import examine, read_log

        found = examine(read_log(self.reader.folder, "gropius"))
        self._examined = [finding.as_dict() for finding in found.findings]
        return self.findings()

    def _cached(self, key: tuple[Any, ...], path: Path, make: Any) -> Any:
        """What `make` reads from the file, made again when the file has changed; what was said of it is then void."""
        signature, kept = _signature(path), self._kept.get(key)
        if kept is not None and kept[0] == signature:
            self._kept.move_to_end(key)
            return kept[1]
        if kept is not None:
            self.reader.problems[:] = [text for text in self.reader.problems if not text.startswith(f"{path}:")]
        value = make()
        self._kept[key] = (signature, value)
        while len(self._kept) > KEPT_TABLES:
            self._kept.popitem(last=False)
        return value

    def _problem(self, text: str) -> None:
        if text not in self.reader.problems:
            self.reader.problems.append(text)


def strict(value: Any) -> Any:
    """A JSON-able copy in which a number that is not finite is null.

    >>> strict({"a": [1.0, float("nan")]})
    {'a': [1.0, None]}
    """
    if isinstance(value, dict):
        return {str(key): strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [strict(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value


def _signature(path: Path) -> tuple[int, int]:
    try:
        status = path.stat()
    except OSError:
        return 0, 0
    return status.st_size, status.st_mtime_ns


def _some_rows(file: pq.ParquetFile, row_group: int, wanted: pa.ChunkedArray) -> pa.Table:
    """Some rows of a row group, a column at a time, so that never more than one whole column is in memory."""
    names = file.schema_arrow.names
    columns = [file.read_row_group(row_group, columns=[name]).filter(wanted).column(name) for name in names]
    return pa.table(dict(zip(names, columns, strict=True)))


def _may_hold(file: pq.ParquetFile, row_group: int, group_id: str) -> bool:
    """False only when the row group's own statistics exclude the id."""
    column = file.schema_arrow.get_field_index("group_id")
    statistics = file.metadata.row_group(row_group).column(column).statistics if column >= 0 else None
    if statistics is None or not statistics.has_min_max:
        return True
    return bool(statistics.min <= group_id <= statistics.max)
