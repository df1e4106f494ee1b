"""The only composition: loss = Σ_t weight_t · ( − keep_t · correction_t · surrogate_t + β · kl_t ). Torch.

Nothing reduces between the ratio and the weighted sum; a sequence must be whole within one call, a batch need not be.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gropius.errors import ObjectiveError
from gropius.objective.kl import kl_term
from gropius.objective.ratio import Segments, correction, log_ratio
from gropius.objective.spec import Objective
from gropius.objective.surrogate import SURROGATES, Inputs


@dataclass(frozen=True, eq=False)
class Tokens:
    """A flat, ragged batch of `_L` token positions of `_N` sequences; everything but the policy's log-probabilities.

    sequence [_L] int64: whose token. mask [_L] bool: loss tokens. advantage, weight [_L]: constants from
    `selection.assign`. anchor [_L]: log π_anchor; None means the policy itself, detached (one update a batch).
    sampler, reference [_L]: as the objective needs them. keep [_L] bool: the policy term's entropy mask.
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
    inputs = Inputs(policy, log_r, anchor, advantage, segments, objective.ratio.level == "none")
    term, flat = SURROGATES[objective.surrogate.kind](objective.surrogate, inputs)
    factor = _policy_factor(objective, policy, anchor, inputs, tokens)
    per_token = -factor * term
    kl = torch.zeros_like(policy)
    if objective.kl_in_loss:
        reference = segments.select(_needed(tokens.reference, "reference", "kl.estimator"))
        kl = kl_term(objective.kl, policy, reference, anchor)
        per_token = per_token + objective.kl.coefficient * kl
    contribution = segments.select(weight * per_token)
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
