"""Write a run folder: one owner, whole files or none, strict JSON. No torch.

Every file is written under a temporary name, fsynced and renamed, so a reader never sees half of one. `metrics.jsonl`
is the exception: it only grows, one line by one write.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import re
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from gropius.errors import RunFolderError, RunHalted
from gropius.records import faults
from gropius.records.schema import REPEATED, ResponseRecord, clean_text, row_group_size, to_table

LOCK = "run.lock"
RESOLVED = "resolved.json"
METRICS = "metrics.jsonl"
FINDINGS = "findings.json"
ROLLOUTS = "rollouts"
CHECKPOINTS = "checkpoints"
LOGS = "logs"
TOKENIZER = "tokenizer.json"
MODEL = "model"  # of a warm start alone

Number = float | int | None


def rollout_file(folder: Path, step: int) -> Path:
    """The rollout file of a step.

    >>> rollout_file(Path("runs/a"), 7).as_posix()
    'runs/a/rollouts/step-000007.parquet'
    """
    return folder / ROLLOUTS / f"step-{step:06d}.parquet"


class RunWriter:
    """The only writer of a run folder, from `create` or `reopen` until `close`; a context manager.

    The lock is the operating system's: it ends with the process, however it ends, so there is no stale lock.
    """

    def __init__(self, folder: Path, lock: int, *, fsync: bool = False) -> None:
        self.folder = folder
        self._lock: int | None = lock
        self._fsync = fsync
        self._metrics = os.open(folder / METRICS, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    @classmethod
    def create(cls, folder: Path, document: Mapping[str, Any], *, fsync: bool = False) -> RunWriter:
        """Make a run folder and store the resolved recipe in it.

        document: what resolved.json holds. fsync: flush metrics.jsonl to the disk after every line.
        Errors: RunFolderError when the folder is taken, in use, or cannot be written.
        """
        try:
            refuse_taken(folder)
            folder.mkdir(parents=True, exist_ok=True)
            lock = _take_lock(folder)
        except OSError as error:
            raise RunFolderError(f"{folder}: cannot be made: {error.strerror}; write another out or name") from error
        with contextlib.ExitStack() as until_made:
            until_made.callback(os.close, lock)
            refuse_taken(folder)
            faults.reached("run.locked")
            write_json(folder / RESOLVED, document)
            faults.reached("run.described")
            for name in (ROLLOUTS, CHECKPOINTS, LOGS):
                (folder / name).mkdir(exist_ok=True)
            writer = cls(folder, lock, fsync=fsync)
            until_made.pop_all()
        return writer

    @classmethod
    def reopen(cls, folder: Path, *, last_step: int | None = None, fsync: bool = False) -> RunWriter:
        """Take an existing run folder to continue it; a half-written last line of metrics.jsonl is cut off.

        last_step: the step to go on from; what was recorded of later ones is taken back, for they will come again.
        Errors: RunFolderError when it is no run folder, or another process is writing it.
        """
        if not (folder / RESOLVED).is_file():
            raise RunFolderError(f"{folder}: no {RESOLVED} here, so this is no run folder")
        with contextlib.ExitStack() as until_made:
            try:
                lock = _take_lock(folder)
                until_made.callback(os.close, lock)
                _cut_half_line(folder / METRICS)
                for name in (ROLLOUTS, CHECKPOINTS, LOGS):
                    (folder / name).mkdir(exist_ok=True)
                writer = cls(folder, lock, fsync=fsync)
            except OSError as error:
                raise RunFolderError(f"{folder}: cannot be written: {error.strerror}") from error
            until_made.pop_all()
        if last_step is not None:
            writer.rewind(last_step)
        return writer

    @property
    def metrics_bytes(self) -> int:
        """The length of metrics.jsonl as it is now; with it, `rewind` comes back to this very line."""
        return os.fstat(self._metrics).st_size

    def rewind(self, last_step: int, metrics_bytes: int | None = None) -> None:
        """Take back what was recorded after a checkpoint: rollouts of steps after `last_step`, and their metrics.

        metrics_bytes: the length of metrics.jsonl at the checkpoint; without it, or where the file is not as long,
        lines of later steps go. Errors: RunFolderError when the folder cannot be written.
        """
        try:
            if metrics_bytes is not None and _is_line_end(self.folder / METRICS, metrics_bytes):
                os.ftruncate(self._metrics, metrics_bytes)
            else:
                _drop_later_lines(self.folder / METRICS, last_step)
                os.close(self._metrics)
                self._metrics = os.open(self.folder / METRICS, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            faults.reached("rewind.metrics")
            _drop_later_rollouts(self.folder, last_step)
            faults.reached("rewind.rollouts")
        except OSError as error:
            raise RunFolderError(f"{self.folder}: cannot be written: {error.strerror}") from error

    def describe(self, document: Mapping[str, Any]) -> None:
        """Replace resolved.json (harmless keys changed on resuming). Errors: RunHalted when the disk refuses."""
        write_json(self.folder / RESOLVED, document)

    def write_metrics(self, step: int, metrics: Mapping[str, Number]) -> None:
        """Append one line: the step, its metrics, and by name those that are not finite (null in place of the value).

        Errors: RunHalted when the disk refuses; the line is then taken back as a whole.
        """
        row: dict[str, Any] = {"step": step}
        strange = {}
        for name, value in metrics.items():
            number = _plain(value)
            if isinstance(number, float) and not math.isfinite(number):
                strange[name] = str(number)
                number = None
            row[name] = number
        if strange:
            row["non_finite"] = strange
        line = (json.dumps(row, allow_nan=False) + "\n").encode()
        size = os.fstat(self._metrics).st_size
        faults.reached("metrics.torn", lambda: os.write(self._metrics, line[: len(line) // 2]))
        try:
            written = os.write(self._metrics, line)
            if written < len(line):
                raise OSError(28, "No space left on device")
            if self._fsync:
                os.fsync(self._metrics)
        except OSError as error:
            os.ftruncate(self._metrics, size)
            raise _halted(self.folder / METRICS, error) from error
        faults.reached("metrics.written")

    def write_rollouts(self, step: int, records: Sequence[ResponseRecord], *, token_lists: bool = True) -> Path:
        """Write a step's responses; writing a step again replaces it. Errors: RunHalted when the disk refuses."""
        sink = pa.BufferOutputStream()
        table = to_table(records, token_lists=token_lists)
        pq.write_table(table, sink, row_group_size=row_group_size(records), compression="zstd",
                       write_page_checksum=True, use_dictionary=REPEATED)  # fmt: skip
        path = rollout_file(self.folder, step)
        write_whole(path, sink.getvalue())
        faults.reached("rollouts.written")
        return path

    def write_tokenizer(self, document: str) -> None:
        """Keep the tokenizer's own JSON, so that a reader can show tokens as text. Errors: RunHalted (disk)."""
        write_whole(self.folder / TOKENIZER, document.encode())

    def write_findings(self, findings: Sequence[Mapping[str, Any]]) -> None:
        """Replace findings.json. Errors: RunHalted when the disk refuses; ValueError for a non-finite number."""
        write_json(self.folder / FINDINGS, list(findings))

    def close(self) -> None:
        """Release the folder. May be called twice."""
        if self._lock is not None:
            os.close(self._metrics)
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> RunWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def delete_run(folder: Path) -> None:
    """Delete a run and its folder. No folder: nothing to do.

    Errors: RunFolderError when the folder holds no run, or a file that no run wrote, or is being written.
    """
    if not folder.exists():
        return
    if not (folder / RESOLVED).is_file():
        raise RunFolderError(f"{folder}: holds no run, so it is not deleted; write another name (--set name=…)")
    if foreign := sorted(entry.name for entry in folder.iterdir() if not _written_by_a_run(entry.name)):
        raise RunFolderError(
            f"{folder}: not deleted, as it holds what no run wrote: {', '.join(foreign)}; move it first"
        )
    lock = _take_lock(folder)
    try:
        shutil.rmtree(folder)
    except OSError as error:
        raise RunFolderError(f"{folder}: cannot be deleted: {error.strerror}") from error
    finally:
        os.close(lock)


