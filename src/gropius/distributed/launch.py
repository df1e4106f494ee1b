"""The ranks of one machine: started by torchrun's elastic agent, watched, ended together, started again after a loss.

The ranks are processes of their own in sessions of their own; a signal to this process is handed to rank 0, which
finishes its step and saves. Rank 0 leaves word of how it ended; a rank that ends without that was lost, and is named.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from gropius.errors import RunHalted

ATTEMPT, OUTCOME, LEADER, SECRET = "GROPIUS_ATTEMPT", "GROPIUS_OUTCOME", "GROPIUS_LEADER", "GROPIUS_SECRET"
LOST = 75  # the exit code of a rank that lost sight of another
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
GRACE_S = 15


@dataclass(frozen=True)
class Launch:
    """ranks: processes. bind: the address they meet at. restarts: how often lost ranks are started again.

    words: attempt → arguments of `python -m gropius`; the first is 0.
    """

    ranks: int
    bind: str
    restarts: int
    words: Callable[[int], Sequence[str]]


def leave_word(exit_code: int) -> bool:
    """A rank, rank 0 as a rule: say how the run ended. False where nobody asked (torchrun itself started it)."""
    path = os.environ.get(OUTCOME)
    if path is None:
        return False
    Path(path).write_text(json.dumps({"exit_code": exit_code}), encoding="utf-8")
    return True


def introduce() -> None:
    """Rank 0: say which process signals are for."""
    path = os.environ.get(LEADER)
    if path is not None:
        Path(path).write_text(str(os.getpid()), encoding="utf-8")


def secret() -> str:
    """What processes of one run say to each other first; torchrun's run id does where nothing better was given."""
    return os.environ.get(SECRET) or os.environ.get("TORCHELASTIC_RUN_ID", "") or "none"


def new_secret() -> str:
    """A secret that nobody knows yet."""
    return secrets.token_hex(16)


def launch(plan: Launch, note: Callable[[str], None]) -> int:
    """Run the ranks to their end; the exit code of rank 0.

    Errors: RunHalted when ranks are lost more often than `restarts`, naming the last.
    """
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    with tempfile.TemporaryDirectory(prefix="gropius-ranks-") as scratch, _Signals(Path(scratch) / "leader") as signals:
        os.environ[OUTCOME], os.environ[LEADER] = str(Path(scratch) / "outcome"), str(Path(scratch) / "leader")
        os.environ.setdefault(SECRET, new_secret())
        for attempt in range(plan.restarts + 1):
            for name in ("outcome", "leader"):
                (Path(scratch) / name).unlink(missing_ok=True)
            os.environ[ATTEMPT] = str(attempt)
            lost = _attempt(plan, attempt)
            word = Path(scratch) / "outcome"
            if word.is_file():
                return int(json.loads(word.read_text(encoding="utf-8"))["exit_code"])
            if signals.asked:
                note("stopped before rank 0 had anything to save")
                return 128 + signals.asked
            if attempt == plan.restarts:
                raise RunHalted(
                    f"{lost}; the ranks were started {attempt + 1} times (cluster.restarts = {plan.restarts}). "
                    "Mend the cause, then resume the run"
                )
            note(f"{lost}; all ranks start again from the last checkpoint ({attempt + 1} of {plan.restarts})")
    raise AssertionError("unreachable")


def _attempt(plan: Launch, attempt: int) -> str:
    """One start of all ranks, to their end; who was lost, or nobody."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=plan.ranks,
        run_id=secrets.token_hex(8),
        rdzv_backend="c10d",
        rdzv_endpoint=f"{plan.bind}:0",
        local_addr=plan.bind,
        max_restarts=0,
        monitor_interval=0.1,
        shutdown_timeout=GRACE_S,
    )
    arguments = ["-m", "gropius", *plan.words(attempt)]
    said: list[str] = []

    def work() -> None:
        try:
            elastic_launch(config, sys.executable)(*arguments)
            said.append("every rank ended, and rank 0 left no word of how")
        except ChildFailedError as error:
            said.append(_who(error.failures))
        except (RuntimeError, OSError) as error:  # the agent itself, or its address
            said.append(f"the ranks cannot be started on {plan.bind}: {str(error).splitlines()[0]}")

    # Signals reach the main thread, which must be free to hand them on; the agent listens to none in another.
    thread = threading.Thread(target=work, name="ranks", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(0.1)
    return said[0]


def _who(failures: dict[int, Any]) -> str:
    """Name the rank that was lost first: not those that only lost sight of it, or were then ended."""
    own = {rank: f for rank, f in failures.items() if f.exitcode not in (LOST, -signal.SIGTERM)}
    rank, failure = min((own or failures).items(), key=lambda item: (item[1].timestamp, item[0]))
    if failure.exitcode < 0:
        how = f"was ended by {signal.Signals(-failure.exitcode).name}"
    elif failure.exitcode == LOST:
        how = "lost sight of another"
    else:
        how = f"ended with exit code {failure.exitcode}"
    return f"rank {rank} (process {failure.pid}) {how}"


class _Signals:
    """Hands SIGINT, SIGTERM and SIGHUP on to rank 0. asked: the first one's number, or 0."""

    def __init__(self, leader: Path) -> None:
        self._leader = leader
        self._before: dict[int, Any] = {}
        self.asked = 0

    def __enter__(self) -> _Signals:
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._received)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _received(self, number: int, frame: FrameType | None) -> None:
        self.asked = self.asked or number
        threading.Thread(target=self._hand_on, args=(number,), daemon=True).start()

    def _hand_on(self, number: int) -> None:
        """Wait until rank 0 is there, then signal it."""
        for _ in range(600):
            with contextlib.suppress(OSError, ValueError):
                os.kill(int(self._leader.read_text(encoding="utf-8")), number)
                return
            time.sleep(0.1)


@contextlib.contextmanager
def ends_with_word(show: Callable[[Exception], None]) -> Iterator[None]:
    """Rank 0's outermost block: whatever it raises for a person is shown here, and its exit code left as word.

    Where torchrun itself started the rank, errors go on, but for an asked-for end, which is no failure.
    """
    from gropius.errors import GropiusError, Interrupted

    introduce()
    try:
        yield
    except GropiusError as error:
        if not leave_word(error.exit_code) and not isinstance(error, Interrupted):
            raise
        show(error)
        return
    except RuntimeError as error:
        if not lost_sight(error):
            raise
        show(RunHalted(f"rank 0 lost sight of another rank: {str(error).strip().splitlines()[0][:200]}"))
        sys.exit(LOST)
    leave_word(0)


def lost_sight(error: BaseException) -> bool:
    """True for what an exchange raises when another rank is gone or does not answer."""
    text = str(error).lower()
    words = ("gloo", "nccl", "connection", "monitoredbarrier", "timed out", "socket", "store", "broken pipe")
    return type(error).__name__.startswith("Dist") or any(word in text for word in words)
