"""An engine in another process, seen from here: an `Engine` like any other, that can also be handed weights.

A lost connection is `EngineLost`; because a response's random numbers belong to it, drawing it again elsewhere gives
the same response. What is asked for in one turn of the event loop travels in one frame.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from numpy.typing import NDArray

from gropius.errors import DataError, EngineError
from gropius.rollout.engine import empty_completion
from gropius.rollout.server import CODEC, CONNECT_S, read_frame
from gropius.types import Completion, Request


class EngineLost(EngineError):
    """The process of an engine is gone, or cannot be reached."""


@dataclass(frozen=True)
class Address:
    """Where an engine listens, and what it is called when it is lost."""

    host: str
    port: int
    name: str


@dataclass(eq=False)
class _Line:
    """One connection, which belongs to one event loop."""

    loop: asyncio.AbstractEventLoop
    writer: asyncio.StreamWriter
    waiting: dict[int, asyncio.Future[Any]] = field(default_factory=dict)
    unsent: list[tuple[int, Request]] = field(default_factory=list)
    reading: asyncio.Task[None] | None = None
    broken: str = ""

    def ask(self, number: int, request: Request) -> None:
        """Send a request, with all others of this turn of the event loop."""
        if not self.unsent:
            self.loop.call_soon(self._flush)
        self.unsent.append((number, request))

    def take_back(self, number: int) -> None:
        """Nobody waits for a request any more."""
        left = [pair for pair in self.unsent if pair[0] != number]
        if len(left) == len(self.unsent) and not self.broken:
            self.writer.write(CODEC.encode({"cancel": number}))
        self.unsent[:] = left

    def cut(self) -> None:
        """End all that was asked so far."""
        self._flush()
        if not self.broken:
            self.writer.write(CODEC.encode({"cut": True}))

    def _flush(self) -> None:
        if self.unsent and not self.broken:
            self.writer.write(CODEC.encode({"requests": self.unsent}))
        self.unsent.clear()


class RemoteEngine:
    """The client. Connects when it is first asked in an event loop; a loop that ends takes the connection with it."""

    def __init__(self, address: Address, secret: str) -> None:
        self.address, self._secret = address, secret
        self._line: _Line | None = None
        self._opening: asyncio.Task[_Line] | None = None
        self._numbers = 0
        self._closed = False

    @property
    def name(self) -> str:
        """What a message calls it."""
        return f"{self.address.name} at {self.address.host}:{self.address.port}"

    async def complete(self, request: Request) -> Completion:
        """Draw one response over there. Raises EngineLost when the process is gone."""
        if self._closed:
            raise EngineError("the engine was closed")
        line = await self._connected()
        if not request.left:
            return empty_completion("cancelled", 0, "")
        number, future = self._expect(line)
        try:
            line.ask(number, dataclasses.replace(request, bound=None))  # a bound is not seen from afar: `cut`
            found: Completion = await self._answer(future)
        except asyncio.CancelledError:
            line.take_back(number)
            raise
        finally:
            line.waiting.pop(number, None)
        return found

    async def take(self, tensors: Iterable[tuple[str, NDArray[Any]]]) -> None:
        """Send tensors that replace those over there, one by one; `settle` ends it. Errors: EngineLost."""
        line = await self._connected()
        try:
            for name, value in tensors:
                line.writer.write(CODEC.encode({"tensor": name, "value": value}))
                await line.writer.drain()
        except OSError as error:
            raise EngineLost(f"{self.name} was lost: {error}") from error

    async def settle(self, version: int, digest: str) -> None:
        """All tensors were sent; what is drawn from now on carries version and digest.

        Errors: EngineLost; EngineError when it ends up with other weights than those of `digest`, or was drawing.
        """
        line = await self._connected()
        number, future = self._expect(line)
        try:
            line.writer.write(CODEC.encode({"id": number, "version": version, "digest": digest}))
            await self._answer(future)
        except OSError as error:
            raise EngineLost(f"{self.name} was lost: {error}") from error
        finally:
            line.waiting.pop(number, None)

    def _expect(self, line: _Line) -> tuple[int, asyncio.Future[Any]]:
        self._numbers += 1
        future = line.waiting[self._numbers] = line.loop.create_future()
        return self._numbers, future

    async def _answer(self, future: asyncio.Future[Any]) -> Any:
        answer = await future
        if "error" in answer:
            raise DataError(answer["error"]) if answer["data"] else EngineError(f"{self.name}: {answer['error']}")
        return answer["completion"]

    def cut(self) -> None:
        """End what is being drawn for this event loop as "cancelled", with what it drew so far."""
        if self._line is not None and self._line.loop is asyncio.get_running_loop():
            self._line.cut()

    def set_policy(self, version: int, digest: str) -> None:
        """Nothing: its own process takes the weights over, and stamps what it draws with what it has."""

    def rest(self) -> None:
        """Nothing: its own process knows when."""

    async def close(self) -> None:
        """Hang up; the other process lives on."""
        self._closed = True
        if self._line is not None and self._line.reading is not None:
            self._line.reading.cancel()

    async def _connected(self) -> _Line:
        """The connection of this event loop. All who wait for it go on in one turn of the loop."""
        loop = asyncio.get_running_loop()
        if self._opening is None or self._opening.get_loop() is not loop:
            self._opening = loop.create_task(self._open(loop))
        line = await asyncio.shield(self._opening)
        if line.broken:
            raise EngineLost(line.broken)
        return line

    async def _open(self, loop: asyncio.AbstractEventLoop) -> _Line:
        try:
            reader, writer = await asyncio.wait_for(
                asyncio.open_connection(self.address.host, self.address.port), CONNECT_S
            )
        except (OSError, TimeoutError) as error:
            raise EngineLost(f"{self.name} was lost: {error or type(error).__name__}") from error
        writer.write(CODEC.encode(self._secret))
        line = self._line = _Line(loop, writer)
        line.reading = loop.create_task(self._read(line, reader))
        return line

    async def _read(self, line: _Line, reader: asyncio.StreamReader) -> None:
        why = "the connection ended"
        try:
            while True:
                answer = await read_frame(reader)
                if "broken" in answer:
                    why = str(answer["broken"])
                    return
                future = line.waiting.get(int(answer["id"]))
                if future is not None and not future.done():
                    future.set_result(answer)
        except (OSError, EOFError) as error:
            why = str(error) or why
        except EngineError as error:
            why = str(error)
        finally:
            line.broken = f"{self.name} was lost: {why}"
            for future in list(line.waiting.values()):
                if not future.done():
                    future.set_exception(EngineLost(line.broken))
            line.writer.close()
