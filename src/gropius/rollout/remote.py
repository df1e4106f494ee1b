"""An engine in another process: a server beside it, and a client that is an `Engine` like any other.

Requests and completions travel as frames (`distributed.wire`): no pickle, no code. Whoever connects says the run's
secret first. A lost connection is `EngineLost`; because a response's random numbers belong to it, drawing it again
elsewhere gives the same response.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hmac
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from gropius.distributed.wire import HEAD, Codec, sizes
from gropius.errors import DataError, EngineError
from gropius.rollout.engine import Engine
from gropius.types import Completion, Request, Sampling

CODEC = Codec((Request, Sampling, Completion))
CONNECT_S = 30.0


class EngineLost(EngineError):
    """The process of an engine is gone, or cannot be reached."""


@dataclass(frozen=True)
class Address:
    """Where an engine listens, and what it is called when it is lost."""

    host: str
    port: int
    name: str


async def read_frame(reader: asyncio.StreamReader) -> Any:
    """The next value. Errors: asyncio.IncompleteReadError at the end, EngineError for what is no frame."""
    start = await reader.readexactly(HEAD.size)
    return CODEC.decode(start + await reader.readexactly(sum(sizes(start))))


class EngineServer:
    """Serves an engine from a thread of its own, on one address. The engine's weights are changed by others, between
    responses.
    """

    def __init__(self, engine: Engine, secret: str, host: str = "127.0.0.1", port: int = 0) -> None:
        self.engine, self._secret = engine, secret
        self._loop = asyncio.new_event_loop()
        self._stopped = asyncio.Event()
        self._ready = threading.Event()
        self._fault: OSError | None = None
        self.host, self.port = host, port
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()
        self._ready.wait()
        if self._fault is not None:
            raise EngineError(f"an engine cannot listen on {host}: {self._fault.strerror}") from self._fault

    def close(self) -> None:
        """Stop listening, drop who is connected."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stopped.set)
            self._thread.join(timeout=CONNECT_S)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._listen())
        finally:
            self._ready.set()
            self._loop.close()

    async def _listen(self) -> None:
        try:
            server = await asyncio.start_server(self._serve, self.host, self.port)
        except OSError as fault:
            self._fault = fault
            return
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        await self._stopped.wait()
        server.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        jobs: dict[int, asyncio.Task[None]] = {}
        try:
            hello = await asyncio.wait_for(read_frame(reader), CONNECT_S)
            if not isinstance(hello, str) or not hmac.compare_digest(hello.encode(), self._secret.encode()):
                return
            while True:
                message = await read_frame(reader)
                number = int(message["id"])
                if "cancel" in message:
                    if number in jobs:
                        jobs.pop(number).cancel()
                    continue
                jobs[number] = asyncio.ensure_future(self._answer(number, message["request"], writer))
                jobs[number].add_done_callback(functools.partial(_forget, jobs, number))
        except (OSError, EOFError, EngineError, KeyError, TypeError, ValueError, TimeoutError):
            return  # the caller is gone, or never was one of ours
        finally:
            for job in list(jobs.values()):
                job.cancel()
            writer.close()

    async def _answer(self, number: int, request: Request, writer: asyncio.StreamWriter) -> None:
        answer: dict[str, Any] = {"id": number}
        try:
            answer["completion"] = await self.engine.complete(request)
        except DataError as error:
            answer |= {"error": str(error), "data": True}
        except EngineError as error:
            answer |= {"error": str(error), "data": False}
        with contextlib.suppress(OSError):
            writer.write(CODEC.encode(answer))
            await writer.drain()


def _forget(jobs: dict[int, asyncio.Task[None]], number: int, job: asyncio.Task[None]) -> None:
    jobs.pop(number, None)


@dataclass(eq=False)
class _Line:
    """One connection, which belongs to one event loop."""

    loop: asyncio.AbstractEventLoop
    writer: asyncio.StreamWriter
    waiting: dict[int, asyncio.Future[Any]] = field(default_factory=dict)
    reading: asyncio.Task[None] | None = None
    broken: str = ""


