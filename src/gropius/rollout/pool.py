"""Several engines as one, of which some may be lost, and may come back."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from gropius.rollout.engine import Engine
from gropius.rollout.remote import EngineLost
from gropius.types import Completion, Request


@dataclass
class Loss:
    """An engine that was lost, why, and how many responses were drawn again elsewhere."""

    name: str
    reason: str
    requeued: int = 0


class EnginePool:
    """Several engines as one. Siblings go to one engine, which computes their prompt once; groups go where least waits.

    An engine that is lost is passed over, and what it had under way is drawn by the others, once. When none is left,
    `revive` may bring one back. note: told of every loss. requeue = False: a loss is the caller's.
    Errors: EngineLost of the last one.
    """

    def __init__(
        self,
        engines: Sequence[tuple[str, Engine]],
        note: Callable[[str], None] = lambda text: None,
        *,
        requeue: bool = True,
        revive: Callable[[str], Awaitable[Engine]] | None = None,
    ) -> None:
        self.engines: dict[str, Engine] = {}
        self._requeue, self._revive = requeue, revive
        self._reviving: asyncio.Task[None] | None = None
        self._load: dict[str, int] = {}
        self._home: dict[tuple[int, ...], str] = {}
        self._note = note
        self.losses: dict[str, Loss] = {}
        for name, engine in engines:
            self.add(name, engine)

    def add(self, name: str, engine: Engine) -> None:
        """One more, or one that is back."""
        self.engines[name], self._load[name] = engine, 0

    def drop(self, name: str) -> None:
        """One less."""
        del self.engines[name], self._load[name]

    async def complete(self, request: Request) -> Completion:
        """Draw one response, wherever."""
        group = request.stream[:-1]
        while True:
            name = self._choose(group)
            self._load[name] += 1
            engine = self.engines[name]
            try:
                return await engine.complete(request)
            except EngineLost as error:
                self.lose(name, engine, error)
                self.losses[name].requeued += 1
                if not self.engines:
                    await self._back(name, error)
            finally:
                if self.engines.get(name) is engine:
                    self._load[name] -= 1

    def set_policy(self, version: int, digest: str) -> None:
        """The weights changed: everybody's do."""
        self.forget()
        for engine in self.engines.values():
            engine.set_policy(version, digest)

    def forget(self) -> None:
        """No engine holds the prompt of any group any more."""
        self._home.clear()

    def rest(self) -> None:
        """Nothing is drawn for a while."""
        for engine in self.engines.values():
            engine.rest()

    async def close(self) -> None:
        """Close all that are left."""
        for engine in self.engines.values():
            await engine.close()

    def lose(self, name: str, engine: Engine, error: EngineLost) -> None:
        """Pass an engine over from now on; nothing where that is known already. Errors: the error, when it is final."""
        if self.engines.get(name) is not engine:
            return
        if not self._requeue or (len(self.engines) == 1 and self._revive is None):
            raise error
        self.drop(name)
        self.losses[name] = Loss(name, str(error))
        left = len(self.engines)
        by = f"by the {left} that are left" if left else "by it, started again"
        self._note(f"{error}; what it had under way is drawn again {by}")

    async def _back(self, name: str, error: EngineLost) -> None:
        """Wait for the engine to be back; all who wait share one start."""
        if self._revive is None:
            raise error
        if self._reviving is None or self._reviving.done():
            self._reviving = asyncio.get_running_loop().create_task(self._bring_back(name))
        await asyncio.shield(self._reviving)

    async def _bring_back(self, name: str) -> None:
        assert self._revive is not None
        self.add(name, await self._revive(name))

    def _choose(self, group: tuple[int, ...]) -> str:
        home = self._home.get(group)
        if home is None or home not in self.engines:
            home = self._home[group] = min(self.engines, key=lambda name: (self._load[name], name))
        return home
