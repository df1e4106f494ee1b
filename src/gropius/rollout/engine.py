"""What an engine is, and a scripted one whose policy is a plain function.

An engine takes requests and gives completions. Callers await one completion each; how requests share a batch is the
engine's own business and never shows in what it returns.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import ArrayLike

from gropius.errors import DataError, EngineError
from gropius.rollout.sampler import Draws, Rules, draw
from gropius.rollout.streams import stream_key, uniforms
from gropius.types import Completion, FinishReason, Request


class Engine(Protocol):
    """Draws responses from the sampler policy."""

    async def complete(self, request: Request) -> Completion:
        """Draw one response. Cancelling the call frees all that it holds. Raises EngineError when the engine died."""
        ...

    def set_policy(self, version: int, digest: str) -> None:
        """The weights changed: drop every cache; completions from here on carry this version and digest."""
        ...

    def rest(self) -> None:
        """No response is wanted until the next `set_policy`: memory may be given back."""
        ...

    async def close(self) -> None:
        """Give back what is held. Waiting calls end with EngineError."""
        ...


@dataclass
class Around:
    """An `Engine` around another one, which does all that a subclass does not say otherwise."""

    engine: Engine

    async def complete(self, request: Request) -> Completion:
        """Draw one response."""
        return await self.engine.complete(request)

    def set_policy(self, version: int, digest: str) -> None:
        """The weights changed."""
        self.engine.set_policy(version, digest)

    def rest(self) -> None:
        """Nothing is wanted for a while."""
        self.engine.rest()

    async def close(self) -> None:
        """End it."""
        await self.engine.close()


Policy = Callable[[tuple[int, ...], tuple[int, ...]], ArrayLike]
Decode = Callable[[Sequence[int]], str]


def check_request(request: Request, context_length: int, vocabulary: int) -> int:
    """How many tokens may be drawn: `max_tokens`, or what the context leaves; 0 where the prompt fills it.

    Raises DataError for a prompt that is empty, longer than the context, or has an id outside the vocabulary.
    """
    length = len(request.prompt_ids)
    if length == 0:
        raise DataError(
            "a prompt of no tokens cannot be continued; give the model at least its beginning-of-text token"
        )
    if length > context_length:
        raise DataError(f"the prompt has {length} tokens and the model's context {context_length}; shorten or drop it")
    if not 0 <= min(request.prompt_ids) <= max(request.prompt_ids) < vocabulary:
        raise DataError(f"the prompt has a token id outside the vocabulary of {vocabulary}")
    return max(0, min(request.sampling.max_tokens, context_length - length))


def empty_completion(reason: FinishReason, version: int, digest: str) -> Completion:
    """A completion of no tokens."""
    nothing = np.zeros(0, np.float32)
    return Completion(np.zeros(0, np.int64), nothing, nothing, reason, version, digest)


class ScriptedEngine:
    """An engine whose policy is `policy(prompt_ids, drawn_ids) -> logits [_V]`: exact, and the same in any company.

    Everything else is real: random streams, sampling rules, stop tokens and strings, limits, versions, cancellation.
    vocabulary: ids of prompts lie below it. decode: needed for stop strings. dies_after: completions
    until the engine "crashes" with `last_words`.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        vocabulary: int = 1 << 31,
        context_length: int = 1 << 20,
        decode: Decode | None = None,
        dies_after: int | None = None,
        last_words: str = "scripted death",
    ) -> None:
        self.policy = policy
        self.vocabulary = vocabulary
        self.context_length = context_length
        self.decode = decode
        self.dies_after = dies_after
        self.last_words = last_words
        self.version, self.digest = 0, ""
        self.active = 0
        self.completed = 0

    async def complete(self, request: Request) -> Completion:
        """Draw one response, giving way to other calls before every token."""
        limit = check_request(request, self.context_length, self.vocabulary)
        version, digest = self.version, self.digest
        self.active += 1
        try:
            tokens: list[Draws] = []
            reason: FinishReason = "length"
            for position in range(limit):
                await asyncio.sleep(0)
                if position >= request.left:
                    reason = "cancelled"
                    break
                tokens.append(self._draw(request, tuple(int(d.ids[0]) for d in tokens), position))
                if self._ends(request, [int(d.ids[0]) for d in tokens]):
                    reason = "stop"
                    break
            self._maybe_die()
        finally:
            self.active -= 1
        self.completed += 1
        if not tokens:
            return empty_completion(reason, version, digest)
        ids, logprobs, drawn = (
            np.concatenate([getattr(d, name) for d in tokens]) for name in ("ids", "logprobs", "drawn_logprobs")
        )
        return Completion(ids, logprobs, drawn, reason, version, digest)

    def set_policy(self, version: int, digest: str) -> None:
        """Stamp later completions."""
        self.version, self.digest = version, digest

    def rest(self) -> None:
        """There is nothing to give back."""

    async def close(self) -> None:
        """From here on every call is refused."""
        self.dies_after, self.last_words = 0, "the engine was closed"

    def _draw(self, request: Request, drawn: tuple[int, ...], position: int) -> Draws:
        self._maybe_die()
        logits = torch.as_tensor(np.asarray(self.policy(request.prompt_ids, drawn), np.float64))[None]
        at = np.array([request.offset + position], np.int64)
        return draw(logits, Rules.of([request.sampling]), uniforms(stream_key(request.stream)[None], at))

    def _ends(self, request: Request, ids: Sequence[int]) -> bool:
        if ids[-1] in request.sampling.stop_token_ids:
            return True
        if not request.sampling.stop_strings or self.decode is None:
            return False
        text = self.decode(ids)
        return any(stop in text for stop in request.sampling.stop_strings)

    def _maybe_die(self) -> None:
        if self.dies_after is not None and self.completed >= self.dies_after:
            raise EngineError(f"the rollout engine died: {self.last_words}")


def pass_rate_policy(
    rate: float | Callable[[tuple[int, ...]], float], right: Sequence[int], wrong: Sequence[int], vocabulary: int
) -> Policy:
    """A policy that answers `right` with a known probability and `wrong` otherwise.

    rate: the probability, or a function of the prompt's ids. right, wrong: the ids of the two answers, stop token
    included; their first ids must differ. vocabulary: number of tokens.
    """
    if right[0] == wrong[0]:
        raise ValueError("the first ids of the right and the wrong answer must differ")

    def policy(prompt_ids: tuple[int, ...], drawn_ids: tuple[int, ...]) -> ArrayLike:
        """Right or wrong at the first token, then the rest of that answer."""
        logits = np.full(vocabulary, -np.inf)
        if not drawn_ids:
            p = rate(prompt_ids) if callable(rate) else rate
            logits[right[0]] = math.log(p) if p > 0 else -np.inf
            logits[wrong[0]] = math.log1p(-p) if p < 1 else -np.inf
            return logits
        answer = right if drawn_ids[0] == right[0] else wrong
        logits[answer[min(len(drawn_ids), len(answer) - 1)]] = 0.0
        return logits

    return policy
