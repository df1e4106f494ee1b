"""A model divided over ranks by FSDP2: each holds a part of every weight, and gathers the whole where it is computed.

    optimiser   a step gathers the weights once, keeps them for all its micro-batches and sums the gradient once: the
                least traffic; a rank holds the whole weights and the whole gradient while it steps
    all         layer by layer, in every micro-batch, forward and backward: the least memory

The gradient is a sum over ranks, never a mean: the weights of the loss were fixed over the whole batch.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from gropius.distributed.world import World

if TYPE_CHECKING:
    from gropius.train.forward import Forward
    from gropius.train.pack import Pack

Mode = Literal["optimiser", "all"]


class Sharded(nn.Module):
    """The whole way from a pack to its log-probabilities as one module, so that every weight on it is gathered."""

    def __init__(self, forward: Forward, mode: Mode):
        super().__init__()
        self.model = forward.model
        self.mode = mode
        self._forward = dataclasses.replace(forward, sharded=None)

    def forward(self, pack: Pack, temperature: float, entropy: bool) -> tuple[Tensor, Tensor | None]:
        """As `Forward.logprobs`, on the weights as they are now."""
        layer: Any = self.model.get_output_embeddings()
        head = dataclasses.replace(self._forward.head, weight=layer.weight, bias=layer.bias)
        return dataclasses.replace(self._forward, head=head).compute(pack, temperature, entropy)

    def last_of_step(self, last: bool) -> None:
        """Say before a backward pass whether the gradient is summed over ranks after it, and the weights let go."""
        whole = self.mode == "optimiser"
        root: Any = self
        root.set_is_last_backward(last)
        root.set_requires_gradient_sync(last or not whole)
        root.set_reshard_after_backward(last or not whole)

    def let_go(self) -> None:
        """Keep only this rank's part: before the optimiser moves it."""
        for module in self.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def shard(forward: Forward, world: World, mode: Mode) -> Forward:
    """The same forward over weights that are divided; the model's parameters become this rank's parts of them.

    Call it on every rank, with the same weights, before an optimiser is made. Errors: none of its own; an architecture
    whose layers cannot be told is one unit.
    """
    low = torch.bfloat16 if forward.compute_dtype == "bfloat16" else None
    # What flows between layers, norms and head stay as on one rank; only the layers' matrices travel in 16 bits.
    layers = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32 if low else None,
                                  cast_forward_inputs=False)  # fmt: skip
    whole = Sharded(forward, mode)
    for layer in decoder_layers(forward.model):
        fully_shard(layer, mesh=world.mesh, reshard_after_forward=mode == "all", mp_policy=layers)
    fully_shard(whole, mesh=world.mesh, mp_policy=MixedPrecisionPolicy(cast_forward_inputs=False))
    for module in whole.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    head: Any = forward.model.get_output_embeddings()
    return dataclasses.replace(
        forward, head=dataclasses.replace(forward.head, weight=head.weight, bias=head.bias), sharded=whole
    )


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The repeated layers of a decoder: the longest list of modules in it; empty where there is none."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    return max((list(found) for found in lists), key=len, default=[])
