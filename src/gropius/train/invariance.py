"""The same gradient, however the batch is laid out: measured on a real batch of the user's own model.

Each variant changes only how the work is done. Its gradient is compared with that of the layout training uses.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from gropius.objective.spec import Objective
from gropius.train.forward import Forward
from gropius.train.optim import Optimiser, OptimiserSettings, StepInfo
from gropius.train.sequences import TrainSequence
from gropius.train.step import Learner, LearnerSettings
from gropius.train.team import Team, full

PerSequence = Sequence[NDArray[Any] | None]
# Relative differences that rounding alone explains, by the type that matrix products are computed in.
BOUNDS = {"float64": 1e-9, "float32": 1e-5, "bfloat16": 5e-2}
AGAIN = 1e-6  # of weights in float64: most models compute their norms in float32 all the same


@dataclass(frozen=True)
class Invariance:
    """One row of the table: what was changed, the bound, and ‖g − g₀‖ / ‖g₀‖ as found."""

    name: str
    bound: float
    found: float

    @property
    def held(self) -> bool:
        """True when the difference is within the bound; a number that is not finite is not."""
        return self.found <= self.bound


@dataclass(frozen=True, eq=False)
class Batch:
    """What one optimiser step would be taken on, with the log-probabilities, and the values, that it needs."""

    sequences: Sequence[TrainSequence]
    anchor: PerSequence | None = None
    reference: PerSequence | None = None
    values: PerSequence | None = None

    def rows(self, order: Sequence[int]) -> Batch:
        """Some rows, in some order; weights stay what they are in the whole batch."""

        def pick(values: PerSequence | None) -> PerSequence | None:
            return None if values is None else [values[i] for i in order]

        return Batch([self.sequences[i] for i in order], *map(pick, (self.anchor, self.reference, self.values)))


class Catcher(Optimiser):
    """An optimiser that keeps the gradient and moves nothing."""

    def __init__(self, model: nn.Module):
        super().__init__(model, OptimiserSettings())
        self.caught: Tensor | None = None

    def step(self) -> StepInfo:
        """Keep the gradient, flat, in float64; forget it in the model."""
        parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
        self.caught = torch.cat([full(part.detach()).double().flatten() for part in parts])
        self.zero()
        return StepInfo(float(self.caught.norm()), 0.0, True)


def gradient(
    forward: Forward, objective: Objective, settings: LearnerSettings, batch: Batch, team: Team | None = None
) -> Tensor:
    """The flat gradient of the objective on a batch, in float64; zeros when no sequence is live."""
    catcher = Catcher(forward.model)
    Learner(forward, objective, catcher, settings, team).update(batch.sequences, batch.anchor, batch.reference)
    if catcher.caught is None:
        return torch.zeros(sum(p.numel() for p in catcher.parameters), dtype=torch.float64)
    return catcher.caught


def invariances(forward: Forward, objective: Objective, settings: LearnerSettings, batch: Batch) -> list[Invariance]:
    """Compare the gradient under every variant with the one that training would use.

    Micro-batches of a third of the tokens and of one sequence; padded rows; no shared prefix; siblings and groups
    permuted; dead sequences run; activations recomputed; 2 and 4 simulated ranks whose gradients are summed.

    A variant out of its bound is read again with the weights in float64, where rounding of matrix products is no cause:
    that row, named so, is the verdict. (A gradient that nearly cancels is small beside the terms it is summed from.)
    """
    bound = BOUNDS[forward.compute_dtype if forward.compute_dtype != "float32" else str(_dtype(forward)).split(".")[-1]]
    base, variants = _readings(forward, objective, settings, batch)
    found = [Invariance(name, bound, _apart(make(), base)) for name, make in variants.items()]
    if all(row.held for row in found) or bound == BOUNDS["float64"]:
        return found
    exact = Forward.of(copy.deepcopy(forward.model).double(), packed=forward.packed)
    base, variants = _readings(exact, objective, settings, batch)
    return [row if row.held else _again(row, _apart(variants[row.name](), base)) for row in found]


def _again(row: Invariance, found: float) -> Invariance:
    return Invariance(f"{row.name}, in float64 ({row.found:.1e} before)", AGAIN, found)


def _apart(one: Tensor, base: Tensor) -> float:
    return float((one - base).norm()) / (float(base.norm()) or 1.0)


def _readings(
    forward: Forward, objective: Objective, settings: LearnerSettings, batch: Batch
) -> tuple[Tensor, dict[str, Callable[[], Tensor]]]:
    """The gradient that training would use, and the ways to come to it again."""

    def measured(changed: Forward = forward, rows: Batch = batch, **options: Any) -> Tensor:
        return gradient(changed, objective, dataclasses.replace(settings, **options), rows)

    tokens = sum(sequence.length_tokens for sequence in batch.sequences)
    shuffled = np.random.default_rng(0).permutation(len(batch.sequences)).tolist()
    return measured(), {
        "again, nothing changed": measured,
        "micro-batches of a third of the tokens": lambda: measured(pack_tokens=max(1, tokens // 3)),
        "micro-batches of one sequence": lambda: measured(pack_tokens=1),
        "padded rows": lambda: measured(dataclasses.replace(forward, packed=False)),
        "no prefix shared": lambda: measured(share_prompts=False),
        "siblings and groups permuted": lambda: measured(rows=batch.rows(shuffled)),
        "dead sequences run": lambda: measured(skip=False),
        "activations recomputed": lambda: measured(Forward.of(forward.model, compute_dtype=forward.compute_dtype,
                                                              packed=forward.packed, recompute=True)),
        "2 ranks": lambda: _over_ranks(measured, batch, 2),
        "4 ranks": lambda: _over_ranks(measured, batch, 4),
    }  # fmt: skip


def _over_ranks(measured: Callable[..., Tensor], batch: Batch, ranks: int) -> Tensor:
    """The sum of the gradients of every `ranks`-th sequence, as ranks that hold whole sequences would add them."""
    parts = [batch.rows(range(rank, len(batch.sequences), ranks)) for rank in range(ranks)]
    return torch.stack([measured(rows=part) for part in parts]).sum(0)


def _dtype(forward: Forward) -> torch.dtype:
    return next(forward.model.parameters()).dtype
