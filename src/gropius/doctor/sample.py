"""Which groups of a long run are looked at, so that memory does not grow with the run. No torch.

A group has a lot, a number made from its id. Of each step those with the smallest lots are kept, so every step stays,
the choice does not depend on what a group holds, and a smaller choice is part of a larger one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

MOST_RESPONSES = 200_000
MOST_TOKENS = 1_000_000
TOKEN_ROWS = 32  # of a step whose tokens are looked at, however long they are


def fingerprint(value: object) -> int:
    """A number that equal values share (63 bits of a digest of how they are written).

    >>> fingerprint([1, 2]) == fingerprint([1, 2]), fingerprint([1, 2]) == fingerprint([12])
    (True, False)
    """
    digest = hashlib.blake2b(repr(value).encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def by_lot(ids: Sequence[str]) -> list[str]:
    """The different ids in the order of their lots."""
    return sorted(dict.fromkeys(ids), key=lambda name: (fingerprint(name), name))


def chosen(ids: Sequence[str], groups: int) -> NDArray[np.bool_]:
    """[rows] True for the rows of the `groups` first groups by lot.

    >>> chosen(["a", "a", "b"], 1).sum() in (1, 2), chosen(["a", "a", "b"], 2).tolist()
    (True, [True, True, True])
    """
    kept = set(by_lot(ids)[:groups])
    return np.array([name in kept for name in ids], np.bool_)


def within_tokens(ids: Sequence[str], lengths: NDArray[np.int64], most: int) -> NDArray[np.bool_]:
    """[rows] True for rows of the first groups by lot that hold `most` tokens together, and at least 32 rows."""
    names = np.array(ids, object)
    kept = np.zeros(len(names), np.bool_)
    tokens = 0
    for name in by_lot(ids):
        here = names == name
        tokens += int(lengths[here].sum())
        if tokens > most and kept.sum() >= TOKEN_ROWS:
            break
        kept |= here
    return kept


def list_lengths(table: pa.Table, name: str) -> NDArray[np.int64]:
    """[rows] length of each list of a column; 0 for a null."""
    lengths = pc.list_value_length(table.column(name)).fill_null(0)
    return np.asarray(lengths.to_numpy(zero_copy_only=False), np.int64)
