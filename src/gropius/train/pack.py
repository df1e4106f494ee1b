"""Packs: several sequences laid in one row of tokens, every shared prefix once. NumPy only; no model is looked at.

The row is a tree written in depth-first order. A token may attend to itself and to its ancestors:

    a is seen by t   ⇔   a ≤ t < end[a]

where end[a] is one past the last descendant of a. Siblings share their prompt; where answers (or the turns of an
environment) begin alike they share that beginning too. Nothing changes but the amount of work.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gropius.train.sequences import Ids, TrainSequence

PAIRS_PER_TOKEN = 8192.0  # so many query-key pairs cost about as much as the matrix products of one token


@dataclass(frozen=True, eq=False)
class Pack:
    """One row of `_L` tokens and what is read from it.

    ids, positions, ends [_L]: token, its position in its own sequence, end of its subtree. parts: the stretches of the
    row that were appended one after another, as (start, stop, depth of the first token).
    paths: per sequence, the row indices of its tokens. index: per sequence, where it stood in the list packed.
    source, targets [_S]: for every loss token of every sequence, in order, the row index whose hidden state predicts it
    and the token itself. owner [_S]: which of the pack's sequences it belongs to.
    """

    sequences: tuple[TrainSequence, ...]
    index: tuple[int, ...]
    ids: Ids
    positions: Ids
    ends: Ids
    parts: tuple[tuple[int, int, int], ...]
    paths: tuple[Ids, ...]
    source: Ids
    targets: Ids
    owner: Ids

    @property
    def run_tokens(self) -> int:
        """_L: tokens that go through the model."""
        return len(self.ids)

    @property
    def row_tokens(self) -> int:
        """Tokens of the same sequences one by one, prompts counted every time."""
        return sum(sequence.length_tokens for sequence in self.sequences)

    @property
    def cost(self) -> float:
        """What running it costs, in tokens: _L and, in proportion, the query-key pairs. What packs are dealt out by."""
        return self.run_tokens + float((self.positions + 1).sum()) / PAIRS_PER_TOKEN


def pack(
    sequences: Sequence[TrainSequence], *, budget_tokens: int, share: bool = True, skip: bool = True
) -> list[Pack]:
    """Lay the sequences that must be run into packs of at most `budget_tokens` tokens; same input, same packs.

    Skipped sequences and those without a loss token are left out. Siblings stay together while they fit, so that
    their prompt is run once; a group larger than the budget is divided and its prompt repeated. A sequence is never
    split: one longer than the budget has a pack of its own. share = False lays every sequence out in full, skip = False
    runs skipped ones too: to measure, and to prove that nothing changes. Raises ValueError for a budget below 1.
    """
    if budget_tokens < 1:
        raise ValueError(f"budget_tokens = {budget_tokens}: a pack needs room for at least one token")
    live = [i for i, s in enumerate(sequences) if s.mask.any() and not (skip and s.skipped)]
    rows = {i: sequences[i].run_ids for i in live}
    bundles = _bundles(sequences, rows, budget_tokens, share)
    bins = _fit(bundles, budget_tokens)
    return [_lay(sequences, sorted(members), rows, share) for members in bins]


@dataclass(frozen=True)
class _Bundle:
    members: tuple[int, ...]
    tokens: int
    cost: float


def _bundles(
    sequences: Sequence[TrainSequence], rows: dict[int, Ids], budget_tokens: int, share: bool
) -> list[_Bundle]:
    """Siblings that stay together, in order of first appearance."""
    groups: dict[str | int, list[int]] = {}
    for i in rows:
        groups.setdefault(sequences[i].group_id if share else i, []).append(i)
    bundles = []
    for members in groups.values():
        order, shared = _sorted(members, rows)
        start, tokens, pairs = 0, 0, 0.0
        for j, i in enumerate(order):
            length = len(rows[i])
            own = length - shared[j] if j > start else length
            if j > start and tokens + own > budget_tokens:
                bundles.append(_Bundle(tuple(order[start:j]), tokens, tokens + pairs / PAIRS_PER_TOKEN))
                start, tokens, pairs, own = j, 0, 0.0, length
            tokens += own
            pairs += own * (length - own / 2)
        bundles.append(_Bundle(tuple(order[start:]), tokens, tokens + pairs / PAIRS_PER_TOKEN))
    return bundles


def _sorted(members: Sequence[int], rows: dict[int, Ids]) -> tuple[list[int], list[int]]:
    """The members in lexicographic order of their ids, and how many ids each shares with the one before it."""
    order = sorted(members, key=lambda i: (rows[i].astype(">u4").tobytes(), i))
    shared = [0] + [_common(rows[a], rows[b]) for a, b in itertools.pairwise(order)]
    return order, shared


def _common(a: Ids, b: Ids) -> int:
    size = min(len(a), len(b))
    different = np.flatnonzero(a[:size] != b[:size])
    return int(different[0]) if len(different) else size


def _fit(bundles: Sequence[_Bundle], budget_tokens: int) -> list[list[int]]:
    """First fit decreasing for the number of packs, then the largest to the least loaded for balance, where it fits."""
    order = sorted(bundles, key=lambda b: (-b.cost, b.members))
    first: list[list[_Bundle]] = []
    room: list[int] = []
    for bundle in order:
        at = next((k for k, free in enumerate(room) if bundle.tokens <= free), None)
        if at is None:
            first.append([])
            room.append(budget_tokens)
            at = len(first) - 1
        first[at].append(bundle)
        room[at] -= bundle.tokens
    even = _balance(order, len(first), budget_tokens) or first
    return [[i for bundle in bundles for i in bundle.members] for bundles in even if bundles]


def _balance(order: Sequence[_Bundle], count: int, budget_tokens: int) -> list[list[_Bundle]] | None:
    bins: list[list[_Bundle]] = [[] for _ in range(count)]
    cost, tokens = [0.0] * count, [0] * count
    for bundle in order:
        fits = [k for k in range(count) if not bins[k] or tokens[k] + bundle.tokens <= budget_tokens]
        if not fits:
            return None
        k = min(fits, key=lambda k: (cost[k], k))
        bins[k].append(bundle)
        cost[k] += bundle.cost
        tokens[k] += bundle.tokens
    return bins


def _lay(sequences: Sequence[TrainSequence], members: list[int], rows: dict[int, Ids], share: bool) -> Pack:
    """Write the members as one tree, depth first, and note where each sequence's tokens came to lie."""
    order, shared = _sorted(members, rows) if share else (members, [0] * len(members))
    size = sum(len(rows[i]) for i in order) - sum(shared)
    ids, positions, ends = np.empty(size, np.int64), np.empty(size, np.int64), np.empty(size, np.int64)
    parts, where = [], {}
    at, previous = 0, np.zeros(0, np.int64)
    for i, depth in zip(order, shared, strict=True):
        row = rows[i]
        stop = at + len(row) - depth
        path = np.concatenate([previous[:depth], np.arange(at, stop)])
        if stop > at:
            ids[at:stop], positions[at:stop] = row[depth:], np.arange(depth, len(row))
            parts.append((at, stop, depth))
        ends[path] = stop
        where[i] = previous = path
        at = stop
    source, targets, owner = [], [], []
    for n, i in enumerate(members):
        sequence = sequences[i]
        own = sequence.loss_positions
        source.append(where[i][len(sequence.prompt_ids) + own - 1])
        targets.append(sequence.response_ids[own])
        owner.append(np.full(len(own), n, np.int64))
    return Pack(
        sequences=tuple(sequences[i] for i in members),
        index=tuple(members),
        ids=ids,
        positions=positions,
        ends=ends,
        parts=tuple(parts),
        paths=tuple(where[i] for i in members),
        source=np.concatenate(source),
        targets=np.concatenate(targets),
        owner=np.concatenate(owner),
    )


def ancestors(token: int, pack: Pack) -> Ids:
    """Row indices of the ancestors of one token, from the root down: every a < token with token < end[a]."""
    if pack.positions[token] == 0:
        return np.zeros(0, np.int64)
    return np.flatnonzero(pack.ends[:token] > token)
