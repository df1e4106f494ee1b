"""TRL 1.16.0, GRPOConfig: what each option makes of the objective, and where that is written. No torch.

GT: trl/trainer/grpo_trainer.py, GC: grpo_config.py, U: utils.py, CB: callbacks.py of the 1.16.0 release, line numbers
after the colon.
"""

from __future__ import annotations

from typing import Any

from gropius.audit.dialect import Caveat, Dialect, Parsed, Rule, Units, Values, always, unused
from gropius.audit.sources import command_line, keyword_call, split_interpolations, structured, words
from gropius.audit.trl_options import (
    CLIPPED,
    OPTIONS,
    TOKEN_SUMS,
    VLLM_KEYS,
    clip_max,
    corrected,
    correction,
    generation_steps,
    grouped,
    high,
    on_policy,
    scale,
)

_MEAN = {"advantage.baseline": "group_mean", "advantage.combine": "sum_then_normalise"}
_SAMPLE = {"advantage.ddof": 1, "advantage.epsilon": 1e-4}

RULES: tuple[Rule, ...] = (
    Rule(
        "advantage", "GT:2770-2787, U:1021", lambda v: grouped(v) and scale(v) == "group",
        {**_MEAN, **_SAMPLE, "advantage.scale": "group_std"},
        "centred on the group's mean, divided by the group's sample std (ddof 1) + 1e-4; the 1e-4 is not an option",
    ),
    Rule(
        "advantage", "GT:2776-2787", lambda v: grouped(v) and scale(v) == "batch",
        {**_MEAN, **_SAMPLE, "advantage.scale": "batch_std", "advantage.scale_of": "rewards"},
        "centred on the group's mean, divided by the sample std (ddof 1) of all rewards of the generation batch, over "
        "all ranks, + 1e-4",
    ),
    Rule(
        "advantage", "GT:2785", lambda v: grouped(v) and scale(v) == "none", {**_MEAN, "advantage.scale": "none"},
        "centred on the group's mean, not scaled",
    ),
    Rule(
        "advantage", "GT:2791-2799", lambda v: not grouped(v),
        {
            "advantage.baseline": "group_mean", "advantage.scale": "group_std", **_SAMPLE,
            "advantage.combine": "normalise_then_sum", "advantage.whiten": "sequences",
        },
        "every reward function is standardised in its group (ddof 1, + 1e-4), summed by weight, then centred and "
        "divided over the batch (ddof 1, + 1e-4)",
    ),
    Rule(
        "ratio", "GT:3083", lambda v: v["importance_sampling_level"] == "token",
        {"ratio.level": "token", "ratio.anchor": "snapshot"}, "one ratio a token, to the policy before the update",
    ),
    Rule(
        "ratio", "GT:3085-3087", lambda v: v["importance_sampling_level"] == "sequence",
        {"ratio.level": "sequence", "ratio.anchor": "snapshot"},
        "one ratio a response, the geometric mean of its token ratios, gradient through all of them",
    ),
    Rule(
        "ratio", "GT:2659-2707, GT:3147", corrected, correction,
        lambda v: f"policy term times anchor over sampler, {v['vllm_importance_sampling_mode']}, "
        f"[{v['vllm_importance_sampling_clip_min']}, {clip_max(v)}]; the sequence modes take the product over tokens",
    ),
    Rule(
        "surrogate", "GT:3113-3120", lambda v: v["loss_type"] in CLIPPED,
        lambda v: {
            "surrogate.kind": "clip", "surrogate.low": float(v["epsilon"]), "surrogate.high": high(v),
            "surrogate.ceiling": float(v["delta"] or 0.0),
        },
        lambda v: f"clip to [1 - {v['epsilon']:g}, 1 + {high(v):g}], no dual clip"
        + (f", two-sided: ratio at most {v['delta']:g} in the unclipped branch" if v["delta"] else ""),
    ),
    Rule(
        "surrogate", "GT:3110-3111", lambda v: v["loss_type"] == "cispo",
        lambda v: {"surrogate.kind": "capped", "surrogate.cap": high(v), "surrogate.cap_low": 0.0},
        lambda v: f"detached ratio capped at {high(v):g}, an absolute bound, times A log π; no lower bound",
    ),
    Rule(
        "surrogate", "GT:3121-3124", lambda v: v["loss_type"] == "sapo",
        lambda v: {
            "surrogate.kind": "soft_gate", "surrogate.tau_positive": float(v["sapo_temperature_pos"]),
            "surrogate.tau_negative": float(v["sapo_temperature_neg"]),
        },
        "a smooth gate in place of the clip; A = 0 takes the negative temperature",
    ),
    Rule("kl", "GC beta", lambda v: v["beta"] == 0, {"kl.estimator": "none"}, "no reference model at all"),
    Rule(
        "kl", "GT:3097-3105, GT:3150", lambda v: v["beta"] != 0,
        lambda v: {
            "kl.estimator": "k3", "kl.place": "loss", "kl.coefficient": float(v["beta"]), "kl.clamp": 0.0,
            "kl.gradient": "score" if v["use_bias_correction_kl"] else "direct",
        },
        lambda v: "k3 in the loss, unclamped, "
        + ("times the differentiable ratio" if v["use_bias_correction_kl"] else "differentiated directly")
        + "; added after every mask and correction of the policy term, so none of them silences it",
    ),
    Rule(
        "aggregate", "GT:3153-3157", lambda v: v["loss_type"] in ("grpo", "sapo"),
        {"aggregate.kind": "response_mean", "aggregate.count_masked": True},
        "mean over responses of token means; a fully masked response counts; holds across micro-batches, and across "
        "ranks with equal numbers of responses",
    ),
    Rule(
        "aggregate", "GT:3158-3162", lambda v: v["loss_type"] == "bnpo", {"aggregate.kind": "token_mean"},
        "token mean of each micro-batch, then the mean of those: depends on the micro-batch, the shuffle and the ranks",
    ),
    Rule(
        "aggregate", "GT:3163-3167", lambda v: v["loss_type"] == "dr_grpo",
        lambda v: {
            "aggregate.kind": "constant_length", "aggregate.length": int(v["max_completion_length"]),
            "aggregate.count_masked": True,
        },
        lambda v: f"token sum over responses x {v['max_completion_length']} (max_completion_length); holds across "
        "micro-batches and ranks",
    ),
    Rule(
        "aggregate", "GT:2498, GT:3168-3174", lambda v: v["loss_type"] in TOKEN_SUMS, {"aggregate.kind": "token_mean"},
        "token sum over the loss tokens of the generation batch, all ranks, scaled to one optimiser step; exact when "
        "steps_per_generation = gradient_accumulation_steps",
    ),
    Rule(
        "aggregate", "GT:3175-3182", lambda v: v["loss_type"] == "luspo",
        {"aggregate.kind": "response_sum", "aggregate.count_masked": True},
        "mean over responses of token sums; holds across micro-batches, and across ranks with equal numbers",
    ),
    Rule(
        "selection", "GT:2756-2818", always, {"selection.dead": "keep"},
        "groups of equal rewards are kept, run forward, and counted in every denominator; no dynamic sampling",
    ),
    Rule(
        "selection", "GT:2488-2497", lambda v: bool(v["mask_truncated_completions"]),
        {"selection.truncated": "mask_loss"},
        "truncated responses lose their loss (and attention) mask but stay in the group's mean and std",
    ),
    Rule(
        "selection", "GT:1380-1416, GT:3144", lambda v: v["top_entropy_quantile"] < 1,
        lambda v: {"selection.entropy_top": max(float(v["top_entropy_quantile"]), 1e-9)},
        lambda v: f"policy term only on the {v['top_entropy_quantile']:.0%} of tokens with the highest entropy of the "
        "current policy; denominators unchanged",
    ),
    Rule(
        "selection", "GT:2945-2968, GT:3141", lambda v: v["off_policy_mask_threshold"] is not None,
        lambda v: {"selection.off_policy_mask": float(v["off_policy_mask_threshold"])},
        lambda v: f"policy term dropped where A < 0 and the mean log-ratio to the older policy exceeds "
        f"{v['off_policy_mask_threshold']:g}; denominators unchanged",
    ),
)  # fmt: skip


