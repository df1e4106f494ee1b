"""The ranks that train one model, as the learner sees them. Alone, every call is answered here and costs nothing.

Rank 0 runs the whole program. Where the others have to take part it `lead`s: they are told which call it is and with
what, and make the same call. What each does is a share of the batch, dealt by cost; what comes back is a sum (the
gradient) or a list in the order of the batch (log-probabilities), so that nobody can tell how it was dealt.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel

from gropius.distributed.launch import secret
from gropius.distributed.wire import Codec
from gropius.distributed.world import World
from gropius.models.load import LoadedModel
from gropius.rollout.apart import Transfer
from gropius.rollout.engine import Engine
from gropius.rollout.pool import EnginePool
from gropius.rollout.remote import Address, RemoteEngine
from gropius.rollout.torch_engine import TorchEngine
from gropius.train.gathered import Gathered
from gropius.train.gathered import full as full
from gropius.train.gathered import local as local
from gropius.train.optim import Optimiser, OptimiserSettings
from gropius.train.pack import Pack
from gropius.train.sequences import TrainSequence
from gropius.train.sharded import Mode, shard
from gropius.train.shares import Share, evenly

if TYPE_CHECKING:
    from gropius.train.forward import Forward

CODEC = Codec((TrainSequence, OptimiserSettings))
POLICY, REFERENCE, CRITIC = "policy", "reference", "critic"
GOODBYE_S = 10.0
HANDED, SAVED = "handed", "saved"  # what of the policy engines are handed, and what a checkpoint saves


class Team:
    """Who trains. world: None for one process alone. mode: what of a model is divided at all times.

    divided: True where no process keeps the policy whole, because all who draw from it are elsewhere.

    Methods that `lead` are called on rank 0, and by `crew.follow` on the others; alone they are plain calls.
    """

    def __init__(self, world: World | None = None, mode: Mode = "optimiser", divided: bool = False) -> None:
        self.world, self.mode = world, mode
        self.divided = divided and world is not None
        self.forwards: dict[str, Forward] = {}
        self._held: dict[str, Callable[[], Mapping[str, Tensor]]] = {}
        self._optimisers: dict[str, Optimiser] = {}
        self.transfer: Transfer | None = None
        self.astray = False

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
        """What the ranks call a way over a model that is divided over them."""
        same = (name for name, known in self.forwards.items() if _same(known, forward))
        return next(same, "")

    def hold(self, name: str, forward: Forward, parts: Mapping[str, Tensor] | None = None) -> Forward:
        """Call a way over a model, and this rank's part of its tensors, by a name. parts: None, all its parameters."""
        held = dict(forward.model.named_parameters()) if parts is None else parts
        self.forwards[name], self._held[name] = forward, lambda: held
        return forward

    def parts(self, name: str) -> Mapping[str, Tensor]:
        """This rank's part of what is held under a name; nothing where nothing is."""
        return self._held[name]() if name in self._held else {}

    def join(self, name: str, whole: PreTrainedModel, make: Callable[[PreTrainedModel], Forward]) -> Forward:
        """A copy of a model, divided over the ranks, as what they call `name`; alone, the policy is the model itself.

        Rank 0's weights become everybody's. The model that is given stays whole, for engines and checkpoints, but where
        this team keeps none so: then it is the one that is divided.
        """
        if name not in self.forwards or self.world is None:
            self.lead("join", name)
            if self.world is not None:
                self.world.spread([*whole.parameters(), *whole.buffers()])
            in_place = name == POLICY and (self.world is None or self.divided)
            own = whole if in_place else copy.deepcopy(whole)
            if name == REFERENCE:
                own.requires_grad_(False)
            self.hold(name, make(own) if self.world is None else shard(make(own), self.world, self.mode))
        return self.forwards[name]

    def publish(self, whole: nn.Module, version: int) -> None:
        """Bring every rank's whole copy of the policy up to date, tensor by tensor. `transfer`: what came to this."""
        if self.world is None:
            return
        self.lead("publish", version)
        began, moved = time.perf_counter(), 0
        into = dict(whole.named_parameters())
        with torch.no_grad():
            for key, part in self.parts(POLICY).items():
                if part.requires_grad:
                    into[key].copy_(full(part))
                    moved += part.nbytes - local(part).nbytes
        self.transfer = Transfer(version, moved, time.perf_counter() - began)

    def whole(self, name: str, keys: Sequence[str]) -> dict[str, Tensor]:
        """Some tensors of what is held under a name, put together."""
        self.lead("whole", name, list(keys))
        parts = self.parts(name)
        return {key: full(parts[key].detach()) for key in keys}

    def gathered(self, name: str) -> Mapping[str, Tensor]:
        """All tensors of what is held under a name, by name: put together as they are read."""
        parts = self.parts(name)
        return dict(parts) if self.world is None else Gathered(parts, lambda keys: self.whole(name, keys))

    def put(self, name: str, tensors: Mapping[str, Tensor] | None) -> None:
        """Rank 0's whole tensors, by name, into what is held under a name."""
        self.lead("put", name)
        for key, part in self.parts(name).items():
            part.data.copy_(self._part(None if tensors is None else tensors[key], part))

    def refresh(self, name: str = REFERENCE) -> None:
        """What is held under a name becomes what the policy is now."""
        self.lead("refresh", name)
        now = self.parts(POLICY)
        with torch.no_grad():
            for key, part in self.parts(name).items():
                part.copy_(now[key])

    def keep_moments(self, name: str, optimiser: Optimiser) -> None:
        """Hold this rank's part of the moments of what is held under a name."""
        self._optimisers[name] = optimiser
        self._held[moments_of(name)] = optimiser.tensors

    def watch(self, optimiser: Optimiser, loaded: LoadedModel) -> None:
        """Hold the policy's moments, and what of the policy is handed over and saved."""
        self.keep_moments(POLICY, optimiser)
        self._held |= {HANDED: loaded.handed, SAVED: lambda: _once(loaded.saved())}

    def restore(self, name: str, optimiser: Optimiser, tensors: Mapping[str, Tensor], steps: int) -> None:
        """Put the moments of what is held under a name back. Errors: ValueError when they belong to another model."""
        optimiser.check(tensors)
        if self.world is None:
            optimiser.restore(dict(tensors), steps)
            return
        counts = {key: float(value) for key, value in tensors.items() if key.endswith(".step")}
        names = [key for key in tensors if key not in counts]
        self.lead("restore", name, names, counts, steps)
        self._receive(optimiser, names, counts, tensors)
        optimiser.steps = steps

    def receive(self, name: str, names: list[str], counts: dict[str, float], steps: int) -> None:
        """The other ranks: their part of moments that rank 0 has whole."""
        self._receive(self._optimisers[name], names, counts, None)
        self._optimisers[name].steps = steps

    def _receive(
        self, optimiser: Optimiser, names: list[str], counts: dict[str, float], tensors: Mapping[str, Tensor] | None
    ) -> None:
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
        """Rank 0: the run is over, however it ended; the others leave too.

        One that does not come within GOODBYE_S stands in the middle of an exchange, and leaves when this process does;
        where that is known (`astray`) nobody is waited for.
        """
        if self.world is not None and self.rank == 0 and not self.astray:
            self.world.call(GOODBYE_S)
            self.world.broadcast(CODEC.encode(("end", [])))


def moments_of(name: str) -> str:
    """What the moments of what is held under a name are called."""
    return f"{name}.moments"


def _once(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A tensor of two names under the first."""
    found: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in named.items():
        found.setdefault(id(tensor), (name, tensor))
    return dict(found.values())


def _same(one: Forward, other: Forward) -> bool:
    return one.model is other.model and one.within is other.within
