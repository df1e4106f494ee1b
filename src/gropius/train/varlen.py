"""A pack as variable-length attention sees it: one sequence a part of the tree, its keys the path that leads to it.

A part is a stretch of the row whose tokens follow one another. Its queries see the ancestors of its first token and,
causally, itself: q_len queries that are the last of k_len keys, which is what such kernels compute when causal. Queries
stay where they are; a shared prefix is run once through every layer and only its keys and values are read again.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gropius.train.pack import Pack, ancestors

HALF = (torch.bfloat16, torch.float16)
KERNELS = {
    "blocks": "blocks of the tree on the CPU",
    "sdpa": "PyTorch's scaled dot-product attention over blocks of the tree",
    "flash": "variable-length flash attention",
}


@dataclass(frozen=True, eq=False)
class Varlen:
    """keys [_K]: row indices of the keys, part after part. bounds_q, bounds_k [parts + 1] int32: where a part begins.

    longest_q, longest_k: of one part. The queries are the rows of the pack in their order.
    """

    keys: Tensor
    bounds_q: Tensor
    bounds_k: Tensor
    longest_q: int
    longest_k: int


def varlen(pack: Pack, device: torch.device | str = "cpu") -> Varlen:
    """Cut a pack into its parts."""
    keys = [np.concatenate([ancestors(start, pack), np.arange(start, stop)]) for start, stop, _ in pack.parts]
    q_lengths = [stop - start for start, stop, _ in pack.parts]
    k_lengths = [len(own) for own in keys]
    bounds = [np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32) for lengths in (q_lengths, k_lengths)]
    index, of_q, of_k = (torch.from_numpy(a).to(device) for a in (np.concatenate(keys), *bounds))
    return Varlen(index, of_q, of_k, max(q_lengths), max(k_lengths))


def varlen_attention(rows: Sequence[Tensor], where: Varlen, window: int | None, scale: float) -> Tensor:
    """rows: query [_L, H, e], key and value [_L, H_kv, e]; window: a sliding window or None → [_L, H, e].

    What is not in 16 bits is computed in the dtype of the values; the result has it too.
    """
    dtype = rows[2].dtype
    query, key, value = (tensor.to(dtype) for tensor in rows)
    seen_k, seen_v = (tensor.index_select(0, where.keys) for tensor in (key, value))
    out: Tensor = kernel()(
        query,
        seen_k,
        seen_v,
        where.bounds_q,
        where.bounds_k,
        where.longest_q,
        where.longest_k,
        softmax_scale=scale,
        causal=True,
        window_size=(-1, -1) if window is None else (window - 1, 0),
    )
    return out


def kernel() -> Callable[..., Any]:
    """The kernel itself; imported where it is used."""
    from flash_attn import flash_attn_varlen_func

    found: Callable[..., Any] = flash_attn_varlen_func
    return found


def choose(device: torch.device, dtype: torch.dtype) -> tuple[str, str]:
    """Which of KERNELS computes packed attention on a device in a number format, and why not flash attention, or ""."""
    if device.type == "cpu":
        return "blocks", ""
    if device.type != "cuda":
        return "sdpa", f"flash attention needs CUDA, and this is {device.type}"
    if dtype not in HALF:
        return "sdpa", f"flash attention computes in 16 bits, and this is {str(dtype)[6:]}"
    if importlib.util.find_spec("flash_attn") is None:
        return "sdpa", "flash_attn is not installed"
    return "flash", ""
