"""A batch as training holds it, and its evaluation through `assign` and `loss`, whole or in parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gropius.objective.loss import LossOutput, Tokens, beside, loss
from gropius.objective.ratio import Segments, correction
from gropius.objective.selection import Assignment, Response, assign
from gropius.objective.spec import Objective

Array = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Drawn:
    """One response with the log-probabilities that only the torch half needs."""

    response: Response
    policy: Array
    sampler: Array | None = None
    entropy: Array | None = None


@dataclass(eq=False)
class Result:
    """Summed loss of all parts; per response: the gradient and every per-token number."""

    loss: float
    gradient: list[Array]
    numbers: list[dict[str, Array]]
    assignment: Assignment
    losses: list[float] = field(default_factory=list)

    def flat(self, name: str) -> Array:
        return np.concatenate([n[name] for n in self.numbers])


NUMBERS = ("contribution", "ratio", "surrogate", "kl", "correction", "flat")


def evaluate(
    objective: Objective,
    drawn: Sequence[Drawn],
    *,
    parts: Sequence[Sequence[int]] | None = None,
    dtype: torch.dtype = torch.float64,
    part_weights: Mapping[str, float] | None = None,
) -> Result:
    """Assign over the whole batch, then the loss of every part (default: one part with everything)."""
    if objective.ratio.correction != "none" and not objective.aggregate.count_corrected:
        drawn = [replace(d, response=replace(d.response, kept=_kept(objective, d))) for d in drawn]
    assignment = assign(objective, [d.response for d in drawn], part_weights)
    gradient: list[Any] = [None] * len(drawn)
    numbers: list[Any] = [None] * len(drawn)
    losses = []
    for part in parts if parts is not None else [range(len(drawn))]:
        if not part:
            continue
        logprobs, tokens = _tokens([drawn[i] for i in part], [assignment.responses[i] for i in part], dtype)
        out = loss(objective, logprobs, tokens)
        (grad,) = torch.autograd.grad(out.loss, logprobs)
        losses.append(float(out.loss.detach()))
        start = 0
        for i in part:
            stop = start + len(drawn[i].policy)
            gradient[i] = grad[start:stop].double().numpy()
            numbers[i] = _slice(out, start, stop)
            start = stop
    return Result(sum(losses), gradient, numbers, assignment, losses)


def _slice(out: LossOutput, start: int, stop: int) -> dict[str, Array]:
    return {name: getattr(out, name)[start:stop].double().numpy() for name in NUMBERS}


def _kept(objective: Objective, d: Drawn) -> NDArray[np.bool_]:
    mask = torch.from_numpy(d.response.mask)
    segments = Segments(torch.zeros(len(mask), dtype=torch.int64), mask, 1)
    anchor, sampler = (segments.select(torch.from_numpy(a)) for a in (d.response.anchor, d.sampler))
    return (correction(objective.ratio, anchor, sampler, segments) != 0).numpy()


def _tokens(drawn: Sequence[Drawn], assigned: Sequence[Any], dtype: torch.dtype) -> tuple[torch.Tensor, Tokens]:
    def flat(arrays: Sequence[Any], kind: torch.dtype = dtype) -> torch.Tensor:
        return torch.from_numpy(np.concatenate(arrays)).to(kind)

    def optional(arrays: Sequence[Any]) -> torch.Tensor | None:
        return None if any(a is None for a in arrays) else flat(arrays)

    lengths = torch.tensor([len(d.policy) for d in drawn])
    logprobs = flat([d.policy for d in drawn]).requires_grad_(True)
    return logprobs, Tokens(
        sequence=torch.repeat_interleave(torch.arange(len(drawn)), lengths),
        mask=flat([d.response.mask for d in drawn], torch.bool),
        advantage=flat([a.advantage for a in assigned]),
        weight=flat([a.weight for a in assigned]),
        sequences=len(drawn),
        anchor=optional([d.response.anchor for d in drawn]),
        sampler=optional([d.sampler for d in drawn]),
        reference=optional([d.response.reference for d in drawn]),
        keep=flat([a.keep for a in assigned], torch.bool),
        entropy=optional([d.entropy for d in drawn]),
        **beside(assigned, lambda pick: flat([pick(i) for i in range(len(assigned))])),
    )


def close(got: Any, expected: Any, rtol: float = 1e-9, atol: float = 1e-11) -> None:
    """The tolerance of the oracles: values and gradients are float64."""
    np.testing.assert_allclose(np.asarray(got, np.float64), np.asarray(expected, np.float64), rtol=rtol, atol=atol)


def response(group: str, reward: Any, length: int = 1, **fields: Any) -> Response:
    """A response of `length` loss tokens without log-probabilities."""
    return Response(group=group, reward=reward, mask=np.ones(length, np.bool_), **fields)


def advantages(objective: Objective, rewards: Sequence[float], groups: Sequence[Any] | None = None) -> list[float]:
    """The advantages of one-token responses."""
    groups = groups if groups is not None else [0] * len(rewards)
    rows = [response(str(g), r) for g, r in zip(groups, rewards, strict=True)]
    return [a.value for a in assign(objective, rows).responses]
