"""Engines in processes of their own: handed the weights after every step, watched, started again when they are lost.

The weights travel tensor by tensor as frames; the digest of what arrived is the policy's, or the hand-over is refused,
and then a probe compares the engine's log-probabilities of a few tokens with the trainer's.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray

from gropius.models.load import DTYPES, LoadedModel
from gropius.rollout.pool import EnginePool, Loss
from gropius.rollout.remote import Address, EngineLost, HandOver, RemoteEngine
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
    """An `Engine` of several processes. Whoever makes it closes it, and with it the processes."""

    def __init__(self, loaded: LoadedModel, start: Start, apart: Apart, note: Callable[[str], None]) -> None:
        self._loaded, self._start, self._apart, self._note = loaded, start, apart, note
        self._hosts: dict[str, Host] = {}
        self._pool = EnginePool([], note, revive=self._revive)
        self._policy = (0, "")
        self._kept: dict[str, NDArray[Any]] | None = None
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
        if self._apart.keep:
            self._kept = {name: value.copy() for name, value in self._live()}
        asyncio.run(self._everybody())

    def rest(self) -> None:
        """Nothing: what they hold is theirs."""

    async def close(self) -> None:
        """End every process."""
        await self._pool.close()
        await asyncio.to_thread(self._end)

    async def _everybody(self) -> None:
        """Hand over to all; who is lost on the way is started again first."""
        self._pool.forget()
        done: list[HandOver] = []
        pending = self._names
        while pending:
            for name in pending:
                if name not in self._pool.engines:
                    self._pool.add(name, await self._again(name))
            engines = [cast(RemoteEngine, self._pool.engines[name]) for name in pending]
            answers = await asyncio.gather(*map(self._equip, engines), return_exceptions=True)
            for name, answer in zip(pending, answers, strict=True):
                if isinstance(answer, EngineLost):
                    self._pool.drop(name)
                elif isinstance(answer, BaseException):
                    raise answer
                else:
                    done.append(answer)
            pending = [name for name in pending if name not in self._pool.engines]
        self.transfer = Transfer(self._policy[0], sum(one.bytes for one in done), max(one.seconds for one in done))

    async def _equip(self, engine: RemoteEngine) -> HandOver:
        deadline_s = self._apart.deadline_s
        try:
            async with asyncio.timeout(deadline_s):
                done = await self._hand_over(engine)
                await self._look(engine)
        except TimeoutError:
            late = f"{engine.name} did not take the weights over within {deadline_s:g} s (cluster.deadline_s)"
            self._note(late)
            raise EngineLost(late) from None
        return done

    async def _hand_over(self, engine: RemoteEngine) -> HandOver:
        return await engine.hand_over(self._live() if self._kept is None else self._kept.items(), *self._policy)

    async def _look(self, engine: RemoteEngine) -> None:
        """The probe of one engine, against the trainer's weights as they are."""
        vocabulary = int(cast(torch.Tensor, self._loaded.model.get_input_embeddings().weight).shape[0])
        asked = probe.probe_requests(vocabulary, self._loaded.context_length, self._policy[0])
        drawn = await asyncio.gather(*map(engine.complete, asked))
        dtype = DTYPES[self._apart.dtype]
        self.last_probe = probe.compare(self._loaded, dtype, asked, drawn)
        probe.require_agreement(self.last_probe, self._apart.bound, engine.name, dtype)

    async def _revive(self, name: str) -> RemoteEngine:
        """The engine, started again in the middle of a collection, with the weights that this draws from."""
        engine = await self._again(name)
        await self._hand_over(engine)
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

    def _live(self) -> Iterator[tuple[str, NDArray[Any]]]:
        """What the trainer trains, by name, tied tensors once."""
        seen: set[int] = set()
        for name, tensor in self._loaded.model.state_dict(keep_vars=True).items():
            if id(tensor) not in seen and (self._loaded.adapter is None or tensor.requires_grad):
                seen.add(id(tensor))
                yield name, np.asarray(tensor.detach().cpu().numpy())

    def _end(self) -> None:
        for host in list(self._hosts.values()):
            host.end()
        self._hosts.clear()
