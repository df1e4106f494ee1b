"""The engine's end of a talk between processes: requests come in, completions go out, and weights are taken over.

Everything travels as frames (`distributed.wire`): no pickle, no code. Whoever connects says the run's secret first.
Requests of one frame begin together, so that what shares a batch does not depend on the network.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import hmac
import threading
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from numpy.typing import NDArray
from torch import Tensor

from gropius.distributed.wire import HEAD, Codec, sizes
from gropius.errors import DataError, EngineError
from gropius.models.load import LoadedModel
from gropius.rollout.engine import Engine
from gropius.types import Bound, Completion, Request, Sampling

CODEC = Codec((Request, Sampling, Completion))
CONNECT_S = 30.0


class Weights(Protocol):
    """A model whose tensors are replaced one by one."""

    def put(self, name: str, value: NDArray[Any]) -> None:
        """One tensor. Errors: EngineError where there is none of this name and shape, or while responses are drawn."""
        ...

    def digest(self) -> str:
        """Of all weights as they are now."""
        ...


class HeldWeights:
    """A whole model of this process, overwritten in place while nobody draws from it."""

    def __init__(self, loaded: LoadedModel, engine: Engine) -> None:
        self._loaded, self._engine = loaded, engine
        self._tensors: dict[str, Tensor] = dict(loaded.model.state_dict(keep_vars=True))

    def put(self, name: str, value: NDArray[Any]) -> None:
        """See `Weights.put`."""
        into = self._tensors.get(name)
        if into is None or tuple(into.shape) != value.shape:
            raise EngineError(f"a tensor {name} {value.shape} was handed over, and the model here has none")
        if getattr(self._engine, "busy", 0):
            raise EngineError("weights were handed over while responses were being drawn from the ones before")
        with torch.no_grad():
            into.copy_(torch.from_numpy(value))

    def digest(self) -> str:
        """See `Weights.digest`."""
        return self._loaded.digest()


async def read_frame(reader: asyncio.StreamReader) -> Any:
    """The next value. Errors: asyncio.IncompleteReadError at the end, EngineError for what is no frame."""
    start = await reader.readexactly(HEAD.size)
    return CODEC.decode(start + await reader.readexactly(sum(sizes(start))))


@dataclass(eq=False)
class _Caller:
    """Who is connected. jobs: what is drawn for them; bound: of all of it, lowered when they cut it."""

    writer: asyncio.StreamWriter
    jobs: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    bound: Bound = field(default_factory=Bound)

    def cut(self) -> None:
        """End it all, with what was drawn."""
        self.bound.limit = 0
        self.bound = Bound()


class EngineServer:
    """Serves an engine from a thread of its own, on one address.

    weights: what whoever is connected may hand over; None: they are changed by others, between responses.
    """

    def __init__(
        self, engine: Engine, secret: str, host: str = "127.0.0.1", port: int = 0, weights: Weights | None = None
    ) -> None:
        self.engine, self._secret, self._weights = engine, secret, weights
        self._refused = ""
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
            with contextlib.suppress(RuntimeError):  # it has just closed by itself
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
        caller = _Caller(writer)
        try:
            hello = await asyncio.wait_for(read_frame(reader), CONNECT_S)
            if not isinstance(hello, str) or not hmac.compare_digest(hello.encode(), self._secret.encode()):
                return
            while True:
                self._hear(await read_frame(reader), caller)
        except (OSError, EOFError, EngineError, KeyError, TypeError, ValueError, TimeoutError):
            return  # the caller is gone, or never was one of ours
        except asyncio.CancelledError:
            return  # the server closes; asyncio would complain of a handler that was cancelled
        finally:
            for job in list(caller.jobs.values()):
                job.cancel()
            writer.close()

    def _hear(self, message: Any, caller: _Caller) -> None:
        jobs, writer = caller.jobs, caller.writer
        if "requests" in message:
            for number, request in message["requests"]:
                bounded = dataclasses.replace(request, bound=caller.bound)
                jobs[number] = asyncio.ensure_future(self._answer(number, bounded, writer))
                jobs[number].add_done_callback(functools.partial(_forget, jobs, number, writer))
        elif "cut" in message:
            caller.cut()
        elif "cancel" in message:
            if message["cancel"] in jobs:
                jobs.pop(message["cancel"]).cancel()
        elif "tensor" in message:
            self._put(message["tensor"], message["value"])
        else:
            writer.write(CODEC.encode({"id": message["id"]} | self._settle(message["version"], message["digest"])))

    def _put(self, name: str, value: NDArray[Any]) -> None:
        """Take a tensor; what is wrong with it is told when all are here."""
        try:
            if self._weights is None:
                raise EngineError("its weights are not handed over by wire")
            self._weights.put(name, value)
        except EngineError as error:
            self._refused = self._refused or str(error)

    def _settle(self, version: int, digest: str) -> dict[str, Any]:
        """The weights are all here: stamp with them what is drawn from now on."""
        refused, self._refused = self._refused, ""
        try:
            if refused or self._weights is None:
                raise EngineError(refused or "its weights are not handed over by wire")
            found = self._weights.digest()
            if found != digest:
                raise EngineError(f"it holds the weights {found[:12]} after the hand-over of {digest[:12]}")
            self.engine.set_policy(version, digest)
        except EngineError as error:
            return {"error": str(error), "data": False}
        return {"completion": None}

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


def _forget(
    jobs: dict[int, asyncio.Task[None]], number: int, writer: asyncio.StreamWriter, job: asyncio.Task[None]
) -> None:
    """A job is over. One that broke ends the connection, for all who wait at its other end; the cause is told first."""
    jobs.pop(number, None)
    fault = None if job.cancelled() else job.exception()
    if fault is not None:
        with contextlib.suppress(OSError):
            writer.write(CODEC.encode({"broken": f"{type(fault).__name__}: {fault}"}))
        writer.close()
