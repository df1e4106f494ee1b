"""Being asked to stop: the first signal finishes the step, the second stops at once, but not while weights move."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopRequest:
    """Listens for SIGINT, SIGTERM and SIGHUP while it is entered; `asked` is the first signal's number, or 0.

    A second signal raises KeyboardInterrupt wherever the program is, except inside `held`, where the weights move:
    there the third does. A signal that was ignored (SIGHUP under nohup) stays ignored. Outside the main thread, where
    Python delivers no signals, it listens to nothing and can still be asked by `ask`.
    """

    def __init__(self, note: Callable[[str], None] = lambda text: None):
        self.asked = 0
        self.moving = False
        self._times = 0
        self._note = note
        self._before: dict[int, Any] = {}

    def ask(self, number: int = signal.SIGINT) -> None:
        """Ask to stop after this step."""
        self.asked = number

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """While the weights and what is written of them belong together; `moving` stays True when it is broken."""
        self.moving = True
        yield
        self.moving = False

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._received)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def _received(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            _leave_terminal()
        self._times += 1
        if not self.asked:
            self.ask(number)
            self._say("asked to stop: this step is finished and saved first; ask again to stop at once")
        elif self.moving and self._times == 2:
            self._say(
                "the weights are moving: stops when they are saved, within this step; a third time loses the step"
            )
        else:
            raise KeyboardInterrupt

    def _say(self, text: str) -> None:
        # The program may have been interrupted in the middle of printing, or its terminal may be gone.
        with contextlib.suppress(RuntimeError, OSError):
            self._note(text)


def _leave_terminal() -> None:
    """The terminal is gone: what is still printed there goes nowhere, instead of failing."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        with contextlib.suppress(OSError):
            if os.isatty(descriptor):
                os.dup2(nowhere, descriptor)
    os.close(nowhere)
