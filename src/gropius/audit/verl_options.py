"""verl at 1dda039b9: the keys that touch the objective, their defaults, and what follows from them. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gropius.audit.dialect import Option, Test, Values, literal
from gropius.errors import UsageError

A, R, ALG = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout.", "algorithm."
CORR, OVER = ALG + "rollout_correction.", "reward.reward_kwargs.overlong_buffer_cfg."
ESTIMATORS = (
    "gae", "grpo", "grpo_vectorized", "gdpo", "grpo_passk", "reinforce_plus_plus", "reinforce_plus_plus_baseline",
    "remax", "rloo", "rloo_vectorized", "opo", "gpg", "optimal_token_baseline", "tir_optimal_token_baseline",
)  # fmt: skip
MODES = (
    "vanilla", "dppo_tv", "dppo_kl", "gspo", "sapo", "gpg", "clip_cov", "kl_cov", "geo_mean", "dro", "cispo",
    "bypass_mode",
)  # fmt: skip
KL_NAMES = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "full", "kl+", "k1+", "abs+", "low_var_kl+", "k3+")

OPTIONS: dict[str, Option] = {
    ALG + "adv_estimator": Option("gae", ESTIMATORS),
    ALG + "norm_adv_by_std_in_grpo": Option(True, (True, False)),
    ALG + "gamma": Option(1.0),
    ALG + "lam": Option(1.0),
    ALG + "use_kl_in_reward": Option(False, (True, False)),
    ALG + "kl_penalty": Option("kl", KL_NAMES),
    ALG + "kl_ctrl.type": Option("fixed", ("fixed", "adaptive")),
    ALG + "kl_ctrl.kl_coef": Option(0.001),
    ALG + "use_pf_ppo": Option(False, (True, False)),
    ALG + "filter_groups.enable": Option(False, (True, False)),
    ALG + "filter_groups.metric": Option(None, kind="text"),
    ALG + "filter_groups.max_num_gen_batches": Option(0),
    CORR + "rollout_is": Option(None, (None, "token", "sequence")),
    CORR + "rollout_is_threshold": Option("2.0"),
    CORR + "rollout_rs": Option(None, kind="text"),
    CORR + "rollout_rs_threshold": Option("null"),
    CORR + "bypass_mode": Option(False, (True, False)),
    CORR + "loss_type": Option("ppo_clip", ("ppo_clip", "reinforce")),
    CORR + "rollout_is_batch_normalize": Option(False, (True, False)),
    A + "clip_ratio": Option(0.2),
    A + "clip_ratio_low": Option(0.2),
    A + "clip_ratio_high": Option(0.2),
    A + "clip_ratio_c": Option(3.0),
    A + "policy_loss.loss_mode": Option("vanilla", MODES),
    A + "tau_pos": Option(1.0),
    A + "tau_neg": Option(1.05),
    A + "loss_agg_mode": Option(
        "token-mean",
        ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"),
    ),
    A + "loss_scale_factor": Option(None, least=1),
    A + "entropy_coeff": Option(0.0),
    A + "use_kl_loss": Option(False, (True, False)),
    A + "kl_loss_coef": Option(0.001),
    A + "kl_loss_type": Option("low_var_kl", KL_NAMES),
    A + "ppo_epochs": Option(1, least=1),
    A + "ppo_mini_batch_size": Option(256, least=1),
    A + "ppo_micro_batch_size_per_gpu": Option(None, least=1),
    A + "use_dynamic_bsz": Option(False, (True, False)),
    A + "optim.lr": Option(1e-6),
    A + "optim.weight_decay": Option(0.01),
    R + "n": Option(1, least=1),
    R + "temperature": Option(1.0),
    R + "top_p": Option(1.0),
    R + "top_k": Option(-1),
    R + "calculate_log_probs": Option(True, (True, False)),
    "data.train_batch_size": Option(1024, least=1),
    "data.max_response_length": Option(512, least=1),
    OVER + "enable": Option(False, (True, False)),
    OVER + "len": Option(0),
    OVER + "penalty_factor": Option(1.0),
    "trainer.n_gpus_per_node": Option(8, least=1),
    "trainer.nnodes": Option(1, least=1),
    "trainer.total_training_steps": Option(None, least=1),
}
RENAMED = {"reward_model.": "reward.", "reward.overlong_buffer.": OVER}


def estimator(v: Values) -> str:
    """The advantage estimator."""
    return str(v[ALG + "adv_estimator"])


def loss_mode(v: Values) -> str:
    """The policy loss that really runs: bypass mode replaces it (core:2412)."""
    if v[CORR + "bypass_mode"]:
        return "reinforce" if v[CORR + "loss_type"] == "reinforce" else "vanilla"
    return str(v[A + "policy_loss.loss_mode"])


def bound(v: Values, side: str) -> float:
    """`clip_ratio_low` / `clip_ratio_high`, falling back to `clip_ratio` only where they are null."""
    value = v[f"{A}clip_ratio_{side}"]
    return float(v[A + "clip_ratio"] if value is None else value)


def fixes_denominator(v: Values) -> bool:
    """Does the policy loss fix its own denominator?"""
    return loss_mode(v) in ("gspo", "sapo", "geo_mean")


def is_one_of(*names: str) -> Test:
    """A test that the estimator is one of these."""
    return lambda v: estimator(v) in names


def kl_name(name: str) -> str:
    """k1, k2, k3 or abs by any of its names."""
    base = name.removesuffix("+")
    return {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}.get(base, base)


def thresholds(text: Any) -> tuple[float, float] | None:
    """ "lo_hi" as two numbers; None when it is one number or nothing. Errors: UsageError for anything else."""
    parts = [literal(p) for p in str(text).split("_")]
    if any(isinstance(p, str | bool) or (p is not None and not p > 0) for p in parts) or len(parts) > 2:
        raise UsageError(f"threshold {text!r}: write one positive number, or two as lo_hi")
    return (float(parts[0]), float(parts[1])) if len(parts) == 2 and None not in parts else None


def upper(v: Values) -> float:
    """The one number of `rollout_is_threshold`; the upper one where there are two."""
    text = v[CORR + "rollout_is_threshold"]
    band = thresholds(text)
    return band[1] if band else float(literal(str(text)) or 2.0)


def is_weights(v: Values) -> Mapping[str, Any]:
    """The correction as fields of the ratio: one number truncates, lo_hi masks."""
    level = "sequence_" if v[CORR + "rollout_is"] == "sequence" else ""
    band = thresholds(v[CORR + "rollout_is_threshold"])
    low, high = band or (0.0, upper(v))
    kind = level + ("mask" if band else "truncate")
    return {"ratio.correction": kind, "ratio.correction_low": low, "ratio.correction_high": high}


def corrects(v: Values) -> bool:
    """Is the policy term weighted by anchor over sampler?"""
    return v[CORR + "rollout_is"] is not None and not v[CORR + "bypass_mode"]


def geometric(v: Values) -> bool:
    """Rejection that a Gropius objective has: the geometric mean alone, with both bounds."""
    return (
        v[CORR + "rollout_rs"] == "seq_mean_k1" and v[CORR + "rollout_is"] is None and not v[CORR + "bypass_mode"]
        and thresholds(v[CORR + "rollout_rs_threshold"]) is not None
    )  # fmt: skip


def geometric_sets(v: Values) -> Mapping[str, Any]:
    """Its fields: upstream bounds sampler over anchor, so the band is turned round."""
    low, high = thresholds(v[CORR + "rollout_rs_threshold"]) or (0.0, 0.0)
    return {
        "ratio.correction": "geometric_mask", "ratio.correction_low": 1 / high, "ratio.correction_high": 1 / low,
        "aggregate.count_corrected": False,
    }  # fmt: skip


def kl_loss(v: Values) -> Mapping[str, Any]:
    """The KL term of the loss."""
    name = str(v[A + "kl_loss_type"])
    through = name.endswith("+") and kl_name(name) != "k2"
    return {
        "kl.estimator": kl_name(name), "kl.place": "loss", "kl.coefficient": float(v[A + "kl_loss_coef"]),
        "kl.gradient": "straight_through" if through else "direct",
        "kl.clamp": 20.0 if kl_name(name) == "k3" else 0.0,
    }  # fmt: skip


def kl_reward(v: Values) -> Mapping[str, Any]:
    """The KL in the reward."""
    name = kl_name(str(v[ALG + "kl_penalty"]))
    return {
        "kl.estimator": name, "kl.place": "reward", "kl.coefficient": float(v[ALG + "kl_ctrl.kl_coef"]),
        "kl.reward_form": "to_go" if estimator(v) in ("reinforce_plus_plus", "remax") else "sequence",
        "kl.clamp": 20.0 if name == "k3" else 0.0,
    }  # fmt: skip
