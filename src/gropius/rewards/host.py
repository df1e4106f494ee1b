"""Reward workers on another machine: a host that keeps them, and the pool's end of the talk. No torch.

Everything travels as frames (`distributed.wire`): no pickle, no code; whoever connects says the run's secret first. One
connection is one worker, which ends with it. Where hosts listen stands in a file that the controller of the run writes;
a host that is lost is passed over, and the pool asks once more elsewhere.
"""

from __future__ import annotations

import hmac
import itertools
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from gropius.distributed.keeper import book
from gropius.distributed.launch import secret
from gropius.distributed.wire import HEAD, Codec, sizes
from gropius.errors import EngineError, RewardError
from gropius.rewards.worker import START_S, Worker, WorkerLost
from gropius.types import EnvironmentStep, Episode, Outcome, Place, Step, Task, Turn, Verdict

CODEC = Codec((Episode, Task, Turn, EnvironmentStep, Verdict, Outcome, Place, Step))
CONNECT_S, AGAIN_S = 10.0, 0.2


class RemoteWorker:
    """A worker of a host elsewhere; see `rewards.worker.Worker`."""

    def __init__(self, line: socket.socket, name: str) -> None:
        self._line, self.name, self.calls = line, name, 0

    @classmethod
    def start(cls, settings: Mapping[str, Any], first: int) -> RemoteWorker:
        """Have the next host that answers start one. first: which to try first. Raises WorkerLost, RewardError."""
        until, why = time.monotonic() + START_S, "none is listed"
        for turn in itertools.count(first):
            hosts = book()["rewards"]
            if hosts:
                address, port, name = hosts[turn % len(hosts)]
                try:
                    return cls._begun(socket.create_connection((address, int(port)), CONNECT_S), str(name), settings)
                except OSError as error:
                    why = f"{name}: {error}"
            if time.monotonic() > until:
                break
            time.sleep(AGAIN_S)
        raise WorkerLost(f"no reward host answers within {START_S:g} s ({why})", timeout=False)

    @classmethod
    def _begun(cls, line: socket.socket, name: str, settings: Mapping[str, Any]) -> RemoteWorker:
        worker = cls(line, name)
        line.sendall(CODEC.encode(secret()))
        worker._asked({"settings": dict(settings)}, START_S, "the start of a reward worker")
        return worker

    def ask(self, episodes: Sequence[Episode], deadline_s: float) -> dict[str, Any]:
        """The worker's answer. Raises WorkerLost where it or its host is gone or late, RewardError to halt."""
        self.calls += 1
        question = {"episodes": list(episodes), "deadline_s": deadline_s}
        return self._asked(question, START_S + deadline_s, "a reward")

    def kill(self) -> None:
        """Hang up, which ends the worker."""
        self._line.close()

    def _asked(self, question: Mapping[str, Any], patience_s: float, what: str) -> dict[str, Any]:
        try:
            frame = CODEC.encode(question)
        except TypeError as error:
            raise RewardError(f"an episode cannot be sent to a reward host: {error}") from error
        try:
            self._line.settimeout(patience_s)
            self._line.sendall(frame)
            answer = receive(self._line)
        except TimeoutError:
            raise WorkerLost(f"{what} took longer than its deadline at {self.name}", timeout=True) from None
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


# the host's side


def serve(address: str, port: int, password: str) -> Iterator[int]:
    """Listen; yields the port, then serves until the process ends."""
    with socket.create_server((address, port)) as listening:
        yield int(listening.getsockname()[1])
        while True:
            line, _ = listening.accept()
            threading.Thread(target=_talk, args=(line, password), daemon=True).start()


def _talk(line: socket.socket, password: str) -> None:
    """One connection: one worker. It is this thread's, and the kernel ends it with the thread."""
    worker: Worker | None = None
    with line, suppress(OSError, EOFError, EngineError, KeyError, TypeError, ValueError):
        try:
            line.settimeout(CONNECT_S)
            hello = receive(line)
            if not isinstance(hello, str) or not hmac.compare_digest(hello.encode(), password.encode()):
                return
            line.settimeout(None)
            while True:
                message = receive(line)
                try:
                    if worker is None:
                        worker, answer = Worker.start(message["settings"]), {}
                    else:
                        answer = worker.ask(message["episodes"], message["deadline_s"])
                except WorkerLost as problem:
                    answer = {"lost": str(problem), "timeout": problem.timeout}
                except RewardError as problem:
                    answer = {"halt": str(problem)}
                line.sendall(CODEC.encode(answer))
        finally:
            if worker is not None:
                worker.kill()


def main() -> None:
    """`python -m gropius.rewards.host ADDRESS PORT`: keep reward workers for whoever knows the run's secret."""
    for _ in serve(sys.argv[1], int(sys.argv[2]), secret()):
        pass


if __name__ == "__main__":
    main()
