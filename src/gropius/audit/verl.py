"""verl at 1dda039b9 (2026-08-22, 0.10.0.dev): what its Hydra keys make of the objective, and where. No torch.

core: verl/trainer/ppo/core_algos.py, losses: verl/workers/utils/losses.py,
rcorr: verl/trainer/ppo/rollout_corr_helper.py, rb: verl/trainer/ppo/v1/replay_buffer.py,
trainer_base: beside it, tf: verl/utils/torch_functional.py, actor.yaml and ppo_trainer.yaml under verl/trainer/config;
line numbers after the colon.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gropius.audit.dialect import Caveat, Dialect, Parsed, Rule, Units, Values, always, unused
from gropius.audit.sources import flat, overrides, split_interpolations, structured, words
from gropius.audit.verl_options import (
    ALG,
    CORR,
    OPTIONS,
    OVER,
    RENAMED,
    A,
    R,
    bound,
    corrects,
    estimator,
    fixes_denominator,
    geometric,
    geometric_sets,
    is_one_of,
    is_weights,
    kl_loss,
    kl_reward,
    loss_mode,
    thresholds,
    upper,
)

_SAMPLE = {
    "advantage.baseline": "group_mean",
    "advantage.scale": "group_std",
    "advantage.ddof": 1,
    "advantage.epsilon": 1e-6,
}
_WHITE = {"advantage.scale": "none", "advantage.whiten": "tokens", "advantage.ddof": 1}
_PLAIN = {"ratio.level": "none", "surrogate.kind": "none"}
_RESPONSES = {"aggregate.count_masked": True}

RULES: tuple[Rule, ...] = (
    Rule("advantage", "core:310-328",
         lambda v: is_one_of("grpo", "grpo_vectorized")(v) and v[ALG + "norm_adv_by_std_in_grpo"],
         _SAMPLE, "centred on the group's mean, divided by the group's sample std (ddof 1) + 1e-6"),
    Rule("advantage", "core:327-328",
         lambda v: is_one_of("grpo", "grpo_vectorized")(v) and not v[ALG + "norm_adv_by_std_in_grpo"],
         {"advantage.baseline": "group_mean", "advantage.scale": "none"}, "centred on the group's mean, not scaled"),
    Rule("advantage", "core:587-637, core:833-868", is_one_of("rloo", "rloo_vectorized"),
         {"advantage.baseline": "leave_one_out", "advantage.scale": "none"}, "minus the mean of the other responses"),
    Rule("advantage", "core:533-584, tf:329", is_one_of("reinforce_plus_plus_baseline"),
         {"advantage.baseline": "group_mean", **_WHITE},
         "centred on the group's mean, then whitened over the batch's tokens (sample variance + 1e-8 under the root)"),
    Rule("advantage", "core:693-731, tf:329", is_one_of("reinforce_plus_plus"),
         {"advantage.baseline": "none", **_WHITE},
         "the return to go, whitened over the batch's tokens (sample variance + 1e-8 under the root)"),
    Rule("advantage", "core:639-690", is_one_of("opo"),
         {"advantage.baseline": "length_weighted", "advantage.scale": "none"},
         "minus the length-weighted mean of the group"),
    Rule("advantage", "core:734-767", is_one_of("remax"), {"advantage.baseline": "greedy", "advantage.scale": "none"},
         "minus the reward of the greedy response"),
    Rule("ratio", "core:1336-1339, losses ppo_loss", lambda v: loss_mode(v) not in ("gspo", "gpg", "reinforce"),
         {"ratio.level": "token", "ratio.anchor": "snapshot"},
         "one ratio a token, log-ratio clamped to ±20, to the log-probabilities recomputed before the update"),
    Rule("ratio", "core:1575-1592", lambda v: loss_mode(v) == "gspo",
         {"ratio.level": "sequence_token", "ratio.anchor": "snapshot"},
         "the geometric mean of the response's token ratios in value, the token's own gradient (GSPO-token), "
         "log-ratio at most 10"),
    Rule("ratio", "core:2412", lambda v: bool(v[CORR + "bypass_mode"]), {"ratio.anchor": "sampler"},
         "bypass mode: the sampler's own log-probabilities are the anchor"),
    Rule("ratio", "rcorr:566-604", corrects, is_weights,
         lambda v: f"policy term times anchor over sampler, {v[CORR + 'rollout_is']} level, threshold "
         f"{v[CORR + 'rollout_is_threshold']} (one number truncates, lo_hi masks as IcePop does)"),
    Rule("ratio", "rcorr:263-322", geometric, geometric_sets,
         "responses whose mean log(sampler/anchor) leaves the band lose their mask, in the denominator as well"),
    Rule("surrogate", "core:1285-1376", lambda v: loss_mode(v) == "vanilla",
         lambda v: {"surrogate.kind": "clip", "surrogate.low": bound(v, "low"), "surrogate.high": bound(v, "high"),
                    "surrogate.dual": float(v[A + "clip_ratio_c"])},
         lambda v: f"clip to [1 - {bound(v, 'low'):g}, 1 + {bound(v, 'high'):g}], dual clip c = "
         f"{v[A + 'clip_ratio_c']:g} "
         "on by default"),
    Rule("surrogate", "core:1594-1596", lambda v: loss_mode(v) == "gspo",
         lambda v: {"surrogate.kind": "clip", "surrogate.low": bound(v, "low"), "surrogate.high": bound(v, "high")},
         lambda v: f"clip to [1 - {bound(v, 'low'):g}, 1 + {bound(v, 'high'):g}], no dual clip"),
    Rule("surrogate", "core:1621-1703", lambda v: loss_mode(v) == "sapo",
         lambda v: {"surrogate.kind": "soft_gate", "surrogate.tau_positive": float(v[A + "tau_pos"]),
                    "surrogate.tau_negative": float(v[A + "tau_neg"])}, "a smooth gate in place of the clip"),
    Rule("surrogate", "core:1706-1739", lambda v: loss_mode(v) == "gpg", _PLAIN, "A log π, no ratio"),
    Rule("surrogate", "core:1927-2010", lambda v: loss_mode(v) == "geo_mean",
         lambda v: {"surrogate.kind": "log_clip", "surrogate.low": bound(v, "low"), "surrogate.high": bound(v, "high")},
         "the geometric mean of token ratios clipped in log space, on the side that A pushes"),
    Rule("surrogate", "core:2046-2100", lambda v: loss_mode(v) == "cispo",
         lambda v: {"surrogate.kind": "capped", "surrogate.cap": 1 + bound(v, "high"),
         "surrogate.cap_low": 1 - bound(v, "low")},
         lambda v: f"detached ratio kept in [{1 - bound(v, 'low'):g}, {1 + bound(v, 'high'):g}] (offsets, with "
         f"a lower bound "
         "that the paper has not), times A log π"),
    Rule("surrogate", "core:1379-1542", lambda v: loss_mode(v) in ("dppo_tv", "dppo_kl"),
         lambda v: {"surrogate.kind": "divergence_mask", "surrogate.divergence": loss_mode(v)[5:],
                    "surrogate.threshold": bound(v, "high"), "surrogate.cap": float(v[A + "clip_ratio_c"])},
         "the term is dropped where the divergence from the anchor exceeds clip_ratio_low/high and A pushes "
         "away; weight at "
         "most clip_ratio_c"),
    Rule("surrogate", "core:2330-2409", lambda v: loss_mode(v) == "reinforce" and v[CORR + "rollout_is"] is None,
         _PLAIN,
         "bypass mode, reinforce: A log π"),
    Rule("surrogate", "core:2330-2409", lambda v: loss_mode(v) == "reinforce" and v[CORR + "rollout_is"] == "token",
         lambda v: {"ratio.level": "token", "surrogate.kind": "capped",
                    "surrogate.cap": upper(v)},
         "bypass mode, reinforce: A log π times the detached, truncated ratio of the policy to the sampler"),
    Rule("kl", "losses ppo_loss, core:2187-2247", lambda v: bool(v[A + "use_kl_loss"]), kl_loss,
         lambda v: f"{v[A + 'kl_loss_type']} in the loss, coefficient {v[A + 'kl_loss_coef']:g}, outside clip "
         f"and correction; "
         "k3 has its input clamped to ±20 and its value to ±10"),
    Rule("kl", "ray_trainer apply_kl_penalty",
         lambda v: bool(v[ALG + "use_kl_in_reward"]) and not v[A + "use_kl_loss"], kl_reward,
         lambda v: f"{v[ALG + 'kl_penalty']} of the anchor in the reward, coefficient "
         f"{v[ALG + 'kl_ctrl.kl_coef']:g}, before "
         "any baseline"),
    Rule("kl", "actor.yaml use_kl_loss", lambda v: not v[A + "use_kl_loss"] and not v[ALG + "use_kl_in_reward"],
         {"kl.estimator": "none"}, "none"),
    Rule("aggregate", "core:1172-1178", lambda v: v[A + "loss_agg_mode"] == "token-mean" and not fixes_denominator(v),
         {"aggregate.kind": "token_mean"},
         "token sum over the loss tokens of the whole mini-batch, summed over ranks: holds across micro-batches "
         "and ranks"),
    Rule("aggregate", "core:1184-1191",
         lambda v: v[A + "loss_agg_mode"] == "seq-mean-token-sum" and not fixes_denominator(v),
         {"aggregate.kind": "response_sum", **_RESPONSES},
         "token sums over the configured mini-batch size, fully masked responses counted: holds across "
         "micro-batches and ranks"),
    Rule("aggregate", "core:1184-1196",
         lambda v: v[A + "loss_agg_mode"] == "seq-mean-token-sum-norm" and not fixes_denominator(v),
         lambda v: {"aggregate.kind": "constant_length", **_RESPONSES,
                    "aggregate.length": int(v[A + "loss_scale_factor"] or v["data.max_response_length"])},
         lambda v: "token sums over the configured mini-batch size x "
         + (f"{v[A + 'loss_scale_factor']:g}" if v[A + "loss_scale_factor"] else "the padded width of the batch")),
    Rule("aggregate", "core:1197-1206",
         lambda v: v[A + "loss_agg_mode"] == "seq-mean-token-mean" or fixes_denominator(v),
         {"aggregate.kind": "response_mean", **_RESPONSES},
         "mean over the configured mini-batch size of token means (length + 1e-8): holds across micro-batches "
         "and ranks, "
         "except geo_mean's, which is a mean of each micro-batch"),
    Rule("selection", "rb:250-300", lambda v: bool(v[ALG + "filter_groups.enable"]), {"selection.dead": "refill"},
         "groups whose metric has std exactly 0 are evicted and replaced"),
    Rule("selection", "core:310-328", lambda v: not v[ALG + "filter_groups.enable"], {"selection.dead": "keep"},
         "groups of equal rewards are kept and counted in every denominator"),
    Rule("selection", "reward_manager/dapo.py", lambda v: bool(v[OVER + "enable"]),
         lambda v: {"selection.truncated": "soft_penalty", "selection.overlong_max": int(v["data.max_response_length"]),
                    "selection.overlong_cache": int(v[OVER + "len"])},
         lambda v: f"a penalty growing to -{v[OVER + 'penalty_factor']:g} over the last {v[OVER + 'len']} "
         f"tokens, in the reward"),
)  # fmt: skip


def _both(v: Values) -> bool:
    return bool(v[A + "use_kl_loss"] and v[ALG + "use_kl_in_reward"])


def _rs_missing(v: Values) -> bool:
    return v[CORR + "rollout_rs"] is not None and not geometric(v)


def _bypass_is(v: Values) -> bool:
    """Bypass with reinforce and weights other than token truncation."""
    level = v[CORR + "rollout_is"]
    banded = thresholds(v[CORR + "rollout_is_threshold"]) is not None
    return loss_mode(v) == "reinforce" and level is not None and (level == "sequence" or banded)


CAVEATS: tuple[Caveat, ...] = (
    Caveat("inexpressible", "core:215-263", is_one_of("gae"),
           "adv_estimator gae (the default): a critic with GAE, whitened; a group-relative objective has none",
           (ALG + "adv_estimator",), True),
    Caveat("inexpressible", "core:361-530, core:871-1100",
           is_one_of("gdpo", "grpo_passk", "optimal_token_baseline", "tir_optimal_token_baseline"),
           lambda v: f"adv_estimator {estimator(v)}", (ALG + "adv_estimator",), True),
    Caveat("inexpressible", "core:805-826", is_one_of("gpg"),
           "adv_estimator gpg: multiplied by B over the number of non-zero rewards", (ALG + "adv_estimator",), True),
    Caveat("inexpressible", "core:1742-1924, core:2013-2043", lambda v: loss_mode(v) in ("clip_cov", "kl_cov", "dro"),
           lambda v: f"loss_mode {loss_mode(v)}", (A + "policy_loss.loss_mode",), True),
    Caveat("inexpressible", "core:1404-1446",
           lambda v: loss_mode(v) in ("dppo_tv", "dppo_kl") and bound(v, "low") != bound(v, "high"),
           "different divergence thresholds for the two signs of A; that for A > 0 stands in", (A + "clip_ratio_low",)),
    Caveat("inexpressible", "core:1179-1183", lambda v: v[A + "loss_agg_mode"] == "token-sum",
           "loss_agg_mode token-sum: no denominator", (A + "loss_agg_mode",), True),
    Caveat("inexpressible", "core:2412", _bypass_is, "bypass mode, reinforce, with sequence or masked weights",
           (CORR + "rollout_is",), True),
    Caveat("inexpressible", "rcorr:263-322", _rs_missing,
           lambda v: f"rejection {v[CORR + 'rollout_rs']}: only seq_mean_k1 alone, with both bounds, has an equivalent",
           (CORR + "rollout_rs",)),
    Caveat("inexpressible", "rcorr:628", lambda v: corrects(v) and bool(v[CORR + "rollout_is_batch_normalize"]),
           "weights normalised to a batch mean of 1", (CORR + "rollout_is_batch_normalize",)),
    Caveat("inexpressible", "core:1986-1997", lambda v: corrects(v) and loss_mode(v) == "geo_mean",
           "the geometric mean of the correction over a response", (CORR + "rollout_is",)),
    Caveat("inexpressible", "losses ppo_loss", lambda v: v[A + "entropy_coeff"] != 0, "an entropy bonus",
           (A + "entropy_coeff",)),
    Caveat("inexpressible", "losses ppo_loss", _both, "a KL in the reward besides the one in the loss",
           (ALG + "use_kl_in_reward",)),
    Caveat("inexpressible", "core:152",
           lambda v: bool(v[ALG + "use_kl_in_reward"]) and v[ALG + "kl_ctrl.type"] == "adaptive",
           "a coefficient that adapts to a target", (ALG + "kl_ctrl.type",)),
    Caveat("inexpressible", "losses ppo_loss, core:1610",
           lambda v: bool(v[A + "use_kl_loss"]) and fixes_denominator(v)
           and v[A + "loss_agg_mode"] != "seq-mean-token-mean",
           "the KL keeps loss_agg_mode while the policy term is a mean over responses", (A + "loss_agg_mode",)),
    Caveat("inexpressible", "core:2260", lambda v: bool(v[ALG + "use_pf_ppo"]), "resampling by reward",
           (ALG + "use_pf_ppo",)),
    Caveat("inexpressible", "core:720-726", lambda v: estimator(v) == "reinforce_plus_plus" and v[ALG + "gamma"] != 1,
           "a discount other than 1", (ALG + "gamma",)),
    Caveat("inexpressible", "reward_manager/dapo.py",
           lambda v: bool(v[OVER + "enable"]) and v[OVER + "penalty_factor"] != 1,
           "an overlong penalty whose largest value is not 1", (OVER + "penalty_factor",)),
    Caveat("inexpressible", "core:1999", lambda v: loss_mode(v) == "geo_mean" and not _one_micro_batch(v),
           "geo_mean averages each micro-batch; the mean over the mini-batch stands in",
           (A + "policy_loss.loss_mode",)),
    Caveat("contradiction", "rcorr", lambda v: v[CORR + "rollout_is"] is not None and not v[R + "calculate_log_probs"],
           "a correction needs the sampler's log-probabilities: rollout.calculate_log_probs = True",
           (CORR + "rollout_is",)),
    Caveat("contradiction", "utils/config.py:170", _both, "KL both in the reward and in the loss",
           (ALG + "use_kl_in_reward", A + "use_kl_loss")),
    Caveat("contradiction", "trainer_base:190-199",
           lambda v: bool(v[ALG + "filter_groups.enable"]) and not v[ALG + "filter_groups.metric"],
           "filter_groups.enable needs filter_groups.metric; upstream refuses it", (ALG + "filter_groups.metric",)),
    Caveat("inexpressible", "core:315-317",
           lambda v: v[R + "n"] == 1 and estimator(v).startswith(("grpo", "reinforce_plus_plus_b", "rloo", "opo")),
           "rollout.n = 1: a group of one has mean 0 and std 1, so the raw reward becomes the advantage", (R + "n",)),
    Caveat("trap", "actor.yaml clip_ratio_c", lambda v: loss_mode(v) == "vanilla" and not v.wrote(A + "clip_ratio_c"),
           "the dual clip (c = 3) is on though nothing asks for it", (A + "clip_ratio_c",)),
    Caveat("trap", "core:1192-1195",
           lambda v: v[A + "loss_agg_mode"] == "seq-mean-token-sum-norm" and not v[A + "loss_scale_factor"],
           "without loss_scale_factor the constant is the padded width, which may change from batch to batch; "
           "max_response_length stands in", (A + "loss_scale_factor",)),
    Caveat("trap", "core:1584-1596", lambda v: loss_mode(v) == "gspo" and bound(v, "high") > 0.01,
           "a clip this wide never binds on a sequence ratio; the paper uses 3e-4 and 4e-4", (A + "clip_ratio_high",)),
    Caveat("trap", "tf:329", lambda v: estimator(v).startswith("reinforce_plus_plus"),
           "whitening over tokens: long responses weigh more in the mean and the std", (ALG + "adv_estimator",)),
    Caveat("condition", "core:2233-2236",
           lambda v: "k3" in str(kl_loss(v)["kl.estimator"]) and bool(v[A + "use_kl_loss"]),
           "equal while no token's k3 exceeds 10, where upstream's gradient stops"),
    Caveat("condition", "core:1436", lambda v: loss_mode(v) in ("dppo_tv", "dppo_kl", "gpg"),
           "the gradient is equal; the printed loss value may not be (upstream prints a multiple of log π)"),
    Caveat("condition", "tf:346", lambda v: estimator(v).startswith("reinforce_plus_plus"),
           "equal up to the 1e-8 that upstream adds to the variance"),
    *unused("core:1318-1320", [A + "clip_ratio"], "clip_ratio_low and clip_ratio_high = null (both default to 0.2)",
            lambda v: v[A + "clip_ratio_low"] is not None and v[A + "clip_ratio_high"] is not None),
    *unused("core:1285", [A + "clip_ratio_c"], "loss_mode vanilla or dppo_*",
            lambda v: loss_mode(v) not in ("vanilla", "dppo_tv", "dppo_kl")),
    *unused("core:1610", [A + "loss_agg_mode"], "another loss_mode: gspo, sapo and geo_mean fix their own denominator",
            lambda v: fixes_denominator(v) and not v[A + "use_kl_loss"]
            and v[A + "loss_agg_mode"] != "seq-mean-token-mean"),
    *unused("core:1192", [A + "loss_scale_factor"], "loss_agg_mode = seq-mean-token-sum-norm",
            lambda v: v[A + "loss_agg_mode"] != "seq-mean-token-sum-norm"),
    *unused("core:1621", [A + "tau_pos", A + "tau_neg"], "loss_mode sapo", lambda v: loss_mode(v) != "sapo"),
    *unused("losses ppo_loss", [A + "kl_loss_coef", A + "kl_loss_type"], "use_kl_loss = True",
            lambda v: not v[A + "use_kl_loss"]),
    *unused("apply_kl_penalty", [ALG + "kl_penalty", ALG + "kl_ctrl.kl_coef", ALG + "kl_ctrl.type"],
            "use_kl_in_reward = True",
            lambda v: not v[ALG + "use_kl_in_reward"]),
    *unused("core:267", [ALG + "norm_adv_by_std_in_grpo"], "adv_estimator grpo",
            lambda v: estimator(v) not in ("grpo", "grpo_vectorized", "grpo_passk")),
    *unused("core:215", [ALG + "lam"], "adv_estimator gae", lambda v: estimator(v) != "gae"),
    *unused("core:693", [ALG + "gamma"], "adv_estimator gae or reinforce_plus_plus",
            lambda v: estimator(v) not in ("gae", "reinforce_plus_plus")),
    *unused("trainer_base:208-213", [ALG + "filter_groups.max_num_gen_batches"],
            "another trainer (this one ignores it)", always),
    *unused("rcorr", [CORR + k for k in ("rollout_is_threshold", "rollout_is_batch_normalize")], "rollout_is",
            lambda v: v[CORR + "rollout_is"] is None),
    *unused("core:2412", [CORR + "loss_type"], "bypass_mode = True", lambda v: not v[CORR + "bypass_mode"]),
    *unused("core:2470", [CORR + "rollout_is"],
            "loss_type reinforce in bypass mode (the ratio is the correction there)",
            lambda v: bool(v[CORR + "bypass_mode"]) and v[CORR + "loss_type"] == "ppo_clip"),
)  # fmt: skip


def _ranks(v: Values) -> int:
    return int(v["trainer.nnodes"]) * int(v["trainer.n_gpus_per_node"])


def _one_micro_batch(v: Values) -> bool:
    micro = v[A + "ppo_micro_batch_size_per_gpu"]
    return micro is not None and int(micro) * _ranks(v) >= int(v[A + "ppo_mini_batch_size"]) * int(v[R + "n"])


def parse(text: str, suffix: str) -> Parsed:
    """Nested YAML or JSON, or `a.b=c` overrides in a shell script or a plain list."""
    table = structured(text, suffix)
    parsed = split_interpolations(flat(table)) if table is not None else overrides(words(text))
    return Parsed(_renamed(parsed.given), _renamed(parsed.unread))


def _renamed(table: Mapping[str, Any]) -> dict[str, Any]:
    """Older spellings of the reward's keys."""
    out = {}
    for key, value in table.items():
        for old, new in RENAMED.items():
            key = new + key.removeprefix(old) if key.startswith(old) else key
        out[key] = value
    return out


