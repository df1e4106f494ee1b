"""The critic: a value head on a model of its own, or on the policy's trunk, trained on the policy's packs.

    V(s_t) = w · h_t + b,  h_t the hidden state that predicts token t        loss = Σ_t 1/N · ½ ℓ(V_t − return_t)

N loss tokens of the whole optimiser batch, so packs, prefix sharing and ranks change nothing. The head begins at 0.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Sequence
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
from gropius.train.step import Learner

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


def own_trunk(forward: Forward, model: PreTrainedModel) -> Forward:
    """A way to run packs through a copy of `model` without its output head; `forward` says how packs are run."""
    copied = copy.deepcopy(model)
    embeddings = copied.get_input_embeddings()
    head = copied.get_output_embeddings()
    if head is not None and head.weight is not embeddings.weight:
        copied.set_output_embeddings(nn.Identity())
    weight = next(embeddings.parameters()).detach()
    return dataclasses.replace(forward, model=copied, body=backbone(copied), head=Head(weight))


class Critic:
    """Values of sequences before an update, and steps toward the returns that the update's advantages came with."""

    def __init__(self, forward: Forward, optimiser: OptimiserSettings, settings: CriticSettings, learner: Learner):
        self.forward, self.settings, self.learner = forward, settings, learner
        width = int(forward.head.weight.shape[1])
        self.model = ValueModel(width, None if settings.shared else forward.body, forward.head.weight)
        self.optimiser = Optimiser(self.model, optimiser)
        self.metrics: dict[str, float] = {}

    @classmethod
    def beside(cls, learner: Learner, table: CriticTable, optimiser: OptimiserSettings) -> Critic:
        """The value model that a recipe's [critic] describes; a trunk of its own begins as the policy is now."""
        settings = CriticSettings.of(table)
        forward = learner.forward if settings.shared else own_trunk(learner.forward, learner.forward.model)
        return cls(forward, optimiser, settings, learner)

    @property
    def moves_trunk(self) -> bool:
        """True when the value loss is part of the policy's gradient."""
        return self.settings.shared and self.settings.coefficient > 0

    @torch.no_grad()
    def values(self, sequences: Sequence[TrainSequence]) -> list[NDArray[Any] | None]:
        """Per sequence [_T] the value before every loss token, 0 at masked ones; None without a loss token."""
        out: list[NDArray[Any] | None] = [None] * len(sequences)
        for one in self._packs(sequences):
            scatter(one, self._values(one), out)
        return out

    def update(self, sequences: Sequence[TrainSequence], old: PerSequence) -> None:
        """`epochs` steps toward the returns of the sequences that have some; old: the values they came from."""
        for _ in range(self.settings.epochs):
            self.accumulate(sequences, old)
            self.step()

    def accumulate(self, sequences: Sequence[TrainSequence], old: PerSequence, tokens: int = 0) -> float:
        """Add the gradient of the value loss, times the coefficient where the trunk feels it; the loss itself.

        tokens: N, where the sequences are a part of the optimiser batch; 0: they are all of it.
        """
        self.optimiser.zero()
        tokens = tokens or trained_tokens(sequences)
        factor = self.settings.coefficient if self.moves_trunk else 1.0
        total, clipped = 0.0, 0
        with self.forward.running():
            for one in self._packs(sequences):
                values = self._values(one)
                returns, before, weight = (
                    torch.from_numpy(np.concatenate(rows)).to(values.device, values.dtype)
                    for rows in _columns(one, old, tokens)
                )
                terms, flat = value_terms(self.settings.loss, values, before, returns)
                loss = (weight * terms).sum(dtype=torch.float64)
                torch.autograd.backward(loss * factor)
                total += float(loss.detach())
                clipped += int((flat & (weight > 0)).sum())
        self.metrics |= {"critic/loss": total, "critic/clip_fraction": clipped / max(tokens, 1)}
        self.metrics["critic/explained_variance"] = _explained(sequences, old)
        return total

    def step(self) -> None:
        """Move the head (and its own trunk) by the accumulated gradient."""
        info = self.optimiser.step()
        self.metrics |= {"critic/grad_norm": info.grad_norm, "critic/learning_rate": info.learning_rate}

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """What a checkpoint holds of the critic; the policy's trunk is not among it."""
        weights = {name: p.detach() for name, p in self.model.named_parameters()}
        return {"critic": weights, "critic_optimiser": self.optimiser.tensors()}

    def put_back(self, snapshot: Snapshot) -> bool:
        """Weights, moments and steps of a snapshot; False when it has none. Raises ValueError when they do not fit."""
        saved = snapshot.tensors.get("critic")
        if saved is None:
            return False
        mine = dict(self.model.named_parameters())
        if set(saved) != set(mine) or any(saved[name].shape != p.shape for name, p in mine.items()):
            raise ValueError("the saved critic has another shape than the recipe's")
        for name, parameter in mine.items():
            parameter.data.copy_(saved[name])
        self.optimiser.restore(dict(snapshot.tensors["critic_optimiser"]), int(snapshot.facts["critic_steps"]))
        return True

    @property
    def parameters(self) -> int:
        """Numbers that the critic's optimiser moves."""
        return sum(p.numel() for p in self.model.parameters())

    def _values(self, one: Pack) -> Tensor:
        hidden = self.forward.hidden(one)
        if self.settings.shared and not self.moves_trunk:
            hidden = hidden.detach()
        head = self.model.value
        return nn.functional.linear(hidden.to(head.weight.dtype), head.weight, head.bias)[:, 0]

    def _packs(self, sequences: Sequence[TrainSequence]) -> list[Pack]:
        s = self.learner.settings
        return pack(sequences, budget_tokens=s.pack_tokens, share=s.share_prompts, skip=False)


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