def _window_differs(v: Values) -> bool:
    return v["loss_type"] in TOKEN_SUMS and generation_steps(v) != int(v["gradient_accumulation_steps"])


def _several(v: Values) -> bool:
    return int(v["gradient_accumulation_steps"]) > 1 or v.processes > 1


def _ragged(v: Values) -> bool:
    size = int(v["per_device_train_batch_size"]) * v.processes
    total = v["generation_batch_size"] or size * generation_steps(v)
    return bool(int(total) % max(int(v["num_generations"]), 1) or int(total) % size)


CAVEATS: tuple[Caveat, ...] = (
    Caveat("inexpressible", "GT:3126-3136", lambda v: v["loss_type"] == "vespo",
           "loss_type vespo: a smooth detached weight of the sequence product", ("loss_type",), True),
    Caveat("inexpressible", "GT:3158-3162", lambda v: v["loss_type"] == "bnpo" and _several(v),
           "loss_type bnpo: the mean of micro-batch token means; the token mean of the whole step stands in its place",
           ("loss_type",)),
    Caveat("inexpressible", "GT:3170-3172", _window_differs,
           "steps_per_generation differs from gradient_accumulation_steps: the denominator is the average "
           "window of the "
           "generation batch; the token count of the step stands in its place", ("steps_per_generation",)),
    Caveat("inexpressible", "GT:3104-3105",
           lambda v: v["beta"] != 0 and v["use_bias_correction_kl"] and v["importance_sampling_level"] == "sequence",
           "the KL is multiplied by the sequence ratio; a token ratio stands in its place",
           ("use_bias_correction_kl",)),
    Caveat("inexpressible", "GT:3115-3116",
           lambda v: v["loss_type"] in CLIPPED and 0 < (v["delta"] or 0) <= 1 + high(v),
           "delta is not above 1 + epsilon_high: it also bounds A > 0; INTELLECT-2 uses 4", ("delta",), True),
    Caveat("inexpressible", "GT:3188-3205", lambda v: bool(v["entropy_coef"]) or bool(v["use_adaptive_entropy"]),
           "an entropy bonus", ("entropy_coef", "use_adaptive_entropy")),
    Caveat("inexpressible", "GT:3248-3250", lambda v: bool(v["router_aux_loss_coef"]),
           "a load-balancing loss of a mixture "
           "of experts", ("router_aux_loss_coef",)),
    Caveat("inexpressible", "GT:3070-3073",
           lambda v: v["off_policy_mask_threshold"] is not None and bool(v["use_vllm"]),
           "the off-policy mask measures from the sampler; the snapshot stands in its place",
           ("off_policy_mask_threshold",)),
    Caveat("inexpressible", "GT:1404-1411", lambda v: v["top_entropy_quantile"] < 1,
           "the entropy threshold is the current policy's and of each micro-batch; that of the whole step and of the "
           "anchor stands in its place (equal with one micro-batch and on-policy)", ("top_entropy_quantile",)),
    Caveat("inexpressible", "CB:130-154",
           lambda v: v["beta"] != 0 and bool(v["sync_ref_model"]) and v["ref_model_mixup_alpha"] != 1,
           "the reference moves towards the policy by a mixture", ("sync_ref_model", "ref_model_mixup_alpha")),
    Caveat("contradiction", "GC:1114-1117",
           lambda v: v.wrote("generation_batch_size") and v.wrote("steps_per_generation"),
           "generation_batch_size and steps_per_generation are both written; upstream refuses it",
           ("generation_batch_size", "steps_per_generation")),
    Caveat("contradiction", "GC:1103-1135", _ragged,
           "the generation batch is not whole prompts x num_generations and whole per-device batches; upstream "
           "refuses it",
           ("num_generations",)),
    Caveat("contradiction", "GC:1137", lambda v: v["num_generations"] < 2,
           "fewer than two responses a prompt; upstream "
           "refuses it", ("num_generations",)),
    Caveat("contradiction", "GT:928-934",
           lambda v: v["importance_sampling_level"] == "sequence" and v["loss_type"] in ("bnpo", "dr_grpo", "dapo",
           "cispo"),
           "a sequence ratio with a sum over tokens weights a response by its length; GSPO is loss_type grpo",
           ("importance_sampling_level", "loss_type")),
    Caveat("contradiction", "GT:916-920",
           lambda v: v["loss_type"] == "luspo" and v["importance_sampling_level"] == "token",
           "luspo is defined on the sequence ratio; this runs token ratios", ("loss_type",)),
    Caveat("trap", "GT:3110, GT:946", lambda v: v["loss_type"] == "cispo" and high(v) < 1,
           lambda v: f"epsilon_high is the absolute cap under cispo: {high(v):g} makes every weight at most that, so "
           f"on-policy gradients are {high(v):g} of CISPO's; write epsilon_high = 5.0", ("epsilon_high",)),
    Caveat("trap", "GT:2786", lambda v: v["loss_type"] == "dr_grpo" and grouped(v) and scale(v) != "none",
           "loss_type dr_grpo only changes the denominator: the std is still divided by; Dr. GRPO also needs "
           'scale_rewards = "none"', ("loss_type", "scale_rewards")),
    Caveat("trap", "paper index",
           lambda v: v["loss_type"] == "dapo" and v.wrote("loss_type") and v["epsilon_high"] is None,
           "loss_type dapo is only DAPO's token mean: the clip is symmetric and there is no dynamic sampling",
           ("loss_type",)),
    Caveat("trap", "GT:1494-1501", lambda v: v["top_p"] < 1 or bool(v["top_k"]) or bool(v["min_p"])
           or v["repetition_penalty"] != 1,
           "tokens are drawn from a cut or reshaped distribution but scored under the whole one",
           ("top_p", "top_k", "min_p", "repetition_penalty")),
    Caveat("trap", "GC:453", lambda v: v.wrote("disable_dropout") and not v["disable_dropout"],
           "dropout stays live in sampling and scoring: ratios are noisy", ("disable_dropout",)),
    Caveat("condition", "U:1021-1055, GT:2787", always,
           "rewards are float32: a group of equal non-dyadic rewards can get advantages of 1e-3 and more"),
    Caveat("condition", "U:941-952", always, "the last incomplete chunk of prompts of an epoch is dropped"),
    Caveat("no_effect", "GT:2642-2657",
           lambda v: on_policy(v) and v["loss_type"] != "vespo" and v.wrote("epsilon", "epsilon_high", "delta"),
           "generation and optimiser steps are aligned, so every ratio is exactly 1 and no bound is ever reached",
           ("epsilon", "epsilon_high", "delta")),
    *unused("GT:2791-2799", ["scale_rewards"], 'multi_objective_aggregation = "sum_then_normalize"',
            lambda v: not grouped(v)),
    *unused("GT:3097", ["use_bias_correction_kl", "sync_ref_model", "ref_model_mixup_alpha", "ref_model_sync_steps"],
            "beta other than 0", lambda v: v["beta"] == 0),
    *unused("GT:1206", ["ref_model_mixup_alpha", "ref_model_sync_steps"], "sync_ref_model = True",
            lambda v: v["beta"] != 0 and not v["sync_ref_model"]),
    *unused("GT:3109-3111", ["epsilon"], "a clipped loss_type (under cispo only epsilon_high counts)",
            lambda v: v["loss_type"] == "cispo" and v["epsilon_high"] is not None),
    *unused("GT:3113-3138", ["epsilon", "epsilon_high"], "a clipped loss_type",
            lambda v: v["loss_type"] in ("sapo", "vespo")),
    *unused("GT:3115", ["delta"], "a clipped loss_type", lambda v: v["loss_type"] not in CLIPPED),
    *unused("GT:3122", ["sapo_temperature_pos", "sapo_temperature_neg"], 'loss_type = "sapo"',
            lambda v: v["loss_type"] != "sapo"),
    *unused("GT:3126", [f"vespo_{k}_{s}" for k in ("k", "lambda") for s in ("pos", "neg")], 'loss_type = "vespo"',
            lambda v: v["loss_type"] != "vespo"),
    *unused("GT:2659", VLLM_KEYS, "use_vllm = True", lambda v: not v["use_vllm"]),
    *unused("GT:2659", [k for k in VLLM_KEYS if not k.endswith("correction")],
            "vllm_importance_sampling_correction = True",
            lambda v: v["use_vllm"] and not v["vllm_importance_sampling_correction"]),
    *unused("GT:3203", [f"entropy_{k}" for k in ("coef_min", "coef_max", "coef_delta", "target")],
            "use_adaptive_entropy = True", lambda v: not v["use_adaptive_entropy"]),
)  # fmt: skip


