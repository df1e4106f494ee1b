"""Decode steps captured once for a few slot counts and widths, and replayed: a small step on a GPU costs its launches.

A step of fewer rows is padded to the next slot count. The padding feeds token 0 at position 0 of slots that no row
sits in, which a later prompt overwrites; its logits are left out. New weights or slots make every captured step stale.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gropius.rollout.decoder import FusedDecoder

SLOT_COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # a wider batch is bound by its arithmetic
WIDTH_STEP = 256  # positions; a step reads whole multiples of it

Replay = Callable[[], Tensor]
Capture = Callable[[Replay], Replay]


def on_gpu(step: Replay) -> Replay:
    """Capture a CUDA graph of a step: run it aside once, record it, and give what replays it into the same logits."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = step()

    def replay() -> Tensor:
        graph.replay()
        return logits

    return replay


@dataclass(frozen=True, eq=False)
class _Captured:
    """A step over fixed inputs [_B]."""

    ids: Tensor
    positions: Tensor
    replay: Replay


class StepGraphs:
    """`FusedDecoder.step` by replaying captured steps. capture: how one is made of a function that runs it.

    Where the device refuses to capture, a warning says so and steps run as they are from then on.
    """

    def __init__(self, decoder: FusedDecoder, capture: Capture = on_gpu) -> None:
        self._decoder = decoder
        self._capture = capture
        self._steps: dict[tuple[int, int], _Captured] = {}
        self._keys = decoder.keys
        self._refused = False

    def __len__(self) -> int:
        return len(self._steps)

    def clear(self) -> None:
        """The weights changed, or the slots are others: no step holds on to the ones before."""
        self._steps.clear()
        self._keys = self._decoder.keys

    @torch.inference_mode()
    def step(self, ids: Tensor, positions: Tensor, width: int) -> Tensor:
        """Logits [_B, _V]; see `FusedDecoder.step`."""
        _, slots, _, capacity, _ = self._decoder.keys.shape
        rows = next((count for count in SLOT_COUNTS if count >= len(ids)), 0)
        wide = min(-(-width // WIDTH_STEP) * WIDTH_STEP, capacity)
        if not rows or self._refused:
            return self._decoder.step(ids, positions, width)
        captured = self._captured(min(rows, slots), wide)
        if captured is None:
            return self._decoder.step(ids, positions, width)
        for held, new in ((captured.ids, ids), (captured.positions, positions)):
            held.zero_()
            held[: len(new)] = new
        return captured.replay()[: len(ids)].clone()

    def _captured(self, rows: int, width: int) -> _Captured | None:
        if self._decoder.keys is not self._keys:
            self._steps.clear()
            self._keys = self._decoder.keys
        if (rows, width) not in self._steps:
            ids, positions = (torch.zeros(rows, dtype=torch.int64, device=self._keys.device) for _ in range(2))
            # Capturing runs the step: what it writes at position 0 must be nobody's.
            kept = self._keys[:, :rows, :, 0].clone(), self._decoder.values[:, :rows, :, 0].clone()
            try:
                replay = self._capture(lambda: self._decoder.step(ids, positions, width))
            except RuntimeError as fault:  # the boundary: a driver or a library that does not capture
                warnings.warn(f"decode steps are not captured as CUDA graphs here: {fault}", stacklevel=2)
                self._refused = True
                return None
            finally:
                self._keys[:, :rows, :, 0], self._decoder.values[:, :rows, :, 0] = kept
            self._steps[rows, width] = _Captured(ids, positions, replay)
        return self._steps[rows, width]
