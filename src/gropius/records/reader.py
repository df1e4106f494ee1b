"""Read a run folder, live or finished: what is damaged is said and skipped, never raised half-way. No torch."""

from __future__ import annotations

import json
import re
from collections.abc import Container, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from gropius.errors import RunFolderError
from gropius.records.schema import ROLLOUT_SCHEMA, ResponseRecord, from_table
from gropius.records.writer import CHECKPOINTS, FINDINGS, METRICS, RESOLVED, ROLLOUTS, lock_holder, rollout_file


class RunReader:
    """One run folder. `problems` collects, once each, what was damaged and skipped so far.

    Errors: RunFolderError when there is no folder, or nothing in it is a run's.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.problems: list[str] = []
        if not self.folder.is_dir():
            raise RunFolderError(f"{folder}: there is no such run folder")
        if not any((self.folder / name).exists() for name in (RESOLVED, METRICS, ROLLOUTS)):
            raise RunFolderError(f"{folder}: holds no {RESOLVED}, {METRICS} or {ROLLOUTS}/, so this is no run folder")

    @property
    def live(self) -> bool:
        """True while a process is writing the folder."""
        return lock_holder(self.folder) is not None

    def resolved(self) -> dict[str, Any]:
        """The resolved recipe as stored. Errors: RunFolderError when it is missing or damaged."""
        path = self.folder / RESOLVED
        try:
            document = json.loads(path.read_bytes())
        except OSError as error:
            raise RunFolderError(f"{path}: cannot be read: {error.strerror}") from error
        except ValueError as error:
            raise RunFolderError(f"{path}: is damaged: {error}") from error
        if not isinstance(document, dict):
            raise RunFolderError(f"{path}: is damaged: not a table of keys")
        return document

    def metrics(self) -> list[dict[str, Any]]:
        """Rows of metrics.jsonl in order; values that were not finite are floats again.

        A half-written last line (the run is being written, or was killed) and damaged lines are skipped and said.
        """
        return list(self._metric_rows())

    def metrics_by_step(self, names: Container[str] | None = None) -> dict[int, dict[str, Any]]:
        """The metrics of each step, rows of the same step merged, the later one winning.

        names: only these are kept in memory; None keeps all.
        """
        merged: dict[int, dict[str, Any]] = {}
        for row in self._metric_rows():
            kept = row if names is None else {name: value for name, value in row.items() if name in names}
            merged.setdefault(row["step"], {}).update(kept)
        return dict(sorted(merged.items()))

    def _metric_rows(self) -> Iterator[dict[str, Any]]:
        path = self.folder / METRICS
        if not path.is_file():
            return
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):
                    self._problem(f"{path}:{number}: the last line is half-written; skipped")
                    return
                row = _json_row(line)
                if row is None:
                    self._problem(f"{path}:{number}: not a row of metrics; skipped")
                    continue
                row.update({name: float(text) for name, text in row.pop("non_finite", {}).items()})
                yield row

    def steps(self) -> list[int]:
        """Steps that have a rollout file, ascending."""
        return _numbered(self.folder / ROLLOUTS, r"step-(\d+)\.parquet")

    def checkpoints(self) -> list[int]:
        """Steps that have a complete checkpoint, ascending."""
        found = _numbered(self.folder / CHECKPOINTS, r"step-(\d+)")
        return [step for step in found if (self.folder / CHECKPOINTS / f"step-{step:06d}" / "COMPLETE").is_file()]

    def table(self, step: int, columns: Sequence[str] | None = None) -> pa.Table | None:
        """A step's responses as a table (all columns, or the named ones); None when the file is missing or damaged."""
        path = rollout_file(self.folder, step)
        wanted = list(columns) if columns is not None else None
        try:
            with pq.ParquetFile(path, page_checksum_verification=True) as file:
                table = file.read(columns=wanted)
        except FileNotFoundError:
            self._problem(f"{path}: missing; skipped")
            return None
        except (OSError, ValueError, pa.ArrowException) as error:
            self._problem(f"{path}: damaged ({_first_line(error)}); skipped")
            return None
        if strange := _strange_columns(table.schema, wanted or ROLLOUT_SCHEMA.names):
            self._problem(f"{path}: column {', '.join(strange)} missing or of another type; skipped")
            return None
        return table

    def rollouts(self, step: int) -> list[ResponseRecord]:
        """A step's responses as records; empty when the file is missing or damaged."""
        table = self.table(step)
        if table is None:
            return []
        try:
            return from_table(table)
        except (ValueError, pa.ArrowException) as error:
            self._problem(f"{rollout_file(self.folder, step)}: damaged ({_first_line(error)}); skipped")
            return []

    def findings(self) -> list[dict[str, Any]]:
        """The stored findings; empty when there are none or the file is damaged."""
        path = self.folder / FINDINGS
        if not path.is_file():
            return []
        try:
            findings = json.loads(path.read_bytes())
        except ValueError as error:
            self._problem(f"{path}: damaged ({error}); skipped")
            return []
        return findings if isinstance(findings, list) else []

    def _problem(self, text: str) -> None:
        if text not in self.problems:
            self.problems.append(text)


def _json_row(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    well_formed = (
        isinstance(row, dict) and isinstance(row.get("step"), int) and isinstance(row.get("non_finite", {}), dict)
    )
    return row if well_formed else None


def _strange_columns(found: pa.Schema, wanted: Sequence[str]) -> list[str]:
    """Wanted columns of ROLLOUT_SCHEMA that are absent, or whose values are of another type."""
    kinds = {field.name: field.type for field in found}
    return [
        name for name in wanted if name in ROLLOUT_SCHEMA.names and kinds.get(name) != ROLLOUT_SCHEMA.field(name).type
    ]


def _numbered(folder: Path, pattern: str) -> list[int]:
    names = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
    return sorted(int(match.group(1)) for name in names if (match := re.fullmatch(pattern, name)))


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
