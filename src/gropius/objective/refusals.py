"""Refusals about credit: positions, critics, the best of k, marks and terms. Rows for `validate`. No torch."""

from __future__ import annotations

from collections.abc import Callable

from gropius.objective.spec import Objective

Rule = tuple[Callable[[Objective], bool], str]
POSITIONED = ("step", "turn")
K_USES = ("best_of_k", "pkpo")


def _uses_k(o: Objective) -> bool:
    return o.advantage.transform in K_USES or o.advantage.baseline == "subset" or o.advantage.scale == "subset_std"


def _kl_in_reward(o: Objective) -> bool:
    return o.kl.estimator != "none" and o.kl.place == "reward"


def _critic(o: Objective) -> bool:
    return o.advantage.baseline == "critic"


def _positioned(o: Objective) -> bool:
    return o.advantage.credit in POSITIONED


CONTRADICTIONS: tuple[Rule, ...] = (
    (
        lambda o: o.advantage.baseline in ("critic", "optimal_token") and o.advantage.scale != "none",
        'advantage.baseline = "critic" and "optimal_token" are subtracted token by token, so no scale of a group fits; '
        'write advantage.scale = "none" (advantage.whiten scales over the batch)',
    ),
    (
        lambda o: _critic(o) and _kl_in_reward(o) and o.kl.reward_form == "to_go",
        'with advantage.baseline = "critic" the KL is part of each token\'s reward; write kl.reward_form = "token"',
    ),
    (
        lambda o: _kl_in_reward(o) and o.kl.reward_form == "token" and not _critic(o),
        'kl.reward_form = "token" gives every token a reward, which a critic turns into advantages; '
        'write advantage.baseline = "critic", or kl.reward_form = "to_go"',
    ),
    (
        lambda o: o.advantage.transform != "none" and o.advantage.combine == "normalise_then_sum",
        "advantage.transform looks at one reward, but normalise_then_sum keeps several apart; "
        'write combine = "sum_then_normalise"',
    ),
    (
        lambda o: _uses_k(o) and o.advantage.k < 1,
        'advantage.k is the k of "best of k"; write e.g. advantage.k = 4',
    ),
    (
        lambda o: o.advantage.baseline == "subset" and o.advantage.transform == "none",
        'advantage.baseline = "subset" is the best of k − 1 others; write advantage.transform = "pkpo" or "best_of_k"',
    ),
    (
        lambda o: (
            _positioned(o) and not _critic(o) and o.advantage.baseline not in ("none", "group_mean", "leave_one_out")
        ),
        'advantage.credit = "step" and "turn" compare steps and turns; '
        'write advantage.baseline = "group_mean", "leave_one_out" or "none", or "critic"',
    ),
    (
        lambda o: (
            _positioned(o) and (o.advantage.scale not in ("none", "group_std") or o.advantage.transform != "none")
        ),
        'advantage.credit = "step" and "turn" scale within a pool of steps or turns; '
        'write advantage.scale = "group_std" or "none", and advantage.transform = "none"',
    ),
    (
        lambda o: _positioned(o) and o.advantage.whiten == "sequences",
        'advantage.credit = "step" and "turn" give tokens of one response their own advantages; '
        'write advantage.whiten = "tokens"',
    ),
    (
        lambda o: _positioned(o) and o.advantage.combine == "normalise_then_sum",
        "advantage.combine normalises whole rewards apart, and steps and turns have one pool; "
        'write combine = "sum_then_normalise"',
    ),
    (
        lambda o: _critic(o) and o.advantage.whiten == "sequences",
        'advantage.baseline = "critic" gives every token its own advantage; write advantage.whiten = "tokens"',
    ),
    (
        lambda o: not 0 <= o.advantage.discount <= 1,
        "advantage.discount is the γ of turns and of the critic and lies between 0 and 1; write 1.0 for none",
    ),
    (
        lambda o: not (0 <= o.advantage.gae_lambda <= 1 and 0 <= o.advantage.gae_lambda_critic <= 1),
        "advantage.gae_lambda and advantage.gae_lambda_critic lie between 0 and 1; write e.g. 0.95",
    ),
    (
        lambda o: o.advantage.gae_alpha < 0,
        "advantage.gae_alpha is the α of λ = 1 − 1/(α L) and cannot be negative; write e.g. 0.05, or 0 for off",
    ),
    (
        lambda o: o.advantage.gae_alpha > 0 and o.advantage.gae_lambda != 1.0,
        "advantage.gae_alpha takes the place of advantage.gae_lambda; write gae_lambda = 1.0 or gae_alpha = 0",
    ),
    (
        lambda o: (
            o.surrogate.kind == "gamma_gate"
            and min(
                o.surrogate.k_positive, o.surrogate.k_negative, o.surrogate.lambda_positive, o.surrogate.lambda_negative
            )
            <= 0
        ),
        'surrogate.kind = "gamma_gate" needs surrogate.k_positive, k_negative, lambda_positive and lambda_negative '
        "above 0 (published: 2, 3, 3, 2)",
    ),
    (
        lambda o: o.surrogate.kind == "classify" and o.surrogate.tau <= 0,
        'surrogate.kind = "classify" needs surrogate.tau, what mean log-ratios are divided by; write e.g. tau = 0.5',
    ),
    (
        lambda o: o.surrogate.kind == "classify" and (o.ratio.level != "token" or o.ratio.correction != "none"),
        'surrogate.kind = "classify" forms mean log-ratios itself; write ratio.level = "token" and '
        'ratio.correction = "none"',
    ),
    (
        lambda o: (
            o.surrogate.kind == "classify" and (o.aggregate.kind != "response_mean" or o.advantage.whiten != "none")
        ),
        'surrogate.kind = "classify" is a mean over groups of one loss each, with its own slope in place of an '
        'advantage; write aggregate.kind = "response_mean" and advantage.whiten = "none"',
    ),
    (
        lambda o: o.surrogate.demonstrations == "shaped" and o.surrogate.gamma <= 0,
        'surrogate.demonstrations = "shaped" needs surrogate.gamma, the γ of π/(π + γ); write e.g. gamma = 0.1',
    ),
    (
        lambda o: o.selection.covariance != "none" and not 0 < o.selection.covariance_share <= 1,
        "selection.covariance_share is a share of tokens; write e.g. 0.0002",
    ),
    (
        lambda o: o.selection.covariance == "kl" and o.selection.covariance_coefficient <= 0,
        'selection.covariance = "kl" needs selection.covariance_coefficient, the weight of |log r|; write e.g. 1.0',
    ),
    (
        lambda o: o.selection.covariance_low > o.selection.covariance_high,
        "selection.covariance_low is above selection.covariance_high",
    ),
    (
        lambda o: min(o.terms.entropy, o.terms.entropy_target, o.terms.entropy_step, o.terms.imitation) < 0,
        "terms.entropy, terms.entropy_target, terms.entropy_step and terms.imitation cannot be negative; 0 is off",
    ),
    (
        lambda o: o.terms.entropy_target > 0 and o.terms.entropy_step <= 0,
        "terms.entropy_target moves the coefficient by terms.entropy_step; write e.g. entropy_step = 0.005",
    ),
)

