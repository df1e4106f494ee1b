"""The arithmetic of a decode step: what it must compute and read, and how fast this machine does either."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from gropius.models.load import LoadedModel
from gropius.rollout.shadow import Matrix
from gropius.rollout.torch_engine import TorchEngine, position_bytes


@dataclass(frozen=True)
class Limit:
    """What one decode step of `rows` full rows must do, and the rates of this machine.

    parameters: of the matrix products, each 2 FLOPs a token and, in bfloat16, 2 bytes a step. position_bytes: keys and
    values of one position as the own engine keeps them. products_s: of the products of a step, in whichever of bfloat16
    and float32 is the faster at each shape. best: GFLOP/s of a large product.
    memory: GB/s of a + b → c.
    """

    rows: int
    parameters: int
    position_bytes: int
    products_s: float
    best: float
    memory: float

    def bytes_s(self, positions: float) -> float:
        """Seconds to read a step's weights once and the keys and values of rows of so many positions."""
        return (2 * self.parameters + self.rows * positions * self.position_bytes) / self.memory / 1e9

    def tokens_s(self, positions: float) -> float:
        """Tokens per second at most."""
        return self.rows / max(self.products_s, self.bytes_s(positions))

    def describe(self) -> str:
        """FLOPs and bytes of a token, and the rates measured."""
        flops = 2 * self.parameters
        return (
            f"{self.parameters / 1e6:.1f} M parameters in matrix products: {flops / 1e9:.3f} GFLOP a token, "
            f"{flops / 1e6:.0f} MB of weights a step, {self.position_bytes / 1e3:.1f} kB of keys and values "
            "a position\n"
            f"this machine: {flops * self.rows / self.products_s / 1e9:.0f} GFLOP/s in products of "
            f"these shapes at {self.rows} rows ({self.best:.0f} in a large one), {self.memory:.0f} GB/s of memory"
        )

    def describe_step(self, positions: float) -> str:
        """A step at a mean length, and what follows from it."""
        return (
            f"a step of {self.rows} rows of {positions:.0f} positions: products {1e3 * self.products_s:.1f} ms, bytes "
            f"{1e3 * self.bytes_s(positions):.1f} ms, so at most {self.tokens_s(positions):,.0f} tokens/s"
        )


@torch.inference_mode()
def limit_of(loaded: LoadedModel, rows: int) -> Limit:
    """Measure the machine with a model's shapes."""
    head = loaded.model.get_output_embeddings()
    shapes = [tuple(m.weight.shape) for m in loaded.model.modules() if isinstance(m, torch.nn.Linear)]
    assert head is not None
    seconds = 0.0
    for shape in set(shapes):
        found = []
        for dtype in (torch.bfloat16, torch.float32):
            matrix, x = Matrix(torch.randn(shape).to(dtype)), torch.randn(rows, shape[1]).to(dtype)
            matrix.pack()
            found.append(best_time(lambda x=x, matrix=matrix: matrix(x)))
        seconds += shapes.count(shape) * min(found)
    square = torch.randn(2048, 2048).bfloat16()
    best = 2 * 2048**3 / best_time(lambda: square @ square) / 1e9
    a, b, c = (torch.ones(32 << 20) for _ in range(3))
    memory = 3 * 4 * a.numel() / best_time(lambda: torch.add(a, b, out=c)) / 1e9
    engine = TorchEngine(loaded)
    positions = position_bytes(loaded.model, engine._path)
    return Limit(rows, sum(m * n for m, n in shapes), positions, seconds, best, memory)


def best_time(work: Callable[[], object], times: int = 7) -> float:
    """The shortest of some runs."""
    found = []
    for _ in range(times):
        began = time.perf_counter()
        work()
        found.append(time.perf_counter() - began)
    return min(found)