def parse(text: str, suffix: str) -> Parsed:
    """JSON, YAML, Python with one GRPOConfig(...) call, or a command line (`trl grpo --beta 0.04`)."""
    table = structured(text, suffix)
    if table is not None:
        return split_interpolations(table)
    if suffix in (".sh", ".bash"):
        return command_line(words(text))
    return keyword_call(text, ("GRPOConfig",))


def units(v: Values) -> Units:
    """per_device_train_batch_size counts responses; a generation batch is that x ranks x steps_per_generation."""
    device, accumulation = int(v["per_device_train_batch_size"]), int(v["gradient_accumulation_steps"])
    steps = generation_steps(v)
    group, update = max(int(v["num_generations"]), 1), device * v.processes * accumulation
    rollout = max(device * v.processes * steps, update)
    return Units(
        rollout / group, group, float(update), device, v.processes, rollout / update, int(v["num_iterations"]),
        (
            f"per_device_train_batch_size = {device} responses (not prompts) of one rank and micro-batch",
            f"generation batch = {device} x {v.processes} ranks x {steps} = {device * v.processes * steps} responses",
            f"optimiser step = {device} x {v.processes} ranks x {accumulation} = {update} responses",
        ),
    )  # fmt: skip


def run(v: Values) -> dict[str, Any]:
    """Recipe keys beyond the objective."""
    u = units(v)
    out: dict[str, Any] = {
        "rollout.max_tokens": int(v["max_completion_length"]), "rollout.temperature": float(v["temperature"]),
        "rollout.top_p": float(v["top_p"]), "rollout.top_k": int(v["top_k"] or 0),
        "rollout.min_p": float(v["min_p"] or 0),
        "train.learning_rate": float(v["learning_rate"]), "train.weight_decay": float(v["weight_decay"]),
        "train.beta1": float(v["adam_beta1"]), "train.beta2": float(v["adam_beta2"]),
        "train.adam_epsilon": float(v["adam_epsilon"]), "train.grad_clip": float(v["max_grad_norm"] or 0),
    }  # fmt: skip
    if v["reward_weights"]:
        out["reward.weights"] = v["reward_weights"]
    schedule = {"linear": "linear", "constant": "constant", "cosine": "cosine"}.get(str(v["lr_scheduler_type"]))
    if schedule:
        out["train.schedule"] = schedule
    if v["max_steps"] and v["max_steps"] > 0:
        out["train.steps"] = max(int(v["max_steps"] / (u.updates * u.epochs)), 1)
    if v["warmup_steps"] and v["warmup_steps"] >= 1:
        out["train.warmup_steps"] = max(int(v["warmup_steps"] / (u.updates * u.epochs)), 1)
    if v["beta"] != 0 and v["sync_ref_model"] and v["ref_model_mixup_alpha"] == 1:
        out["train.reference_refresh"] = max(int(v["ref_model_sync_steps"] / (u.updates * u.epochs)), 1)
    return out


DIALECT = Dialect(
    "trl", "TRL GRPOTrainer", "1.16.0",
    {"GT": "trl/trainer/grpo_trainer.py", "GC": "trl/trainer/grpo_config.py", "U": "trl/trainer/utils.py",
     "CB": "trl/trainer/callbacks.py"},
    OPTIONS, RULES, CAVEATS, parse, units, run,
)  # fmt: skip