def units(v: Values) -> Units:
    """train_batch_size and ppo_mini_batch_size count prompts; micro-batches count responses of one device."""
    prompts, n, mini = int(v["data.train_batch_size"]), int(v[R + "n"]), int(v[A + "ppo_mini_batch_size"])
    micro = 0 if v[A + "use_dynamic_bsz"] else int(v[A + "ppo_micro_batch_size_per_gpu"] or 0)
    return Units(
        prompts, n, float(mini * n), micro, _ranks(v), prompts / mini, int(v[A + "ppo_epochs"]),
        (
            f"data.train_batch_size = {prompts} prompts x rollout.n = {n} = {prompts * n} responses",
            f"ppo_mini_batch_size = {mini} prompts = {mini * n} responses an optimiser step",
            "micro-batches are cut by tokens" if not micro
            else f"ppo_micro_batch_size_per_gpu = {micro} responses of one of {_ranks(v)} devices",
        ),
    )  # fmt: skip


def run(v: Values) -> dict[str, Any]:
    """Recipe keys beyond the objective."""
    out: dict[str, Any] = {
        "rollout.max_tokens": int(v["data.max_response_length"]), "rollout.temperature": float(v[R + "temperature"]),
        "rollout.top_p": float(v[R + "top_p"]), "rollout.top_k": max(int(v[R + "top_k"]), 0),
        "train.learning_rate": float(v[A + "optim.lr"]), "train.weight_decay": float(v[A + "optim.weight_decay"]),
    }  # fmt: skip
    if v["trainer.total_training_steps"]:
        out["train.steps"] = int(v["trainer.total_training_steps"])
    return out


DIALECT = Dialect(
    "verl", "verl", "0.10.0.dev at 1dda039b9 (2026-08-22)",
    {"core": "verl/trainer/ppo/core_algos.py", "losses": "verl/workers/utils/losses.py",
     "rcorr": "verl/trainer/ppo/rollout_corr_helper.py", "rb": "verl/trainer/ppo/v1/replay_buffer.py",
     "trainer_base": "verl/trainer/ppo/v1/trainer_base.py", "tf": "verl/utils/torch_functional.py"},
    OPTIONS, RULES, CAVEATS, parse, units, run,
)  # fmt: skip
