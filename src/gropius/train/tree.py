"""The arithmetic of attention over a pack's blocks: queries, keys and values by row in, outputs by row out.

    S = Q Kᵀ · scale + mask        P = softmax(S)        O = P V
    dV = Pᵀ dO        dS = P ∘ (dO Vᵀ − Σ_e dO ∘ O)        dQ = dS K · scale        dK = dSᵀ Q · scale

Scores and softmax are float32 (float64 for float64 inputs) whatever the rest is in; the other products are in the dtype
of the values. P is formed again in the backward pass from the log of its normaliser: no [_L, k] numbers are kept.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gropius.train.varlen import Varlen

LN2 = math.log(2.0)


@dataclass(frozen=True, eq=False)
class Blocks:
    """Blocks computed together: queries [n, q] and keys [n, k] are row indices, padded; seen [n, q, k].

    padding [n, q]: a padded query repeats its block's first one, so that every query sees something; its result is not
    read and it gives no gradient. distance [n, q, k]: how many positions a key lies before its query.
    """

    queries: Tensor
    keys: Tensor
    seen: Tensor
    distance: Tensor
    padding: Tensor
    masks: dict[tuple[int | None, torch.dtype], Tensor] = field(default_factory=dict)

    def mask(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """[n, 1, q, k] added to the scores: 0 where seen (and less than `window` positions back), else −inf."""
        key = (window, dtype)
        if key not in self.masks:
            seen = self.seen if window is None else self.seen & (self.distance < window)
            zero = torch.zeros((), dtype=dtype, device=seen.device)
            self.masks[key] = torch.where(seen, zero, float("-inf"))[:, None]
        return self.masks[key]


@dataclass(frozen=True, eq=False)
class Layout:
    """What the attention of one pack needs: its blocks, and for each row index the place of its result.

    uses, bounds: for each row index the places where it stands as a key, as the bags of an embedding bag.
    windows: sliding windows that were asked for, layer by layer (None: full attention), for the check at load time.
    varlen: given where a variable-length kernel computes the pack; then there are no blocks.
    """

    blocks: tuple[Blocks, ...]
    place: Tensor
    uses: Tensor
    bounds: Tensor
    windows: list[int | None] = field(default_factory=list)
    varlen: Varlen | None = None


def tree_attention(rows: Sequence[Tensor], layout: Layout, window: int | None, scale: float) -> Tensor:
    """rows: query [_L, H, e], key and value [_L, H_kv, e]; window: a sliding window or None → [_L, H, e]."""
    out: Tensor = TreeAttention.apply(*rows, (layout, window, scale))  # type: ignore[no-untyped-call]
    return out


def fused_attention(rows: Sequence[Tensor], layout: Layout, window: int | None, scale: float) -> Tensor:
    """The same by the library's fused kernel and autograd: what a GPU runs."""
    query, key, value = rows
    outputs = []
    for blocks in layout.blocks:
        own, seen_k, seen_v = (
            _take(tensor, index).transpose(1, 2)
            for tensor, index in ((query, blocks.queries), (key, blocks.keys), (value, blocks.keys))
        )
        mask = blocks.mask(window, own.dtype)
        out = torch.nn.functional.scaled_dot_product_attention(
            own, seen_k, seen_v, attn_mask=mask, scale=scale, enable_gqa=own.shape[1] != seen_k.shape[1]
        )
        outputs.append(out.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs).index_select(0, layout.place)


def _take(tensor: Tensor, index: Tensor) -> Tensor:
    """[_L, H, e] at [n, m] row indices → [n, m, H, e]."""
    return tensor.flatten(1).index_select(0, index.flatten()).view(*index.shape, *tensor.shape[1:])


