"""One training step: score what has to be scored, accumulate the gradient over packs, let the optimiser move.

The objective is evaluated by `objective.loss.loss` and nowhere else; weights were fixed over the whole optimiser batch
before anything was packed, so the number of packs changes nothing but memory.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gropius.objective.loss import Tokens, beside, loss
from gropius.objective.spec import Objective
from gropius.train.forward import Forward, Scores, scatter, score
from gropius.train.optim import Optimiser
from gropius.train.pack import Pack, pack
from gropius.train.savings import Saving, saving
from gropius.train.sequences import TrainSequence
from gropius.train.shares import Share, filled, nothing
from gropius.train.team import Team, local

PerSequence = Sequence[NDArray[Any] | None]


@dataclass(frozen=True)
class LearnerSettings:
    """temperature: of the sampling. pack_tokens: unique tokens of one pack at most, what bounds the memory.

    entropy: also compute every loss token's entropy in `update`. share_prompts, skip: off only to measure and to prove
    that they change nothing.
    """

    temperature: float = 1.0
    pack_tokens: int = 16384
    entropy: bool = False
    share_prompts: bool = True
    skip: bool = True


@dataclass(frozen=True, eq=False)
class UpdateReport:
    """What one update did. Lists follow the sequences given; an entry is None where the sequence was not run.

    loss: Σ weight · term. grad_norm: before clipping, 0 without a step. taken: False when no sequence was live or
    something was not finite; then `refused` says which and `culprits` names the rows (indices into the list given).
    logprobs, entropies, contributions, ratios, kls, clipped: [_T] each, 0 at masked tokens.
    metrics: shares and means over loss tokens with weight, skipped ones included, under TRL's names where it has one.
    saving: ids run and left out. row_tokens: of the live rows one by one. all_tokens: of every row, skipped ones too.
    """

    loss: float
    grad_norm: float
    learning_rate: float
    taken: bool
    refused: str
    culprits: tuple[int, ...]
    logprobs: list[NDArray[Any] | None]
    entropies: list[NDArray[Any] | None]
    contributions: list[NDArray[Any] | None]
    ratios: list[NDArray[Any] | None]
    kls: list[NDArray[Any] | None]
    clipped: list[NDArray[Any] | None]
    metrics: dict[str, float]
    saving: Saving
    row_tokens: int
    all_tokens: int
    live: int
    packs: int
    time_s: float

    @property
    def run_tokens(self) -> int:
        """Ids through the model."""
        return self.saving.run

    @property
    def skipped_compute(self) -> float:
        """Share of the tokens of all rows that did not have to be run: shared prefixes, skipped rows, last tokens."""
        return 1.0 - self.run_tokens / self.all_tokens if self.all_tokens else 0.0


@dataclass(eq=False)
class _Tally:
    """Per-sequence results of the packs so far."""

    count: int
    loss: float = 0.0
    lists: dict[str, list[NDArray[Any] | None]] = field(default_factory=dict)
    culprits: list[int] = field(default_factory=list)

    def add(self, name: str, pack: Pack, values: Tensor) -> None:
        scatter(pack, values, self.lists.setdefault(name, [None] * self.count))

    def get(self, name: str) -> list[NDArray[Any] | None]:
        return self.lists.get(name, [None] * self.count)


class Learner:
    """A policy, an objective and an optimiser. It scores sequences and takes steps; it never draws or rewards any.

    bonus: the entropy coefficient as it is now, None for the declared one.
    """

    def __init__(
        self,
        forward: Forward,
        objective: Objective,
        optimiser: Optimiser,
        settings: LearnerSettings,
        team: Team | None = None,
    ):
        self.forward, self.objective, self.optimiser, self.settings = forward, objective, optimiser, settings
        self.team = team or Team()
        self.bonus: float | None = None

    def score(
        self, sequences: Sequence[TrainSequence], *, forward: Forward | None = None, entropy: bool = False
    ) -> Scores:
        """Log-probabilities of every loss token under the policy as it is now, or under another model's `forward`.

        Skipped sequences are not run. Without gradients.
        """
        way = forward or self.forward
        self.team.lead("score", self.team.name(way), dataclasses.asdict(self.settings), list(sequences), entropy)
        shared = self._share(sequences)
        found = score(
            way,
            [one for one, _ in shared.rounds()],
            count=len(sequences),
            temperature=self.settings.temperature,
            entropy=entropy,
        )
        if way.sharded is None:
            return found
        way.sharded.let_go()
        every = self.team.merged({"logprobs": found.logprobs, "entropies": found.entropies})
        return Scores(filled([one["logprobs"] for one in every]), filled([one["entropies"] for one in every]))

    def update(
        self,
        sequences: Sequence[TrainSequence],
        anchor: PerSequence | None = None,
        reference: PerSequence | None = None,
        also: Callable[[], None] | None = None,
    ) -> UpdateReport:
        """Accumulate the gradient of the objective over all live sequences and take one optimiser step.

        also: adds another gradient to the same parameters first (a value head on a shared trunk).

        anchor: [_T] log-probabilities of the snapshot; None means the policy itself (one update a batch). reference:
        the KL target's. No live sequence: no step. A loss or gradient that is not finite: no step, weights untouched.
        """
        began = time.perf_counter()
        given = (
            list(sequences),
            None if anchor is None else list(anchor),
            None if reference is None else list(reference),
        )
        self.team.lead(
            "update", self.objective.as_dict(), dataclasses.asdict(self.settings), self.bonus, also is not None, *given
        )
        shared = self._share(sequences)
        tally = _Tally(len(sequences))
        self.optimiser.zero()
        if also is not None:
            also()
        with self.forward.running():
            for one, last in shared.rounds():
                if one is None:
                    self._idle(last)
                else:
                    self._accumulate(one, anchor, reference, tally, last)
                if tally.culprits and self.team.alone:
                    break
        tally = self._merged(tally)
        packs = shared.packs
        refused, norm, rate, taken = self._finish(packs, anchor, reference, tally)
        return UpdateReport(
            loss=tally.loss,
            grad_norm=norm,
            learning_rate=rate,
            taken=taken,
            refused=refused,
            culprits=tuple(tally.culprits),
            logprobs=tally.get("logprobs"),
            entropies=tally.get("entropies"),
            contributions=tally.get("contribution"),
            ratios=tally.get("ratio"),
            kls=tally.get("kl"),
            clipped=tally.get("flat"),
            metrics=_metrics(sequences, tally),
            saving=saving(sequences, packs, packed=self.forward.packed),
            row_tokens=sum(one.row_tokens for one in packs),
            all_tokens=sum(sequence.length_tokens for sequence in sequences),
            live=sum(len(one.sequences) for one in packs),
            packs=len(packs),
            time_s=time.perf_counter() - began,
        )

    def _share(self, sequences: Sequence[TrainSequence]) -> Share:
        settings = self.settings
        return self.team.share(
            lambda tokens: pack(sequences, budget_tokens=tokens, share=settings.share_prompts, skip=settings.skip),
            settings.pack_tokens,
        )

    def _merged(self, tally: _Tally) -> _Tally:
        """Rank 0: what all ranks found on their shares."""
        if self.team.alone:
            return tally
        every = self.team.merged({"loss": tally.loss, "lists": tally.lists, "culprits": tally.culprits})
        names = dict.fromkeys(name for one in every for name in one["lists"])
        lists = {name: filled([one["lists"][name] for one in every if name in one["lists"]]) for name in names}
        culprits = sorted(i for one in every for i in one["culprits"])
        return _Tally(tally.count, sum(one["loss"] for one in every), lists, culprits)

    def _backward(self, value: Tensor, last: bool) -> None:
        if self.forward.sharded is not None:
            self.forward.sharded.last_of_step(last)
        torch.autograd.backward(value)

    def _idle(self, last: bool) -> None:
        """Take part in what the ranks exchange in a micro-batch, with nothing to add."""
        logprobs, _ = self.forward.logprobs(nothing())
        self._backward(logprobs.sum() * 0.0, last)

    def _accumulate(
        self, one: Pack, anchor: PerSequence | None, reference: PerSequence | None, tally: _Tally, last: bool = True
    ) -> None:
        """Run one pack forward and backward. A loss that is not finite is not run backward; its rows are noted."""
        wants = self.settings.entropy or self.objective.entropy_in_loss
        logprobs, entropies = self.forward.logprobs(one, temperature=self.settings.temperature, entropy=wants)
        made = _tokens(one, anchor, reference if self.objective.kl_in_loss else None, logprobs)
        if self.objective.entropy_in_loss:
            made = dataclasses.replace(made, entropy=entropies, bonus=self.bonus)
        out = loss(self.objective, logprobs, made)
        finite = torch.isfinite(out.contribution)
        if not bool(finite.all()):
            rows = set(one.owner[~finite.cpu().numpy()].tolist())
            tally.culprits.extend(one.index[n] for n in sorted(rows))
            if not self.team.alone:
                self._backward(logprobs.sum() * 0.0, last)
            return
        self._backward(out.loss, last)
        tally.loss += float(out.loss.detach())
        tally.add("logprobs", one, logprobs)
        if entropies is not None:
            tally.add("entropies", one, entropies)
        for name in ("contribution", "ratio", "kl", "flat"):
            tally.add(name, one, getattr(out, name))

    def _finish(
        self, packs: Sequence[Pack], anchor: PerSequence | None, reference: PerSequence | None, tally: _Tally
    ) -> tuple[str, float, float, bool]:
        """Take the step, or say why not."""
        if not packs:
            return "no live sequence", 0.0, 0.0, False
        if self.forward.sharded is not None:
            self.forward.sharded.let_go()
        if self.team.any(bool(tally.culprits)):
            self.optimiser.zero()
            return "the loss is not finite", float("nan"), 0.0, False
        info = self.optimiser.step()
        if info.taken:
            return "", info.grad_norm, info.learning_rate, True
        tally.culprits.extend(self._blame(packs, anchor, reference))
        return "the gradient is not finite", info.grad_norm, info.learning_rate, False

    def _blame(self, packs: Sequence[Pack], anchor: PerSequence | None, reference: PerSequence | None) -> list[int]:
        """The rows whose own gradient is not finite; rare, so every row is run alone. All of them if none is."""
        found, all_rows = [], []
        for one in packs:
            for sequence, i in zip(one.sequences, one.index, strict=True):
                (alone,) = pack([sequence], budget_tokens=sequence.length_tokens, skip=False)
                place = _Tally(1)
                with self.forward.running():
                    if self.team.rank:
                        self._idle(True)
                    else:
                        self._accumulate(alone, _only(anchor, i), _only(reference, i), place)
                gradients = [local(p.grad) for p in self.optimiser.parameters if p.grad is not None]
                if self.team.any(bool(place.culprits) or not all(bool(torch.isfinite(g).all()) for g in gradients)):
                    found.append(i)
                all_rows.append(i)
                self.optimiser.zero()
        return sorted(found or all_rows)


def _only(values: PerSequence | None, i: int) -> PerSequence | None:
    return None if values is None else [values[i]]


def _tokens(one: Pack, anchor: PerSequence | None, reference: PerSequence | None, like: Tensor) -> Tokens:
    """The pack's loss tokens as the objective wants them; masked tokens are left out altogether."""

    def _flat(rows: Sequence[NDArray[Any]]) -> Tensor:
        own = [row[sequence.mask] for row, sequence in zip(rows, one.sequences, strict=True)]
        return torch.from_numpy(np.concatenate(own)).to(like.device, like.dtype)

    def _given(values: PerSequence | None) -> Tensor | None:
        if values is None:
            return None
        rows = [row for i in one.index if (row := values[i]) is not None]
        if len(rows) != len(one.index):
            missing = [i for i in one.index if values[i] is None]
            raise ValueError(f"rows {missing} have no log-probabilities to compare with; score what is updated")
        return _flat(rows)

    keep = np.concatenate([s.keep[s.mask] for s in one.sequences])
    return Tokens(
        sequence=torch.from_numpy(one.owner).to(like.device),
        mask=torch.ones(len(one.owner), dtype=torch.bool, device=like.device),
        advantage=_flat([s.advantage for s in one.sequences]),
        weight=_flat([s.weight for s in one.sequences]),
        sequences=len(one.sequences),
        anchor=_given(anchor),
        sampler=_flat([s.sampler_logprobs for s in one.sequences]),
        reference=_given(reference),
        keep=None if keep.all() else torch.from_numpy(keep).to(like.device),
        **beside(one.sequences, lambda pick: _flat([pick(i) for i in range(len(one.sequences))])),
    )


