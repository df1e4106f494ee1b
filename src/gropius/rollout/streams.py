"""Random numbers that belong to a response: draw number t of stream s is one fixed number, whoever asks and when.

A counter-based generator (Philox 4×32-10, Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3") turns
(stream, position) into a uniform number. There is no state, so a response does not depend on its neighbours in the
batch, on the slot it sits in, or on when it was admitted.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


def stream_key(stream: Sequence[int]) -> NDArray[np.uint64]:
    """[4] 32-bit words naming a stream such as (seed, step, group, member); the same on every machine."""
    text = ",".join(str(int(part)) for part in stream).encode()
    digest = hashlib.blake2b(text, digest_size=16).digest()
    return np.frombuffer(digest, dtype="<u4").astype(np.uint64)


def uniforms(keys: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """One number in [0, 1) for each row: draw `positions[n]` of the stream `keys[n]` (shapes [_N, 4] and [_N])."""
    at = positions.astype(np.uint64)
    counter = [at & _LOW, at >> _HALF, keys[:, 2], keys[:, 3]]
    words = philox(counter, [keys[:, 0], keys[:, 1]])
    return ((words[0] >> np.uint64(5)) * 67108864.0 + (words[1] >> np.uint64(6))) / 9007199254740992.0


def philox(counter: Sequence[NDArray[np.uint64]], key: Sequence[NDArray[np.uint64]]) -> list[NDArray[np.uint64]]:
    """Philox 4×32-10: four words of counter and two of key, arrays of 32-bit values, to four words of noise."""
    a, b, c, d = counter
    k0, k1 = key
    for round_number in range(10):
        if round_number:
            k0 = (k0 + np.uint64(_WEYL[0])) & _LOW
            k1 = (k1 + np.uint64(_WEYL[1])) & _LOW
        first, second = a * _MULTIPLIERS[0], c * _MULTIPLIERS[1]
        a, b, c, d = (second >> _HALF) ^ b ^ k0, second & _LOW, (first >> _HALF) ^ d ^ k1, first & _LOW
    return [a, b, c, d]
