"""The critic's gradient, however the batch is laid out: the rows that `invariance` measures for the policy."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gropius.train.critic import Critic, trained_tokens
from gropius.train.invariance import BOUNDS, Batch, Invariance


def critic_invariances(critic: Critic, batch: Batch) -> list[Invariance]:
    """Compare the value loss's gradient under every layout with the one that training would use.

    The critic takes one step first: at its beginning the head is 0, and no gradient would reach a trunk.
    """
    old = batch.values
    assert old is not None
    critic.update(batch.sequences, old)
    whole = batch.sequences
    tokens = sum(s.length_tokens for s in whole)
    order = list(reversed(range(len(whole))))
    variants: dict[str, Callable[[], Tensor]] = {
        "critic: micro-batches of a third of the tokens": lambda: _measured(critic, batch, pack_tokens=tokens // 3 + 1),
        "critic: no prefix shared": lambda: _measured(critic, batch, share_prompts=False),
        "critic: siblings and groups permuted": lambda: _measured(critic, batch.rows(order)),
        "critic: 2 ranks": lambda: _over_ranks(critic, batch, 2),
    }
    base = _measured(critic, batch)
    scale = float(base.norm()) or 1.0
    bound = BOUNDS[critic.forward.compute_dtype]
    return [Invariance(name, bound, float((make() - base).norm()) / scale) for name, make in variants.items()]


def _measured(critic: Critic, batch: Batch, total: int = 0, **options: Any) -> Tensor:
    settings = critic.learner.settings
    critic.learner.settings = dataclasses.replace(settings, **options)
    try:
        critic.accumulate(batch.sequences, batch.values or [], total)
    finally:
        critic.learner.settings = settings
    parameters = list(critic.model.parameters())
    parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    flat = torch.cat([part.detach().double().flatten() for part in parts])
    critic.optimiser.zero()
    return flat


def _over_ranks(critic: Critic, batch: Batch, ranks: int) -> Tensor:
    total = trained_tokens(batch.sequences)
    parts = [batch.rows(range(rank, len(batch.sequences), ranks)) for rank in range(ranks)]
    return torch.stack([_measured(critic, part, total) for part in parts]).sum(0)