class RemoteEngine:
    """The client. Connects when it is first asked in an event loop; a loop that ends takes the connection with it."""

    def __init__(self, address: Address, secret: str) -> None:
        self.address, self._secret = address, secret
        self._line: _Line | None = None
        self._opening: asyncio.Lock | None = None
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
        self._numbers += 1
        number = self._numbers
        future: asyncio.Future[Any] = line.loop.create_future()
        line.waiting[number] = future
        try:
            line.writer.write(CODEC.encode({"id": number, "request": request}))
            answer = await future
        except asyncio.CancelledError:
            if not line.broken:
                line.writer.write(CODEC.encode({"id": number, "cancel": True}))
            raise
        finally:
            line.waiting.pop(number, None)
        if "error" in answer:
            raise DataError(answer["error"]) if answer["data"] else EngineError(answer["error"])
        found: Completion = answer["completion"]
        return found

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
        loop = asyncio.get_running_loop()
        if self._line is None or self._line.loop is not loop:
            self._line, self._opening = None, asyncio.Lock()
        assert self._opening is not None
        async with self._opening:
            if self._line is None:
                self._line = await self._open(loop)
            line = self._line
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
        line = _Line(loop, writer)
        line.reading = loop.create_task(self._read(line, reader))
        return line

    async def _read(self, line: _Line, reader: asyncio.StreamReader) -> None:
        why = "the connection ended"
        try:
            while True:
                answer = await read_frame(reader)
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


@dataclass
class Loss:
    """An engine that was lost, why, and how many responses were drawn again elsewhere."""

    name: str
    reason: str
    requeued: int = 0


class EnginePool:
    """Several engines as one. Siblings go to one engine, which computes their prompt once; groups go where least waits.

    An engine that is lost is passed over from then on, and what it had under way is drawn by the others, once.
    note: told of every loss. requeue = False: a loss is the caller's. Errors: EngineLost of the last one.
    """

    def __init__(
        self,
        engines: Sequence[tuple[str, Engine]],
        note: Callable[[str], None] = lambda text: None,
        *,
        requeue: bool = True,
    ) -> None:
        self._engines = dict(engines)
        self._requeue = requeue
        self._load = dict.fromkeys(self._engines, 0)
        self._home: dict[tuple[int, ...], str] = {}
        self._note = note
        self.losses: dict[str, Loss] = {}

    async def complete(self, request: Request) -> Completion:
        """Draw one response, wherever."""
        group = request.stream[:-1]
        while True:
            name = self._choose(group)
            self._load[name] += 1
            try:
                return await self._engines[name].complete(request)
            except EngineLost as error:
                self._lose(name, error)
            finally:
                if name in self._load:
                    self._load[name] -= 1

    def set_policy(self, version: int, digest: str) -> None:
        """The weights changed: everybody's do."""
        self._home.clear()
        for engine in self._engines.values():
            engine.set_policy(version, digest)

    def rest(self) -> None:
        """Nothing is drawn for a while."""
        for engine in self._engines.values():
            engine.rest()

    async def close(self) -> None:
        """Close all that are left."""
        for engine in self._engines.values():
            await engine.close()

    def _choose(self, group: tuple[int, ...]) -> str:
        home = self._home.get(group)
        if home is None or home not in self._engines:
            home = self._home[group] = min(self._engines, key=lambda name: (self._load[name], name))
        return home

    def _lose(self, name: str, error: EngineLost) -> None:
        if name in self._engines:
            if len(self._engines) == 1 or not self._requeue:
                raise error
            del self._engines[name], self._load[name]
            self.losses[name] = Loss(name, str(error))
            self._note(f"{error}; what it had under way is drawn again by the {len(self._engines)} that are left")
        self.losses[name].requeued += 1
