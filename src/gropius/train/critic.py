"""The critic: a value head on a model of its own, or on the policy's trunk, trained on the policy's packs.

    V(s_t) = w · h_t + b,  h_t the hidden state that predicts token t        loss = Σ_t 1/N · ½ ℓ(V_t − return_t)

N loss tokens of the whole optimiser batch, so packs, prefix sharing and ranks change nothing. The head begins at 0.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel

from gropius.models.logprobs import Head, backbone
from gropius.objective.value import ValueLoss, value_terms
from gropius.recipe.schema import CriticTable
from gropius.train.forward import Forward, scatter
from gropius.train.optim import Optimiser, OptimiserSettings
from gropius.train.pack import Pack, pack
from gropius.train.sequences import TrainSequence
from gropius.train.sharded import let_go, shard_alone
from gropius.train.shares import Share, filled, nothing
from gropius.train.step import Learner
from gropius.train.team import CRITIC, local, moments_of

if TYPE_CHECKING:
    from gropius.train.checkpoint import Snapshot

PerSequence = Sequence[NDArray[Any] | None]


@dataclass(frozen=True)
class CriticSettings:
    """loss: clip and Huber. epochs: passes over each optimiser batch. pretrain_steps: training steps in which only the
    critic moves. shared: the head reads the policy's trunk; coefficient: of the value loss in the trunk's gradient (0:
    the trunk does not feel it).
    """

    loss: ValueLoss
    epochs: int = 1
    pretrain_steps: int = 0
    shared: bool = False
    coefficient: float = 0.0

    @classmethod
    def of(cls, table: CriticTable) -> CriticSettings:
        """As the recipe's [critic] has it."""
        shared = table.trunk == "shared"
        loss = ValueLoss(table.value_clip, table.huber)
        return cls(loss, table.epochs, table.pretrain_steps, shared, table.coefficient)


class ValueModel(nn.Module):
    """What the critic's optimiser moves: the head, and its own trunk where it has one."""

    def __init__(self, width: int, body: nn.Module | None, like: Tensor):
        super().__init__()
        head = nn.Linear(width, 1, device=like.device, dtype=torch.promote_types(torch.float32, like.dtype))
        nn.init.zeros_(head.weight)
        nn.init.zeros_(head.bias)
        self.value = head
        self.body = body


def trunk_of(make: Callable[[PreTrainedModel], Forward], model: PreTrainedModel) -> Forward:
    """A way to run packs through a model whose output head is taken off; `make` says how packs are run."""
    forward = make(model)
    embeddings = model.get_input_embeddings()
    head = model.get_output_embeddings()
    if head is not None and head.weight is not embeddings.weight:
        model.set_output_embeddings(nn.Identity())
    weight = next(embeddings.parameters()).detach()
    return dataclasses.replace(forward, body=backbone(model), head=Head(weight))


