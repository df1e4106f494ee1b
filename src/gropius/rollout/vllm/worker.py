"""The worker's side: take requests and weights from the wire, draw, answer. What draws is a `Core`; vLLM is one.

A reader thread takes messages in, so that the end of the trainer is noticed also while the core works: the worker then
ends at once, with all its processes.
"""

from __future__ import annotations

import json
import queue
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from gropius.rollout.vllm.weights import Named, ReceivedWeights
from gropius.rollout.vllm.wire import Message, Wire, WireError

PULSE_S = 1.0


@dataclass
class Tokens:
    """What one request has drawn since it was last heard of; `reason` ("stop", "length") when that was all."""

    key: int
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    drawn: list[float] = field(default_factory=list)
    reason: str = ""

    def add(self, more: Tokens) -> None:
        """Append what was drawn later."""
        self.ids += more.ids
        self.logprobs += more.logprobs
        self.drawn += more.drawn
        self.reason = more.reason


class Core(Protocol):
    """Draws tokens for many requests at a time; one is made a trainer.

    facts: what the trainer is told (name, version, dtype, sleeps ...), JSON-ready.
    """

    facts: dict[str, Any]

    def add(self, key: int, request: Mapping[str, Any]) -> None:
        """Begin a request: prompt (ids), limit, stop (ids), rules, stream, offset. Raises ValueError to refuse it."""
        ...

    def drop(self, keys: Sequence[int]) -> None:
        """Forget requests."""
        ...

    def step(self) -> list[Tokens]:
        """One step for every request that is being drawn; what is new."""
        ...

    def load(self, tensors: Iterator[Named]) -> None:
        """Take new weights, waking first, and drop every cache of the old ones."""
        ...

    def adapt(self, tensors: Iterator[Named]) -> None:
        """Take a new adapter beside the weights (A and s · B under peft's names), and drop every cache of the old one.

        Asked only where the options name a rank.
        """
        ...

    def sleep(self) -> None:
        """Give memory back until the next weights."""
        ...

    def close(self) -> None:
        """Give everything back."""
        ...


MakeCore = Callable[[Mapping[str, Any]], Core]


@dataclass
class _Open:
    """A request being drawn. streams: every token is sent as it comes, else all at the end. Times: perf_counter."""

    streams: bool
    tokens: Tokens
    began: float
    first: float = 0.0


class Server:
    """Serves one trainer over one wire, until it closes or is gone."""

    def __init__(self, wire: Wire, mailbox: Mapping[str, list[Named]] | None = None) -> None:
        self.wire = wire
        self.mailbox = {} if mailbox is None else mailbox  # of a trainer in this process: weights by reference
        self.incoming: queue.SimpleQueue[tuple[Message, int | None] | None] = queue.SimpleQueue()
        self.open: dict[int, _Open] = {}
        self.stamp: dict[str, Any] = {"version": 0, "digest": ""}
        self.memory: ReceivedWeights | None = None
        self.spoke = time.monotonic()

    def serve(self, make_core: MakeCore, when_gone: Callable[[], object], keep_core: bool = False) -> bool:
        """Serve; True when nothing went wrong on this side.

        when_gone: what is done, in the reader's thread, when the trainer vanished without closing. keep_core: it is
        used again, so its requests are dropped and it is left open.
        """
        threading.Thread(target=self._read, args=(when_gone,), daemon=True, name="gropius-wire").start()
        core: Core | None = None
        try:
            core = self._started(make_core)
            if core is not None:
                self._work(core)
            return True
        except WireError:  # the trainer is gone, and nobody is left to be told
            traceback.print_exc()
            return True
        except Exception as error:  # the boundary: whatever ends the core is told before the end
            traceback.print_exc()
            self._last_words(error)
            return False
        finally:
            self.wire.close()
            if core is not None:
                core.drop(list(self.open)) if keep_core else core.close()

    def _read(self, when_gone: Callable[[], object]) -> None:
        closing = False
        try:
            while (arrived := self.wire.receive()) is not None:
                closing = closing or arrived[0]["op"] == "close"
                self.incoming.put(arrived)
        except WireError:
            traceback.print_exc()
        self.incoming.put(None)
        if not closing:
            when_gone()

    def _started(self, make_core: MakeCore) -> Core | None:
        arrived = self.incoming.get()
        if arrived is None or arrived[0]["op"] != "start":
            return None
        try:
            core = make_core(arrived[0])
        except (Exception, SystemExit) as error:  # the boundary: another package starts, and may fail in any way
            traceback.print_exc()
            self._say("failed", error=_named(error))
            return None
        self._say("ready", facts=core.facts)
        return core

    def _work(self, core: Core) -> None:
        while True:
            while not self.open or not self.incoming.empty():
                arrived = self.incoming.get()
                if arrived is None or arrived[0]["op"] == "close":
                    return
                self._handle(core, *arrived)
            for tokens in core.step():
                self._account(tokens)
            if time.monotonic() - self.spoke > PULSE_S:
                self._say("alive")

    def _handle(self, core: Core, message: Message, file: int | None) -> None:
        op = message["op"]
        if file is not None:
            self.memory = ReceivedWeights(file)
        if op == "draw":
            self._begin(core, message)
        elif op == "drop":
            gone = [key for key in message["keys"] if self.open.pop(key, None) is not None]
            if gone:
                core.drop(gone)
        elif op in ("weights", "adapter"):
            began = time.perf_counter()
            (core.load if op == "weights" else core.adapt)(self._tensors(message))
            self.stamp = {"version": message["version"], "digest": message["digest"]}
            self._say("done", call=message["call"], seconds=time.perf_counter() - began)
        elif op == "sleep":
            core.sleep()
            self._say("done", call=message["call"])
        else:
            raise WireError(f"no worker knows {ascii(op)[:40]}")

    def _begin(self, core: Core, message: Message) -> None:
        key = message["key"]
        try:
            core.add(key, message)
        except ValueError as error:
            self._say("refused", key=key, error=str(error)[:2000])
            return
        self.open[key] = _Open(message["streams"], Tokens(key), time.perf_counter())

    def _tensors(self, message: Message) -> Iterator[tuple[str, Tensor]]:
        if "mailbox" in message:
            return iter(self.mailbox[message["mailbox"]])
        if self.memory is None:
            raise WireError("weights were announced and no memory was handed over")
        return self.memory.tensors(message["tensors"])

    def _account(self, tokens: Tokens) -> None:
        """Send what a request has drawn, at once or when it is finished."""
        row = self.open.get(tokens.key)
        if row is None:
            return
        row.first = row.first or time.perf_counter()
        row.tokens.add(tokens)
        if not (row.streams or tokens.reason):
            return
        times = {"prompt_s": row.first - row.began, "decode_s": time.perf_counter() - row.first}
        self._say("drawn", **vars(row.tokens), **self.stamp, **times)
        row.tokens = Tokens(tokens.key)
        if tokens.reason:
            del self.open[tokens.key]

    def _say(self, op: str, **fields: Any) -> None:
        self.wire.send({"op": op, **fields})
        self.spoke = time.monotonic()

    def _last_words(self, error: Exception) -> None:
        try:
            self._say("died", error=_named(error))
        except WireError:
            traceback.print_exc()


def _named(error: BaseException) -> str:
    text = str(error).strip()
    try:
        json.dumps(text)
    except (TypeError, ValueError):
        text = ascii(text)
    return f"{type(error).__name__}: {text}"[:2000]
