"""The rows that are being decoded: what belongs to each, in arrays, so that a step costs no Python a row."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from gropius.rollout.sampler import Draws, Rules
from gropius.rollout.streams import stream_key, uniforms
from gropius.types import Completion, FinishReason, Request

Decode = Callable[[Sequence[int]], str]


@dataclass(eq=False)
class Row:
    """One response on its way. limit: tokens that may be drawn, at least 1; at first those that were asked for.

    The times are of `time.perf_counter`.
    """

    request: Request
    limit: int
    future: asyncio.Future[Completion]
    order: int
    asked: int = field(init=False)
    key: NDArray[np.uint64] = field(init=False)
    prompt_time_s: float = 0.0
    decode_started: float = 0.0
    finish_reason: FinishReason = "length"

    def __post_init__(self) -> None:
        self.key = stream_key(self.request.stream)
        self.asked = self.limit

    def tighten(self) -> None:
        """Take the request's bound over as it is now."""
        self.limit = max(1, min(self.limit, self.request.left))

    @property
    def positions(self) -> int:
        """Positions of the cache that the row may come to need; its last token is never fed."""
        return len(self.request.prompt_ids) + self.limit - 1


class Batch:
    """The active rows in their order, with all they have drawn."""

    def __init__(self, vocabulary: int, decode: Decode) -> None:
        self._vocabulary = vocabulary
        self._decode = decode
        self._stop_sets: dict[tuple[int, ...], int] = {}
        self._stop_table = np.zeros((0, vocabulary), np.bool_)
        self.rows: list[Row] = []
        self._arrays: dict[str, NDArray[Any]] = {}
        self._reset()

    def __len__(self) -> int:
        return len(self.rows)

    def add(self, rows: Sequence[Row]) -> None:
        """Append rows that have drawn nothing yet."""
        if not rows:
            return
        if not self.rows:
            self._reset()
        self.rows = [*self.rows, *rows]
        new = {
            "home": self._homes(rows),
            "count": np.zeros(len(rows), np.int64),
            "limit": np.array([row.limit for row in rows], np.int64),
            "length": np.array([len(row.request.prompt_ids) for row in rows], np.int64),
            "offset": np.array([row.request.offset for row in rows], np.int64),
            "stop": np.array([self._stop_set(row.request.sampling.stop_token_ids) for row in rows], np.int64),
            "listens": np.array([bool(row.request.sampling.stop_strings) for row in rows], np.bool_),
            "key": np.stack([row.key for row in rows]),
        }
        self._arrays = {name: np.concatenate([self._arrays[name], values]) for name, values in new.items()}
        self.rules = Rules.of([row.request.sampling for row in self.rows])

    def take(self, other: Batch, order: NDArray[np.int64]) -> None:
        """Append some rows of another batch, with what they have drawn."""
        had = len(self)
        self.add([other.rows[index] for index in order])
        mine, theirs, longest = self._arrays["home"][had:], other._arrays["home"][order], other._tokens.shape[1]
        self._arrays["count"][had:] = other._arrays["count"][order]
        self._tokens[mine, :longest] = other._tokens[theirs]
        self._logprobs[mine, :longest] = other._logprobs[theirs]
        self._drawn[mine, :longest] = other._drawn[theirs]

    def tighten(self) -> None:
        """Take the bounds of all rows over as they are now."""
        for row in self.rows:
            row.tighten()
        self._arrays["limit"] = np.array([row.limit for row in self.rows], np.int64)

    def uniform(self) -> NDArray[np.float64]:
        """[_B] the number that decides each row's next token: draw offset + count of its stream."""
        return uniforms(self._arrays["key"], self._arrays["offset"] + self._arrays["count"])

    def record(self, draws: Draws) -> NDArray[np.bool_]:
        """Note one token for every row; returns [_B] which rows are finished by it."""
        arrays = self._arrays
        home, count = arrays["home"], arrays["count"]
        self._tokens[home, count] = draws.ids
        self._logprobs[home, count] = draws.logprobs
        self._drawn[home, count] = draws.drawn_logprobs
        count += 1
        stopped = self._stop_table[arrays["stop"], draws.ids]
        for index in np.flatnonzero(arrays["listens"] & ~stopped):
            text = self._decode(self._tokens[home[index], : count[index]].tolist())
            stopped[index] = any(stop in text for stop in self.rows[index].request.sampling.stop_strings)
        for index in np.flatnonzero(stopped):
            self.rows[index].finish_reason = "stop"
        return cast(NDArray[np.bool_], stopped | (count >= arrays["limit"]))

    @property
    def last_ids(self) -> NDArray[np.int64]:
        """[_B] the token that each row drew last."""
        return cast(NDArray[np.int64], self._tokens[self._arrays["home"], self._arrays["count"] - 1])

    @property
    def positions(self) -> NDArray[np.int64]:
        """[_B] the position of each row's last token."""
        return cast(NDArray[np.int64], self._arrays["length"] + self._arrays["count"] - 1)

    def fed(self, index: int) -> tuple[int, ...]:
        """The ids that row `index` was fed: its prompt and what it drew, but for the last."""
        home, count = self._arrays["home"][index], self._arrays["count"][index]
        return self.rows[index].request.prompt_ids + tuple(self._tokens[home, : count - 1].tolist())

    def completion(self, index: int, version: int, digest: str) -> Completion:
        """What row `index` has drawn, as its caller gets it."""
        row, home, count = self.rows[index], self._arrays["home"][index], self._arrays["count"][index]
        return Completion(
            token_ids=self._tokens[home, :count].copy(),
            logprobs=self._logprobs[home, :count].copy(),
            drawn_logprobs=self._drawn[home, :count].copy(),
            finish_reason="cancelled" if row.finish_reason == "length" and row.limit < row.asked else row.finish_reason,
            policy_version=version,
            weight_digest=digest,
            prompt_time_s=row.prompt_time_s,
            decode_time_s=time.perf_counter() - row.decode_started,
        )

    def keep(self, order: NDArray[np.int64]) -> None:
        """Keep the rows `order`, in that order."""
        dropped = np.setdiff1d(np.arange(len(self.rows)), order, assume_unique=True)
        self._free.extend(self._arrays["home"][dropped].tolist())
        self.rows = [self.rows[index] for index in order.tolist()]
        self._arrays = {name: values[order] for name, values in self._arrays.items()}
        self.rules = self.rules.rows(order)

    def _reset(self) -> None:
        self.rows = []
        self.rules = Rules.of([])
        self._free: list[int] = []
        self._tokens = np.zeros((0, 0), np.int64)
        self._logprobs = self._drawn = np.zeros((0, 0), np.float32)
        whole = np.zeros(0, np.int64)
        self._arrays = dict.fromkeys(("home", "count", "limit", "length", "offset", "stop"), whole)
        self._arrays |= {"listens": np.zeros(0, np.bool_), "key": np.zeros((0, 4), np.uint64)}

    def _homes(self, rows: Sequence[Row]) -> NDArray[np.int64]:
        """A place for each row's tokens that stays the same while rows move."""
        missing = len(rows) - len(self._free)
        have, longest = self._tokens.shape
        longest = max(longest, *(row.limit for row in rows))
        if missing > 0:
            self._free.extend(range(have, have + missing))
        shape = (max(have, have + missing), longest)
        if shape != self._tokens.shape:
            for name in ("_tokens", "_logprobs", "_drawn"):
                old = getattr(self, name)
                new = np.zeros(shape, old.dtype)
                new[:have, : old.shape[1]] = old
                setattr(self, name, new)
        taken, self._free = self._free[: len(rows)], self._free[len(rows) :]
        return np.array(taken, np.int64)

    def _stop_set(self, ids: tuple[int, ...]) -> int:
        if ids not in self._stop_sets:
            self._stop_sets[ids] = len(self._stop_sets)
            line = np.zeros((1, self._vocabulary), np.bool_)
            line[0, [token for token in ids if 0 <= token < self._vocabulary]] = True
            self._stop_table = np.concatenate([self._stop_table, line])
        return self._stop_sets[ids]