def _written_by_a_run(name: str) -> bool:
    known = (LOCK, RESOLVED, METRICS, FINDINGS, ROLLOUTS, CHECKPOINTS, LOGS, MODEL, TOKENIZER)
    return name in known or _is_temporary(name)


def _is_temporary(name: str) -> bool:
    return name.startswith(".") and ".tmp-" in name


def write_whole(path: Path, data: bytes | pa.Buffer) -> None:
    """Write a file so that it is there whole or not at all: temporary name, fsync, rename, fsync of the folder.

    Errors: RunHalted naming the file when the disk refuses; the temporary file is removed.
    """
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    try:
        try:
            with temporary.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            faults.reached("file.written")
            temporary.replace(path)
            faults.reached("file.renamed")
        finally:
            temporary.unlink(missing_ok=True)
        sync_folder(path.parent)
    except OSError as error:
        raise _halted(path, error) from error


def write_json(path: Path, value: Any) -> None:
    """Write strict JSON whole, lone surrogates replaced. Errors: ValueError for NaN or infinity; RunHalted (disk)."""
    write_whole(path, (clean_text(json.dumps(value, allow_nan=False, ensure_ascii=False, indent=2)) + "\n").encode())


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries (a rename) to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def lock_holder(folder: Path) -> str | None:
    """Who is writing the run folder (`process 17 since 2026-01-31 10:00:00`), or None when nobody is."""
    try:
        descriptor = os.open(folder / LOCK, os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return _holder(os.pread(descriptor, 4096, 0))
    else:
        return None
    finally:
        os.close(descriptor)


def _take_lock(folder: Path) -> int:
    """Hold the lock, and write into it who holds it."""
    descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = _holder(os.pread(descriptor, 4096, 0))
        os.close(descriptor)
        raise RunFolderError(
            f"{folder}: in use by {holder}; wait for it or stop it, or write another name (--set name=…)"
        ) from error
    started = time.strftime("%Y-%m-%d %H:%M:%S")
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps({"pid": os.getpid(), "started": started}).encode(), 0)
    return descriptor


