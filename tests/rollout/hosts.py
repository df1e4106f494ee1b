"""Engines apart from the trainer's, in threads: another copy of the model, the same server and the same wire."""

from __future__ import annotations

import copy
import dataclasses

from gropius.models.load import LoadedModel
from gropius.rollout.apart import Apart, Engines
from gropius.rollout.remote import Address
from gropius.rollout.server import EngineServer, HeldWeights
from gropius.rollout.torch_engine import TorchEngine

SECRET = "a secret"


class InThread:
    """A host. dies_after: completions until its connection is cut, as by the end of its process; None: never."""

    def __init__(self, number: int, loaded: LoadedModel, secret: str = SECRET, dies_after: int | None = None) -> None:
        own = dataclasses.replace(loaded, model=copy.deepcopy(loaded.model))
        for parameter in own.model.parameters():  # what is trained begins as another policy
            if parameter.requires_grad:
                parameter.data.mul_(0.5)
        self.engine = TorchEngine(own)
        self.drawn: list[tuple[int, ...]] = []
        self.server = EngineServer(self.engine, secret, weights=HeldWeights(own, self.engine))
        self.address = Address(self.server.host, self.server.port, f"engine {number}")
        self.describes = self.engine.describe()
        self._dies_after, self._complete = dies_after, self.engine.complete
        self.engine.complete = self._counted  # type: ignore[method-assign]

    async def _counted(self, request):
        completion = await self._complete(request)
        if request.stream[1:2] >= (0,):  # the probe's have a negative step
            self.drawn.append(request.stream)
            if self._dies_after is not None and len(self.drawn) > self._dies_after:
                self.server._loop.call_soon(self.server._stopped.set)
                raise RuntimeError("killed")
        return completion

    def ended(self) -> str:
        """How a process would have ended."""
        return "signal SIGKILL" if not self.server._thread.is_alive() else ""

    def end(self) -> None:
        """Stop it."""
        self.server.close()


def engines(loaded: LoadedModel, count: int = 1, restarts: int = 3, dies: dict | None = None, note=lambda text: None):
    """Engines in threads, and the hosts: the first ones by number, then those that were started again.

    dies: place in that list → completions it lives for.
    """
    hosts: list[InThread | None] = [None] * count

    def start(number: int) -> InThread:
        place = number if hosts[number] is None else len(hosts)
        host = InThread(number, loaded, dies_after=(dies or {}).get(place))
        if place == number:
            hosts[number] = host
        else:
            hosts.append(host)
        return host

    return Engines(loaded, start, Apart(count, SECRET, restarts, 1e-3), note), hosts


def engine(loaded: LoadedModel) -> Engines:
    """One engine in a thread."""
    return engines(loaded)[0]
