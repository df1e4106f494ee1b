"""Presets: rows of data with a citation and the differences spelled out. No torch.

A preset fills every field; any key overrides one. What a name means elsewhere differs, so each row says how.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gropius.errors import ObjectiveError, did_you_mean
from gropius.objective import presets_credit
from gropius.objective.preset import NO_KL, PLAIN, UNSCALED, Preset, clip_bounds, other_surrogate
from gropius.objective.spec import Objective, flatten, override
from gropius.objective.validate import check

_ROWS: tuple[Preset, ...] = (
    Preset(
        "reinforce",
        "REINFORCE: reward times score, the sequence is one action",
        "Williams 1992, Machine Learning 8",
        {"advantage.baseline": "none", **UNSCALED, **PLAIN, **NO_KL, "aggregate.kind": "response_sum"},
        "None: no baseline, no scale, no ratio; the sum over a response's tokens, mean over responses.",
        {
            "TRL": "no trainer of this name; RLOOTrainer is the nearest and adds a leave-one-out baseline and a clip.",
            "verl": "reinforce_plus_plus is the nearest; plain REINFORCE needs a custom estimator, and its default "
            "policy loss clips (with dual clip c = 3) and averages over tokens.",
            "OpenRLHF": "--advantage_estimator reinforce whitens over the batch and runs the clipped token loss.",
        },
    ),
    Preset(
        "rloo",
        "RLOO: leave-one-out baseline, no scale, no clip",
        "Ahmadian et al. 2024, arXiv 2402.14740, section 2.3 and eq. 3",
        {
            "advantage.baseline": "leave_one_out",
            **UNSCALED,
            **PLAIN,
            "kl.estimator": "k1",
            "kl.place": "reward",
            "kl.coefficient": 0.03,
            "aggregate.kind": "response_sum",
        },
        "None: the sequence is one action; β = 0.03 is the paper's TL;DR setting (0.10 on HH).",
        {
            "TRL": "RLOOTrainer multiplies the product of token ratios and clips it at 0.2; β 0.05 in the reward.",
            "verl": "rloo only changes the advantage; the loss stays the token-level dual clip with token mean.",
            "OpenRLHF": "rloo only changes the advantage; the loss stays the token-level clip with token mean.",
        },
    ),
    Preset(
        "grpo",
        "GRPO: group mean and population std, token clip, response mean, k3",
        "Shao et al. 2024 (DeepSeekMath), arXiv 2402.03300 v3, eqs. 3-4, section 4.1.2",
        {},
        "The paper prints neither which std (population here) nor an epsilon (0 here) nor the clip bound (0.2 here).",
        {
            "TRL": 'loss_type defaults to "dapo" (token mean), β to 0, std is the sample std plus 1e-4; '
            'write loss_type = "grpo" and beta = 0.04 for this denominator and KL.',
            "verl": "sample std plus 1e-6, token mean, dual clip c = 3 switched on, no KL term unless use_kl_loss.",
            "OpenRLHF": "group_norm: sample std plus 1e-9, token mean, KL by --kl options.",
        },
    ),
    Preset(
        "dr_grpo",
        "Dr. GRPO: neither the group std nor the response's own length",
        "Liu et al. 2025, arXiv 2503.20783 v2, section 3.2; the authors' code for C",
        {**UNSCALED, **NO_KL, "aggregate.kind": "constant_length", "aggregate.length": 3000},
        "The printed objective has no length divisor at all; the authors' code divides by the generation budget, 3000. "
        "Set aggregate.length to your own budget; it rescales the learning rate and nothing else.",
        {
            "TRL": 'loss_type = "dr_grpo" divides by max_completion_length and keeps the std unless '
            'scale_rewards = "none" is set as well.',
            "verl": "needs norm_adv_by_std_in_grpo = False and loss_agg_mode = seq-mean-token-sum-norm, set apart.",
            "OpenRLHF": "dr_grpo only removes the std; the loss stays a token mean.",
        },
    ),
    Preset(
        "dapo",
        "DAPO: asymmetric clip, dynamic sampling, token mean, soft overlong penalty by hand",
        "Yu et al. 2025, arXiv 2503.14476, eqs. 8, 11-13",
        {
            **clip_bounds(0.2, 0.28),
            **NO_KL,
            "aggregate.kind": "token_mean",
            "selection.dead": "refill",
        },
        "Eq. 12 as printed averages tokens inside each prompt (prompt_mean here); the released code and this row use "
        "the token mean of the batch. The overlong penalty depends on the run's length limit: switch it on with "
        'selection.truncated = "soft_penalty", overlong_max and overlong_cache (paper: 20480, 4096).',
        {
            "TRL": 'loss_type = "dapo" is the token mean only: symmetric clip unless epsilon_high = 0.28, no dynamic '
            "sampling, sample std plus 1e-4.",
            "verl": "the DAPO recipe: sample std plus 1e-6, dual clip c = 10, at most 10 refills.",
            "OpenRLHF": "--dynamic_filtering with clip 0.2/0.28 and the token mean; sample std plus 1e-9.",
        },
    ),
    Preset(
        "gspo",
        "GSPO: one ratio a sequence, the geometric mean of its token ratios",
        "Zheng et al. 2025, arXiv 2507.18071 v2, eqs. 5-7",
        {"ratio.level": "sequence", **clip_bounds(3e-4, 4e-4), **NO_KL},
        "None; population std, as the paper does not name one.",
        {
            "TRL": 'importance_sampling_level = "sequence" with loss_type = "grpo"; with the default "dapo" a response '
            "is weighted by its length.",
            "verl": 'loss_mode = "gspo" runs the sequence_token form with the log-ratio capped at 10.',
            "OpenRLHF": 'policy_loss_type = "gspo" is a sequence ratio; its default clip of 0.2 is far too wide.',
        },
    ),
    Preset(
        "gspo_token",
        "GSPO-token: the sequence ratio with per-token advantages",
        "Zheng et al. 2025, arXiv 2507.18071 v2, eqs. 13-14",
        {"ratio.level": "sequence_token", **clip_bounds(3e-4, 4e-4), **NO_KL},
        "None; equals gspo in value and gradient while a response's tokens share one advantage.",
        {
            "TRL": "was an experimental trainer; absent from 1.16.",
            "verl": 'this is what loss_mode = "gspo" runs.',
            "OpenRLHF": "absent.",
        },
    ),
    Preset(
        "cispo",
        "CISPO: the detached, capped ratio weighs log π; no token is dropped",
        "MiniMax-M1 2025, arXiv 2506.13585, eqs. 4-5",
        {**other_surrogate("capped", cap=5.0), **NO_KL, "aggregate.kind": "token_mean"},
        "The paper never prints the cap; 5.0 is the absolute ratio that later reports use. No lower bound, as printed.",
        {
            "TRL": 'loss_type = "cispo" reads epsilon_high as the absolute cap; left at its default of 0.2 it shrinks '
            "every gradient five-fold.",
            "verl": "the cap is an offset (1 + clip_ratio_high) and a lower bound of 1 - 0.2 is on by default.",
            "OpenRLHF": "absent.",
        },
    ),
    Preset(
        "reinforce_pp",
        "REINFORCE++: k1 to go in the reward, whitened over the batch's tokens, token clip",
        "Hu et al. 2025, arXiv 2501.03262 v9, eqs. 4-5",
        {
            "advantage.baseline": "none",
            **UNSCALED,
            "advantage.whiten": "tokens",
            "kl.estimator": "k1",
            "kl.place": "reward",
            "kl.reward_form": "to_go",
            "kl.coefficient": 0.01,
        },
        "The paper does not say over which population it whitens (tokens here) nor with which std (population here); "
        "γ = 1.",
        {
            "TRL": "absent.",
            "verl": "reinforce_plus_plus whitens over tokens (sample std), dual clip, token mean.",
            "OpenRLHF": "reinforce whitens over tokens with rsqrt(var + 1e-8) and averages over tokens.",
        },
    ),
    Preset(
        "reinforce_pp_baseline",
        "REINFORCE++ with baseline: group mean, then batch whitening, a separate k2 term",
        "Hu et al. 2025, arXiv 2501.03262 v9, eqs. 1, 6-8",
        {
            **UNSCALED,
            "advantage.whiten": "sequences",
            "kl.estimator": "k2",
            "kl.coefficient": 0.01,
        },
        "The coefficient of the k2 term is not reported; 0.01 here. Whitened over sequences with the population std.",
        {
            "TRL": "absent.",
            "verl": "reinforce_plus_plus_baseline whitens over tokens (sample std): long responses count more.",
            "OpenRLHF": "reinforce_baseline whitens over tokens and averages the loss over tokens.",
        },
    ),
    Preset(
        "lite_ppo",
        "Lite PPO: group mean, batch std, token mean",
        "Liu et al. 2025 (Tricks or Traps), arXiv 2508.08221",
        {"advantage.scale": "batch_std", **NO_KL, "aggregate.kind": "token_mean"},
        "Read as the std of the batch's raw rewards; the paper does not print ddof (population here).",
        {
            "TRL": 'scale_rewards = "batch" with loss_type = "dapo": sample std plus 1e-4.',
            "verl": "absent.",
            "OpenRLHF": "absent.",
        },
    ),
    Preset(
        "opo",
        "OPO: exactly on-policy with the length-weighted baseline",
        "Hao et al. 2025, arXiv 2505.23585",
        {
            "advantage.baseline": "length_weighted",
            **UNSCALED,
            **PLAIN,
            **NO_KL,
            "aggregate.kind": "response_sum",
        },
        "None: baseline Σ L_i R_i / Σ L_i, no scale, no ratio, no KL.",
        {"TRL": "absent.", "verl": "opo only changes the advantage.", "OpenRLHF": "absent."},
    ),
    Preset(
        "maxrl",
        "MaxRL: the residual divided by the group's mean",
        "arXiv 2602.02710",
        {"advantage.scale": "group_mean", **PLAIN, **NO_KL, "aggregate.kind": "response_sum"},
        "None known: A = (R − mean)/mean, 0 for a group without success; rewards must not be negative.",
        {"TRL": "absent.", "verl": "absent.", "OpenRLHF": "absent."},
    ),
    Preset(
        "gpg",
        "GPG: plain policy gradient, rescaled by the live share",
        "Chu et al. 2025, arXiv 2504.02546",
        {
            **UNSCALED,
            "advantage.rescale_live": True,
            **PLAIN,
            **NO_KL,
            "aggregate.kind": "token_mean",
        },
        "F_norm = 1, the final recipe. The paper resamples below a live share of 0.6; "
        'write selection.dead = "refill" for full batches. Its repository averages per response.',
        {
            "TRL": "absent.",
            "verl": "gpg multiplies by B over the number of non-zero rewards, which is another number.",
            "OpenRLHF": "absent.",
        },
    ),
    Preset(
        "sapo",
        "SAPO: a smooth gate in place of the clip",
        "arXiv 2511.20347, eq. 5",
        {**other_surrogate("soft_gate", tau_positive=1.0, tau_negative=1.05), **NO_KL},
        "None; A = 0 takes the negative temperature. The value at ratio 1 is 2A/τ, only the gradient matches.",
        {"TRL": 'loss_type = "sapo": sample std plus 1e-4.', "verl": 'loss_mode = "sapo".', "OpenRLHF": "absent."},
    ),
    Preset(
        "gmpo",
        "GMPO: the geometric mean of one-sidedly clipped token ratios",
        "Zhao et al. 2025, arXiv 2507.20673",
        {"surrogate.kind": "log_clip", "surrogate.low": 0.4, "surrogate.high": 0.4, **NO_KL},
        "None: bounds on the log-ratio, (e^−0.4, e^0.4).",
        {
            "TRL": "experimental trainer; ignores the mismatch correction and the off-policy mask.",
            "verl": 'loss_mode = "geo_mean"; averaged per micro-batch in some versions.',
            "OpenRLHF": "absent.",
        },
    ),
    Preset(
        "dppo",
        "DPPO: a mask on the divergence from the sampler in place of the ratio clip",
        "arXiv 2602.04879 (binary total variation)",
        {
            **other_surrogate("divergence_mask", divergence="tv", threshold=0.15, cap=20.0),
            "ratio.anchor": "sampler",
            **NO_KL,
            "aggregate.kind": "constant_length",
            "aggregate.length": 3000,
        },
        "Threshold 0.15 and cap 20 are those of the public example; the constant length is not printed, 3000 here.",
        {
            "TRL": "absent from 1.16.",
            "verl": 'loss_mode = "dppo_tv" / "dppo_kl": the loss value differs, the gradient does not.',
            "OpenRLHF": "absent.",
        },
    ),
    Preset(
        "scalerl",
        "ScaleRL: truncated importance-sampled REINFORCE against the sampler, prompt mean, batch std",
        "Khatri et al. 2025, arXiv 2510.13786, section 4",
        {
            "advantage.scale": "batch_std",
            "advantage.scale_of": "residuals",
            "ratio.anchor": "sampler",
            **other_surrogate("capped", cap=5.0),
            **NO_KL,
            "aggregate.kind": "prompt_mean",
            "selection.dead": "drop",
        },
        "The paper reports 4 to 8 as equivalent caps; 5 here. Its curriculum (retire prompts solved nine times in "
        "ten), float32 head and forced interruptions are settings of the run, not of the objective.",
        {
            "TRL": 'no such name; loss_type = "cispo" with epsilon_high = 5.0 and scale_rewards = "batch" is '
            "nearest, with a token mean.",
            "verl": "no such name; its cispo loss takes the cap as an offset from 1.",
            "OpenRLHF": "absent.",
        },
    ),
)

PRESETS: dict[str, Preset] = {row.name: row for row in (*_ROWS, *presets_credit.ROWS)}


def resolve(preset: str | None = None, overrides: Mapping[str, Any] | None = None) -> Objective:
    """Fill a preset, apply overrides (`axis.key` or nested tables), and refuse what contradicts or does nothing.

    Errors: ObjectiveError for an unknown preset, key or value, a contradiction, or a key without effect.

    >>> resolve("grpo", {"surrogate.high": 0.28}).surrogate.high
    0.28
    """
    name = preset or "grpo"
    if name not in PRESETS:
        raise ObjectiveError(f"objective.preset = {name!r} is unknown; {did_you_mean(name, PRESETS)}")
    flat = flatten(overrides or {})
    objective = override(PRESETS[name].objective, flat)
    if objective.kl.estimator == "none" and "kl.coefficient" not in flat:
        objective = override(objective, {"kl.coefficient": 0.0})  # the preset's, of a term that is not there
    check(objective, flat)
    return objective
