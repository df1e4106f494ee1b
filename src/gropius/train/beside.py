"""One coroutine in a thread with an event loop of its own, while the caller does something else."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Beside(Generic[T]):
    """Begins at once; `result` waits for it, `cancel` ends it."""

    def __init__(self, work: Callable[[], Coroutine[Any, Any, T]]) -> None:
        self._work = work
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[T] | None = None
        self._begun = threading.Event()
        self._found: list[T] = []
        self._fault: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="gropius-beside", daemon=True)
        self._thread.start()

    def result(self) -> T:
        """What it came to. Errors: what it raised."""
        self._thread.join()
        if self._fault is not None:
            raise self._fault
        return self._found[0]

    def cancel(self) -> None:
        """End it, and wait until it has given back what it holds."""
        self._begun.wait()
        if self._loop is not None and self._task is not None:
            with suppress(RuntimeError):  # it is over, and its loop closed
                self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join()

    def _run(self) -> None:
        try:
            self._found.append(asyncio.run(self._main()))
        except BaseException as fault:  # the caller's to handle, in the caller's thread
            self._fault = fault
        finally:
            self._begun.set()

    async def _main(self) -> T:
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        self._begun.set()
        return await self._work()
