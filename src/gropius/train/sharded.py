"""A model divided over ranks by FSDP2: each holds a part of every weight, and gathers the whole where it is computed.

    optimiser   a step gathers the weights once, keeps them for all its micro-batches and sums the gradient once: the
                least traffic; a rank holds the whole weights and the whole gradient while it steps
    all         layer by layer, in every micro-batch, forward and backward: the least memory

The gradient is a sum over ranks, never a mean: the weights of the loss were fixed over the whole batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers.pytorch_utils import Conv1D

from gropius.distributed.world import World

if TYPE_CHECKING:
    from gropius.models.logprobs import Head
    from gropius.train.forward import Forward

Mode = Literal["optimiser", "all"]
T = TypeVar("T")


class Sharded(nn.Module):
    """The whole way from a pack to its log-probabilities as one module, so that every weight on it is gathered."""

    def __init__(self, forward: Forward, mode: Mode):
        super().__init__()
        self.model = forward.model
        self.mode = mode
        self._forward = dataclasses.replace(forward, sharded=None)

    def forward(self, work: Callable[[Forward], T]) -> T:
        """As `Forward.on_weights`, on the weights as they are now."""
        return work(dataclasses.replace(self._forward, head=_head(self._forward)))

    def forget_whole(self, head: Head) -> None:
        """Hold no more of the weights than the ranks divide. head: this rank's part of the output head."""
        self._forward = dataclasses.replace(self._forward, head=head)

    def last_of_step(self, last: bool) -> None:
        """Say before a backward pass whether the gradient is summed over ranks after it, and the weights let go."""
        whole = self.mode == "optimiser"
        root: Any = self
        root.set_is_last_backward(last)
        root.set_requires_gradient_sync(last or not whole)
        root.set_reshard_after_backward(last or not whole)

    def let_go(self) -> None:
        """Keep only this rank's part: before the optimiser moves it."""
        let_go(self)


def shard(forward: Forward, world: World, mode: Mode) -> Forward:
    """The same forward over weights that are divided; the model's parameters become this rank's parts of them.

    Call it on every rank, with the same weights, before an optimiser is made. Errors: none of its own; an architecture
    whose layers cannot be told is one unit.
    """
    low = torch.bfloat16 if forward.compute_dtype == "bfloat16" else None
    # What flows between layers, norms and head stay as on one rank; only the layers' matrices travel in 16 bits. So a
    # norm is gathered by itself: what belongs to a layer is cast with it.
    layers = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32 if low else None,
                                  cast_forward_inputs=False)  # fmt: skip
    whole = Sharded(forward, mode)
    plain = MixedPrecisionPolicy(cast_forward_inputs=False)
    for layer in decoder_layers(forward.model):
        for module in _kept_as_they_are(layer) if low else ():
            fully_shard(module, mesh=world.mesh, reshard_after_forward=mode == "all", mp_policy=plain)
        fully_shard(layer, mesh=world.mesh, reshard_after_forward=mode == "all", mp_policy=layers)
    fully_shard(whole, mesh=world.mesh, mp_policy=plain)
    _sum_gradients(whole)
    head = _head(forward)
    whole.forget_whole(head)
    return dataclasses.replace(forward, head=head, sharded=whole)


def shard_alone(module: nn.Module, world: World) -> None:
    """A module by itself, in place: what stands beside a model that is divided, such as a head on its trunk."""
    fully_shard(module, mesh=world.mesh)
    _sum_gradients(module)


def let_go(module: nn.Module) -> None:
    """Keep only this rank's part of what is gathered."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def _sum_gradients(module: nn.Module) -> None:
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)


def _head(forward: Forward) -> Head:
    """The head as its weights lie now; a trunk that has none shows its embeddings."""
    layer: Any = forward.model.get_output_embeddings()
    if not isinstance(layer, nn.Linear):
        layer = forward.model.get_input_embeddings()
    return dataclasses.replace(forward.head, weight=layer.weight, bias=getattr(layer, "bias", None))


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The repeated layers of a decoder: the longest list of modules in it; empty where there is none."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    return max((list(found) for found in lists), key=len, default=[])


def _kept_as_they_are(layer: nn.Module) -> list[nn.Module]:
    """Modules of a layer with vectors of their own, norms above all: autocast multiplies no matrices there."""
    linear = nn.Linear, Conv1D
    inner = [m for m in layer.modules() if m is not layer and not isinstance(m, linear)]
    own = {m: list(m.parameters(recurse=False)) for m in inner}
    return [m for m, weights in own.items() if weights and all(w.ndim == 1 for w in weights)]
