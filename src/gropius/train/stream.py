"""A stream of groups: drawing goes on across the steps, and the weights are swapped while responses are on their way.

    at the beginning of step t, with the weights after step t - 1, groups are begun until (s + 1) P are not trained yet

with s = `train.max_staleness` and P prompts a step. Group n has the task, the id and the random numbers that it has in
the synchronous run: place n mod P of step n div P + 1.

    stale = "wait": step t trains on the groups of step t; who begins after t - 1 is trained by t + s: none is too old
    stale = "drop": step t trains on those that are complete first; one whose oldest token is older than s steps is
                    thrown away, and another is begun for it

Between two hand-overs lies a `Stretch`. Engines in processes of their own draw while the trainer trains, and stop when
it has new weights; an engine on the trainer's weights draws until the batch is full. What is then unfinished is gone on
with under the new weights, its beginning read again; every token keeps the version that drew it.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gropius.rollout import select, waiting
from gropius.rollout.apart import Engines
from gropius.rollout.collect import Begun, CollectPlan, Played
from gropius.rollout.engine import Engine
from gropius.rollout.select import Selected
from gropius.rollout.stretch import Stretch
from gropius.train.ahead import Drawn, measured, rewind
from gropius.train.beside import Beside
from gropius.train.deadline import within
from gropius.train.order import TaskOrder
from gropius.train.require import require_policy, require_verdicts, too_void
from gropius.types import Group, Task

if TYPE_CHECKING:
    from gropius.train.loop import Run

Collecting = Callable[[int], CollectPlan]


class Stream:
    """The batches of a run, as `Ahead` has them. collecting: how the groups of a step are drawn."""

    def __init__(self, run: Run, order: TaskOrder, collecting: Collecting) -> None:
        self._run, self._order, self._collecting = run, order, collecting
        train, rollout = run.plan.train, run.plan.rollout
        self._size, self._most, self._drops = rollout.prompts, train.max_staleness, train.stale == "drop"
        self._shape = [rollout.prompts, rollout.group_size]
        self._cut = _cut_of(run.player.engine) if train.stream == "between_tokens" else None
        self._apart = isinstance(run.player.engine, Engines)
        self._changed = threading.Condition()
        self._begun: dict[int, Begun] = {}
        self._over: dict[int, Drawn] = {}
        self._after: dict[int, int] = {}
        self._admitted = run.state.step * self._size
        self._stretch: Stretch | None = None
        self._under_way: Beside[list[Begun]] | None = None
        self._drawing = False
        self._waited = self._drew = 0.0
        self._stale = (0.0, 0.0)
        self._go_on()

    def take(self, step: int) -> Drawn:
        """The batch of a step, drawn as far as it is not there; drawing may go on until `settle`."""
        run, self._waited, self._drew = self._run, 0.0, 0.0
        self._after[run.learner.optimiser.steps] = step - 1
        self._after = {version: s for version, s in self._after.items() if s >= step - 2 - self._most}
        dropped, aborted = self._throw_away(step)
        resumed = [group for group in self._begun.values() if group.said]
        fresh = self._admit(step)
        began = time.perf_counter()
        self._draw(step)
        self._waited = time.perf_counter() - began
        groups = self._chosen(step)
        budget = replace(
            select.budget(groups, dropped, 1),
            begun=fresh,
            resumed=sum(len(group.said) for group in resumed),
            resumed_tokens=sum(group.tokens for group in resumed),
            aborted=sum(len(group.said) for group in aborted),
            aborted_tokens=sum(group.tokens for group in aborted),
        )
        batch = Selected(tuple(groups), tuple(dropped), budget, None)
        require_verdicts(run, batch, step)
        ages = step - 1 - np.concatenate([self._afters(_versions(group)) for group in groups])
        self._stale = (float(ages.mean()), float(ages.max())) if len(ages) else (0.0, 0.0)
        return Drawn(step, step - 1 - int(self._stale[1]), "" if ages.any() else run.digest, 0, batch)

    def begin(self, step: int) -> None:
        """Nothing: drawing goes on by itself where it can."""

    def settle(self) -> None:
        """Stop drawing, between tokens or between responses: weights may be handed over."""
        under_way, self._under_way = self._under_way, None
        if under_way is None or self._stretch is None:
            return
        began = time.perf_counter()
        self._stretch.stop_soon()
        self._leave(under_way.result())
        self._waited += time.perf_counter() - began

    def waiting(self) -> tuple[Drawn, ...]:
        """Groups that are complete and not trained yet, in the order in which they were."""
        return tuple(self._over.values())

    def begun(self, batch: Selected) -> tuple[Begun, ...]:
        """Groups that are on their way."""
        return tuple(self._begun.values())

    def memory(self) -> dict[str, Any]:
        """What a run that goes on must know besides: groups begun so far, and after which step a version was made."""
        return {
            "shape": self._shape,
            "admitted": self._admitted,
            "untrained": len(self._begun) + len(self._over),
            "after": [list(pair) for pair in self._after.items()],
        }

    def close(self) -> None:
        """End what is being drawn."""
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            under_way.cancel()

    def measured(self, drawn: Drawn, seconds: float) -> dict[str, float]:
        """Metrics of a step of so many seconds."""
        return measured(self._stale, (self._waited, self._drew), seconds)

    def _go_on(self) -> None:
        """Begin with what a checkpoint holds, where that is of such a stream; else its data is taken again."""
        run, memory = self._run, self._run.state.stream
        if memory.get("shape") != self._shape:
            rewind(run, self._order)
            return
        self._admitted, self._after = memory["admitted"], dict(memory["after"])
        for group in waiting.from_json(run.state.waiting, run.tasks):
            self._begun[self._number(group.step, group.index)] = group
        for drawn in run.ahead:
            if too_void(drawn.batch, run.plan.void_limit):
                self._begin(drawn.position, drawn.batch.groups[0].task)
            else:
                self._over[drawn.position] = drawn

    def _throw_away(self, step: int) -> tuple[list[Group], list[Begun]]:
        """Take out what would be too old for this step: complete groups, and those on their way."""
        if not self._drops:
            return [], []
        oldest = step - 1 - self._most
        over = [n for n, drawn in self._over.items() if self._is_before(oldest, _versions(drawn.batch.groups[0]))]
        begun = [n for n, group in self._begun.items() if self._is_before(oldest, _said_versions(group))]
        return [self._over.pop(n).batch.groups[0] for n in over], [self._begun.pop(n) for n in begun]

    def _admit(self, step: int) -> int:
        """Begin groups until as many as may be are not trained yet; how many."""
        steps = min(self._most + 1, self._run.plan.train.steps + 1 - step)
        fresh = max(0, steps * self._size - len(self._begun) - len(self._over))
        for task in self._order.take(fresh):
            self._begin(self._admitted, task)
            self._admitted += 1
        return fresh

    def _begin(self, number: int, task: Task) -> None:
        before, index = divmod(number, self._size)
        self._begun[number] = Begun(task, before + 1, index, ())

    def _draw(self, step: int) -> None:
        """Go on until the batch is there: beside, or here and no further."""
        if not self._begun or (self._is_full(step) and not self._apart):
            return
        at = [self._begun[number] for number in sorted(self._begun)]
        run = self._run
        stretch = self._stretch = Stretch(
            at, self._collecting(step), lambda asked, drawn: require_policy(run, asked, drawn), self._cut
        )
        if not self._apart:
            self._leave(asyncio.run(self._play(stretch, step)))
            return
        self._drawing = True
        self._under_way = Beside(lambda: self._play(stretch, step))
        with self._changed:
            self._changed.wait_for(lambda: self._is_full(step) or not self._drawing)
        if not self._is_full(step):
            self.settle()  # raises what ended it

    async def _play(self, stretch: Stretch, step: int) -> list[Begun]:
        run, began = self._run, time.perf_counter()

        def ended(played: Played) -> None:
            self._complete(played)
            if self._is_full(step) and not self._apart:
                stretch.stop()

        try:
            return await within(run.player, run.plan.train.deadline_s, lambda player: stretch.play(player, ended))
        finally:
            self._drew += time.perf_counter() - began
            with self._changed:
                self._drawing = False
                self._changed.notify_all()

    def _complete(self, played: Played) -> None:
        assert played.group is not None
        number = self._number(played.seat.step, played.seat.index)
        batch = Selected((played.group,), (), select.budget([played.group], [], 1), None)
        with self._changed:
            self._over[number] = Drawn(0, int(self._afters(_versions(played.group)).min(initial=0)), "", number, batch)
            self._changed.notify_all()

    def _is_full(self, step: int) -> bool:
        """Is the batch of a step there?"""
        return len(self._over) >= self._size if self._drops else all(n in self._over for n in self._numbers(step))

    def _chosen(self, step: int) -> list[Group]:
        with self._changed:
            chosen = sorted(list(self._over)[: self._size] if self._drops else self._numbers(step))
            return [self._over.pop(number).batch.groups[0] for number in chosen]

    def _leave(self, left: Iterable[Begun]) -> None:
        self._begun = {self._number(group.step, group.index): group for group in left}
        self._run.player.engine.rest()

    def _numbers(self, step: int) -> range:
        return range((step - 1) * self._size, step * self._size)

    def _number(self, step: int, index: int) -> int:
        return (step - 1) * self._size + index

    def _afters(self, versions: NDArray[np.int64]) -> NDArray[np.int64]:
        """The last step after which the weights were of each version."""
        return np.array([self._after.get(version, 0) for version in versions.tolist()], np.int64)

    def _is_before(self, oldest: int, versions: NDArray[np.int64]) -> bool:
        return bool((self._afters(versions) < oldest).any())


def _versions(group: Group) -> NDArray[np.int64]:
    """Of every token that the model drew, in all episodes."""
    every = [
        np.full(len(turn.token_ids), episode.policy_version, np.int64) if turn.versions is None else turn.versions
        for episode in group.episodes
        for turn in episode.turns
        if turn.role == "model"
    ]
    return np.concatenate(every) if every else np.zeros(0, np.int64)


def _said_versions(group: Begun) -> NDArray[np.int64]:
    every = [turn.versions for member in group.said for turn in member]
    return np.concatenate(every) if every else np.zeros(0, np.int64)


def _cut_of(engine: Engine) -> Callable[[], None]:
    """How an engine's responses are ended where it does not see a lowered bound."""
    return engine.cut if isinstance(engine, Engines) else lambda: None
