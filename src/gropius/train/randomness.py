"""The global random generators: nothing of ours draws from them, a person's reward or environment may.

They are seeded when a run begins, and saved with every checkpoint, so that such code continues to the same bits.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Randomness:
    """facts: the generators of `random` and `numpy.random`, JSON-ready. tensors: torch's."""

    facts: dict[str, Any]
    tensors: dict[str, Tensor]


def seed_all(seed: int) -> None:
    """Seed every global generator from the recipe's seed."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def capture() -> Randomness:
    """The state of every global generator."""
    version, words, gauss = random.getstate()
    kind, keys, place, has_gauss, cached = np.random.get_state(legacy=True)
    facts = {
        "python": [version, list(words), gauss],
        "numpy": [str(kind), np.asarray(keys).tolist(), int(place), int(has_gauss), float(cached)],
    }
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states.update({f"cuda{n}": state for n, state in enumerate(torch.cuda.get_rng_state_all())})
    return Randomness(facts, states)


def restore(saved: Randomness) -> None:
    """Put back what `capture` gave; generators of devices that are not here are left out."""
    version, words, gauss = saved.facts["python"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, place, has_gauss, cached = saved.facts["numpy"]
    np.random.set_state((kind, np.asarray(keys, np.uint32), place, has_gauss, cached))
    torch.set_rng_state(saved.tensors["cpu"])
    for n in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        if f"cuda{n}" in saved.tensors:
            torch.cuda.set_rng_state(saved.tensors[f"cuda{n}"], n)