def _holder(data: bytes) -> str:
    try:
        content = json.loads(data)
        return f"process {int(content['pid'])} since {content['started']}"
    except (ValueError, KeyError, TypeError):
        return "another process"


def refuse_taken(folder: Path) -> None:
    """Refuse a folder that a new run must not use: it holds a run, or anything else.

    Errors: RunFolderError saying which, and how to go on.
    """
    if folder.exists() and not folder.is_dir():
        raise RunFolderError(f"{folder}: is a file, and a run folder goes there; write another out or name")
    if not folder.exists() or all(entry.name == LOCK or _is_temporary(entry.name) for entry in folder.iterdir()):
        return  # what a run leaves that was killed before it had written its recipe
    other = "write another name (--set name=…) or out (--set out=…)"
    if not (folder / RESOLVED).is_file():
        raise RunFolderError(f"{folder}: is not empty and holds no run; {other}")
    if holder := lock_holder(folder):
        raise RunFolderError(f"{folder}: in use by {holder}; wait for it or stop it, or {other}")
    raise RunFolderError(
        f"{folder}: already holds a run; continue it with `gropius resume {folder}`, replace it with --overwrite, "
        f"or {other}"
    )


def _cut_half_line(path: Path) -> None:
    if not path.is_file():
        return
    with path.open("rb+") as file:
        data = file.read()
        if data and not data.endswith(b"\n"):
            file.truncate(data.rfind(b"\n") + 1)


def _is_line_end(path: Path, size: int) -> bool:
    """True when the first `size` bytes of a file are there and end with a line."""
    if size == 0:
        return path.is_file()
    try:
        with path.open("rb") as file:
            file.seek(size - 1)
            return file.read(1) == b"\n"
    except OSError:
        return False


def _drop_later_lines(metrics: Path, last_step: int) -> None:
    """Take back the lines of steps after `last_step`; damaged lines stay, for a reader to name."""
    if metrics.is_file():
        lines = metrics.read_bytes().splitlines(keepends=True)
        kept = [line for line in lines if _step_of(line) <= last_step]
        if len(kept) < len(lines):
            write_whole(metrics, b"".join(kept))


def _drop_later_rollouts(folder: Path, last_step: int) -> None:
    """Delete the responses and refused batches of steps after `last_step`, and temporary files that a kill left."""
    for path in (*(folder / ROLLOUTS).glob("step-*.parquet"), *(folder / LOGS).glob("refused-step-*.json")):
        number = re.search(r"step-(\d+)", path.name)
        if number and int(number.group(1)) > last_step:
            path.unlink()
    for place in (folder, folder / ROLLOUTS, folder / LOGS):
        for path in place.glob(".*.tmp-*"):
            path.unlink()


def _step_of(line: bytes) -> int:
    try:
        step = json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return -1
    return step if isinstance(step, int) else -1


def _plain(value: Any) -> Number:
    if value is None or isinstance(value, bool | int | float):
        return value
    number = value.item() if hasattr(value, "item") else value
    if isinstance(number, int | float):
        return number
    raise TypeError(f"a metric is a number, got {type(value).__name__}")


def _halted(path: Path, error: OSError) -> RunHalted:
    return RunHalted(
        f"{path}: cannot be written: {error.strerror}. Nothing half-written is left; make room, then continue the run"
    )
