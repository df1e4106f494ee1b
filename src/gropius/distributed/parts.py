"""What the controller of a run handles: its parts, what they need, and where they are placed. No torch, no Ray."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from gropius.distributed.launch import LOST

Kind = Literal["rank", "engine", "reward host"]
LEASE = 0.6  # of lost_after_s: a keeper gives up its process before the controller gives up the keeper


class Gone(Exception):
    """A keeper cannot be asked any more; the text says why."""


class Post(Protocol):
    """A keeper somewhere (`distributed.keeper`), asked without waiting."""

    def ask(self, method: str, *arguments: Any) -> Any:
        """Begin a call; a token for `Cluster.answers`."""
        ...


class Cluster(Protocol):
    """Where parts are placed."""

    def place(self, needs: Sequence[Need], spread: bool) -> list[Post]:
        """One keeper for each need, all or none, as soon as there is room; what they are asked before then waits.

        spread: on as many machines as there are, else on as few.
        """
        ...

    def answers(self, tokens: Sequence[Any], wait_s: float) -> dict[Any, Any]:
        """What calls gave that are over; a `Gone` for a keeper that is lost. Waits until all are, at most so long."""
        ...

    def release(self, posts: Sequence[Post]) -> None:
        """Give places back, whatever runs there."""
        ...

    def describe(self) -> str:
        """What there is, in words."""
        ...


@dataclass(frozen=True)
class Need:
    """What a part takes of a machine."""

    cpus: float = 1.0
    gpus: float = 0.0


@dataclass(frozen=True)
class Job:
    """What is to run. words: the verb and its arguments. rewards: hosts of reward workers. folder: where all run.

    needs: what one of each kind takes. recipe: the resolved one, for engines. lost_after_s: whoever does not answer for
    so long is lost. deadline_s: for finding room. restarts: of the ranks together, and of each engine and reward host.
    """

    words: Sequence[str]
    ranks: int
    engines: int
    rewards: int
    needs: Mapping[Kind, Need]
    recipe: Mapping[str, Any]
    restarts: int
    deadline_s: float
    lost_after_s: float
    secret: str
    folder: str
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(eq=False)
class Part:
    """One process of the run. pending: the look that is under way, and since when."""

    kind: Kind
    number: int
    post: Post
    machine: str = ""
    address: str = ""
    port: int = 0
    pid: int = 0
    seen: Mapping[str, Any] = field(default_factory=dict)
    pending: tuple[Any, float] | None = None
    gone: str = ""
    started: int = 1

    @property
    def name(self) -> str:
        """What messages call it."""
        return f"{self.kind} {self.number} (process {self.pid} on {self.machine})"

    @property
    def code(self) -> int | None:
        """Its exit code, minus a signal's number; None while it runs."""
        code: int | None = self.seen.get("code")
        return code

    def end_of_it(self) -> str:
        """How it was lost."""
        if self.gone:
            return f"{self.name} was lost: {self.gone}"
        if self.code == LOST:
            return f"{self.name} lost sight of another"
        if self.code is not None and self.code < 0:
            return f"{self.name} was ended by {signal.Signals(-self.code).name}"
        return f"{self.name} ended with exit code {self.code}"

    @property
    def lost(self) -> bool:
        """True when it ended in any other way than by itself and well."""
        return bool(self.gone) or self.code not in (None, 0)
