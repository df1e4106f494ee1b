"""Surrogates: how the policy term uses ratio and advantage, per token, to be maximised. Torch.

One function a kind, one row a kind in `SURROGATES`. Each returns the term and where its flat branch was chosen.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gropius.objective.ratio import Segments
from gropius.objective.spec import Surrogate


@dataclass(frozen=True, eq=False)
class Inputs:
    """What a surrogate may look at; all [_L], masked positions already replaced by 0.

    logprobs: log π (differentiable). log_ratio: at the declared level (differentiable where the level is). anchor:
    log π_anchor. advantage: a constant. ratio_is_one: no ratio was declared, the term is A log π. offset: the constant
    of `classify`.
    """

    logprobs: Tensor
    log_ratio: Tensor
    anchor: Tensor
    advantage: Tensor
    segments: Segments
    ratio_is_one: bool
    offset: Tensor | None = None


Term = tuple[Tensor, Tensor]
GATE_SATURATED = 80.0  # log-ratio where the gate is flat in float32 and float64, and exp still finite in float32


def _never(inputs: Inputs) -> Tensor:
    return torch.zeros_like(inputs.segments.mask)


def _by_sign(positive: Tensor, above: float, below: float, like: Tensor) -> Tensor:
    """[_L] one number where positive, another elsewhere, in the dtype of `like` (a bare number would be float32)."""
    return torch.where(positive, torch.full_like(like, above), torch.full_like(like, below)).detach()


def plain(axis: Surrogate, inputs: Inputs) -> Term:
    """A log π without a ratio (REINFORCE), r A with one."""
    if inputs.ratio_is_one:
        return inputs.advantage * inputs.logprobs, _never(inputs)
    return inputs.advantage * _exp_where(inputs.advantage != 0, inputs.log_ratio), _never(inputs)


def _exp_where(used: Tensor, log_ratio: Tensor) -> Tensor:
    """[_L] exp of the log-ratio where it is used, 1 without gradient elsewhere.

    Selected before exp: a ratio that overflows where nothing depends on it gives the gradient 0, not 0 · inf.
    """
    return torch.where(used, log_ratio, torch.zeros_like(log_ratio)).exp()


def _bounded(axis: Surrogate, ratio: Tensor, advantage: Tensor) -> Tensor:
    """[_L] the ratio after the bounds that bind on the side A pushes; `ratio` is detached.

    A > 0: at most 1 + high. A < 0: at least 1 − low, and at most the dual's c or the ceiling δ, whichever is smaller.
    """
    ceiling = min((bound for bound in (axis.dual, axis.ceiling) if bound), default=math.inf)
    above = ratio.clamp(max=1 + axis.high)
    below = ratio.clamp(1 - axis.low).clamp(max=ceiling)
    return torch.where(advantage > 0, above, torch.where(advantage < 0, below, ratio))


def clip(axis: Surrogate, inputs: Inputs) -> Term:
    """min(r A, clip(r, 1 − low, 1 + high) A); dual clip and ceiling act on A < 0 with a large ratio.

    dual c: max(·, c A) for A < 0. ceiling δ: min(r, δ) in the unclipped branch. In a constant branch the gradient is 0;
    exactly on a bound the ratio still counts as inside.
    Sources: PPO eq. 7; dual clip 1912.09729; two-sided clip 2505.07291; asymmetric bounds DAPO eq. 8.
    """
    ratio = inputs.log_ratio.detach().exp()
    bounded = _bounded(axis, ratio, inputs.advantage)
    flat = bounded != ratio
    free = _exp_where(~flat & (inputs.advantage != 0), inputs.log_ratio)
    return torch.where(flat, bounded, free) * inputs.advantage, flat


def capped(axis: Surrogate, inputs: Inputs) -> Term:
    """sg(clip(r, cap_low, cap)) A log π: no token is dropped, its weight is bounded. Source: CISPO eqs. 4-5."""
    ratio = inputs.log_ratio.detach().exp()
    weight = ratio.clamp(axis.cap_low, axis.cap)
    return weight * inputs.advantage * inputs.logprobs, weight != ratio


def clip_masked(axis: Surrogate, inputs: Inputs) -> Term:
    """sg(r) A log π where the clip would be active, 0 elsewhere: the clip's gradient. Source: CISPO eqs. 6-7."""
    ratio = inputs.log_ratio.detach().exp()
    flat = _bounded(axis, ratio, inputs.advantage) != ratio
    weight = torch.where(flat, torch.zeros_like(ratio), ratio)
    return weight * inputs.advantage * inputs.logprobs, flat


def soft_gate(axis: Surrogate, inputs: Inputs) -> Term:
    """(4/τ) σ(τ (r − 1)) A, τ by the sign of A (0 takes the negative one). Source: SAPO eq. 5."""
    positive = inputs.advantage > 0
    tau = _by_sign(positive, axis.tau_positive, axis.tau_negative, inputs.log_ratio)
    ratio = inputs.log_ratio.clamp(max=GATE_SATURATED).exp()
    gate = torch.sigmoid(tau * (ratio - 1)) * 4 / tau
    return gate * inputs.advantage, _never(inputs)


