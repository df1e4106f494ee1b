"""Being asked to stop: the first signal finishes the step, the second stops at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """Listens for SIGINT and SIGTERM while it is entered; `asked` is the signal's number, or 0.

    A second signal raises KeyboardInterrupt wherever the program is. Outside the main thread, where Python delivers no
    signals, it listens to nothing and can still be asked by `ask`.
    """

    def __init__(self, note: Callable[[str], None] = lambda text: None):
        self.asked = 0
        self._note = note
        self._before: dict[int, Any] = {}

    def ask(self, number: int = signal.SIGINT) -> None:
        """Ask to stop after this step."""
        self.asked = number

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                self._before[number] = signal.signal(number, self._received)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def _received(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.ask(number)
        self._note("asked to stop: this step is finished and saved first; ask again to stop at once")
