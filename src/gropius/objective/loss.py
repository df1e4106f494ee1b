"""The only composition: loss = Σ_t weight_t · ( − keep_t · correction_t · surrogate_t + β · kl_t − η · entropy_t )
− Σ_t imitation_t · log π_t. Torch.

Nothing reduces between the ratio and the weighted sum; a sequence must be whole within one call, a batch need not be.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gropius.errors import ObjectiveError
from gropius.objective.kl import kl_term
from gropius.objective.ratio import Segments, correction, log_ratio
from gropius.objective.spec import Objective
from gropius.objective.surrogate import SURROGATES, Inputs, for_demonstrations


@dataclass(frozen=True, eq=False)
class Tokens:
    """A flat, ragged batch of `_L` token positions of `_N` sequences; everything but the policy's log-probabilities.

    sequence [_L] int64: whose token. mask [_L] bool: loss tokens. advantage, weight [_L]: constants from
    `selection.assign`. anchor [_L]: log π_anchor; None means the policy itself, detached (one update a batch).
    sampler, reference [_L]: as the objective needs them. keep [_L] bool: the policy term's mask. penalised [_L] bool:
    tokens that `covariance = "kl"` picked. imitation [_L]: weight of −log π. offset [_L]: the value beside the slope of
    `classify`. demonstration [_L] bool: a teacher wrote the token. entropy [_L]: of the policy, differentiable, for
    `terms.entropy`. bonus: η as it is now; None: the declared one.
    Float arrays have the dtype the loss is computed in.
    """

    sequence: Tensor
    mask: Tensor
    advantage: Tensor
    weight: Tensor
    sequences: int
    anchor: Tensor | None = None
    sampler: Tensor | None = None
    reference: Tensor | None = None
    keep: Tensor | None = None
    penalised: Tensor | None = None
    imitation: Tensor | None = None
    offset: Tensor | None = None
    demonstration: Tensor | None = None
    entropy: Tensor | None = None
    bonus: float | None = None


@dataclass(frozen=True, eq=False)
class LossOutput:
    """The loss (differentiable) and every per-token number behind it (detached, [_L], 0 at masked positions).

    contribution sums to the loss. surrogate: the policy term before correction and weight. flat: the constant branch
    was chosen. ratio: at the declared level. kl: before its coefficient.
    """

    loss: Tensor
    contribution: Tensor
    ratio: Tensor
    surrogate: Tensor
    kl: Tensor
    correction: Tensor
    flat: Tensor


def beside(rows: Sequence[Any], flat: Callable[[Callable[[int], NDArray[Any]]], Tensor]) -> dict[str, Any]:
    """The optional arrays of `Tokens` that rows (assigned responses, training sequences) carry, laid out by `flat`.

    flat: given row number → array, one flat tensor. None where no row has the array; 0 where another row has it.
    """
    out: dict[str, Any] = {}
    for name in ("penalised", "imitation", "offset"):
        found = any(getattr(row, name) is not None and np.any(getattr(row, name)) for row in rows)
        out[name] = flat(lambda i, name=name: _or_zero(getattr(rows[i], name), rows[i].weight)) if found else None  # type: ignore[misc]
    if any(row.demonstration for row in rows):
        out["demonstration"] = flat(lambda i: np.full(len(rows[i].weight), float(rows[i].demonstration))).bool()
    penalised = out["penalised"]
    out["penalised"] = None if penalised is None else penalised.bool()
    return out


def _or_zero(values: NDArray[Any] | None, like: NDArray[Any]) -> NDArray[Any]:
    return np.zeros(len(like)) if values is None else values


def loss(objective: Objective, logprobs: Tensor, tokens: Tokens) -> LossOutput:
    """Evaluate the objective on some whole sequences of a batch.

    logprobs [_L]: log π of every position's token, differentiable. The sum of the losses of any split into whole
    sequences is the loss of the batch. Masked positions may hold anything, inf and NaN included.
    Errors: ObjectiveError when the objective needs sampler or reference log-probabilities that are not given.
    """
    segments = Segments(tokens.sequence, tokens.mask, tokens.sequences)
    policy = segments.select(logprobs)
    anchor = _anchor(objective, policy, tokens, segments)
    advantage, weight = segments.select(tokens.advantage), segments.select(tokens.weight)
    log_r = log_ratio(objective.ratio, policy, anchor, segments)
    offset = None if tokens.offset is None else segments.select(tokens.offset)
    inputs = Inputs(policy, log_r, anchor, advantage, segments, objective.ratio.level == "none", offset)
    term, flat = SURROGATES[objective.surrogate.kind](objective.surrogate, inputs)
    if tokens.demonstration is not None:
        term, flat = for_demonstrations(objective.surrogate, inputs, tokens.demonstration, (term, flat))
    factor = _policy_factor(objective, policy, anchor, inputs, tokens)
    per_token = -factor * term
    kl = torch.zeros_like(policy)
    if objective.kl_in_loss:
        reference = segments.select(_needed(tokens.reference, "reference", "kl.estimator"))
        kl = kl_term(objective.kl, policy, reference, anchor)
        per_token = per_token + objective.kl.coefficient * kl
    contribution = segments.select(weight * _beside(objective, per_token, policy - anchor, tokens, segments))
    if tokens.imitation is not None:
        contribution = contribution - segments.select(tokens.imitation) * policy
    total = contribution.sum(dtype=torch.float64)
    return LossOutput(
        loss=total,
        contribution=contribution.detach(),
        ratio=segments.select(log_r.detach().exp()),
        surrogate=segments.select(term.detach()),
        kl=segments.select(kl.detach()),
        correction=segments.select(factor.detach()),
        flat=flat & tokens.mask,
    )


def _beside(objective: Objective, per_token: Tensor, drift: Tensor, tokens: Tokens, segments: Segments) -> Tensor:
    """[_L] the terms with the penalty of `covariance = "kl"` and the entropy bonus; drift: log π − log π_anchor."""
    if tokens.penalised is not None:
        picked = (tokens.penalised & segments.mask).to(drift.dtype)
        per_token = per_token + objective.selection.covariance_coefficient * picked * drift.abs()
    bonus = objective.terms.entropy if tokens.bonus is None else tokens.bonus
    if objective.entropy_in_loss and bonus:
        per_token = per_token - bonus * segments.select(_entropies(tokens))
    return per_token


def _entropies(tokens: Tokens) -> Tensor:
    if tokens.entropy is None:
        raise ObjectiveError("objective.terms.entropy needs the policy's entropy at every token")
    return tokens.entropy


def _needed(values: Tensor | None, name: str, key: str) -> Tensor:
    if values is None:
        raise ObjectiveError(f"objective.{key} needs the {name} log-probabilities of every token")
    return values


def _anchor(objective: Objective, policy: Tensor, tokens: Tokens, segments: Segments) -> Tensor:
    """[_L] the detached log-probabilities that the ratio is measured against."""
    if objective.ratio.anchor == "sampler" and objective.ratio.level != "none":
        return segments.select(_needed(tokens.sampler, "sampler", 'ratio.anchor = "sampler"')).detach()
    if tokens.anchor is None:
        return policy.detach()
    return segments.select(tokens.anchor).detach()


def _policy_factor(objective: Objective, policy: Tensor, anchor: Tensor, inputs: Inputs, tokens: Tokens) -> Tensor:
    """[_L] what multiplies the policy term and not the KL: mismatch correction, entropy mask, off-policy mask."""
    segments = inputs.segments
    factor = torch.ones_like(policy)
    if objective.ratio.correction != "none":
        sampler = segments.select(_needed(tokens.sampler, "sampler", "ratio.correction"))
        factor = correction(objective.ratio, anchor, sampler, segments)
    if tokens.keep is not None:
        factor = factor * tokens.keep.to(factor.dtype)
    if objective.selection.off_policy_mask > 0:
        drift = segments.spread(segments.average((anchor - policy).detach()))
        stale = (inputs.advantage < 0) & (drift > objective.selection.off_policy_mask)
        factor = torch.where(stale, torch.zeros_like(factor), factor)
    return factor
