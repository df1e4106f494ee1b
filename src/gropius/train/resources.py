"""What a run holds: bytes of optimiser state, of weights and gradients, and the most memory there was."""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gropius.train.team import POLICY, REFERENCE, local

if TYPE_CHECKING:
    from gropius.train.loop import Run


def resources(run: Run) -> dict[str, float]:
    """Metrics of memory on this rank. Weights and gradients: of policy, critic and reference, every tensor once; a
    gradient is as large as its weight. The peak is the device's where there is one, else the process's; it never falls.
    """
    critic = run.critic
    moved = [*run.learner.optimiser.parameters, *(critic.model.parameters() if critic is not None else ())]
    team = run.learner.team
    held = [*run.loaded.model.parameters(), *moved, *team.parts(POLICY).values(), *team.parts(REFERENCE).values()]
    moments = [*run.learner.optimiser.tensors().values()]
    moments += [] if critic is None else [*critic.optimiser.tensors().values()]
    return {
        "memory/optimiser_bytes": _bytes(moments),
        "memory/weight_bytes": _bytes(held),
        "memory/gradient_bytes": _bytes(moved),
        "memory/peak_bytes": peak_bytes(),
    }


def peak_bytes() -> int:
    """The most memory so far: allocated on the GPU, or resident in the process."""
    if torch.cuda.is_available():
        return int(torch.cuda.max_memory_allocated())
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _bytes(tensors: Iterable[Tensor]) -> int:
    unique = {mine.data_ptr(): mine.nbytes for mine in map(local, tensors)}
    return sum(unique.values())
