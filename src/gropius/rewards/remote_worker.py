"""A reward worker on another machine, as the pool sees it; `rewards.host` is the other end. No torch.

Everything travels as frames (`distributed.wire`): no pickle, no code; whoever connects says the run's secret first. One
connection is one worker, which ends with it. Where hosts listen stands in a file that the controller of the run writes;
a host that is lost is passed over, and the pool asks once more elsewhere.
"""

from __future__ import annotations

import itertools
import select
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any

from gropius.distributed.keeper import book
from gropius.distributed.launch import secret
from gropius.distributed.wire import HEAD, Codec, sizes
from gropius.errors import EngineError, RewardError
from gropius.rewards.worker import START_S, WorkerLost
from gropius.types import EnvironmentStep, Episode, Outcome, Place, Step, Task, Turn, Verdict

CODEC = Codec((Episode, Task, Turn, EnvironmentStep, Verdict, Outcome, Place, Step))
CONNECT_S, AGAIN_S, LOOK_S = 10.0, 0.2, 0.5


class RemoteWorker:
    """A worker of a host elsewhere; see `rewards.worker.Worker`. place: the host's entry in the book.

    A host that is cut off ends no connection. It is lost as soon as the controller takes it out of the book, or when it
    is silent for longer than its worker may take: the host itself says when a function is late.
    """

    def __init__(self, line: socket.socket, place: Sequence[Any]) -> None:
        self._line, self.place, self.name, self.calls = line, list(place), str(place[2]), 0

    @classmethod
    def start(cls, settings: Mapping[str, Any], first: int) -> RemoteWorker:
        """Have the next host that answers start one. first: which to try first. Raises WorkerLost, RewardError."""
        until, why = time.monotonic() + START_S, "none is listed"
        for turn in itertools.count(first):
            hosts = book()["rewards"]
            if hosts:
                address, port, name = place = hosts[turn % len(hosts)]
                try:
                    return cls._begun(socket.create_connection((address, int(port)), CONNECT_S), place, settings)
                except OSError as error:
                    why = f"{name}: {error}"
            if time.monotonic() > until:
                break
            time.sleep(AGAIN_S)
        raise WorkerLost(f"no reward host answers within {START_S:g} s ({why})", timeout=False)

    @classmethod
    def _begun(cls, line: socket.socket, place: Sequence[Any], settings: Mapping[str, Any]) -> RemoteWorker:
        worker = cls(line, place)
        line.sendall(CODEC.encode(secret()))
        worker._asked({"settings": dict(settings)}, START_S + CONNECT_S)
        return worker

    def ask(self, episodes: Sequence[Episode], deadline_s: float) -> dict[str, Any]:
        """The worker's answer. Raises WorkerLost where it or its host is gone or late, RewardError to halt."""
        self.calls += 1
        question = {"episodes": list(episodes), "deadline_s": deadline_s}
        return self._asked(question, START_S + deadline_s + CONNECT_S)

    def kill(self) -> None:
        """Hang up, which ends the worker."""
        self._line.close()

    def _asked(self, question: Mapping[str, Any], patience_s: float) -> dict[str, Any]:
        try:
            frame = CODEC.encode(question)
        except TypeError as error:
            raise RewardError(f"an episode cannot be sent to a reward host: {error}") from error
        try:
            self._line.settimeout(CONNECT_S)
            self._line.sendall(frame)
            self._await_answer(time.monotonic() + patience_s)
            answer = receive(self._line)
        except (OSError, EOFError, EngineError) as error:
            why = str(error) or "the connection ended"
            raise WorkerLost(f"{self.name} was lost: {why}", timeout=False) from error
        if not isinstance(answer, dict):
            raise WorkerLost(f"{self.name} answered what is no verdict", timeout=False)
        if "halt" in answer:
            raise RewardError(str(answer["halt"]))
        if "lost" in answer:
            raise WorkerLost(f"{answer['lost']} (at {self.name})", timeout=answer.get("timeout") is True)
        return answer

    def _await_answer(self, until: float) -> None:
        """Until there is something to read. Errors: OSError where its host is no longer listed, or silent by then."""
        while not select.select([self._line], [], [], LOOK_S)[0]:
            if self.place not in book()["rewards"]:
                raise OSError("the controller no longer reaches it")
            if time.monotonic() > until:
                raise OSError("it does not answer")


def receive(line: socket.socket) -> Any:
    """The next value. Errors: EOFError at the end, OSError, EngineError for what is no frame."""
    start = _exactly(line, HEAD.size)
    return CODEC.decode(start + _exactly(line, sum(sizes(start))))


def _exactly(line: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        piece = line.recv(min(size - len(data), 1 << 20))
        if not piece:
            raise EOFError("the connection ended")
        data += piece
    return bytes(data)