EFFECTS: dict[str, Rule] = {
    "advantage.k": (_uses_k, 'advantage.transform, advantage.baseline = "subset" or advantage.scale = "subset_std"'),
    "advantage.pool": (lambda o: o.advantage.credit == "turn" and not _critic(o), 'advantage.credit = "turn"'),
    "advantage.final": (
        lambda o: _positioned(o) and not _critic(o),
        'advantage.credit = "step" or "turn" (with a critic the final reward always falls at the last token)',
    ),
    "advantage.final_weight": (
        lambda o: _positioned(o) and not _critic(o) and o.advantage.final == "beside",
        'advantage.credit = "step" or "turn" with advantage.final = "beside"',
    ),
    "advantage.discount": (
        lambda o: _critic(o) or o.advantage.credit == "turn",
        'advantage.credit = "turn" or advantage.baseline = "critic"',
    ),
    "advantage.gae_lambda": (_critic, 'advantage.baseline = "critic"'),
    "advantage.gae_lambda_critic": (_critic, 'advantage.baseline = "critic"'),
    "advantage.gae_alpha": (_critic, 'advantage.baseline = "critic"'),
    "surrogate.k_positive": (lambda o: o.surrogate.kind == "gamma_gate", 'surrogate.kind = "gamma_gate"'),
    "surrogate.k_negative": (lambda o: o.surrogate.kind == "gamma_gate", 'surrogate.kind = "gamma_gate"'),
    "surrogate.lambda_positive": (lambda o: o.surrogate.kind == "gamma_gate", 'surrogate.kind = "gamma_gate"'),
    "surrogate.lambda_negative": (lambda o: o.surrogate.kind == "gamma_gate", 'surrogate.kind = "gamma_gate"'),
    "surrogate.tau": (lambda o: o.surrogate.kind == "classify", 'surrogate.kind = "classify"'),
    "surrogate.gamma": (lambda o: o.surrogate.demonstrations == "shaped", 'surrogate.demonstrations = "shaped"'),
    "selection.entropy_over": (lambda o: o.selection.entropy_top < 1, "selection.entropy_top below 1"),
    "selection.covariance_share": (lambda o: o.selection.covariance != "none", "selection.covariance"),
    "selection.covariance_low": (lambda o: o.selection.covariance == "clip", 'selection.covariance = "clip"'),
    "selection.covariance_high": (lambda o: o.selection.covariance == "clip", 'selection.covariance = "clip"'),
    "selection.covariance_coefficient": (lambda o: o.selection.covariance == "kl", 'selection.covariance = "kl"'),
    "selection.correct": (
        lambda o: o.terms.imitation > 0 or o.surrogate.kind == "classify",
        'terms.imitation or surrogate.kind = "classify"',
    ),
    "terms.entropy_step": (lambda o: o.terms.entropy_target > 0, "terms.entropy_target"),
}

# numbers that must be finite
FINITE = (
    "advantage.final_weight", "advantage.discount", "advantage.gae_lambda", "advantage.gae_lambda_critic",
    "advantage.gae_alpha", "surrogate.k_positive", "surrogate.k_negative", "surrogate.lambda_positive",
    "surrogate.lambda_negative", "surrogate.tau", "surrogate.gamma", "selection.covariance_share",
    "selection.covariance_coefficient", "selection.correct", "terms.entropy", "terms.entropy_target",
    "terms.entropy_step", "terms.imitation",
)  # fmt: skip
