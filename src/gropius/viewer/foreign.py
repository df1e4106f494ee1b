"""Another trainer's log, made a run folder and made again while the log grows. No torch."""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gropius.doctor.imported import as_run, recognised
from gropius.errors import GropiusError
from gropius.records.writer import RESOLVED
from gropius.viewer.store import RunStore

LOOK_EVERY_S = 2.0
REST = 5.0


def is_foreign(path: Path) -> bool:
    """True for the log of another trainer."""
    return path.exists() and not (path / RESOLVED).exists() and recognised(path) is not None


@contextmanager
def opened(path: Path) -> Iterator[RunStore]:
    """A run folder as a store; the log of another trainer by way of a folder that ends with the block.

    Errors: RunFolderError when it is neither.
    """
    if not is_foreign(path):
        yield RunStore("run", path)
        return
    with tempfile.TemporaryDirectory(prefix="gropius-log-") as place:
        yield RunStore("run", as_run(path, Path(place)))


class ForeignLog:
    """A log that is followed. `folder` is the run folder of its newest reading; `problem` why there is no newer one.

    place: where its run folders lie. Errors: RunFolderError when the first reading fails.
    """

    def __init__(self, path: Path, place: Path) -> None:
        self._path, self._place = path, place
        self.folder = as_run(path, place)
        self.problem = ""
        self._outdated: Path | None = None
        self._due = time.monotonic() + LOOK_EVERY_S
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def look(self) -> None:
        """Read the log again if it has changed, in a thread; returns at once, and does nothing before it is due."""
        with self._lock:
            busy = self._thread is not None and self._thread.is_alive()
            if not busy and time.monotonic() >= self._due:
                self._thread = threading.Thread(target=self.read_again, daemon=True)
                self._thread.start()

    def read_again(self) -> None:
        """Read the log now; a file that is damaged, or half-written at this moment, leaves the last reading in place.

        The next look waits five times as long as this one took, so that a large log does not keep a core busy.
        """
        began = time.monotonic()
        try:
            folder = as_run(self._path, self._place)
            self.problem = ""
        except (GropiusError, OSError) as error:
            folder, self.problem = self.folder, f"shown as it was last read: {error}"
        if folder != self.folder:
            if self._outdated is not None:
                shutil.rmtree(self._outdated.parent, ignore_errors=True)
            self._outdated, self.folder = self.folder, folder
        self._due = time.monotonic() + max(LOOK_EVERY_S, REST * (time.monotonic() - began))
