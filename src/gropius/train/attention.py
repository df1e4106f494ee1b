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
from numpy.typing import NDArray
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel

from gropius.errors import ModelError
from gropius.train.pack import Pack, ancestors
from gropius.train.tree import Blocks, Layout, fused_attention, tree_attention
from gropius.train.varlen import varlen, varlen_attention

NAME = "gropius_pack"
Piece = tuple[NDArray[np.int64], NDArray[np.int64]]  # row indices of a block's queries and of the keys they look at
BLOCK_TOKENS = 48  # queries of a block: large enough for the matrix products, small enough to skip what is not seen
PADDING, ROUND_KEYS = 1.2, 256  # a batch of blocks may be a sixth padding, and so many keys more than that


def layout(
    pack: Pack, device: torch.device | str = "cpu", block_tokens: int = BLOCK_TOKENS, *, kernel: str = ""
) -> Layout:
    """Cut the pack's row into blocks and group those of like size; for kernel = "flash" into its parts instead."""
    if kernel == "flash":
        nothing = torch.zeros(0, dtype=torch.int64, device=device)
        return Layout((), nothing, nothing, nothing, varlen=varlen(pack, device))
    batches = _batches(_pieces(pack, block_tokens))
    place = np.empty(pack.run_tokens, np.int64)
    offset, blocks = 0, []
    for batch in batches:
        most = max(len(queries) for queries, _ in batch)
        for n, (queries, _) in enumerate(batch):
            place[queries] = offset + n * most + np.arange(len(queries))
        offset += len(batch) * most
        blocks.append(_blocks(batch, pack, device))
    uses, bounds = _uses(batches, pack.run_tokens)
    place_, uses_, bounds_ = (torch.from_numpy(a).to(device) for a in (place, uses, bounds))
    return Layout(tuple(blocks), place_, uses_, bounds_)


def _batches(pieces: list[Piece]) -> list[list[Piece]]:
    """Most keys first; a batch takes pieces while its padding costs less than another round of kernels would."""
    batches: list[list[Piece]] = []
    filled = 0
    for piece in sorted(pieces, key=lambda piece: (-len(piece[1]), piece[0][0])):
        size = len(piece[1])
        if batches and (len(batches[-1]) + 1) * len(batches[-1][0][1]) <= PADDING * (filled + size) + ROUND_KEYS:
            batches[-1].append(piece)
            filled += size
        else:
            batches.append([piece])
            filled = size
    return batches


def _uses(batches: list[list[Piece]], size: int) -> Piece:
    """Where each row index stands among the padded keys of all blocks, one index after another; and the bag bounds."""
    token, slot, offset = [], [], 0
    for batch in batches:
        k = max(len(keys) for _, keys in batch)
        for _, keys in batch:
            token.append(keys)
            slot.append(offset + np.arange(len(keys)))
            offset += k
    tokens, slots = np.concatenate(token), np.concatenate(slot)
    counts = np.bincount(tokens, minlength=size)
    return slots[np.argsort(tokens, kind="stable")], np.concatenate([[0], np.cumsum(counts)[:-1]])


def _pieces(pack: Pack, block_tokens: int) -> list[Piece]:
    """Consecutive stretches of the row with the keys each needs. Cuts fall where a part begins, if one does in time."""
    pieces: list[Piece] = []
    begin = 0
    for start, stop, _depth in pack.parts:
        if begin < start and stop - begin > block_tokens:
            pieces.append(_piece(begin, start, pack))
            begin = start
        while stop - begin > block_tokens:
            pieces.append(_piece(begin, begin + block_tokens, pack))
            begin += block_tokens
    if begin < pack.run_tokens:
        pieces.append(_piece(begin, pack.run_tokens, pack))
    return pieces


def _piece(begin: int, stop: int, pack: Pack) -> Piece:
    queries = np.arange(begin, stop)
    return queries, np.concatenate([ancestors(begin, pack), queries])


def _blocks(batch: list[Piece], pack: Pack, device: torch.device | str) -> Blocks:
    q, k = max(len(own) for own, _ in batch), max(len(seen) for _, seen in batch)
    queries, keys = np.empty((len(batch), q), np.int64), np.zeros((len(batch), k), np.int64)
    real = np.zeros((len(batch), 1, k), np.bool_)
    for n, (own, seen) in enumerate(batch):
        queries[n, : len(own)], queries[n, len(own) :] = own, own[0]
        keys[n, : len(seen)], real[n, 0, : len(seen)] = seen, True
    at, of = queries[:, :, None], keys[:, None, :]
    visible = (of <= at) & (at < pack.ends[of]) & real
    distance = pack.positions[at] - pack.positions[of]
    padding = np.arange(q) >= np.array([len(own) for own, _ in batch])[:, None]
    made = [torch.from_numpy(a).to(device) for a in (queries, keys, visible, distance, padding)]
    return Blocks(made[0], made[1], made[2], made[3], made[4])


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
    if where.varlen is not None:
        out = varlen_attention(rows, where.varlen, window, scale)
    elif query.device.type == "cpu":
        out = tree_attention(rows, where, window, scale)
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