def log_clip(axis: Surrogate, inputs: Inputs) -> Term:
    """S A, S the geometric mean of token ratios clipped on the side A pushes: log r ≤ high for A > 0, ≥ −low for A < 0.

    A clipped token has no gradient but stays in S. Source: GMPO 2507.20673.
    """
    raw, advantage = inputs.log_ratio, inputs.advantage
    flat = ((advantage > 0) & (raw > axis.high)) | ((advantage < 0) & (raw < -axis.low))
    bound = _by_sign(advantage > 0, axis.high, -axis.low, raw)
    kept = torch.where(flat, bound, raw)
    ratio = inputs.segments.spread(inputs.segments.average(kept)).exp()
    return inputs.segments.select(ratio * advantage), flat


def divergence_mask(axis: Surrogate, inputs: Inputs) -> Term:
    """r A, 0 where the step would push a token that has already moved by more than `threshold` from the anchor.

    Binary total variation |π − μ|, or binary KL(μ‖π) of the two outcomes (this token, any other); μ the anchor. The
    gradient weight is min(r, cap). Source: DPPO 2602.04879.
    """
    ratio = inputs.log_ratio.exp()
    weight = ratio.detach().clamp(max=axis.cap) if axis.cap else ratio.detach()
    moved = DIVERGENCES[axis.divergence](inputs.anchor, inputs.logprobs.detach()) > axis.threshold
    away = ((inputs.advantage > 0) & (weight > 1)) | ((inputs.advantage < 0) & (weight < 1))
    flat = moved & away
    weight = torch.where(flat, torch.zeros_like(weight), weight)
    return weight * inputs.advantage * (1 + inputs.logprobs - inputs.logprobs.detach()), flat


def gamma_gate(axis: Surrogate, inputs: Inputs) -> Term:
    """sg(e^λ W^k e^(−λW)) A log π, W the ratio; (k, λ) by the sign of A (0 takes the negative ones). At W = 1 it is 1.

    A smooth weight that falls to 0 on both sides of its peak at W = k/λ. Source: VESPO 2602.10693.
    """
    positive = inputs.advantage > 0
    log_w = inputs.log_ratio.detach()
    k = _by_sign(positive, axis.k_positive, axis.k_negative, log_w)
    rate = _by_sign(positive, axis.lambda_positive, axis.lambda_negative, log_w)
    weight = (rate + k * log_w - rate * log_w.clamp(max=GATE_SATURATED).exp()).exp()
    return weight * inputs.advantage * inputs.logprobs, _never(inputs)


def classify(axis: Surrogate, inputs: Inputs) -> Term:
    """value + A (log π − sg log π): a loss over whole groups at the policy as it is, made by `objective.classify`.

    Source: REAL 2602.05630.
    """
    offset = torch.zeros_like(inputs.logprobs) if inputs.offset is None else inputs.offset
    return offset + inputs.advantage * (inputs.logprobs - inputs.logprobs.detach()), _never(inputs)


def for_demonstrations(axis: Surrogate, inputs: Inputs, demonstration: Tensor, own: Term) -> Term:
    """[_L] the term of `own` at sampled tokens; at a teacher's, π/(π + γ) A, where `demonstrations` is shaped.

    Its gradient is largest where the policy finds the teacher's token unlikely. Source: LUFFY 2504.14945 eq. 8.
    """
    if axis.demonstrations == "same":
        return own
    probability = inputs.logprobs.exp()
    shaped = inputs.advantage * probability / (probability + axis.gamma)
    return torch.where(demonstration, shaped, own[0]), own[1] & ~demonstration


def _binary_tv(anchor: Tensor, policy: Tensor) -> Tensor:
    return (policy.exp() - anchor.exp()).abs()


def _binary_kl(anchor: Tensor, policy: Tensor) -> Tensor:
    """KL of Bernoulli(μ) to Bernoulli(π), from log-probabilities; the complements are floored at 1e-12."""
    mu, pi = anchor.exp(), policy.exp()
    rest_mu, rest_pi = (1 - mu).clamp(min=1e-12), (1 - pi).clamp(min=1e-12)
    return mu * (anchor - policy) + rest_mu * (rest_mu.log() - rest_pi.log())


DIVERGENCES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"tv": _binary_tv, "kl": _binary_kl}

SURROGATES: dict[str, Callable[[Surrogate, Inputs], Term]] = {
    "none": plain,
    "clip": clip,
    "capped": capped,
    "clip_masked": clip_masked,
    "soft_gate": soft_gate,
    "log_clip": log_clip,
    "divergence_mask": divergence_mask,
    "gamma_gate": gamma_gate,
    "classify": classify,
}
