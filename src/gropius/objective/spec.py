"""The objective as a frozen value: seven independent axes, every field named, nothing implied. No torch.

    loss = Σ_t weight_t · ( − keep_t · correction_t · surrogate_t + β · kl_t − η · entropy_t ) + μ · imitation

`advantage` says what a token is worth, `ratio` against which policy it is measured, `surrogate` how far the policy
may move, `kl` what ties it to the reference, `aggregate` what weight a token has, `selection` which responses and
tokens take part, `terms` what stands beside the policy term.
Nothing anywhere asks which preset an objective came from.
"""

from __future__ import annotations

import dataclasses
import html
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args, get_type_hints

from gropius.errors import ObjectiveError, did_you_mean

Baseline = Literal[
    "none", "batch_mean", "group_mean", "leave_one_out", "length_weighted", "greedy", "critic", "runner_up", "subset",
    "optimal_token",
]  # fmt: skip
Scale = Literal["none", "group_std", "batch_std", "group_mean", "subset_std"]
RatioLevel = Literal["none", "token", "sequence", "sequence_token", "sequence_product"]
Correction = Literal["none", "truncate", "mask", "sequence_truncate", "sequence_mask", "geometric_mask"]
SurrogateKind = Literal[
    "none", "clip", "capped", "clip_masked", "soft_gate", "log_clip", "divergence_mask", "gamma_gate", "classify"
]
Estimator = Literal["none", "k1", "k2", "k3", "abs"]
AggregateKind = Literal["response_mean", "token_mean", "prompt_mean", "response_sum", "constant_length"]


@dataclass(frozen=True)
class Advantage:
    """What a response is worth relative to its siblings: A = (R − baseline) / (scale + epsilon). Float64 arithmetic.

    baseline: what is subtracted. scale: what the residual is divided by. scale_of: what `batch_std` is the std of.
    ddof: 0 population, 1 sample. epsilon: added to every std and to a group mean used as scale. whiten: a second,
    batch-level centring and scaling. combine: how several reward parts become one number.
    rescale_live: multiply by B/(B − M), M responses in groups of equal rewards (GPG's α).
    transform: what becomes of a group's rewards first: best_of_k, the expected best of the k siblings' subsets that
    hold the response; pkpo, k times that. k: of them, of the baseline `subset` and of `subset_std`.
    credit: "outcome", one number a response; "step", rewards with a position, each token taking those that fall at or
    after it; "turn", the return to go of each turn. pool: what a turn's return is compared with. final: the reward
    without a position is a term of its own times final_weight, or falls at the last token. discount: γ of turns and of
    the critic. gae_lambda, gae_lambda_critic: λ of the policy's advantage and of the critic's target; gae_alpha: α of
    the policy's λ = 1 − 1/(α L) in its place, 0 is off.
    """

    baseline: Baseline = "group_mean"
    scale: Scale = "group_std"
    scale_of: Literal["rewards", "residuals"] = "rewards"
    ddof: Literal[0, 1] = 0
    epsilon: float = 0.0
    whiten: Literal["none", "sequences", "tokens"] = "none"
    combine: Literal["sum_then_normalise", "normalise_then_sum"] = "sum_then_normalise"
    rescale_live: bool = False
    transform: Literal["none", "best_of_k", "pkpo"] = "none"
    k: int = 0
    credit: Literal["outcome", "step", "turn"] = "outcome"
    pool: Literal["group", "turn_index"] = "group"
    final: Literal["beside", "in_return"] = "beside"
    final_weight: float = 1.0
    discount: float = 1.0
    gae_lambda: float = 1.0
    gae_lambda_critic: float = 1.0
    gae_alpha: float = 0.0


@dataclass(frozen=True)
class Ratio:
    """Which probability ratio enters the surrogate, and the correction of a sampler that is not the anchor.

    level: token r_t = π/π_anchor; sequence s = exp(mean_t log r_t); sequence_token sg(s)·π/sg(π);
    sequence_product Π r_t.
    anchor: "snapshot" (the policy before the batch's first update) or "sampler" (what the engine reported).
    correction: w = π_anchor/π_sampler, detached, times the policy term: truncated to, or masked outside,
    [correction_low, correction_high], per token, per sequence (product) or on the sequence's geometric mean.
    """

    level: RatioLevel = "token"
    anchor: Literal["snapshot", "sampler"] = "snapshot"
    correction: Correction = "none"
    correction_low: float = 0.0
    correction_high: float = math.inf


