"""Draw one token a row, each by its own rule, with one uniform number a row; the log-probability comes with it.

The draw inverts the cumulative distribution in blocks: sums of blocks, the block that holds u · total, the entry in
the block. The order of the rules is temperature, top-k, top-p, min-p, each on what the one before left.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gropius.types import Sampling

BLOCK = 256
CANDIDATES = 256  # tokens looked at first when only top-p cuts; rows whose mass is spread wider are sorted whole


@dataclass(frozen=True, eq=False)
class Rules:
    """The sampling rules of _N rows, as arrays [_N]."""

    temperature: NDArray[np.float64]
    top_p: NDArray[np.float64]
    top_k: NDArray[np.int64]
    min_p: NDArray[np.float64]

    @classmethod
    def of(cls, samplings: Sequence[Sampling]) -> Rules:
        """Gather the rules of rows."""
        return cls(
            np.array([s.temperature for s in samplings], np.float64),
            np.array([s.top_p for s in samplings], np.float64),
            np.array([s.top_k for s in samplings], np.int64),
            np.array([s.min_p for s in samplings], np.float64),
        )

    def rows(self, index: NDArray[np.int64] | slice) -> Rules:
        """The rules of some rows."""
        return Rules(self.temperature[index], self.top_p[index], self.top_k[index], self.min_p[index])


@dataclass(frozen=True, eq=False)
class Draws:
    """ids [_N] int64; logprobs [_N] of the drawn token under softmax(logits / temperature), whole vocabulary;
    drawn_logprobs [_N] under the distribution it was drawn from.
    """

    ids: NDArray[np.int64]
    logprobs: NDArray[np.float32]
    drawn_logprobs: NDArray[np.float32]


def draw(logits: Tensor, rules: Rules, uniform: NDArray[np.float64]) -> Draws:
    """Draw one token for each row of `logits` [_N, _V] with the numbers `uniform` [_N] in [0, 1).

    A row of temperature 0 takes its largest logit; its log-probability is that of temperature 1 (there is no
    softmax at 0) and its drawn log-probability is 0. A token of probability 0 is never drawn.
    Raises ValueError when a row has no finite logit or a NaN: a model that diverged must not sample on.
    """
    z = logits.float()
    greedy = rules.temperature == 0
    temperature = np.where(greedy, 1.0, rules.temperature)
    if (temperature != 1.0).any():
        z = z / torch.as_tensor(temperature, dtype=torch.float32, device=z.device)[:, None]
    u = torch.as_tensor(uniform, dtype=torch.float64, device=z.device)
    ids, normaliser = _draw_in_blocks(z, u)
    if not bool(torch.isfinite(normaliser).all()):
        raise ValueError("the model's logits are not finite: its weights have diverged")
    if greedy.any():
        rows = torch.as_tensor(np.flatnonzero(greedy), device=z.device)
        ids[rows] = z[rows].argmax(dim=-1)
    cut = ((rules.top_p < 1) | (rules.top_k > 0) | (rules.min_p > 0)) & ~greedy
    kept_mass = torch.zeros_like(normaliser)
    if cut.any():
        rows = torch.as_tensor(np.flatnonzero(cut), device=z.device)
        ids[rows], kept_mass[rows] = _draw_cut(z[rows], normaliser[rows], u[rows], rules.rows(np.flatnonzero(cut)))
    logprobs = z.gather(1, ids[:, None])[:, 0].double() - normaliser
    whole = logprobs.cpu().numpy().astype(np.float32)
    drawn = np.where(greedy, 0.0, (logprobs - kept_mass).cpu().numpy()).astype(np.float32)
    return Draws(ids.cpu().numpy(), whole, drawn)


def _draw_in_blocks(z: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """Ids [_N] drawn from softmax(z) and log Σ exp z [_N] in float64."""
    rows, vocabulary = z.shape
    top = z.amax(dim=-1, keepdim=True)
    weight = torch.exp_(z - top)
    if vocabulary > 2 * BLOCK:
        missing = -vocabulary % BLOCK
        if missing:
            weight = torch.nn.functional.pad(weight, (0, missing))
        blocks = weight.view(rows, -1, BLOCK)
        edges = blocks.sum(-1).double().cumsum_(-1)
        target = (u * edges[:, -1]).unsqueeze(-1)
        block = _first_above(edges, target)
        below = torch.where(block > 0, edges.gather(1, (block - 1).clamp_(min=0)), torch.zeros_like(target))
        inside = blocks.gather(1, block[..., None].expand(rows, 1, BLOCK))[:, 0].double().cumsum_(-1)
        ids = (block * BLOCK + _first_above(inside, target - below))[:, 0]
    else:
        edges = weight.double().cumsum_(-1)
        ids = _first_above(edges, (u * edges[:, -1]).unsqueeze(-1))[:, 0]
    return ids, edges[:, -1].log() + top[:, 0].double()


def _first_above(edges: Tensor, target: Tensor) -> Tensor:
    """[_N, 1] index of the first cumulative edge above the target, but never past the last entry that has mass."""
    index = torch.searchsorted(edges, target, right=True)
    last = torch.searchsorted(edges, edges[:, -1:].contiguous())
    return torch.minimum(index, last)


def _draw_cut(z: Tensor, normaliser: Tensor, u: Tensor, rules: Rules) -> tuple[Tensor, Tensor]:
    """Ids drawn from the truncated distributions, and the log of the probability mass that was kept [_N] float64."""
    ids = torch.empty(len(z), dtype=torch.int64, device=z.device)
    kept_mass = torch.empty_like(normaliser)
    pending = np.arange(len(z))
    width = _candidates(z.shape[1], rules)
    while len(pending):
        of = torch.as_tensor(pending, device=z.device)
        left = rules.rows(pending)
        values, tokens = torch.topk(z[of], width, dim=-1)
        p = torch.exp(values.double() - normaliser[of, None])
        kept = _kept(p, left)
        edges = torch.where(kept, p, torch.zeros_like(p)).cumsum_(-1)
        place = _first_above(edges, (u[of] * edges[:, -1]).unsqueeze(-1))
        ids[of], kept_mass[of] = tokens.gather(1, place)[:, 0], edges[:, -1].log()
        # A row that keeps its last candidate may own more of the vocabulary, unless its top-k ends there.
        bounded = (left.top_k > 0) & (left.top_k <= width)
        unsure = kept[:, -1].cpu().numpy() & ~bounded & (width < z.shape[1])
        pending, width = pending[unsure], min(width * 16, z.shape[1])
    return ids, kept_mass


def _candidates(vocabulary: int, rules: Rules) -> int:
    wanted = int(rules.top_k.max()) if (rules.top_k > 0).all() else max(CANDIDATES, int(rules.top_k.max()))
    return min(vocabulary, wanted)


def _kept(p: Tensor, rules: Rules) -> Tensor:
    """[_N, C] which of the candidates (probabilities p, descending) each row's rules keep; the first always stays."""
    device = p.device
    top_k = torch.as_tensor(np.where(rules.top_k > 0, rules.top_k, p.shape[1]), device=device)[:, None]
    kept = torch.arange(p.shape[1], device=device)[None] < top_k
    left = torch.where(kept, p, torch.zeros_like(p))
    # Without top-k the whole vocabulary is left, also what is not among the candidates.
    has_k = torch.as_tensor(rules.top_k > 0, device=device)[:, None]
    total = torch.where(has_k, left.sum(-1, keepdim=True), torch.ones_like(top_k, dtype=p.dtype))
    before = left.cumsum(-1) - left
    top_p = torch.as_tensor(np.where(rules.top_p < 1, rules.top_p, math.inf), device=device)[:, None]
    kept &= before < top_p * total
    kept &= p >= torch.as_tensor(rules.min_p, device=device)[:, None] * p[:, :1]
    kept[:, 0] = True
    return kept
