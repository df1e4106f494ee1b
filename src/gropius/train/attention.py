"""Attention over a pack, through transformers' attention interface: any decoder that calls the interface can be packed.

The row of a pack is cut into blocks of consecutive tokens. A block's queries look at the ancestors of its first token
and at the block itself: in a tree written depth first no other token can be an ancestor of any of them. Blocks of like
size are computed together. Keys are gathered, never repeated for grouped queries; sliding windows count positions, not
places in the row.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel

from gropius.errors import ModelError
from gropius.train.pack import Pack, ancestors
from gropius.train.tree import Blocks, Layout, TreeAttention, fused_attention

NAME = "gropius_pack"
BLOCK_TOKENS = 64  # queries of a block: large enough for the matrix products, small enough to skip what is not seen


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
    uses, bounds = _uses(batches, pack.run_tokens)
    return Layout(tuple(blocks), *(torch.from_numpy(a).to(device) for a in (place, uses, bounds)))


def _uses(batches: list[list[tuple[np.ndarray, np.ndarray]]], size: int) -> tuple[np.ndarray, np.ndarray]:
    """Where each row index stands among the padded keys of all blocks, one index after another; and the bag bounds."""
    token, slot, offset = [], [], 0
    for batch in batches:
        k = max(len(keys) for _, keys in batch)
        for keys in (keys for _, keys in batch):
            token.append(keys)
            slot.append(offset + np.arange(len(keys)))
            offset += k
    tokens, slots = np.concatenate(token), np.concatenate(slot)
    counts = np.bincount(tokens, minlength=size)
    return slots[np.argsort(tokens, kind="stable")], np.concatenate([[0], np.cumsum(counts)[:-1]])


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
    padding = np.arange(q) >= np.array([len(own) for own, _ in batch])[:, None]
    made = (torch.from_numpy(a).to(device) for a in (queries, keys, visible, distance, padding))
    return Blocks(*made)


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
    where = _checked(options)
    window = options.get("sliding_window")
    where.windows.append(window)
    scale = options.get("scaling") or query.shape[3] ** -0.5
    rows = [tensor[0].transpose(0, 1).contiguous() for tensor in (query, key, value)]
    if query.device.type == "cpu":
        out = TreeAttention.apply(*rows, where, window, scale)
    else:
        out = fused_attention(rows, where, window, scale)
    return out[None], None


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
