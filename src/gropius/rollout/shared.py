"""Prompts that siblings share: held once beside the slots, read once a step for all rows that began with them.

Attention of a row over [prompt | its own positions] is one softmax over two stretches of scores. Those of the prompt
are one product a prompt and key head, its siblings' queries one below the other; so a long prompt is read from memory
once a step and not once a row. An index puts rows into that order and back; padding is masked, and weighs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

SHARE_FROM = 1024  # (siblings − 1) · prompt tokens: below, prompts are copied
ALIGN = 16  # prompts are padded to a multiple of so many positions


class Prompt(Protocol):
    """keys, values [layer, kv head, _P, e]."""

    @property
    def keys(self) -> Tensor: ...

    @property
    def values(self) -> Tensor: ...

    @property
    def length(self) -> int: ...


@dataclass(frozen=True, eq=False)
class Order:
    """How rows and prompts belong together. G prompts, M siblings at most, k key heads.

    keys, values [layer, G · k, _P, e]; into [G · k · M]: the row and head that sits there, some number where none does;
    back [_B · k]: where a row and head sits, 0 where it has no prompt; lengths [_B]: of each row's prompt, 0 for none;
    alone [_B · k, 1, 1]: which have none, None where every row has one.
    """

    keys: Tensor
    values: Tensor
    into: Tensor
    back: Tensor
    lengths: Tensor
    alone: Tensor | None

    @property
    def width(self) -> int:
        """Positions of the longest prompt, padded."""
        return int(self.keys.shape[2])


class SharedPrompts:
    """Which row began with which shared prompt. Rows are those of the slots, in their order."""

    def __init__(self, kv_heads: int, dtype: torch.dtype, device: torch.device) -> None:
        self._heads, self._dtype, self._device = kv_heads, dtype, device
        self._prompts: list[Prompt] = []
        self._of = np.zeros(0, np.int64)
        self._held: tuple[list[Prompt], Tensor, Tensor] | None = None
        self._order: Order | None = None

    def __bool__(self) -> bool:
        return bool(self._prompts)

    @property
    def bytes(self) -> int:
        """Memory of the prompts as a step reads them."""
        return 0 if self._held is None else 2 * self._held[1].numel() * self._held[1].element_size()

    def lengths(self) -> NDArray[np.int64]:
        """[_B] positions that each row has in a shared prompt, 0 for none."""
        return np.array([*(prompt.length for prompt in self._prompts), 0], np.int64)[self._of]

    def prompt(self, row: int) -> Prompt | None:
        """What the row began with."""
        return self._prompts[self._of[row]] if self._of[row] >= 0 else None

    def add(self, prompts: Sequence[Prompt | None]) -> None:
        """Append a row for each; None: a row whose prompt lies in its slot."""
        found = []
        for prompt in prompts:
            if prompt is None:
                found.append(-1)
                continue
            known = next((n for n, held in enumerate(self._prompts) if held is prompt), None)
            if known is None:
                known = len(self._prompts)
                self._prompts.append(prompt)
            found.append(known)
        self._set(np.concatenate([self._of, np.array(found, np.int64)]))

    def keep(self, rows: NDArray[np.int64]) -> None:
        """Keep these rows, renumbered in that order; a prompt without a row is let go."""
        self._set(self._of[rows])

    def _set(self, of: NDArray[np.int64]) -> None:
        used = [n for n in range(len(self._prompts)) if (of == n).any()]
        number = np.full(len(self._prompts) + 1, -1, np.int64)
        number[used] = np.arange(len(used))
        self._prompts = [self._prompts[n] for n in used]
        self._of, self._order = number[of], None
        if not used:
            self._held = None

    def order(self) -> Order:
        """Rows and prompts as they are now. Only where there is a prompt."""
        if self._order is None:
            keys, values = self._stacked()
            groups, heads = len(self._prompts), self._heads
            rows = [np.flatnonzero(self._of == n) for n in range(groups)]
            most = max(map(len, rows))
            into = np.zeros((groups, heads, most), np.int64)
            back = np.zeros((len(self._of), heads), np.int64)
            for n, members in enumerate(rows):
                for head in range(heads):
                    into[n, head, : len(members)] = members * heads + head
                    back[members, head] = (n * heads + head) * most + np.arange(len(members))
            alone = (self._of < 0).repeat(heads)[:, None, None] if (self._of < 0).any() else None
            self._order = Order(
                keys,
                values,
                self._put(into.ravel()),
                self._put(back.ravel()),
                self._put(self.lengths()),
                None if alone is None else self._put(alone),
            )
        return self._order

    def _put(self, array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(array).to(self._device)

    def _stacked(self) -> tuple[Tensor, Tensor]:
        if self._held is None or self._held[0] != self._prompts:
            width = -(-max(prompt.length for prompt in self._prompts) // ALIGN) * ALIGN
            stacked = (
                torch.stack([_wide(part, width) for part in parts], dim=1).flatten(1, 2).to(self._dtype)
                for parts in zip(*((prompt.keys, prompt.values) for prompt in self._prompts), strict=True)
            )
            keys, values = stacked
            self._held = list(self._prompts), keys, values
        return self._held[1], self._held[2]


def _wide(part: Tensor, width: int) -> Tensor:
    return pad(part, (0, 0, 0, width - part.shape[2]))


def shared_attention(
    q: Tensor, order: Order, layer: int, prompt_mask: Tensor, own: tuple[Tensor, Tensor, Tensor]
) -> Tensor:
    """One query position a row over its shared prompt and its own positions.

    q [_B · k, g, e]; prompt_mask [_B · k, 1, _P] and own = (keys [_B · k, e, m], values [_B · k, m, e], mask
    [_B · k, 1, m]), masks additive, in each row at least one own position open. Returns [_B · k, g, e].
    """
    keys, values = order.keys[layer], order.values[layer]
    own_keys, own_values, own_mask = own
    scale, g, e = q.shape[-1] ** -0.5, q.shape[1], q.shape[2]
    together = q.index_select(0, order.into).view(len(keys), -1, e)
    scores = torch.bmm(together, keys.transpose(1, 2)).view(-1, g, order.width).index_select(0, order.back)
    both = torch.cat(
        (torch.add(prompt_mask, scores, alpha=scale), torch.baddbmm(own_mask, q, own_keys, alpha=scale)), dim=-1
    )
    weights = torch.softmax(both, dim=-1)
    of_prompt = weights[..., : order.width].index_select(0, order.into).view(len(keys), -1, order.width)
    mixed = torch.bmm(of_prompt, values).view(-1, g, e).index_select(0, order.back)
    if order.alone is not None:
        mixed.masked_fill_(order.alone, 0.0)
    return torch.baddbmm(mixed, weights[..., order.width :], own_values)