@dataclass(frozen=True)
class Surrogate:
    """How the policy term uses the ratio. Bounds of `clip` are absolute offsets from 1, as printed in the papers.

    clip: min(r A, clip(r, 1 − low, 1 + high) A), with dual (c of the dual clip) and ceiling (δ of the two-sided clip).
    capped: sg(clip(r, cap_low, cap)) A log π. clip_masked: sg(r) A log π where `clip` would be active, else 0.
    soft_gate: (4/τ) σ(τ (r − 1)) A, τ by the sign of A. log_clip: geometric mean of token ratios clipped at
    |log r| ≤ low/high on the side that A pushes. divergence_mask: r A, dropped where the step would push a token
    further than `threshold` (binary tv or kl divergence) from the anchor; gradient weight at most cap. 0 is off.
    gamma_gate: sg(e^λ r^k e^−λr) A log π, k and λ by the sign of A. classify: siblings told apart as right or wrong by
    their mean log-ratios over tau. demonstrations: "shaped" gives tokens that a teacher wrote π/(π + gamma) · A.
    """

    kind: SurrogateKind = "clip"
    low: float = 0.2
    high: float = 0.2
    dual: float = 0.0
    ceiling: float = 0.0
    cap: float = 0.0
    cap_low: float = 0.0
    tau_positive: float = 0.0
    tau_negative: float = 0.0
    divergence: Literal["none", "tv", "kl"] = "none"
    threshold: float = 0.0
    k_positive: float = 0.0
    k_negative: float = 0.0
    lambda_positive: float = 0.0
    lambda_negative: float = 0.0
    tau: float = 0.0
    demonstrations: Literal["same", "shaped"] = "same"
    gamma: float = 0.0


@dataclass(frozen=True)
class Kl:
    """What ties the policy to the reference. x = log π − log π_ref.

    estimator: k1 x; k2 x²/2; k3 e^−x − 1 + x; abs |x|. place: a term of the loss, or part of the reward (computed with
    the anchor). gradient (loss): direct; score (times the token ratio, differentiated through it); weighted (times the
    detached ratio); straight_through (the estimator's value, k2's gradient). reward_form (reward): "sequence" subtracts
    the sum before the baseline, "to_go" subtracts Σ_{i≥t} from token t after it, "token" is part of the reward of each
    token (with a critic). clamp: bound on |x| before exp; 0 is off.
    """

    estimator: Estimator = "k3"
    place: Literal["loss", "reward"] = "loss"
    gradient: Literal["direct", "score", "weighted", "straight_through"] = "direct"
    reward_form: Literal["sequence", "to_go", "token"] = "sequence"
    coefficient: float = 0.04
    clamp: float = 0.0


@dataclass(frozen=True)
class Aggregate:
    """What weight a token has, fixed over the whole optimiser batch before anything is split or packed.

    n responses, P prompts, L_i loss tokens of response i, N_q of prompt q, N of all:
    response_mean 1/(n L_i); token_mean 1/N; prompt_mean 1/(P N_q); response_sum 1/n; constant_length 1/(n C),
    C = length.
    count_masked: does a fully masked response, or a masked token of a truncated one, stay in the denominator.
    count_dead: does a dropped dead group stay in the denominator. count_corrected: does a token that the correction
    masked stay in it. shared: a token that several branches share is drawn once and trained once, with the weight of
    one branch ("once") or of all of them ("each").
    """

    kind: AggregateKind = "response_mean"
    length: int = 0
    count_masked: bool = False
    count_dead: bool = False
    count_corrected: bool = True
    shared: Literal["once", "each"] = "once"


@dataclass(frozen=True)
class Selection:
    """Which responses take part.

    dead (groups whose raw metric is all equal): keep; drop; refill (sample fresh prompts until the batch is full);
    grow (more siblings for an all-failed group). truncated: keep; mask_loss (its reward still counts in the group);
    exclude_from_baseline (it leaves loss and statistics); soft_penalty (DAPO eq. 13 with overlong_max, overlong_cache).
    entropy_top: share of the tokens with the highest anchor entropy that keep their policy term. off_policy_mask: δ;
    drops the policy term of a response with A < 0 and mean_t(log π_anchor − log π) > δ; 0 is off.
    entropy_over: what that share is of, the batch or each response. covariance, of centred log π and A: "clip" drops
    the policy term of a share of the tokens that have it in [covariance_low, covariance_high]; "kl" adds
    covariance_coefficient · |log r| to the share of tokens that have most of it. correct: raw metric from which a
    response counts as right, for `terms.imitation` and surrogate `classify`.
    """

    dead: Literal["keep", "drop", "refill", "grow"] = "keep"
    truncated: Literal["keep", "mask_loss", "exclude_from_baseline", "soft_penalty"] = "keep"
    overlong_max: int = 0
    overlong_cache: int = 0
    entropy_top: float = 1.0
    off_policy_mask: float = 0.0
    entropy_over: Literal["batch", "response"] = "batch"
    covariance: Literal["none", "clip", "kl"] = "none"
    covariance_share: float = 0.0
    covariance_low: float = 0.0
    covariance_high: float = math.inf
    covariance_coefficient: float = 0.0
    correct: float = 1.0


@dataclass(frozen=True)
class Terms:
    """What stands beside the policy term and the KL.

    entropy: η of a bonus on the entropy of every loss token, with the token's weight. entropy_target: nats; η is then
    in force only while the batch's mean entropy is at most the target, and moves by entropy_step a training step, up
    below the target and down above it, never below 0. imitation: μ of the mean −log π over the tokens of right
    responses.
    """

    entropy: float = 0.0
    entropy_target: float = 0.0
    entropy_step: float = 0.0
    imitation: float = 0.0


