"""The runs that may be shown, each under an id that is safe in an address. No path ever comes from a request."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence
from pathlib import Path

from gropius.errors import RunFolderError
from gropius.records.writer import METRICS, RESOLVED, ROLLOUTS
from gropius.viewer.foreign import ForeignLog, is_foreign
from gropius.viewer.index import RunIndex
from gropius.viewer.store import RunStore


class Library:
    """Run folders by id, in the order given. A folder of runs stands for all in it, those that appear later too.

    A log of another trainer is made a run folder in the cache (without one, in a folder that ends with this library),
    and made again under the same id when the log has grown.
    """

    def __init__(self, folders: Sequence[Path], cache: Path | None = None) -> None:
        self._cache = cache
        self._own: tempfile.TemporaryDirectory[str] | None = None
        self._logs: dict[str, ForeignLog] = {}
        self._ids: dict[Path, str] = {}
        self._stores: dict[str, RunStore] = {}
        self._indexes: dict[str, RunIndex] = {}
        self._given: list[Path] = []
        for path in map(Path, folders):
            if is_foreign(path):
                self._import(path)
            elif not _runs_in(path):
                raise RunFolderError(
                    f"{path}: neither a run folder, nor a folder that holds runs, nor a log that is known"
                )
            else:
                self._given.append(path)
                self._take(path)

    def _take(self, given: Path) -> None:
        for path in _runs_in(given):
            if path not in self._ids:
                run_id = self._free_id(path)
                self._stores[run_id] = RunStore(run_id, path)
                self._ids[path] = run_id

    def _import(self, path: Path) -> None:
        if self._cache is None and self._own is None:
            self._own = tempfile.TemporaryDirectory(prefix="gropius-view-")
        place = Path(self._own.name) if self._own is not None else Path(str(self._cache)) / "imported"
        log = ForeignLog(path, place)
        run_id = self._free_id(log.folder)
        self._logs[run_id], self._stores[run_id] = log, RunStore(run_id, log.folder)

    def follow_now(self) -> None:
        """Read every log of another trainer that has changed, and wait for it."""
        for log in self._logs.values():
            log.read_again()
        self._follow()

    def _follow(self) -> None:
        for run_id, log in self._logs.items():
            log.look()
            store = self._stores[run_id]
            if store.reader.folder != log.folder:
                self._stores[run_id] = store = RunStore(run_id, log.folder)
                self._indexes.pop(run_id, None)
            store.said = log.problem

    def ids(self) -> list[str]:
        """Ids of all runs, in order; looks for new ones, and for what is new in logs of other trainers."""
        self._follow()
        for folder in self._given:
            self._take(folder)
        return list(self._stores)

    def store(self, run_id: str) -> RunStore | None:
        """The run of this id; None when there is none."""
        self.ids()
        return self._stores.get(run_id)

    def index(self, run_id: str) -> RunIndex:
        """The run's index, started when first asked for."""
        if run_id not in self._indexes:
            kept = None if run_id in self._logs else self._cache
            self._indexes[run_id] = RunIndex(self._stores[run_id], kept)
        return self._indexes[run_id]

    def _free_id(self, path: Path) -> str:
        base = re.sub(r"[^A-Za-z0-9._-]+", "-", path.resolve().name).strip("-.") or "run"
        candidate, number = base, 2
        while candidate in self._stores:
            candidate, number = f"{base}-{number}", number + 1
        return candidate


def _runs_in(folder: Path) -> list[Path]:
    if _is_run(folder):
        return [folder]
    if not folder.is_dir():
        return []
    return sorted(entry for entry in folder.iterdir() if entry.is_dir() and _is_run(entry))


def _is_run(folder: Path) -> bool:
    return any((folder / name).exists() for name in (RESOLVED, METRICS, ROLLOUTS))
