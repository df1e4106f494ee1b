"""The ranks that train one model, as the learner sees them. Alone, every call is answered here and costs nothing.

Rank 0 runs the whole program. Where the others have to take part it `lead`s: they are told which call it is and with
what, and make the same call. What each does is a share of the batch, dealt by cost; what comes back is a sum (the
gradient) or a list in the order of the batch (log-probabilities), so that nobody can tell how it was dealt.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel

from gropius.distributed.launch import secret
from gropius.distributed.wire import Codec
from gropius.distributed.world import World
from gropius.rollout.engine import Engine
from gropius.rollout.pool import EnginePool
from gropius.rollout.remote import Address, RemoteEngine
from gropius.rollout.torch_engine import TorchEngine
from gropius.train.optim import Optimiser, OptimiserSettings
from gropius.train.pack import Pack
from gropius.train.sequences import TrainSequence
from gropius.train.sharded import Mode, shard
from gropius.train.shares import Share, evenly

if TYPE_CHECKING:
    from gropius.train.forward import Forward

CODEC = Codec((TrainSequence, OptimiserSettings))
POLICY, REFERENCE = "policy", "reference"


class Team:
    """Who trains. world: None for one process alone. mode: what of a model is divided at all times.

    Methods that `lead` are called on rank 0, and by `crew.follow` on the others; alone they are plain calls.
    """

    def __init__(self, world: World | None = None, mode: Mode = "optimiser") -> None:
        self.world, self.mode = world, mode
        self.forwards: dict[str, Forward] = {}

    @property
    def size(self) -> int:
        """Ranks."""
        return 1 if self.world is None else self.world.size

    @property
    def rank(self) -> int:
        """This one's number; 0 leads."""
        return 0 if self.world is None else self.world.rank

    @property
    def alone(self) -> bool:
        """True for a run of one process."""
        return self.world is None

    @property
    def device(self) -> str:
        """Where this rank's models lie; "" alone, where the recipe says it."""
        return "" if self.world is None else str(self.world.device)

    def engines(self, own: Engine, note: Callable[[str], None]) -> Engine:
        """The engines of all ranks as one, this rank's first; only that one where it serves all."""
        if self.world is None or not isinstance(own, TorchEngine):
            return own
        self.lead("engines")
        found = self.merged({})
        others = [
            (f"rank {n}", RemoteEngine(Address(there["host"], there["port"], f"the engine of rank {n}"), secret()))
            for n, there in enumerate(found[1:], start=1)
        ]
        return EnginePool([("rank 0", own), *others], note, requeue=False)

    def lead(self, call: str, *arguments: Any) -> None:
        """Rank 0: have the others make a call with these arguments too. On every other rank nothing happens."""
        if self.world is not None and self.rank == 0:
            self.world.call()
            self.world.broadcast(CODEC.encode((call, list(arguments))))

    def led(self) -> tuple[str, list[Any]]:
        """The other ranks: the next call, however long it takes to come."""
        assert self.world is not None
        self.world.await_call()
        call, arguments = CODEC.decode(self.world.broadcast(None))
        return call, arguments

    def share(self, packed: Callable[[int], list[Pack]], budget: int) -> Share:
        """What this rank runs of a batch. packed: the whole batch in packs of at most so many tokens."""
        if self.alone:
            packs = packed(budget)
            return Share(packs, packs, len(packs))
        packs, dealt = evenly(packed, budget, self.size)
        return Share(packs, [packs[i] for i in dealt[self.rank]], max(map(len, dealt)))

    def any(self, mine: bool) -> bool:
        """True on every rank when it is on one."""
        return mine if self.world is None else self.world.any(mine)

    def merged(self, mine: dict[str, Any]) -> list[dict[str, Any]]:
        """What every rank found, on rank 0; on the others their own alone."""
        if self.world is None:
            return [mine]
        return [CODEC.decode(frame) for frame in self.world.gather(CODEC.encode(mine))] or [mine]

    def name(self, forward: Forward) -> str:
        """What the ranks call a model that is divided over them."""
        return next((name for name, known in self.forwards.items() if known.model is forward.model), "")

    def join(self, name: str, whole: PreTrainedModel, make: Callable[[PreTrainedModel], Forward]) -> Forward:
        """A copy of a model, divided over the ranks, as the model that they call `name`; alone, the model itself.

        Rank 0's weights become everybody's. The model that is given stays whole: engines and checkpoints read it.
        """
        if self.world is None:
            return make(whole)
        if name not in self.forwards:
            self.lead("join", name)
            self.world.spread([*whole.parameters(), *whole.buffers()])
            own = copy.deepcopy(whole)
            if name != POLICY:
                own.requires_grad_(False)
            self.forwards[name] = shard(make(own), self.world, self.mode)
        return self.forwards[name]

    def publish(self, whole: nn.Module, version: int) -> int:
        """Bring every rank's whole copy of the policy up to date, tensor by tensor. Bytes that came to this rank."""
        if self.world is None or POLICY not in self.forwards:
            return 0
        self.lead("publish", version)
        into = dict(whole.named_parameters())
        moved = 0
        with torch.no_grad():
            for key, parameter in self.forwards[POLICY].model.named_parameters():
                into[key].copy_(full(parameter))
                moved += into[key].nbytes - local(parameter).nbytes
        return moved

    def weights(self, forward: Forward) -> dict[str, Tensor]:
        """A model's parameters, whole, by name."""
        self.lead("weights", self.name(forward))
        return {key: full(parameter.detach()) for key, parameter in forward.model.named_parameters()}

    def put(self, forward: Forward, tensors: Mapping[str, Tensor] | None) -> None:
        """Rank 0's whole tensors, by name, into a model's parameters."""
        self.lead("put", self.name(forward))
        for key, parameter in forward.model.named_parameters():
            parameter.data.copy_(self._part(None if tensors is None else tensors[key], parameter))

    def refresh(self, reference: Forward, policy: nn.Module) -> None:
        """The reference becomes the policy as it is now."""
        self.lead("refresh")
        source = policy if self.world is None else self.forwards[POLICY].model
        now = dict(source.named_parameters())
        with torch.no_grad():
            for key, parameter in reference.model.named_parameters():
                parameter.copy_(now[key])

    def moments(self, optimiser: Optimiser) -> dict[str, Tensor]:
        """Every moment of an optimiser, whole."""
        self.lead("moments")
        return {key: full(value) for key, value in optimiser.tensors().items()}

    def restore(self, optimiser: Optimiser, tensors: Mapping[str, Tensor], steps: int) -> None:
        """Put an optimiser's moments back. Errors: ValueError when they belong to another model."""
        optimiser.check(tensors)
        if self.world is None:
            optimiser.restore(dict(tensors), steps)
            return
        counts = {key: float(value) for key, value in tensors.items() if key.endswith(".step")}
        names = [key for key in tensors if key not in counts]
        self.lead("restore", names, counts, steps)
        self.receive(optimiser, names, counts, tensors)
        optimiser.steps = steps

    def receive(
        self, optimiser: Optimiser, names: list[str], counts: dict[str, float], tensors: Mapping[str, Tensor] | None
    ) -> None:
        """This rank's part of moments that rank 0 has whole."""
        mine = {key: torch.tensor(value) for key, value in counts.items()}
        for key in names:
            like = optimiser.named[key.rpartition(".")[0]]
            mine[key] = self._part(None if tensors is None else tensors[key], like.detach())
        optimiser.restore(mine, optimiser.steps)

    def _part(self, whole: Tensor | None, like: Tensor) -> Tensor:
        """This rank's part of a tensor that rank 0 has whole, laid out as `like`."""
        if self.world is None:
            assert whole is not None
            return whole
        everybody = torch.empty(like.shape, dtype=like.dtype, device=self.world.device)
        if whole is not None:
            everybody.copy_(whole)
        self.world.spread([everybody])
        if not isinstance(like, DTensor):
            return everybody
        return distribute_tensor(everybody, like.device_mesh, like.placements, src_data_rank=None)

    def close(self) -> None:
        """Rank 0: the run is over, however it ended; the others leave too."""
        self.lead("end")


def full(tensor: Tensor) -> Tensor:
    """A divided tensor put together on every rank; any other as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that lies on this rank."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
