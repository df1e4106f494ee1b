"""A host of reward workers, for a pool on another machine: `python -m gropius.rewards.host ADDRESS PORT`. No torch.

Whoever connects says the run's secret first, and then has a worker of its own, which ends with the connection. Not
imported by the package: it is a program.
"""

from __future__ import annotations

import hmac
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress

from gropius.distributed.launch import secret
from gropius.errors import EngineError, RewardError
from gropius.rewards.remote_worker import CODEC, CONNECT_S, receive
from gropius.rewards.worker import Worker, WorkerLost


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
