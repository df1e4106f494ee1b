"""What an engine keeps of a response that is likely to go on: its keys and values, so that a later turn reads only what
is new. Bounded in positions; the oldest goes first; dropped with the weights that made it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Past:
    """Keys and values [layer, kv head, _P, e] of the first _P ids of a conversation, `ids`."""

    ids: tuple[int, ...]
    keys: Tensor
    values: Tensor

    @property
    def bytes(self) -> int:
        """Memory of both."""
        return 2 * self.keys.numel() * self.keys.element_size()


class Pasts:
    """The pasts by the stream that they belong to. budget: positions of all of them together."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.positions = 0
        self._by_stream: dict[tuple[int, ...], Past] = {}

    def __len__(self) -> int:
        return len(self._by_stream)

    @property
    def bytes(self) -> int:
        """Memory of all that is kept."""
        return sum(past.bytes for past in self._by_stream.values())

    def put(self, stream: tuple[int, ...], past: Past) -> None:
        """Keep one; older ones make room for it. One that is larger than the whole budget is not kept."""
        self._drop([stream])
        if len(past.ids) > self.budget:
            return
        self._by_stream[stream] = past
        self.positions += len(past.ids)
        while self.positions > self.budget:
            self._drop([next(iter(self._by_stream))])

    def take(self, stream: tuple[int, ...], prompt_ids: tuple[int, ...]) -> Past | None:
        """The past of a stream, which is then no longer kept; None where the prompt does not go on from it."""
        past = self._by_stream.get(stream)
        self._drop([stream])
        goes_on = past is not None and len(past.ids) < len(prompt_ids) and prompt_ids[: len(past.ids)] == past.ids
        return past if goes_on else None

    def clear(self) -> None:
        """Drop all."""
        self._drop(list(self._by_stream))

    def _drop(self, streams: Sequence[tuple[int, ...]]) -> None:
        for stream in streams:
            past = self._by_stream.pop(stream, None)
            self.positions -= 0 if past is None else len(past.ids)
