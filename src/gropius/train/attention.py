"""Attention over a pack, through transformers' attention interface: any decoder that calls the interface can be packed.

The row of a pack is cut into blocks of consecutive tokens. A block's queries look at the ancestors of its first token
and at the block itself: in a tree written depth first no other token can be an ancestor of any of them. Blocks of like
size are computed together. Keys are gathered, never repeated for grouped queries; sliding windows count positions, not
places in the row.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel

from gropius.errors import ModelError
from gropius.train.pack import Pack, ancestors

NAME = "gropius_pack"
BLOCK_TOKENS = 64  # queries of a block: large enough for the matrix products, small enough to skip what is not seen


@dataclass(frozen=True, eq=False)
class Blocks:
    """Blocks computed together: queries [n, q] and keys [n, k] are row indices, padded; seen [n, q, k].

    A padded query repeats its block's first one, so that every query sees something; its result is not read.
    """

    queries: Tensor
    keys: Tensor
    seen: Tensor
    distance: Tensor
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

    windows: sliding windows that were asked for, layer by layer (None: full attention), for the check at load time.
    """

    blocks: tuple[Blocks, ...]
    place: Tensor
    windows: list[int | None] = field(default_factory=list)


def layout(pack: Pack, device: torch.device | str = "cpu", block_tokens: int = BLOCK_TOKENS) -> Layout:
    """Cut the pack's row into blocks and group those of like size."""
    pieces = _pieces(pack, block_tokens)
    pieces.sort(key=lambda piece: (len(piece[1]), piece[0][0]))
    batches: list[list[tuple[np.ndarray, np.ndarray]]] = []
    for piece in pieces:
        if batches and len(piece[1]) <= 1.25 * len(batches[-1][0][1]) + 16:
            batches[-1].append(piece)
        else:
            batches.append([piece])
    place = np.empty(pack.run_tokens, np.int64)
    offset, blocks = 0, []
    for batch in batches:
        most = max(len(queries) for queries, _ in batch)
        for n, (queries, _) in enumerate(batch):
            place[queries] = offset + n * most + np.arange(len(queries))
        offset += len(batch) * most
        blocks.append(_blocks(batch, pack, device))
    return Layout(tuple(blocks), torch.from_numpy(place).to(device))


def _pieces(pack: Pack, block_tokens: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Consecutive stretches of the row with the keys each needs. Cuts fall where a part begins, if one does in time."""
    starts = {start: (start, stop, depth) for start, stop, depth in pack.parts}
    pieces: list[tuple[np.ndarray, np.ndarray]] = []
    begin = 0
    for start, stop, _depth in pack.parts:
        if begin < start and stop - begin > block_tokens:
            pieces.append(_piece(begin, start, starts, pack))
            begin = start
        while stop - begin > block_tokens:
            pieces.append(_piece(begin, begin + block_tokens, starts, pack))
            begin += block_tokens
    if begin < pack.run_tokens:
        pieces.append(_piece(begin, pack.run_tokens, starts, pack))
    return pieces


def _piece(begin: int, stop: int, starts: dict[int, tuple[int, int, int]], pack: Pack) -> tuple[np.ndarray, np.ndarray]:
    before = ancestors((begin, stop, int(pack.positions[begin])), pack)
    queries = np.arange(begin, stop)
    return queries, np.concatenate([before, queries])


def _blocks(batch: list[tuple[np.ndarray, np.ndarray]], pack: Pack, device: torch.device | str) -> Blocks:
    q, k = max(len(b[0]) for b in batch), max(len(b[1]) for b in batch)
    queries, keys = np.empty((len(batch), q), np.int64), np.zeros((len(batch), k), np.int64)
    real = np.zeros((len(batch), 1, k), np.bool_)
    for n, (own, seen) in enumerate(batch):
        queries[n, : len(own)], queries[n, len(own) :] = own, own[0]
        keys[n, : len(seen)], real[n, 0, : len(seen)] = seen, True
    at, of = queries[:, :, None], keys[:, None, :]
    visible = (of <= at) & (at < pack.ends[of]) & real
    distance = pack.positions[at] - pack.positions[of]
    q_, k_, seen_, distance_ = (torch.from_numpy(a).to(device) for a in (queries, keys, visible, distance))
    return Blocks(q_, k_, seen_, distance_)


def pack_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Transformers' attention signature. query [1, H, _L, e], key and value [1, H_kv, _L, e] → [1, _L, H, e].

    Errors: ModelError for what it does not compute (soft caps, sinks, biases, dropout), so that nothing is left out
    silently; the check at load time turns that into plain, padded rows.
    """
    pack_layout = _checked(options)
    window = options.get("sliding_window")
    pack_layout.windows.append(window)
    heads, kv_heads, size = query.shape[1], key.shape[1], query.shape[3]
    flat_q = query[0].transpose(0, 1).reshape(-1, heads * size)
    flat_k = key[0].transpose(0, 1).reshape(-1, kv_heads * size)
    flat_v = value[0].transpose(0, 1).reshape(-1, kv_heads * value.shape[3])
    outputs = []
    for blocks in pack_layout.blocks:
        (n, q), k = blocks.queries.shape, blocks.keys.shape[1]
        own = flat_q.index_select(0, blocks.queries.flatten()).view(n, q, heads, size).transpose(1, 2)
        seen_k = flat_k.index_select(0, blocks.keys.flatten()).view(n, k, kv_heads, size).transpose(1, 2)
        seen_v = flat_v.index_select(0, blocks.keys.flatten()).view(n, k, kv_heads, -1).transpose(1, 2)
        out = torch.nn.functional.scaled_dot_product_attention(
            own,
            seen_k,
            seen_v,
            attn_mask=blocks.mask(window, own.dtype),
            scale=options.get("scaling"),
            enable_gqa=heads != kv_heads,
        )
        outputs.append(out.transpose(1, 2).reshape(n * q, -1))
    together = torch.cat(outputs) if len(outputs) > 1 else outputs[0]
    return together.index_select(0, pack_layout.place).view(1, -1, heads, value.shape[3]), None


# what a module may pass and what its value must be for the result to be plain scaled-dot-product attention
_HARMLESS = {
    "softcap": None,
    "s_aux": None,
    "position_bias": None,
    "head_mask": None,
    "is_causal": True,
    "dropout": 0.0,
}


def _checked(options: dict[str, Any]) -> Layout:
    found = options.get("pack_layout")
    if not isinstance(found, Layout):
        raise ModelError("this architecture does not hand the pack's layout down to its attention")
    for name, harmless in _HARMLESS.items():
        if options.get(name) not in (None, harmless):
            raise ModelError(f"packed attention does not compute {name}")
    return found


AttentionInterface.register(NAME, pack_attention)


@contextmanager
def packed_attention(model: PreTrainedModel) -> Iterator[None]:
    """Within the block the model's attention is the pack's; outside it is what it was (a rollout engine's)."""
    configs = {id(m.config): m.config for m in model.modules() if isinstance(m, PreTrainedModel)}
    text = model.config.get_text_config()
    configs.setdefault(id(text), text)
    before = [(config, config._attn_implementation) for config in configs.values()]
    try:
        for config, _ in before:
            config._attn_implementation = NAME
        yield
    finally:
        for config, name in before:
            config._attn_implementation = name
