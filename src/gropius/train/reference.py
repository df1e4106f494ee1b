"""The KL target: the policy as it was at the start, or at the last refresh, without a second model where that can be.

    all weights trained          a frozen copy of the model
    a fresh adapter              the same model with the adapter off: at the start that is the policy, bit for bit
    any other adapter            the same model with a frozen copy of what is trained laid in its place

The adapter is off only where the start is the base itself: no trained adapter given, no warm start, no trained bias, no
refresh.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from gropius.models.load import LoadedModel
from gropius.models.lora import adapted, switched_off
from gropius.recipe.resolve import Resolved
from gropius.train import memory
from gropius.train.credit import Credit, Known
from gropius.train.forward import Forward
from gropius.train.sequences import TrainSequence
from gropius.train.step import Learner
from gropius.train.team import POLICY, REFERENCE, Team

if TYPE_CHECKING:
    from gropius.train.loop import Run


Way = Callable[[PreTrainedModel], Forward]


class Reference(Protocol):
    """What a run asks of its reference. forward: what `Learner.score` gives its log-probabilities by."""

    forward: Forward

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
    team = learner.team
    if not plan.objective.needs_reference:
        return None
    if is_a_copy(plan, loaded):
        return FrozenCopy(team, loaded.model, way)
    lora = plan.model.lora
    from_the_base = not lora.adapter and lora.bias == "none"
    if from_the_base and not plan.sft.steps and not plan.train.reference_refresh:
        return AdapterOff(team)
    return AdapterCopy(team)


def is_a_copy(plan: Resolved, loaded: LoadedModel) -> bool:
    """True where the reference is a second model."""
    return plan.objective.needs_reference and loaded.adapter is None


class Stored:
    """What a reference with tensors of its own does with them. Each rank holds its part."""

    def __init__(self, team: Team, forward: Forward) -> None:
        self._team, self.forward = team, forward

    def refresh(self) -> None:
        """Copy every tensor from the policy."""
        self._team.refresh()

    def tensors(self) -> Mapping[str, Tensor]:
        """Every tensor."""
        return self._team.gathered(REFERENCE)

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy every tensor back."""
        self._team.put(REFERENCE, tensors)


class FrozenCopy(Stored):
    """A second model, divided over the ranks as the policy is."""

    def __init__(self, team: Team, policy: PreTrainedModel, way: Way) -> None:
        super().__init__(team, team.join(REFERENCE, policy, way))
        self.refresh()


class AdapterOff:
    """The policy's own model, its adapter off. Make it on every rank."""

    def __init__(self, team: Team) -> None:
        team.lead("reference", "off")
        policy = team.forwards[POLICY]
        off = functools.partial(switched_off, adapted(policy.model))
        self.forward = team.hold(REFERENCE, dataclasses.replace(policy, within=off), {})

    def refresh(self) -> None:
        """Never asked for: a recipe that refreshes has an `AdapterCopy`."""
        raise RuntimeError("the base cannot become the policy; a reference that is refreshed is a copy of the adapter")

    def tensors(self) -> Mapping[str, Tensor]:
        """Nothing."""
        return {}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Nothing to put back."""


class AdapterCopy(Stored):
    """The policy's own model, with a copy of what is trained in the place of it. Make it on every rank."""

    def __init__(self, team: Team) -> None:
        team.lead("reference", "copy")
        policy = team.forwards[POLICY]
        trained = {name: p for name, p in policy.model.named_parameters() if p.requires_grad}
        kept = {name: p.detach().clone() for name, p in trained.items()}
        swapped = functools.partial(exchanged, trained, kept)
        super().__init__(team, team.hold(REFERENCE, dataclasses.replace(policy, within=swapped), kept))


KINDS: dict[str, Callable[[Team], Reference]] = {"off": AdapterOff, "copy": AdapterCopy}


@contextmanager
def exchanged(parameters: Mapping[str, nn.Parameter], values: Mapping[str, Tensor]) -> Iterator[None]:
    """Within the block parameters have other values; their own are back afterwards, bit for bit.

    Written in place: what divides a parameter over ranks reads the memory that it had in the beginning.
    """
    own = {name: p.detach().clone() for name, p in parameters.items()}
    try:
        _copy(values, parameters)
        yield
    finally:
        _copy(own, parameters)


@torch.no_grad()
def _copy(values: Mapping[str, Tensor], into: Mapping[str, Tensor]) -> None:
    for name, tensor in into.items():
        tensor.copy_(values[name])


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
    return memory.with_less(run, lambda: run.learner.score(rows, forward=reference.forward)).logprobs
