"""How much a token's score moves the logits: 1 − 2π + Σ_v π_v², what the optimal token baseline weighs with."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from gropius.models.logprobs import CHUNK_NUMBERS
from gropius.train.forward import Forward, scatter
from gropius.train.pack import Pack
from gropius.train.shares import nothing


@torch.no_grad()
def energies(
    forward: Forward, packs: Sequence[Pack | None], *, count: int, temperature: float
) -> list[NDArray[Any] | None]:
    """Per sequence [_T] the energy of every loss token under the policy as it is, 0 at masked ones; `count` entries.

    A pack that is None is run for the sake of the other ranks, and nothing comes of it.
    """
    out: list[NDArray[Any] | None] = [None] * count
    for one in packs:
        found = forward.on_weights(functools.partial(_energy, one or nothing(), temperature))
        if one is not None:
            scatter(one, found, out)
    return out


def _energy(one: Pack, temperature: float, forward: Forward) -> Tensor:
    """[_S] of one pack. Rows are worked in chunks: the logits of all tokens never exist at once."""
    hidden = forward.states(one)
    targets = torch.from_numpy(one.targets).to(hidden.device)
    size = max(16, CHUNK_NUMBERS // forward.head.weight.shape[0])
    found = []
    for rows, wanted in zip(hidden.split(size), targets.split(size), strict=True):
        p = torch.softmax(forward.head.logits(rows).float() / temperature, dim=-1)
        found.append(1 - 2 * p.gather(1, wanted[:, None])[:, 0] + p.square().sum(-1))
    return torch.cat(found)
