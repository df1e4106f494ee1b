"""The norm of a gradient over all its tensors and all ranks, and clipping by it.

With a bound c, as `torch.nn.utils.clip_grad_norm_` does it:

    ‖g‖ = √(Σ g²)        g ← g · min(1, c / (‖g‖ + 10⁻⁶))
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from gropius.train.gathered import local

AT_ONCE = 4096  # numbers that one float32 sum of squares is taken over, on a CPU


def total_norm(gradients: Sequence[Tensor]) -> float:
    """‖g‖ of all elements of all tensors, of divided ones on all ranks; squares are added in float64.

    On a CPU each sum in float32 is over AT_ONCE numbers: one over a whole tensor, which PyTorch takes there, loses the
    small squares beside the sum, 1 % of the norm where a few rows of an embedding of 28 million are large. On several
    ranks all must call it, with the same tensors; the answer is the same on all. No tensor: 0. One number that is not
    finite makes the norm so.
    """
    norms: dict[torch.device, list[Tensor]] = {}
    for gradient in gradients:
        norms.setdefault(gradient.device, []).append(_norms(local(gradient).detach()))
    squares = [torch.cat(found).double().square().sum().cpu() for found in norms.values()]
    mine = torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float64)
    divided = next((g for g in gradients if isinstance(g, DTensor)), None)
    if divided is not None:
        shared = mine.to(divided.to_local().device)
        dist.all_reduce(shared, group=divided.device_mesh.get_group())
        mine = shared.cpu()
    return math.sqrt(float(mine))


def clip(gradients: Sequence[Tensor], bound: float, norm: float) -> None:
    """Scale gradients, of which `norm` is the total norm, to at most `bound` (above 0). One below it is not touched."""
    factor = bound / (norm + 1e-6)
    if factor < 1:
        for gradient in gradients:
            local(gradient).mul_(factor)


def _norms(part: Tensor) -> Tensor:
    """[n]: norms of pieces that together are the tensor. Numbers of 16 bits are widened as they are read."""
    dtype = torch.promote_types(part.dtype, torch.float32)
    flat = part.reshape(-1)
    whole = flat.numel() // AT_ONCE * AT_ONCE if part.device.type == "cpu" else 0
    pieces: list[Tensor] = [torch.linalg.vector_norm(flat[whole:], dtype=dtype)[None]]
    if whole:
        pieces.append(torch.linalg.vector_norm(flat[:whole].view(-1, AT_ONCE), dim=1, dtype=dtype))
    return torch.cat(pieces)
