"""Clocks, memory, idleness, spread and the speed of this machine's matrix product. Runs in either environment."""

from __future__ import annotations

import os
import platform
import resource
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Moment:
    """Wall and processor seconds; those of child processes that have ended are included."""

    wall: float
    cpu: float

    @classmethod
    def now(cls) -> Moment:
        """This process, now; a GPU, where torch has one, is waited for."""
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_available():
            torch.cuda.synchronize()
        times = os.times()
        return cls(time.perf_counter(), times.user + times.system + times.children_user + times.children_system)

    def __sub__(self, other: Moment) -> Moment:
        return Moment(self.wall - other.wall, self.cpu - other.cpu)

    def __add__(self, other: Moment) -> Moment:
        return Moment(self.wall + other.wall, self.cpu + other.cpu)

    def as_list(self) -> list[float]:
        """For JSON."""
        return [self.wall, self.cpu]


def peak_bytes() -> int:
    """The most memory this process has held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def busy_s() -> float:
    """Processor seconds used on this machine since it started, by anybody; 0 where the system does not say."""
    try:
        with open("/proc/stat", encoding="ascii") as stat:
            fields = [int(word) for word in stat.readline().split()[1:9]]
    except OSError:
        return 0.0
    return (sum(fields) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK")


class Neighbours:
    """Processor seconds of everything but this process and its ended children, a wall second, while it is open."""

    def __init__(self) -> None:
        self.cores = 0.0

    def __enter__(self) -> Neighbours:
        self._busy, self._began = busy_s(), Moment.now()
        return self

    def __exit__(self, *_: object) -> None:
        own = Moment.now() - self._began
        self.cores = max(0.0, (busy_s() - self._busy - own.cpu) / max(own.wall, 1e-9))


def machine(threads: int) -> str:
    """Processor, cores, memory, versions, threads: what a figure belongs to."""
    name = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        name = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), name)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    return f"{name}, {os.cpu_count()} cores, {memory:.0f} GB, Python {platform.python_version()}, {threads} threads"


def head(threads: int, allowed: float) -> None:
    """The first lines of every benchmark: machine, command, load."""
    print(f"machine: {machine(threads)}")
    print(f"command: python {' '.join(sys.argv)}")
    print(f"load {os.getloadavg()[0]:.1f}; a sample counts as disturbed when others use more than {allowed} of a core")


def spread(values: Sequence[float], form: str = ".2f") -> str:
    """Median with smallest and largest."""
    if not values:
        return "none"
    return f"{statistics.median(values):{form}} [{min(values):{form}}, {max(values):{form}}]"


def product_rates(threads: int, device: str = "cpu") -> dict[str, float]:
    """FLOP/s, by wall clock and by processor seconds, of a matrix product, best of 20, for both types.

    On a CPU of a shape as in SmolLM2; on a GPU of 8192 cubed.
    """
    import torch

    torch.set_num_threads(threads)
    rows, inner, outer = (2048, 576, 1536) if device == "cpu" else (8192, 8192, 8192)
    rates = {}
    for dtype in (torch.float32, torch.bfloat16):
        a, b = (torch.randn(size, inner, device=device).to(dtype) for size in (rows, outer))
        torch.nn.functional.linear(a, b)
        taken = [_timed(lambda a=a, b=b: torch.nn.functional.linear(a, b)) for _ in range(20)]
        work = 5 * 2 * rows * inner * outer
        rates[str(dtype)[6:]] = work / min(t.wall for t in taken)
        rates[f"{str(dtype)[6:]} cpu"] = work / max(min(t.cpu for t in taken), 1e-9)
    return rates


def _timed(work: Callable[[], object]) -> Moment:
    """Five runs, with the processor clock of this process at its own resolution."""
    Moment.now()
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(5):
        work()
    Moment.now()
    return Moment(time.perf_counter() - wall, time.process_time() - cpu)
