"""Refusals: pairs of fields that contradict each other, and keys that would do nothing. No torch.

Each rule is one row: when it holds, the message says what is wrong and what to write instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

from gropius.errors import ObjectiveError
from gropius.objective import refusals
from gropius.objective.spec import Objective

GROUP_BASELINES = ("group_mean", "leave_one_out", "length_weighted")
RATIO_SURROGATES = ("clip", "capped", "clip_masked", "soft_gate", "log_clip", "divergence_mask", "gamma_gate")

_Rule = tuple[Callable[[Objective], bool], str]

# fields whose number must be finite; the others are bounds that infinity switches off
FINITE = (
    "advantage.epsilon", "surrogate.low", "surrogate.dual", "surrogate.ceiling", "surrogate.tau_positive",
    "surrogate.tau_negative", "surrogate.threshold", "kl.coefficient", "kl.clamp", "selection.off_policy_mask",
    *refusals.FINITE,
)  # fmt: skip


def field_value(objective: Objective, name: str) -> Any:
    """The value of `axis.key`.

    >>> field_value(Objective(), "kl.coefficient")
    0.04
    """
    axis, _, key = name.partition(".")
    return getattr(getattr(objective, axis), key)


CONTRADICTIONS: tuple[_Rule, ...] = (
    (
        lambda o: o.advantage.scale == "group_mean" and o.advantage.baseline not in ("group_mean", "none"),
        'advantage.scale = "group_mean" divides by the mean that is subtracted; '
        'write advantage.baseline = "group_mean"',
    ),
    (
        lambda o: o.advantage.combine == "normalise_then_sum" and o.advantage.scale == "none",
        'advantage.combine = "normalise_then_sum" normalises nothing with scale = "none"; '
        'write scale = "group_std" or combine = "sum_then_normalise"',
    ),
    (
        lambda o: o.advantage.combine == "normalise_then_sum" and o.kl.place == "reward" and o.kl.estimator != "none",
        'kl.place = "reward" shapes one reward, but normalise_then_sum keeps several apart; write kl.place = "loss"',
    ),
    (
        lambda o: any(not math.isfinite(field_value(o, name)) for name in FINITE),
        f"only a bound may be infinite, and none of {', '.join(FINITE)} is one; write a finite number (0 is off)",
    ),
    (lambda o: o.advantage.epsilon < 0, "advantage.epsilon cannot be negative; write 0 or a small positive number"),
    (
        lambda o: o.surrogate.kind in RATIO_SURROGATES and o.ratio.level == "none",
        'this surrogate.kind bounds a ratio and ratio.level = "none" has none; '
        'write ratio.level = "token" or surrogate.kind = "none"',
    ),
    (
        lambda o: o.surrogate.kind == "log_clip" and o.ratio.level != "token",
        'surrogate.kind = "log_clip" forms the sequence ratio from clipped token ratios; write ratio.level = "token"',
    ),
    (
        lambda o: o.surrogate.kind == "divergence_mask" and o.ratio.level != "token",
        'surrogate.kind = "divergence_mask" compares token probabilities; write ratio.level = "token"',
    ),
    (
        lambda o: (
            o.surrogate.kind == "divergence_mask" and (o.surrogate.divergence == "none" or o.surrogate.threshold <= 0)
        ),
        'surrogate.kind = "divergence_mask" needs surrogate.divergence = "tv" or "kl" and surrogate.threshold > 0',
    ),
    (
        lambda o: o.surrogate.kind == "capped" and o.surrogate.cap <= 0,
        'surrogate.kind = "capped" needs surrogate.cap, the absolute upper bound of the ratio; write e.g. cap = 5.0',
    ),
    (
        lambda o: o.surrogate.kind == "capped" and 0 < o.surrogate.cap < 1,
        "surrogate.cap is an absolute ratio, not an offset from 1: below 1 it shrinks every on-policy gradient; "
        "write 1 + offset",
    ),
    (
        lambda o: o.surrogate.kind == "capped" and o.surrogate.cap_low > o.surrogate.cap,
        "surrogate.cap_low is above surrogate.cap",
    ),
    (
        lambda o: o.surrogate.kind == "soft_gate" and (o.surrogate.tau_positive <= 0 or o.surrogate.tau_negative <= 0),
        'surrogate.kind = "soft_gate" needs surrogate.tau_positive and surrogate.tau_negative above 0',
    ),
    (
        lambda o: min(o.surrogate.low, o.surrogate.high) < 0,
        "surrogate.low and surrogate.high are offsets from 1 and cannot be negative",
    ),
    (
        lambda o: o.surrogate.kind in ("clip", "clip_masked") and o.surrogate.low > 1,
        "surrogate.low above 1 puts the lower bound of the ratio below 0; write low = 1.0 for no lower bound",
    ),
    (
        lambda o: 0 < o.surrogate.dual <= 1,
        "surrogate.dual is the c of the dual clip and must exceed 1; write e.g. dual = 3.0, or 0 for off",
    ),
    (
        lambda o: 0 < o.surrogate.ceiling <= 1 + o.surrogate.high,
        "surrogate.ceiling must exceed 1 + surrogate.high, or it would clip what the other bound allows; "
        "write e.g. ceiling = 4.0, or 0 for off",
    ),
    (
        lambda o: o.ratio.correction != "none" and o.ratio.anchor == "sampler",
        'ratio.correction is anchor over sampler, and with anchor = "sampler" that is 1; '
        'write ratio.anchor = "snapshot" or ratio.correction = "none"',
    ),
    (
        lambda o: o.ratio.correction != "none" and o.ratio.correction_low <= 0 and o.ratio.correction_high == math.inf,
        "ratio.correction needs a bound; write ratio.correction_high "
        "(published: 2.0 for truncate, 3.0 for sequence_mask)",
    ),
    (
        lambda o: o.ratio.correction_low < 0 or o.ratio.correction_low > o.ratio.correction_high,
        "ratio.correction_low must lie between 0 and ratio.correction_high",
    ),
    (
        lambda o: o.kl.estimator != "none" and o.kl.coefficient == 0,
        'kl.coefficient = 0 makes kl.estimator do nothing; write kl.estimator = "none", or a coefficient',
    ),
    (lambda o: o.kl.coefficient < 0, "kl.coefficient cannot be negative"),
    (lambda o: o.kl.clamp < 0, "kl.clamp is a bound on |x| and cannot be negative; 0 is off"),
    (
        lambda o: o.kl.place == "reward" and o.kl.estimator != "none" and o.kl.gradient != "direct",
        'kl.gradient is about a KL term of the loss; with kl.place = "reward" there is none; '
        'write gradient = "direct" or place = "loss"',
    ),
    (
        lambda o: o.kl.place == "reward" and o.kl.reward_form == "to_go" and o.advantage.whiten == "sequences",
        'kl.reward_form = "to_go" gives every token its own advantage; write advantage.whiten = "tokens"',
    ),
    (
        lambda o: o.aggregate.kind == "constant_length" and o.aggregate.length <= 0,
        'aggregate.kind = "constant_length" needs aggregate.length, the constant C; write e.g. length = 3000',
    ),
    (
        lambda o: (
            o.selection.truncated == "soft_penalty" and not 0 < o.selection.overlong_cache <= o.selection.overlong_max
        ),
        'selection.truncated = "soft_penalty" needs selection.overlong_max and overlong_cache with '
        "0 < cache <= max (DAPO: 20480 and 4096)",
    ),
    (
        lambda o: o.selection.truncated == "soft_penalty" and o.advantage.combine == "normalise_then_sum",
        'selection.truncated = "soft_penalty" shapes one reward, but normalise_then_sum keeps several apart; '
        "use the reward `length` as a part of its own",
    ),
    (
        lambda o: not 0 < o.selection.entropy_top <= 1,
        "selection.entropy_top is a share of tokens; write 0.2, or 1.0 for all",
    ),
    (
        lambda o: o.selection.off_policy_mask < 0,
        "selection.off_policy_mask is a bound and cannot be negative; 0 is off",
    ),
    *refusals.CONTRADICTIONS,
)

# key → (has an effect?, what it needs). A key that a person wrote and that has no effect is refused.
EFFECTS: dict[str, _Rule] = {
    "advantage.scale_of": (lambda o: o.advantage.scale == "batch_std", 'advantage.scale = "batch_std"'),
    "advantage.ddof": (
        lambda o: o.advantage.scale in ("group_std", "batch_std") or o.advantage.whiten != "none",
        "a standard deviation (advantage.scale or advantage.whiten)",
    ),
    "advantage.epsilon": (
        lambda o: o.advantage.scale != "none" or o.advantage.whiten != "none",
        "a scale (advantage.scale or advantage.whiten)",
    ),
    "ratio.anchor": (lambda o: o.ratio.level != "none", "a ratio (ratio.level)"),
    "ratio.correction_low": (lambda o: o.ratio.correction != "none", "ratio.correction"),
    "ratio.correction_high": (lambda o: o.ratio.correction != "none", "ratio.correction"),
    "surrogate.low": (lambda o: o.surrogate.kind in ("clip", "clip_masked", "log_clip"), "a clip (surrogate.kind)"),
    "surrogate.high": (lambda o: o.surrogate.kind in ("clip", "clip_masked", "log_clip"), "a clip (surrogate.kind)"),
    "surrogate.dual": (lambda o: o.surrogate.kind == "clip", 'surrogate.kind = "clip"'),
    "surrogate.ceiling": (lambda o: o.surrogate.kind == "clip", 'surrogate.kind = "clip"'),
    "surrogate.cap": (
        lambda o: o.surrogate.kind in ("capped", "divergence_mask"),
        'surrogate.kind = "capped" or "divergence_mask"',
    ),
    "surrogate.cap_low": (lambda o: o.surrogate.kind == "capped", 'surrogate.kind = "capped"'),
    "surrogate.tau_positive": (lambda o: o.surrogate.kind == "soft_gate", 'surrogate.kind = "soft_gate"'),
    "surrogate.tau_negative": (lambda o: o.surrogate.kind == "soft_gate", 'surrogate.kind = "soft_gate"'),
    "surrogate.divergence": (lambda o: o.surrogate.kind == "divergence_mask", 'surrogate.kind = "divergence_mask"'),
    "surrogate.threshold": (lambda o: o.surrogate.kind == "divergence_mask", 'surrogate.kind = "divergence_mask"'),
    "kl.place": (lambda o: o.kl.estimator != "none", "kl.estimator"),
    "kl.gradient": (lambda o: o.kl_in_loss, 'a KL term in the loss (kl.estimator, kl.place = "loss")'),
    "kl.reward_form": (lambda o: o.kl.estimator != "none" and o.kl.place == "reward", 'kl.place = "reward"'),
    "kl.coefficient": (lambda o: o.kl.estimator != "none", "kl.estimator"),
    "kl.clamp": (lambda o: o.kl.estimator != "none", "kl.estimator"),
    "aggregate.length": (lambda o: o.aggregate.kind == "constant_length", 'aggregate.kind = "constant_length"'),
    "aggregate.count_dead": (lambda o: o.selection.dead == "drop", 'selection.dead = "drop"'),
    "aggregate.count_corrected": (
        lambda o: o.ratio.correction in ("mask", "sequence_mask", "geometric_mask"),
        "a correction that masks (ratio.correction)",
    ),
    "selection.overlong_max": (
        lambda o: o.selection.truncated == "soft_penalty",
        'selection.truncated = "soft_penalty"',
    ),
    "selection.overlong_cache": (
        lambda o: o.selection.truncated == "soft_penalty",
        'selection.truncated = "soft_penalty"',
    ),
    **refusals.EFFECTS,
}


_DEFAULT = Objective()
ONE_IS_OFF = (
    "advantage.discount",
    "advantage.final_weight",
    "advantage.gae_lambda",
    "advantage.gae_lambda_critic",
    "selection.correct",
)


def _asks_nothing(name: str, value: Any) -> bool:
    """True for the value that switches a feature off, and for the default of a choice or a flag."""
    if isinstance(value, str | bool):
        return value in ("none", field_value(_DEFAULT, name))
    return value in (0, math.inf) or (name in ONE_IS_OFF and value == 1.0)


def check(objective: Objective, explicit: Iterable[str] = ()) -> None:
    """Refuse a contradictory objective, and any explicitly written key that has no effect in it.

    explicit: the `axis.key` names that a person wrote, on top of a preset. A key written with the value that switches
    its feature off (0, "none", inf), or with the default of its choices, asks for nothing and is never useless.
    Errors: ObjectiveError with the rule that was broken and what to write instead.
    """
    for broken, message in CONTRADICTIONS:
        if broken(objective):
            raise ObjectiveError("objective: " + message)
    for name in explicit:
        if name not in EFFECTS:
            continue
        effective, needs = EFFECTS[name]
        value = field_value(objective, name)
        if not _asks_nothing(name, value) and not effective(objective):
            raise ObjectiveError(
                f"objective.{name} = {value!r} would do nothing: it needs {needs}; remove it or set that"
            )
