"""The partners of episodes: an environment is opened and stepped here, beside the event loop where it may block.

A thread serves one call and ends with it; a call that never returns holds one of the places, and the run's deadline
names it. Nothing is waited for when a collection is cancelled.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TypeVar

from gropius.errors import DataError
from gropius.tasks.base import TaskSet
from gropius.types import Environment, EnvironmentStep, Message, Task

T = TypeVar("T")
Wait = Callable[[str], AbstractContextManager[None]]
PLACES = 16  # calls of blocking environments at once

# What a person's environment may raise and thereby void its episode. Not caught: memory, recursion, interrupts.
ENVIRONMENT_FAULTS = (
    ArithmeticError, AssertionError, AttributeError, LookupError, NameError, OSError, RuntimeError, TypeError,
    ValueError,
)  # fmt: skip


def no_wait(what: str) -> AbstractContextManager[None]:
    """Wait without telling anyone."""
    return nullcontext()


@dataclass
class Partners:
    """The environments of one collection. wait: told what is waited for, while it is."""

    tasks: TaskSet
    wait: Wait = no_wait
    _places: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(PLACES))

    async def open(self, task: Task) -> tuple[Environment | None, tuple[Message, ...]]:
        """A fresh environment, where the tasks have one, and the first messages.

        Raises DataError when it cannot start.
        """
        make = self.tasks.environment
        if make is None:
            return None, task.messages()

        def begun() -> tuple[Environment, tuple[Message, ...]]:
            environment = make(task)
            return environment, tuple(environment.start())

        try:
            return await self._call(begun, f"the start of the environment of {task.key}")
        except ENVIRONMENT_FAULTS as fault:  # the boundary: a person's environment
            raise DataError(f"{task.key}: its environment cannot start: {type(fault).__name__}: {fault}") from fault

    async def step(self, environment: Environment, reply: str, task: Task) -> EnvironmentStep | str:
        """The answer to a reply, or in words what the environment raised."""
        try:
            return await self._call(lambda: environment.step(reply), f"a step of the environment of {task.key}")
        except ENVIRONMENT_FAULTS as fault:  # the boundary: a person's environment
            return f"the environment raised {type(fault).__name__}: {fault}"

    async def _call(self, function: Callable[[], T], what: str) -> T:
        if not self.tasks.blocking:
            return function()
        with self.wait(what):
            async with self._places:
                return await beside(function)


async def beside(function: Callable[[], T]) -> T:
    """What a function returns or raises, in a thread of its own that nothing waits for when the program ends."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def deliver(result: Sequence[T], fault: BaseException | None) -> None:
        if done.done():
            return
        if fault is not None:
            done.set_exception(RuntimeError("StopIteration") if isinstance(fault, StopIteration) else fault)
        else:
            done.set_result(result[0])

    def work() -> None:
        result: Sequence[T] = ()
        fault: BaseException | None = None
        try:
            result = (function(),)
        except BaseException as raised:  # the boundary: it is raised again where the answer is awaited
            fault = raised
        with contextlib.suppress(RuntimeError):  # the loop was closed: nobody waits any more
            loop.call_soon_threadsafe(deliver, result, fault)

    threading.Thread(target=work, name="environment", daemon=True).start()
    return await done