class Critic:
    """Values of sequences before an update, and steps toward the returns that the update's advantages came with.

    Make it on every rank; rank 0's calls are made by all.
    """

    def __init__(self, forward: Forward, optimiser: OptimiserSettings, settings: CriticSettings, learner: Learner):
        self.forward, self.settings, self.learner, self._team = forward, settings, learner, learner.team
        weight = learner.forward.head.weight
        self.model = ValueModel(int(weight.shape[1]), None if settings.shared else forward.body, local(weight))
        if self._team.world is not None:
            shard_alone(self.model.value, self._team.world)
        self.optimiser = Optimiser(self.model, optimiser)
        self._team.hold(CRITIC, forward, dict(self.model.named_parameters()))
        self._team.keep_moments(CRITIC, self.optimiser)
        self.metrics: dict[str, float] = {}

    @classmethod
    def beside(
        cls, learner: Learner, table: CriticTable, optimiser: OptimiserSettings, trunk: Callable[[], Forward]
    ) -> Critic:
        """The value model that a recipe's [critic] describes; a trunk of its own begins as the policy is now.

        trunk: makes it, of every rank's part where there are several.
        """
        settings = CriticSettings.of(table)
        forward = learner.forward if settings.shared else trunk()
        learner.team.lead("critic", dataclasses.asdict(learner.settings))
        return cls(forward, optimiser, settings, learner)

    @property
    def moves_trunk(self) -> bool:
        """True when the value loss is part of the policy's gradient."""
        return self.settings.shared and self.settings.coefficient > 0

    @torch.no_grad()
    def values(self, sequences: Sequence[TrainSequence]) -> list[NDArray[Any] | None]:
        """Per sequence [_T] the value before every loss token, 0 at masked ones; None without a loss token."""
        self._team.lead("critic.values", list(sequences))
        out: list[NDArray[Any] | None] = [None] * len(sequences)
        for one, _ in self._share(sequences).rounds():
            found = self._values(one or nothing())
            if one is not None:
                scatter(one, found, out)
        self._let_go()
        return filled([one["values"] for one in self._team.merged({"values": out})])

    def update(self, sequences: Sequence[TrainSequence], old: PerSequence) -> None:
        """`epochs` steps toward the returns of the sequences that have some; old: the values they came from."""
        for _ in range(self.settings.epochs):
            self.accumulate(sequences, old)
            self.step()

    def accumulate(self, sequences: Sequence[TrainSequence], old: PerSequence, tokens: int = 0) -> float:
        """Add the gradient of the value loss, times the coefficient where the trunk feels it; the loss itself.

        tokens: N, where the sequences are a part of the optimiser batch; 0: they are all of it.
        """
        self._team.lead("critic.accumulate", list(sequences), list(old), tokens)
        self.optimiser.zero()
        tokens = tokens or trained_tokens(sequences)
        factor = self.settings.coefficient if self.moves_trunk else 1.0
        total, clipped = 0.0, 0
        with self.forward.running():
            for one, last in self._share(sequences).rounds():
                if self.forward.sharded is not None:
                    self.forward.sharded.last_of_step(last and not self.settings.shared)
                values = self._values(one or nothing())
                if one is None:
                    torch.autograd.backward(values.sum() * 0.0)
                    continue
                returns, before, weight = (
                    torch.from_numpy(np.concatenate(rows)).to(values.device, values.dtype)
                    for rows in _columns(one, old, tokens)
                )
                terms, flat = value_terms(self.settings.loss, values, before, returns)
                loss = (weight * terms).sum(dtype=torch.float64)
                torch.autograd.backward(loss * factor)
                total += float(loss.detach())
                clipped += int((flat & (weight > 0)).sum())
        if not self.moves_trunk:
            self._let_go()
        every = self._team.merged({"loss": total, "clipped": clipped})
        total, clipped = sum(float(one["loss"]) for one in every), sum(int(one["clipped"]) for one in every)
        self.metrics |= {"critic/loss": total, "critic/clip_fraction": clipped / max(tokens, 1)}
        self.metrics["critic/explained_variance"] = _explained(sequences, old)
        return total

    def step(self) -> None:
        """Move the head (and its own trunk) by the accumulated gradient."""
        self._team.lead("critic.step")
        info = self.optimiser.step()
        self.metrics |= {"critic/grad_norm": info.grad_norm, "critic/learning_rate": info.learning_rate}

    def tensors(self) -> dict[str, Mapping[str, Tensor]]:
        """What a checkpoint holds of the critic; the policy's trunk is not among it."""
        return {"critic": self._team.gathered(CRITIC), "critic_optimiser": self._team.gathered(moments_of(CRITIC))}

    def put_back(self, snapshot: Snapshot) -> bool:
        """Weights, moments and steps of a snapshot; False when it has none. Raises ValueError when they do not fit."""
        saved = snapshot.tensors.get("critic")
        if saved is None:
            return False
        mine = dict(self.model.named_parameters())
        if set(saved) != set(mine) or any(saved[name].shape != p.shape for name, p in mine.items()):
            raise ValueError("the saved critic has another shape than the recipe's")
        self._team.put(CRITIC, saved)
        steps = int(snapshot.facts["critic_steps"])
        self._team.restore(CRITIC, self.optimiser, snapshot.tensors["critic_optimiser"], steps)
        return True

    @property
    def parameters(self) -> int:
        """Numbers that the critic's optimiser moves."""
        return sum(p.numel() for p in self.model.parameters())

    def _values(self, one: Pack) -> Tensor:
        with torch.set_grad_enabled(torch.is_grad_enabled() and (self.moves_trunk or not self.settings.shared)):
            hidden = self.forward.hidden(one)
        head = self.model.value
        found: Tensor = head(hidden.to(head.weight.dtype))
        return found[:, 0]

    def _share(self, sequences: Sequence[TrainSequence]) -> Share:
        s = self.learner.settings
        return self._team.share(
            lambda tokens: pack(sequences, budget_tokens=tokens, share=s.share_prompts, skip=False), s.pack_tokens
        )

    def _let_go(self) -> None:
        let_go(self.model.value)
        if self.forward.sharded is not None:
            self.forward.sharded.let_go()


def trained_tokens(sequences: Sequence[TrainSequence]) -> int:
    """N: tokens that the critic is trained on."""
    return sum(int(_trained(s).sum()) for s in sequences if s.returns is not None)


def _trained(sequence: TrainSequence) -> NDArray[np.bool_]:
    return sequence.mask if sequence.trains is None else sequence.mask & sequence.trains


def _columns(one: Pack, old: PerSequence, tokens: int) -> tuple[list[NDArray[Any]], ...]:
    """Returns, values before and weights of a pack's loss tokens; a sequence without returns weighs 0."""
    returns, before, weight = [], [], []
    for sequence, i in zip(one.sequences, one.index, strict=True):
        own = sequence.mask
        values = old[i]
        has = sequence.returns is not None and values is not None
        returns.append(sequence.returns[own] if has and sequence.returns is not None else np.zeros(int(own.sum())))
        before.append(np.asarray(values)[own] if has else np.zeros(int(own.sum())))
        weight.append(np.where(_trained(sequence)[own], 1.0 / tokens, 0.0) if has else np.zeros(int(own.sum())))
    return returns, before, weight


def _explained(sequences: Sequence[TrainSequence], old: PerSequence) -> float:
    """1 − Var(return − value)/Var(return) over the trained tokens; 0 when the returns are all equal."""
    pairs = [
        (s.returns[_trained(s)], np.asarray(v, np.float64)[_trained(s)])
        for s, v in zip(sequences, old, strict=True)
        if s.returns is not None and v is not None
    ]
    returns = np.concatenate([*(r for r, _ in pairs), np.zeros(0)])
    values = np.concatenate([*(v for _, v in pairs), np.zeros(0)])
    spread = float(returns.var()) if len(returns) else 0.0
    return 1.0 - float((returns - values).var()) / spread if spread > 0 and math.isfinite(spread) else 0.0
