"""An episode played at an OpenEnv server: the reply goes out as an action, an observation comes back. No torch."""

from __future__ import annotations

import json
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

from gropius.types import EnvironmentStep, Message


class Client(Protocol):
    """What is used of the library's synchronous client. A result has `observation`, `reward` and `done`."""

    def reset(self, **options: Any) -> Any:
        """The first observation of an episode."""
        ...

    def step(self, action: Mapping[str, Any]) -> Any:
        """The answer to an action."""
        ...

    def close(self) -> None:
        """End the session."""
        ...


@dataclass(frozen=True)
class Server:
    """How to talk to it. connect: a fresh session. action: the field that the reply is put in. observation: the field
    that the model is shown, "" for the whole observation as JSON.
    """

    connect: Callable[[], Client]
    action: str
    observation: str = ""


@dataclass
class OpenEnv:
    """One episode. `opening` is what the server said to this seed before; another word now is a RuntimeError.

    The last step has raw and part `openenv`: the sum of all rewards of the episode. What the server or the connection
    does wrong is a RuntimeError, which voids the episode.
    """

    server: Server
    seed: int
    opening: str
    total: float = 0.0
    _client: Client | None = field(default=None, init=False)
    _end: Callable[[], Any] | None = field(default=None, init=False)  # also when the episode is dropped half-way

    def start(self) -> Sequence[Message]:
        """The first observation, once."""
        if self._client is not None:
            raise RuntimeError("this environment was started before; it is single-use, make a new one")
        self._client = asked(self.server.connect)
        self._end = weakref.finalize(self, _quietly, self._client.close)
        said = observed(self.server, asked(lambda: self._require().reset(seed=self.seed)))
        if said != self.opening:
            raise RuntimeError(f"the server opens seed {self.seed} differently than before; it must follow its seed")
        return ({"role": "user", "content": said},)

    def step(self, reply: str) -> EnvironmentStep:
        """Send a reply."""
        result = asked(lambda: self._require().step({self.server.action: reply}))
        if result.reward is not None:
            gained = float(result.reward)
            if not math.isfinite(gained):
                raise RuntimeError(f"the server gave the reward {result.reward}")
            self.total += gained
        message: Message = {"role": "user", "content": observed(self.server, result)}
        if not result.done:
            return EnvironmentStep((message,))
        if self._end is not None:
            self._end()
        return EnvironmentStep((message,), done=True, parts={"openenv": self.total}, raw=self.total)

    def _require(self) -> Client:
        if self._client is None:
            raise RuntimeError("this environment was not started")
        return self._client


def observed(server: Server, result: Any) -> str:
    """What the model is shown of a result. Raises RuntimeError when the server shows no such field."""
    observation = result.observation
    if not server.observation:
        return json.dumps(observation, ensure_ascii=False, default=str)
    if not isinstance(observation, Mapping) or server.observation not in observation:
        known = ", ".join(observation) if isinstance(observation, Mapping) else type(observation).__name__
        raise RuntimeError(f'the observation has no field "{server.observation}"; found: {known}')
    return str(observation[server.observation])


def _quietly(close: Callable[[], None]) -> None:
    with suppress(Exception):  # the boundary: a session that is over anyway
        close()


def asked(call: Callable[[], Any]) -> Any:
    """The answer of the server. Raises RuntimeError for whatever the library raises."""
    try:
        return call()
    except Exception as fault:  # the boundary: somebody else's client, connection and server
        raise RuntimeError(f"the OpenEnv server did not answer: {type(fault).__name__}: {fault}") from fault
