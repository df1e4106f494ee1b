"""Batches that are drawn before the step they are trained in: asynchronous training of an exactly known staleness.

    max_staleness = s: the batch of step t + s is drawn wholly from the weights after step t - 1, while t is trained

so that it is s versions old when its own step comes, whatever was fast or slow; the first s + 1 batches are drawn from
the first weights. Engines in processes of their own draw at the same time as the trainer trains; an engine on the
trainer's weights draws first. Either way the same responses come out, and s = 0 is the synchronous run.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from gropius.rollout.apart import Engines
from gropius.rollout.collect import Begun
from gropius.rollout.select import Selected
from gropius.train.beside import Beside
from gropius.train.order import TaskOrder
from gropius.train.require import require_own_weights, require_verdicts, too_void

if TYPE_CHECKING:
    from gropius.train.loop import Run


@dataclass(frozen=True, eq=False)
class Drawn:
    """A batch for a step. after: the step whose weights it was drawn from, with their digest. position: in the order of
    data before it.
    """

    step: int
    after: int
    digest: str
    position: int
    batch: Selected

    @property
    def staleness(self) -> int:
        """Versions between the weights that drew it and those that its step begins with."""
        return self.step - 1 - self.after


Draw = Callable[[int], Coroutine[Any, Any, Selected]]


class Ahead:
    """The batches of a run, in the order of their steps. draw: those of a step.

    A run that goes on begins with those that its checkpoint holds; one that was too void to be trained on is drawn
    again, and all after it.
    """

    def __init__(self, run: Run, order: TaskOrder, draw: Draw) -> None:
        self._run, self._order, self._draw = run, order, draw
        self._most = run.plan.train.max_staleness
        self._apart = isinstance(run.player.engine, Engines)
        if run.state.stream:
            rewind(run, order)
        sound = takewhile(lambda drawn: not too_void(drawn.batch, run.plan.void_limit), run.ahead[: self._most])
        self._queue: deque[Drawn] = deque(sound)
        if len(self._queue) < len(run.ahead):
            order.position = run.ahead[len(self._queue)].position
        self._under_way: Beside[Drawn] | None = None
        self._waited = self._drew = 0.0

    def take(self, step: int) -> Drawn:
        """The batch of a step; where none is there, it is drawn now."""
        self._waited = self._drew = 0.0
        ahead = min(max(1, self._most), self._run.plan.train.steps + 1 - step)
        while len(self._queue) < ahead:
            began = time.perf_counter()
            self._admit(asyncio.run(self._drawn(step + len(self._queue))))
            self._waited += time.perf_counter() - began
        drawn = self._queue.popleft()
        require_verdicts(self._run, drawn.batch, step)
        return drawn

    def begin(self, step: int) -> None:
        """Draw the batch that is trained `max_staleness` steps after this one, now or beside."""
        last = step + self._most
        if not self._most or last > self._run.plan.train.steps:
            return
        if self._apart:
            self._under_way = Beside(lambda: self._drawn(last))
        else:
            began = time.perf_counter()
            self._admit(asyncio.run(self._drawn(last)))
            self._waited += time.perf_counter() - began

    def settle(self) -> None:
        """Wait until nothing is being drawn: weights may be handed over."""
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            began = time.perf_counter()
            self._admit(under_way.result())
            self._waited += time.perf_counter() - began

    def fresh(self) -> Drawn | None:
        """A batch from the weights as they are; None where the run draws no more."""
        self.settle()
        return next((drawn for drawn in self._queue if drawn.digest == self._run.digest), None)

    def waiting(self) -> tuple[Drawn, ...]:
        """What was drawn and is not trained yet."""
        assert self._under_way is None
        return tuple(self._queue)

    def begun(self, batch: Selected) -> tuple[Begun, ...]:
        """Groups that the next step goes on with."""
        return batch.waiting

    def memory(self) -> dict[str, Any]:
        """Nothing: what waits says all."""
        return {}

    def close(self) -> None:
        """End what is being drawn."""
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            under_way.cancel()

    def measured(self, drawn: Drawn, seconds: float) -> dict[str, float]:
        """Metrics of a step of so many seconds; nothing for a synchronous run."""
        stale = float(drawn.staleness)
        return measured((stale, stale), (self._waited, self._drew), seconds) if self._most else {}

    async def _drawn(self, step: int) -> Drawn:
        run, position, began = self._run, self._order.position, time.perf_counter()
        batch = await self._draw(step)
        self._drew += time.perf_counter() - began
        return Drawn(step, run.state.step, run.digest, position, batch)

    def _admit(self, drawn: Drawn) -> None:
        self._run.player.engine.rest()
        require_own_weights(self._run, drawn.batch)
        self._queue.append(drawn)


def measured(stale: tuple[float, float], spent: tuple[float, float], seconds: float) -> dict[str, float]:
    """Metrics of a step. stale: versions, mean and largest; spent: seconds that the trainer waited, and of drawing."""
    waited, drew = spent
    return {
        "staleness/mean": stale[0],
        "staleness/max": stale[1],
        "idle/trainer_s": waited,
        "idle/engine_s": max(0.0, seconds - drew),
        "sampling_time_s": drew,
        "training_time_s": max(0.0, seconds - waited),
    }


def rewind(run: Run, order: TaskOrder) -> None:
    """Give up what a checkpoint holds beside what was trained: its tasks are drawn again, from the weights as they are.

    For a run that goes on otherwise than the one that it comes from.
    """
    state = run.state
    if state.stream:
        order.position -= state.stream["untrained"]
    elif run.ahead:
        order.position = run.ahead[0].position
    state.position, state.stream, state.waiting, run.ahead = order.position, {}, [], ()
