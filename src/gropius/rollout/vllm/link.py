"""The trainer's end of the talk with a worker: who waits for what, until when, and what is said when nobody answers.

One thread reads. It belongs to no event loop, so that requests of one loop, hand-overs between loops, and the end of
the worker are all heard.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, InvalidStateError
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from typing import Any

from gropius.errors import DataError, EngineError
from gropius.rollout.vllm.place import Place
from gropius.rollout.vllm.wire import Message, WireError

LOOK_S = 0.25
Heard = Callable[[Message], Any]


class Link:
    """Requests and calls to one worker. hang_s: a worker that is waited for and says nothing so long is given up."""

    def __init__(self, place: Place, hang_s: float) -> None:
        self._place = place
        self._hang_s = hang_s
        self._lock = threading.Lock()
        self._waiting: dict[int, tuple[Future[Any], Heard | None]] = {}
        self._ready: Future[Message] = Future()
        self._last_heard = time.monotonic()
        self._calls = 0
        self.dead = ""
        self._losing, self._lost = False, threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True, name="gropius-vllm-link")
        self._reader.start()

    def start(self, message: Mapping[str, Any], timeout_s: float) -> Message:
        """What the worker says of itself once it is up. Raises EngineError when it fails, dies or is too slow."""
        self._send({"op": "start", **message})
        try:
            return self._ready.result(timeout_s)
        except FutureTimeout:
            self.lose(f"it was not ready after {timeout_s:g} s (rollout.vllm.start_timeout_s)")
            raise EngineError(self.dead) from None

    def call(self, op: str, fields: Mapping[str, Any], file: int | None = None) -> Message:
        """Do something and wait for it. Raises EngineError when the worker dies or hangs meanwhile."""
        key, future = self._register(None)
        self._send({"op": op, "call": key, **fields}, file)
        found: Message = future.result()
        return found

    def request(self, fields: Mapping[str, Any], heard: Heard) -> tuple[int, Future[Any]]:
        """Begin a response. heard: takes each message, in the reader's thread; the response when it is over."""
        key, future = self._register(heard)
        self._send({"op": "draw", "key": key, **fields})
        return key, future

    def drop(self, key: int) -> None:
        """Nobody wants this response any more."""
        with self._lock:
            known = self._waiting.pop(key, None)
        if known is not None and not self.dead:
            self._send({"op": "drop", "keys": [key]})

    @property
    def busy(self) -> int:
        """Responses that are being drawn."""
        return sum(heard is not None for _, heard in list(self._waiting.values()))

    def close(self) -> None:
        """Let the worker end, end it where it does not, and fail all who wait."""
        self._fail("the engine was closed")
        try:
            self._place.wire.send({"op": "close"})
            grace = {}
        except WireError:
            grace = {"grace_s": 0.0}
        self._place.end(**grace)
        self._reader.join(timeout=2.0)

    def lose(self, cause: str) -> None:
        """Give the worker up: end it, and tell everybody who waits the cause and its last words."""
        with self._lock:
            if self.dead:
                return
            first, self._losing = not self._losing, True
        if not first:  # the end of the worker, which the reader sees, is no cause of its own
            self._lost.wait()
            return
        how = self._place.ended()
        words = self._place.last_words()
        self._place.end(grace_s=0.0)
        text = f"the vLLM engine is lost: {cause}" + (f" ({how})" if how else "")
        self._fail(text + (f"\nits last words:\n{words}" if words else ""))
        self._lost.set()

    def _register(self, heard: Heard | None) -> tuple[int, Future[Any]]:
        future: Future[Any] = Future()
        with self._lock:
            if self.dead:
                raise EngineError(self.dead)
            if not self._waiting:
                self._last_heard = time.monotonic()
            self._calls += 1
            self._waiting[self._calls] = (future, heard)
            return self._calls, future

    def _send(self, message: Mapping[str, Any], file: int | None = None) -> None:
        try:
            self._place.wire.send(message, file)
        except WireError as error:
            self.lose(str(error))
            raise EngineError(self.dead) from error

    def _fail(self, text: str) -> None:
        with self._lock:
            self.dead = self.dead or text
            waiting, self._waiting = self._waiting, {}
        for future, _ in waiting.values():
            if not future.done():
                future.set_exception(EngineError(self.dead))
        if not self._ready.done():
            self._ready.set_exception(EngineError(self.dead))

    def _read(self) -> None:
        while not self.dead:
            try:
                arrived = self._place.wire.receive(LOOK_S)
            except TimeoutError:
                self._look()
                continue
            except WireError as error:
                self.lose(f"it does not speak our language: {error}")
                return
            if arrived is None:
                self.lose("it ended")
                return
            self._last_heard = time.monotonic()
            try:
                self._hear(arrived[0])
            except (KeyError, TypeError, ValueError) as error:  # the boundary: another program wrote it
                self.lose(f"it said what cannot be understood: {ascii(arrived[0])[:200]} ({error})")

    def _look(self) -> None:
        """Is somebody waiting, and has the worker been silent for too long?"""
        silent = time.monotonic() - self._last_heard
        if self._ready.done() and self._waiting and silent > self._hang_s:
            self.lose(f"it hangs: nothing was heard of it for {silent:.0f} s (rollout.vllm.hang_s = {self._hang_s:g})")

    def _hear(self, message: Message) -> None:
        op = message["op"]
        if op == "ready":
            self._ready.set_result(message)
        elif op in ("failed", "died"):
            self.lose(f"{'it did not start' if op == 'failed' else 'it died'}: {message['error']}")
        elif op == "done":
            with self._lock:
                future, _ = self._waiting.pop(message["call"])
            future.set_result(message)
        elif op in ("drawn", "refused"):
            self._hear_of_response(message)
        elif op != "alive":
            raise ValueError(f"op {op!r}")

    def _hear_of_response(self, message: Message) -> None:
        key = message["key"]
        with self._lock:
            future, heard = self._waiting.get(key, (None, None))
        if future is None or heard is None:
            return  # dropped meanwhile
        found: Any = None
        refusal: DataError | None = None
        try:
            found = heard(message)
        except DataError as error:
            refusal = error
        if found is None and refusal is None:
            return
        with self._lock:
            self._waiting.pop(key, None)
        with suppress(InvalidStateError):  # cancelled at this moment
            future.set_exception(refusal) if refusal is not None else future.set_result(found)
        if refusal is None and not message["reason"]:
            self._send({"op": "drop", "keys": [key]})  # over for us, by a stop string
