"""The KL target: the policy as it was at the start, or at the last refresh, without a second model where that can be.

    all weights trained          a frozen copy of the model
    a fresh adapter              the same model with the adapter off: at the start that is the policy, bit for bit
    any other adapter            the same model with a frozen copy of what is trained laid in its place

The adapter is off only where the start is the base itself: no trained adapter given, no warm start, no trained bias, no
refresh.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from gropius.models.load import LoadedModel
from gropius.models.lora import Adapter
from gropius.recipe.resolve import Resolved
from gropius.train import memory
from gropius.train.credit import Credit, Known
from gropius.train.forward import Forward
from gropius.train.sequences import TrainSequence
from gropius.train.step import Learner
from gropius.train.team import REFERENCE, Team

if TYPE_CHECKING:
    from gropius.train.loop import Run


Way = Callable[[PreTrainedModel], Forward]


class Reference(Protocol):
    """What a run asks of its reference."""

    @contextmanager
    def standing_in(self) -> Iterator[Forward]:
        """Within the block the forward given computes the reference's log-probabilities. Not for gradients."""
        ...

    def refresh(self) -> None:
        """Become the policy as it is now."""
        ...

    def tensors(self) -> Mapping[str, Tensor]:
        """What a checkpoint has to keep of it; nothing where the base says it all."""
        ...

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Put back what `tensors` gave."""
        ...


def make(plan: Resolved, loaded: LoadedModel, learner: Learner, way: Way) -> Reference | None:
    """The reference of a run, made from the policy as it is now; None where the objective has no use for one.

    way: how a model is run over packs.
    """
    if not plan.objective.needs_reference:
        return None
    if loaded.adapter is None:
        return FrozenCopy(loaded, learner.team, way)
    forward = learner.forward
    lora = plan.model.lora
    from_the_base = not lora.adapter and lora.bias == "none"
    if from_the_base and not plan.sft.steps and not plan.train.reference_refresh:
        return AdapterOff(loaded.adapter, forward)
    return AdapterCopy(loaded.adapter, forward)


class FrozenCopy:
    """A second model, divided over the ranks as the policy is."""

    def __init__(self, loaded: LoadedModel, team: Team, way: Way) -> None:
        self._policy, self._team = loaded.model, team
        team.publish(loaded.model, 0)
        frozen = copy.deepcopy(loaded.model).requires_grad_(False)
        self.forward = team.join(REFERENCE, frozen, way)

    @contextmanager
    def standing_in(self) -> Iterator[Forward]:
        """The copy's forward."""
        yield self.forward

    def refresh(self) -> None:
        """Copy every weight."""
        self._team.refresh(self.forward, self._policy)

    def tensors(self) -> Mapping[str, Tensor]:
        """Every weight."""
        return self._team.weights(self.forward)

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy every weight back."""
        self._team.put(self.forward, tensors)


class AdapterOff:
    """The policy's own model, its adapter off."""

    def __init__(self, adapter: Adapter, forward: Forward) -> None:
        self._adapter, self._forward = adapter, forward

    @contextmanager
    def standing_in(self) -> Iterator[Forward]:
        """The policy's forward, without the adapter."""
        with self._adapter.disabled():
            yield self._forward

    def refresh(self) -> None:
        """Never asked for: a recipe that refreshes has an `AdapterCopy`."""
        raise RuntimeError("the base cannot become the policy; a reference that is refreshed is a copy of the adapter")

    def tensors(self) -> Mapping[str, Tensor]:
        """Nothing."""
        return {}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Nothing to put back."""


class AdapterCopy:
    """The policy's own model, with a copy of what is trained in the place of it."""

    def __init__(self, adapter: Adapter, forward: Forward) -> None:
        self._trained, self._forward = adapter.trained, forward
        self._kept = {name: p.detach().clone() for name, p in adapter.trained.items()}

    @contextmanager
    def standing_in(self) -> Iterator[Forward]:
        """The policy's forward; its own tensors are back afterwards, untouched."""
        own = {name: p.data for name, p in self._trained.items()}
        try:
            for name, p in self._trained.items():
                p.data = self._kept[name]
            yield self._forward
        finally:
            for name, p in self._trained.items():
                p.data = own[name]

    def refresh(self) -> None:
        """Copy the adapter."""
        self.restore(self._trained)

    def tensors(self) -> Mapping[str, Tensor]:
        """The copy."""
        return self._kept

    @torch.no_grad()
    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy it back."""
        for name, kept in self._kept.items():
            kept.copy_(tensors[name])


def refer(run: Run, credit: Credit, known: Known) -> Known:
    """Add the reference's log-probabilities for a KL in the loss: once a batch, part by part, of the rows that are run.

    Laid in the packs that the first update lays: where the policy is the reference, the KL is exactly 0.
    """
    if run.reference is None or known.reference is not None:
        return known
    values: list[Any] = [None] * len(credit.assignment.responses)
    for part in credit.parts:
        for i, row in zip(part.rows, score_reference(run, run.reference, part.sequences), strict=True):
            values[i] = row
    return dataclasses.replace(known, reference=values)


def score_reference(run: Run, reference: Reference, rows: Sequence[TrainSequence]) -> Sequence[Any]:
    """Log-probabilities of rows under the reference; None for a row that is not run."""
    with reference.standing_in() as forward:
        return memory.with_less(run, lambda: run.learner.score(rows, forward=forward)).logprobs
