"""How much a token's score moves the logits: 1 − 2π + Σ_v π_v², what the optimal token baseline weighs with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from numpy.typing import NDArray

from gropius.models.logprobs import CHUNK_NUMBERS
from gropius.train.forward import Forward, scatter
from gropius.train.pack import Pack


@torch.no_grad()
def energies(forward: Forward, packs: Sequence[Pack], *, count: int, temperature: float) -> list[NDArray[Any] | None]:
    """Per sequence [_T] the energy of every loss token under the policy as it is, 0 at masked ones; `count` entries.

    Rows are worked in chunks: the logits of all tokens never exist at once.
    """
    out: list[NDArray[Any] | None] = [None] * count
    for one in packs:
        hidden = forward.hidden(one)
        targets = torch.from_numpy(one.targets).to(hidden.device)
        size = max(16, CHUNK_NUMBERS // forward.head.weight.shape[0])
        found = []
        for rows, wanted in zip(hidden.split(size), targets.split(size), strict=True):
            p = torch.softmax(forward.head.logits(rows).float() / temperature, dim=-1)
            found.append(1 - 2 * p.gather(1, wanted[:, None])[:, 0] + p.square().sum(-1))
        scatter(one, torch.cat(found), out)
    return out