@dataclass(frozen=True)
class Objective:
    """Seven axes. The default is the preset `grpo`."""

    advantage: Advantage = field(default_factory=Advantage)
    ratio: Ratio = field(default_factory=Ratio)
    surrogate: Surrogate = field(default_factory=Surrogate)
    kl: Kl = field(default_factory=Kl)
    aggregate: Aggregate = field(default_factory=Aggregate)
    selection: Selection = field(default_factory=Selection)
    terms: Terms = field(default_factory=Terms)

    @property
    def kl_in_loss(self) -> bool:
        """True when the loss has a KL term, so that a response without advantage still has a gradient."""
        return self.kl.estimator != "none" and self.kl.place == "loss"

    @property
    def needs_reference(self) -> bool:
        """True when reference log-probabilities enter the loss or the reward."""
        return self.kl.estimator != "none"

    @property
    def entropy_in_loss(self) -> bool:
        """True when the loss has an entropy term."""
        return self.terms.entropy > 0 or self.terms.entropy_target > 0

    @property
    def needs_fresh(self) -> bool:
        """True when the policy's own log-probabilities, as they are at an update, decide what a token brings to it."""
        return self.selection.covariance != "none" or self.surrogate.kind == "classify"

    @property
    def needs_critic(self) -> bool:
        """True when a value model is trained beside the policy."""
        return self.advantage.baseline == "critic"

    def _repr_html_(self) -> str:
        """The formula, for a notebook."""
        from gropius.objective.formula import formula

        return f"<pre>{html.escape(formula(self))}</pre>"

    def as_dict(self) -> dict[str, dict[str, Any]]:
        """Every field, defaults included; an infinite bound is the string "inf" so that JSON stays strict."""
        raw = dataclasses.asdict(self)
        return {
            axis: {key: "inf" if value == math.inf else value for key, value in fields.items()}
            for axis, fields in raw.items()
        }


AXES: dict[str, type[Any]] = {
    "advantage": Advantage,
    "ratio": Ratio,
    "surrogate": Surrogate,
    "kl": Kl,
    "aggregate": Aggregate,
    "selection": Selection,
    "terms": Terms,
}


def flatten(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Bring nested tables and dotted keys to one form, `axis.key`.

    >>> flatten({"kl": {"coefficient": 0.1}, "surrogate.high": 0.28})
    {'kl.coefficient': 0.1, 'surrogate.high': 0.28}
    """
    flat: dict[str, Any] = {}
    for key, value in overrides.items():
        name = key.removeprefix("objective.")
        if isinstance(value, Mapping):
            flat.update({f"{name}.{inner}": leaf for inner, leaf in value.items()})
        else:
            flat[name] = value
    return flat


def override(objective: Objective, overrides: Mapping[str, Any]) -> Objective:
    """Return the objective with some fields replaced; keys are `axis.key` or nested tables.

    Errors: ObjectiveError for an unknown axis or key, a value of the wrong type or outside the choices.
    """
    changes: dict[str, dict[str, Any]] = {}
    for name, value in flatten(overrides).items():
        axis, _, key = name.partition(".")
        if axis not in AXES:
            raise ObjectiveError(f"objective.{name}: unknown axis {axis!r}; {did_you_mean(axis, AXES)}")
        known = {f.name for f in dataclasses.fields(AXES[axis])}
        if not key:
            raise ObjectiveError(
                f"objective.{axis} is a table, not {value!r}; write objective.{axis}.KEY with KEY one of "
                + ", ".join(sorted(known))
            )
        if key not in known:
            raise ObjectiveError(f"objective.{name}: unknown key {key!r} of {axis}; {did_you_mean(key, known)}")
        changes.setdefault(axis, {})[key] = _typed(axis, key, value)
    return dataclasses.replace(
        objective, **{axis: dataclasses.replace(getattr(objective, axis), **fields) for axis, fields in changes.items()}
    )


def _typed(axis: str, key: str, value: Any) -> Any:
    """Check one value against the field's annotation; integers are accepted where a float is asked."""
    hint = get_type_hints(AXES[axis])[key]
    choices = get_args(hint)
    where = f"objective.{axis}.{key}"
    if choices:
        for choice in choices:
            if type(value) is type(choice) and value == choice:
                return choice
        suggestion = did_you_mean(str(value), map(str, choices))
        raise ObjectiveError(f"{where} = {value!r} is not a choice; {suggestion}")
    if hint is bool:
        if isinstance(value, bool):
            return value
    elif isinstance(value, bool):
        pass
    elif hint is int:
        if isinstance(value, int):
            return value
    elif value in ("inf", "+inf"):
        return math.inf
    elif isinstance(value, int | float) and (abs(value) <= sys.float_info.max or value in (math.inf, -math.inf)):
        return float(value)
    raise ObjectiveError(f"{where} = {value!r} has the wrong type; write {_EXPECTED[hint]}")


_EXPECTED = {bool: "true or false", int: "a whole number", float: "a number"}