class TreeAttention(torch.autograd.Function):
    """query [_L, H, e], key, value [_L, H_kv, e], (layout, sliding window or None, scale) → [_L, H, e]."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, view: tuple[Layout, int | None, float]) -> Tensor:
        """Keeps the inputs, the output and one number a query for the backward pass."""
        layout, window, scale = view
        heads, kv_heads = query.shape[1], key.shape[1]
        out = value.new_empty(_slots(layout, "queries"), heads, value.shape[2])
        normalisers, at = [], 0
        with torch.autocast(query.device.type, enabled=False):
            for blocks in layout.blocks:
                own, seen, values = _folded(query, key, value, blocks)
                scores = _scores(own, seen, blocks, window, scale, heads // kv_heads)
                top = scores.amax(-1, keepdim=True)
                weights = scores.sub_(top).exp2_()
                total = weights.sum(-1, keepdim=True)
                result = torch.bmm(weights.to(values.dtype), values).div_(total)
                normalisers.append(_normaliser(top, total, blocks))
                at = _put(out, at, result, blocks.queries.shape, heads)
            out = out.flatten(1).index_select(0, layout.place).view(-1, heads, value.shape[2])
        ctx.save_for_backward(query, key, value, out, *normalisers)
        ctx.view = view
        return out

    @staticmethod
    def backward(ctx: Any, g_out: Tensor) -> tuple[Tensor | None, ...]:
        """The formulas of the module's docstring, block by block; each token's key gradients are summed by bags."""
        query, key, value, out, *normalisers = ctx.saved_tensors
        layout, window, scale = ctx.view
        heads, kv_heads = query.shape[1], key.shape[1]
        dtype = value.dtype
        with torch.autocast(query.device.type, enabled=False):
            g_out = g_out.contiguous().to(dtype)
            centre = (g_out.to(normalisers[0].dtype) * out).sum(-1, dtype=normalisers[0].dtype)[..., None]
            g_query = value.new_empty(_slots(layout, "queries"), heads, query.shape[2])
            g_key = value.new_empty(_slots(layout, "keys"), kv_heads, key.shape[2])
            g_value = value.new_empty(_slots(layout, "keys"), kv_heads, value.shape[2])
            at, k_at = 0, 0
            for blocks, normaliser in zip(layout.blocks, normalisers, strict=True):
                own, seen, values = _folded(query, key, value, blocks)
                scores = _scores(own, seen, blocks, window, scale, heads // kv_heads)
                weights = scores.sub_(normaliser).exp2_()
                g_own = _fold(_take(g_out, blocks.queries), kv_heads)
                _put(g_value, k_at, torch.bmm(weights.to(dtype).transpose(1, 2), g_own), blocks.keys.shape, kv_heads)
                slope = torch.bmm(g_own, values.transpose(1, 2)).to(weights.dtype)
                slope = slope.sub_(_fold(_take(centre, blocks.queries), kv_heads)).mul_(weights).to(dtype)
                g = torch.bmm(slope, seen.to(dtype)).mul_(scale)
                at = _put(g_query, at, g, blocks.queries.shape, heads)
                g = torch.bmm(slope.transpose(1, 2), own.to(dtype)).mul_(scale)
                k_at = _put(g_key, k_at, g, blocks.keys.shape, kv_heads)
            g_query = g_query.flatten(1).index_select(0, layout.place).view_as(query)
        g_key, g_value = _gather(g_key, layout).view_as(key), _gather(g_value, layout).view_as(value)
        return g_query.to(query.dtype), g_key.to(key.dtype), g_value.to(value.dtype), None


def _slots(layout: Layout, name: str) -> int:
    return sum(getattr(blocks, name).numel() for blocks in layout.blocks)


def _fold(tensor: Tensor, kv_heads: int) -> Tensor:
    """[n, q, H, e] → [n · H_kv, H/H_kv · q, e]: the heads that share a key head stand one after another."""
    n, q, heads, size = tensor.shape
    folded = tensor.view(n, q, kv_heads, heads // kv_heads, size).permute(0, 2, 3, 1, 4)
    return folded.reshape(n * kv_heads, -1, size)


def _folded(query: Tensor, key: Tensor, value: Tensor, blocks: Blocks) -> tuple[Tensor, Tensor, Tensor]:
    kv_heads = key.shape[1]
    own = _fold(_take(query, blocks.queries), kv_heads)
    seen, values = (_fold(_take(tensor, blocks.keys), kv_heads) for tensor in (key, value))
    return own, seen, values


def _scores(own: Tensor, seen: Tensor, blocks: Blocks, window: int | None, scale: float, repeat: int) -> Tensor:
    """[n · H_kv, r · q, k] S / ln 2, in float32 or float64: for powers of two, which are as fast for −∞ as for 0."""
    dtype = torch.promote_types(torch.float32, own.dtype)
    scores = torch.bmm(own.to(dtype) * (scale / LN2), seen.to(dtype).transpose(1, 2))
    n, q = blocks.queries.shape
    scores.view(n, -1, q, scores.shape[-1]).add_(blocks.mask(window, dtype))
    return scores


def _normaliser(top: Tensor, total: Tensor, blocks: Blocks) -> Tensor:
    """[n · H_kv, r · q, 1] log₂ Σ 2^scores; +inf for a padded query: its weights are 0 in the backward pass."""
    log = top.add_(total.log2_())
    n, q = blocks.queries.shape
    log.view(n, -1, q).masked_fill_(blocks.padding[:, None], torch.inf)
    return log


def _put(into: Tensor, at: int, values: Tensor, shape: torch.Size, heads: int) -> int:
    """Write [n · H_kv, r · m, e] to n · m rows of [_, H, e], from row `at` on; returns the row after them."""
    n, m = shape
    size = values.shape[-1]
    folded = values.view(n, heads, m, size).transpose(1, 2)
    into[at : at + n * m].view(n, m, heads, size).copy_(folded)
    return at + n * m


def _gather(slots: Tensor, layout: Layout) -> Tensor:
    """[_L, ·] for each row index the sum over the places where it stands as a key."""
    return torch.nn.functional.embedding_bag(layout.uses, slots.flatten(1), layout.bounds, mode="sum")