def _metrics(sequences: Sequence[TrainSequence], tally: _Tally) -> dict[str, float]:
    """Shares and means. A skipped row's tokens count as unclipped and, where the policy term is 0, as without KL."""
    total = sum(int(np.count_nonzero(sequence.weight)) for sequence in sequences)
    run = [i for i, row in enumerate(tally.get("ratio")) if row is not None]
    if not run or not total:
        return {}

    def own(name: str) -> NDArray[Any]:
        rows = tally.get(name)
        return np.concatenate([np.asarray(rows[i])[sequences[i].weight != 0] for i in run])

    ratio, flat, kl = own("ratio"), own("flat").astype(bool), own("kl")
    low, high = flat & (ratio < 1), flat & (ratio > 1)
    metrics = {
        "clip_ratio/low_mean": low.sum() / total,
        "clip_ratio/high_mean": high.sum() / total,
        "clip_ratio/region_mean": flat.sum() / total,
        "ratio/mean": ratio.sum() / len(ratio) if len(ratio) else 1.0,
        "ratio/min": ratio.min() if len(ratio) else 1.0,
        "ratio/max": ratio.max() if len(ratio) else 1.0,
        "kl": kl.sum() / total,
    }
    if tally.lists.get("entropies"):
        entropy = own("entropies")
        metrics["entropy"] = entropy.sum() / max(1, len(entropy))
    return {name: float(value) for name, value in metrics.items()}
