"""Engines in processes of their own: handed the weights after every step, watched, started again when they are lost.

The weights travel tensor by tensor as frames, each to every engine before the next; the digest of what arrived is the
policy's, or the hand-over is refused, and then a probe compares the engines' log-probabilities of a few tokens with the
trainer's.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from gropius.models.load import DTYPES, LoadedModel
from gropius.rollout.pool import EnginePool, Loss
from gropius.rollout.remote import Address, EngineLost, RemoteEngine
from gropius.rollout.source import Source, Whole
from gropius.rollout.vllm import probe
from gropius.types import Completion, Request

LOOKS, BETWEEN_LOOKS_S = 40, 0.05  # for the end of a process whose connection broke


class Host(Protocol):
    """An engine in another process, however that was started."""

    address: Address
    describes: str

    def ended(self) -> str:
        """How the process ended, with its last words; "" while it lives, or where nobody knows."""
        ...

    def end(self) -> None:
        """End it and all that it started."""
        ...


Start = Callable[[int], Host]  # the n-th engine, ready to be handed weights. Errors: EngineError


@dataclass(frozen=True)
class Apart:
    """count: engines. secret: what they ask for. restarts: how often lost ones are started again, all together.

    bound: nats that the probe allows on a token, computed in `dtype`. keep: hold a copy of what was handed over, for an
    engine that is started again while the trainer's own weights move. deadline_s: for one hand-over; who is late is
    lost.
    """

    count: int
    secret: str
    restarts: int
    bound: float
    dtype: str = "float32"
    keep: bool = False
    deadline_s: float = 600.0


@dataclass(frozen=True)
class Transfer:
    """The last hand-over: the version, bytes to all engines, and seconds until the slowest said that it holds them."""

    version: int
    bytes: int
    seconds: float


class Engines:
    """An `Engine` of several processes. Whoever makes it closes it, and with it the processes.

    source: where the weights that they are handed lie; by itself the model, whole in this process.
    """

    def __init__(self, loaded: LoadedModel, start: Start, apart: Apart, note: Callable[[str], None]) -> None:
        self._loaded, self._start, self._apart, self._note = loaded, start, apart, note
        self._hosts: dict[str, Host] = {}
        self._pool = EnginePool([], note, revive=self._revive)
        self._policy = (0, "")
        self._kept: dict[str, Tensor] | None = None
        self._dtype = DTYPES[apart.dtype]
        self.source: Source = Whole(loaded, self._dtype)
        self._restarts = 0
        self.transfer: Transfer | None = None
        self.last_probe: probe.Probe | None = None
        self._names = [f"engine {number}" for number in range(apart.count)]
        with contextlib.ExitStack() as undone:
            undone.callback(self._end)
            with ThreadPoolExecutor(apart.count) as together:
                started = {name: together.submit(self._begin, name) for name in self._names}
            for name, job in started.items():
                self._pool.add(name, job.result())
            undone.pop_all()

    @property
    def loaded(self) -> LoadedModel:
        """The trainer's model, whose weights they are handed."""
        return self._loaded

    @property
    def losses(self) -> dict[str, Loss]:
        """Engines that were lost so far."""
        return self._pool.losses

    def describe(self) -> str:
        """One line: how many, where, and how one describes itself."""
        first = self._hosts[self._names[0]]
        return f"engines in processes of their own: {len(self._names)}, on {first.address.host}; {first.describes}"

    async def complete(self, request: Request) -> Completion:
        """Draw one response. Errors: EngineError, naming who was lost, when none can be started any more."""
        return await self._pool.complete(request)

    def set_policy(self, version: int, digest: str) -> None:
        """Hand the trainer's weights to every engine, lost ones started again first, and compare a few tokens.

        Errors: EngineError when an engine ends up with other weights; MismatchError when its numbers are not theirs.
        """
        self._policy = (version, digest)
        asyncio.run(self._everybody())

    def hand_over(self, version: int) -> str:
        """The same where nobody knows the digest yet: it is that of what is sent."""
        self.set_policy(version, "")
        return self._policy[1]

    def cut(self) -> None:
        """End what is being drawn as "cancelled", with what it drew so far; from within the event loop that asked."""
        for engine in self._pool.engines.values():
            cast(RemoteEngine, engine).cut()

    def rest(self) -> None:
        """Nothing: what they hold is theirs."""

    async def close(self) -> None:
        """End every process."""
        await self._pool.close()
        await asyncio.to_thread(self._end)

    async def _everybody(self) -> None:
        """Hand over to all; who is lost on the way is started again first."""
        self._pool.forget()
        began, moved, pending = time.perf_counter(), 0, self._names
        while pending:
            for name in pending:
                if name not in self._pool.engines:
                    self._pool.add(name, await self._again(name))
            engines = {name: cast(RemoteEngine, self._pool.engines[name]) for name in pending}
            moved += await self._send(engines)
            seconds = time.perf_counter() - began
            await self._all(engines, [self._ask(engine) for engine in engines.values()])
            for name in set(pending) - set(engines):
                self._pool.drop(name)
            pending = [name for name in pending if name not in engines]
        self.transfer = Transfer(self._policy[0], moved, seconds)

    async def _send(self, engines: dict[str, RemoteEngine], kept: Mapping[str, Tensor] | None = None) -> int:
        """All weights to engines, then version and digest; bytes. Who is lost on the way is taken out. kept: these."""
        moved = 0
        if kept is None:
            self._kept = {} if self._apart.keep else None
        for bucket in self.source.buckets() if kept is None else ({name: value} for name, value in kept.items()):
            frames = [(name, tensor.detach().cpu().numpy()) for name, tensor in bucket.items()]
            if self._kept is not None and kept is None:
                self._kept |= {name: torch.from_numpy(value.copy()) for name, value in frames}
            await self._all(engines, [engine.take(frames) for engine in engines.values()])
            moved += len(engines) * sum(value.nbytes for _, value in frames)
            frames.clear()
            if not engines:
                return moved
        self._policy = (self._policy[0], self._policy[1] or self.source.digest())
        await self._all(engines, [engine.settle(*self._policy) for engine in engines.values()])
        return moved

    async def _all(self, engines: dict[str, RemoteEngine], work: Sequence[Coroutine[Any, Any, None]]) -> None:
        """What each engine is to do, within the deadline; who is lost over it is taken out of `engines`."""
        doing = [self._in_time(engine, one) for engine, one in zip(engines.values(), work, strict=True)]
        answers = await asyncio.gather(*doing, return_exceptions=True)
        for name, answer in zip(list(engines), answers, strict=True):
            if isinstance(answer, EngineLost):
                del engines[name]
            elif isinstance(answer, BaseException):
                raise answer

    async def _in_time(self, engine: RemoteEngine, work: Coroutine[Any, Any, None]) -> None:
        deadline_s = self._apart.deadline_s
        try:
            async with asyncio.timeout(deadline_s):
                await work
        except TimeoutError:
            late = f"{engine.name} did not take the weights over within {deadline_s:g} s (cluster.deadline_s)"
            self._note(late)
            raise EngineLost(late) from None

    async def _ask(self, engine: RemoteEngine) -> None:
        """The probe of one engine, against the trainer's weights as they are."""
        vocabulary = int(cast(torch.Tensor, self._loaded.model.get_input_embeddings().weight).shape[0])
        asked = probe.probe_requests(vocabulary, self._loaded.context_length, self._policy[0])
        drawn = await asyncio.gather(*map(engine.complete, asked))
        self.last_probe = probe.differences(self.source.logprobs(asked, drawn), drawn)
        probe.require_agreement(self.last_probe, self._apart.bound, engine.name, self._dtype)

    async def _revive(self, name: str) -> RemoteEngine:
        """The engine, started again in the middle of a collection, with the weights that this draws from."""
        engines = {name: await self._again(name)}
        engine = engines[name]
        await self._send(engines, self._kept)
        if not engines:
            raise EngineLost(f"{engine.name} was lost while it was handed the weights")
        return engine

    async def _again(self, name: str) -> RemoteEngine:
        words = await self._last_words(name)
        if self._restarts >= self._apart.restarts:
            raise EngineLost(
                f"{words}; engines were started again {self._restarts} times "
                f"(cluster.restarts = {self._apart.restarts}). Mend the cause, then resume the run"
            )
        self._restarts += 1
        self._note(f"{words}; it is started again ({self._restarts} of {self._apart.restarts})")
        return await asyncio.to_thread(self._begin, name)

    def _begin(self, name: str) -> RemoteEngine:
        """Start the process of an engine, in the place of one that was lost."""
        lost = self._hosts.pop(name, None)
        if lost is not None:
            lost.end()
        host = self._hosts[name] = self._start(int(name.rpartition(" ")[2]))
        return RemoteEngine(host.address, self._apart.secret)

    async def _last_words(self, name: str) -> str:
        """How it ended. Its connection breaks before its end can be seen, so that is waited for, but not for long."""
        host = self._hosts.get(name)
        if host is None:
            return f"{name} was lost"
        how = host.ended()
        for _ in range(LOOKS):
            if how:
                break
            await asyncio.sleep(BETWEEN_LOOKS_S)
            how = host.ended()
        return f"{name} was lost" + (f": {how}" if how else "")

    def _end(self) -> None:
        for host in list(self._hosts.values()):
            host.end()
        self._hosts.clear()
