"""TRL 1.16.0, GRPOConfig: the options that touch the objective, their defaults, what follows from them. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from gropius.audit.dialect import Option, Values

CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
TOKEN_SUMS = ("dapo", "cispo", "vespo")
VLLM_KEYS = tuple(f"vllm_importance_sampling_{k}" for k in ("mode", "clip_max", "clip_min", "cap", "correction"))

OPTIONS: dict[str, Option] = {
    "loss_type": Option("dapo", ("grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo", "vespo")),
    "scale_rewards": Option("group", ("group", "batch", "none", True, False, None)),
    "multi_objective_aggregation": Option("sum_then_normalize", ("sum_then_normalize", "normalize_then_sum")),
    "reward_weights": Option(None, kind="list"),
    "importance_sampling_level": Option("token", ("token", "sequence")),
    "epsilon": Option(0.2),
    "epsilon_high": Option(None),
    "delta": Option(None),
    "sapo_temperature_pos": Option(1.0),
    "sapo_temperature_neg": Option(1.05),
    "vespo_k_pos": Option(2.0),
    "vespo_k_neg": Option(3.0),
    "vespo_lambda_pos": Option(3.0),
    "vespo_lambda_neg": Option(2.0),
    "beta": Option(0.0),
    "use_bias_correction_kl": Option(True, (True, False)),
    "sync_ref_model": Option(False, (True, False)),
    "ref_model_mixup_alpha": Option(0.6),
    "ref_model_sync_steps": Option(512, least=1),
    "mask_truncated_completions": Option(False, (True, False)),
    "top_entropy_quantile": Option(1.0),
    "off_policy_mask_threshold": Option(None),
    "entropy_coef": Option(0.0),
    "use_adaptive_entropy": Option(False, (True, False)),
    "entropy_coef_min": Option(0.0),
    "entropy_coef_max": Option(1.0),
    "entropy_coef_delta": Option(0.005),
    "entropy_target": Option(0.2),
    "router_aux_loss_coef": Option(None),
    "use_vllm": Option(False, (True, False)),
    "vllm_importance_sampling_correction": Option(True, (True, False)),
    "vllm_importance_sampling_mode": Option(
        "sequence_mask", ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
    ),
    "vllm_importance_sampling_clip_max": Option(3.0),
    "vllm_importance_sampling_clip_min": Option(None),
    "vllm_importance_sampling_cap": Option(None),
    "num_generations": Option(8, least=1),
    "per_device_train_batch_size": Option(8, least=1),
    "gradient_accumulation_steps": Option(1, least=1),
    "steps_per_generation": Option(None, least=1),
    "generation_batch_size": Option(None, least=1),
    "num_iterations": Option(1, least=1),
    "max_completion_length": Option(512, least=1),
    "temperature": Option(1.0),
    "top_p": Option(1.0),
    "top_k": Option(0),
    "min_p": Option(None),
    "repetition_penalty": Option(1.0),
    "disable_dropout": Option(False, (True, False)),
    "max_steps": Option(-1),
    "learning_rate": Option(1e-6),
    "lr_scheduler_type": Option("linear"),
    "warmup_steps": Option(0),
    "weight_decay": Option(0.0),
    "adam_beta1": Option(0.9),
    "adam_beta2": Option(0.999),
    "adam_epsilon": Option(1e-8),
    "max_grad_norm": Option(1.0),
}


def scale(v: Values) -> str:
    """`scale_rewards` in its one spelling (GC:1078)."""
    value = v["scale_rewards"]
    return str({True: "group", False: "none", None: "none"}.get(value, value))


def high(v: Values) -> float:
    """`epsilon_high`, falling back to `epsilon` (GT:946)."""
    return float(v["epsilon"] if v["epsilon_high"] is None else v["epsilon_high"])


def generation_steps(v: Values) -> int:
    """`steps_per_generation`: micro-batches of one rank in a generation batch (GC:1098-1112)."""
    if v["steps_per_generation"] is not None:
        return int(v["steps_per_generation"])
    if v["generation_batch_size"] is not None:
        return max(int(v["generation_batch_size"]) // (int(v["per_device_train_batch_size"]) * v.processes), 1)
    return int(v["gradient_accumulation_steps"])


def corrected(v: Values) -> bool:
    """Is the sampler's mismatch corrected?"""
    return bool(v["use_vllm"] and v["vllm_importance_sampling_correction"])


def on_policy(v: Values) -> bool:
    """Is the anchor the policy itself, so that every ratio is exactly 1? (GT:2642-2657)"""
    aligned = int(v["gradient_accumulation_steps"]) % (generation_steps(v) * int(v["num_iterations"])) == 0
    return aligned and not corrected(v)


def clip_max(v: Values) -> Any:
    """The upper bound of the correction; the deprecated spelling wins (GC:1143)."""
    cap = v["vllm_importance_sampling_cap"]
    return v["vllm_importance_sampling_clip_max"] if cap is None else cap


def correction(v: Values) -> Mapping[str, Any]:
    """The mismatch correction as fields of the ratio."""
    kind = {"token_truncate": "truncate", "token_mask": "mask"}
    mode = v["vllm_importance_sampling_mode"]
    top, bottom = clip_max(v), v["vllm_importance_sampling_clip_min"]
    return {
        "ratio.correction": kind.get(mode, mode),
        "ratio.correction_low": 0.0 if bottom is None else float(bottom),
        "ratio.correction_high": math.inf if top is None else float(top),
    }


def grouped(v: Values) -> bool:
    """Are rewards summed before they are normalised?"""
    return bool(v["multi_objective_aggregation"] == "sum_then_normalize")
