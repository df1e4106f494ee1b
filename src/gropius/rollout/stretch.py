"""A stretch of drawing between two hand-overs of weights: it goes on until it is stopped, and nothing drawn is lost.

Groups that are complete by then are handed over as they complete; the rest are left as they stand, and the next stretch
goes on with them. It ends between tokens (every response with the token that is being drawn) or between responses (a
turn that was begun is drawn to its end, and none is begun any more).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from gropius.rollout.collect import Begun, CollectPlan, Played, Player, play, seats
from gropius.rollout.engine import Around, empty_completion
from gropius.types import Bound, Completion, Request

EVERYTHING = 1 << 62
Look = Callable[[Request, Completion], None]


@dataclass
class _Valve(Around):
    """An `Engine` that begins nothing once it is shut. look: at what was drawn, before anybody uses it."""

    look: Look
    shut: bool = False

    async def complete(self, request: Request) -> Completion:
        """Draw one response, or nothing of it."""
        if self.shut:
            return empty_completion("cancelled", 0, "")
        completion = await self.engine.complete(request)
        self.look(request, completion)
        return completion


class Stretch:
    """Plays groups until all are complete or it is stopped.

    look: called with every completion; what it raises ends the stretch. cut: ends what is being drawn where a lowered
    bound is not seen (an engine in another process); None: stopping waits for the turns under way.
    """

    def __init__(self, at: Sequence[Begun], plan: CollectPlan, look: Look, cut: Callable[[], None] | None) -> None:
        self._at, self._plan, self._look, self._cut = at, plan, look, cut
        self._bound = Bound()
        self._valve: _Valve | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._asked = False

    async def play(self, player: Player, ended: Callable[[Played], None]) -> list[Begun]:
        """What was not complete when it was stopped, as it stands. ended: told of each group as it is complete."""
        self._loop = asyncio.get_running_loop()
        self._valve = _Valve(player.engine, self._look)
        if self._asked:
            self.stop()
        bound = self._bound if self._cut is not None else None
        at = seats((), self._plan, replace(player, engine=self._valve), bound, self._at)
        played = await play(at, lambda one: None if one.group is None else ended(one))
        return [one.begun(EVERYTHING) for one in played if one.group is None]

    def stop(self) -> None:
        """Stop it, from within its event loop."""
        if self._valve is None or self._valve.shut:
            return
        self._valve.shut = True
        if self._cut is not None:
            self._bound.limit = 0
            self._cut()

    def stop_soon(self) -> None:
        """Stop it, from another thread."""
        self._asked = True
        if self._loop is not None:
            with suppress(RuntimeError):  # it is over, and its loop closed
                self._loop.call_soon_threadsafe(self.stop)
