"""Presets whose credit is more than one number a response, or whose objective is more than its mean. No torch."""

from __future__ import annotations

from typing import Any

from gropius.objective.preset import NO_KL, PLAIN, UNSCALED, Preset, clip_bounds, other_surrogate

_ABSENT = "absent as a preset of this name."
_DAPO: dict[str, Any] = {**clip_bounds(0.2, 0.28), **NO_KL, "aggregate.kind": "token_mean"}

ROWS: tuple[Preset, ...] = (
    Preset(
        "ppo",
        "PPO: clipped token loss, a critic with GAE, k1 of every token in its reward",
        "Schulman et al. 2017, arXiv 1707.06347, eqs. 7, 11-12",
        {
            "advantage.baseline": "critic",
            **UNSCALED,
            "advantage.whiten": "tokens",
            "advantage.gae_lambda": 0.95,
            "advantage.gae_lambda_critic": 0.95,
            "kl.estimator": "k1",
            "kl.place": "reward",
            "kl.reward_form": "token",
            "kl.coefficient": 0.05,
            "aggregate.kind": "token_mean",
        },
        "γ = 1 and whitened advantages (population std) are RLHF practice; the paper's are 0.99 and none. Returns are "
        "formed before whitening. The paper's adaptive KL to the policy before the update is not included: k1 to a "
        "reference, in the reward of each token, is what RLHF practice runs. How the critic learns is [critic].",
        {
            "TRL": "PPOTrainer: critic, GAE with λ 0.95, whitened advantages, k1 in the reward with 0.05.",
            "verl": "gae with a critic; the policy loss has the dual clip c = 3 switched on.",
            "OpenRLHF": "gae with a critic, whitened advantages, KL in the reward with 0.01.",
        },
    ),
    Preset(
        "vapo",
        "VAPO: PPO with λ by length, a critic with λ = 1, clip-higher, token mean, imitation of right answers",
        "Yue et al. 2025, arXiv 2504.05118",
        {
            "advantage.baseline": "critic",
            **UNSCALED,
            "advantage.gae_alpha": 0.05,
            **_DAPO,
            "terms.imitation": 0.1,
        },
        "λ = 1 − 1/(α L) is negative below 20 tokens and is kept in [0, 1] here. Its value pre-training (50 steps), "
        "learning rates and group sampling are settings of the run: [critic] pretrain_steps, learning_rate.",
        {"TRL": _ABSENT, "verl": _ABSENT, "OpenRLHF": _ABSENT},
    ),
    Preset(
        "grpo_process",
        "GRPO with process supervision: the group's step scores pooled and standardised, summed from a token on",
        "Shao et al. 2024 (DeepSeekMath), arXiv 2402.03300 v3, section 4.1.3",
        {"advantage.credit": "step"},
        "The paper prints neither which std (population here) nor an epsilon (0 here). A reward without a position is "
        "a term of its own beside the steps (advantage.final_weight); the paper has none.",
        {"TRL": _ABSENT, "verl": _ABSENT, "OpenRLHF": _ABSENT},
    ),
    Preset(
        "grpo_turn",
        "GRPO with turn credit: the return to go of a turn against the same turn of its siblings",
        "Group-relative credit by turn, as in GiGPO (arXiv 2505.10978) and MT-GRPO (arXiv 2505.11821), restated",
        {"advantage.credit": "turn", "advantage.pool": "turn_index", **NO_KL},
        "Neither paper's objective: both add a turn term to an outcome term, and so does this row (final_weight 1), "
        "but a turn's return here holds every later turn reward with discount 1, and its siblings are those that had a "
        "turn of the same number.",
        {"TRL": _ABSENT, "verl": _ABSENT, "OpenRLHF": _ABSENT},
    ),
    Preset(
        "pass_at_k",
        "Pass@k training: the expected best of k, standardised over the group's k-subsets",
        "Chen et al. 2025, arXiv 2508.10751, the analytic advantage",
        {
            "advantage.transform": "best_of_k",
            "advantage.k": 4,
            "advantage.scale": "subset_std",
            **_DAPO,
            "surrogate.high": 0.2,
        },
        "The closed form over all subsets, for any rewards; the paper's is for right and wrong. k = 4 is an example, "
        "and so are clip and denominator.",
        {"TRL": _ABSENT, "verl": _ABSENT, "OpenRLHF": _ABSENT},
    ),
    Preset(
        "pkpo",
        "PKPO: an unbiased gradient of the expected best of k, with the best of k − 1 others as baseline",
        "Walder and Karkhanis 2025, arXiv 2505.15201, eqs. 5, 11 and the leave-one-out-minus-one baseline",
        {
            "advantage.transform": "pkpo",
            "advantage.k": 4,
            "advantage.baseline": "subset",
            **UNSCALED,
            **PLAIN,
            **NO_KL,
            "aggregate.kind": "response_sum",
        },
        'None; k = 4 is an example. advantage.baseline = "none" gives the estimator without its baseline.',
        {"TRL": _ABSENT, "verl": _ABSENT, "OpenRLHF": _ABSENT},
    ),
    Preset(
        "grpo_passk",
        "Best-of-n credit: the best response alone moves, by its lead over the second",
        "arXiv 2503.19595",
        {"advantage.baseline": "runner_up", **UNSCALED, **NO_KL, "aggregate.kind": "token_mean"},
        "None known of the advantage; loss and denominator are those of the public implementation's defaults.",
        {
            "TRL": _ABSENT,
            "verl": "grpo_passk, which also divides by the group's std (sample, plus 1e-6) unless told not to.",
            "OpenRLHF": _ABSENT,
        },
    ),
    Preset(
        "gdpo",
        "GDPO: each reward standardised within its group, then their sum over the batch",
        "arXiv 2601.05242",
        {
            "advantage.combine": "normalise_then_sum",
            "advantage.whiten": "sequences",
            **clip_bounds(0.2, 0.2),
            **NO_KL,
        },
        "Population std here; the public implementations take the sample std.",
        {
            "TRL": 'multi_objective_aggregation = "normalize_then_sum": sample std plus 1e-4.',
            "verl": "gdpo whitens over tokens.",
            "OpenRLHF": _ABSENT,
        },
    ),
    Preset(
        "otb",
        "REINFORCE with the optimal token baseline",
        "verl's documentation (docs/algo/otb.md), 2025",
        {
            "advantage.baseline": "optimal_token",
            **UNSCALED,
            **PLAIN,
            **NO_KL,
            "aggregate.kind": "token_mean",
        },
        "The energy of a token is the squared length of its score in the logits at the policy before the batch's first "
        "update. Denominator and absence of a clip are examples.",
        {"TRL": _ABSENT, "verl": "optimal_token_baseline.", "OpenRLHF": _ABSENT},
    ),
    Preset(
        "high_entropy",
        "The 80/20 rule: DAPO's policy term on the fifth of tokens with the highest entropy",
        "Wang et al. 2025, arXiv 2506.01939",
        {**_DAPO, "selection.dead": "refill", "selection.entropy_top": 0.2},
        "The quantile is that of the whole optimiser batch; the denominator keeps every token.",
        {
            "TRL": "top_entropy_quantile = 0.2, a quantile of each process's batch.",
            "verl": "a recipe of its own.",
            "OpenRLHF": _ABSENT,
        },
    ),
    Preset(
        "clip_cov",
        "Clip-Cov: a share of the tokens with high covariance of log-probability and advantage leaves the policy term",
        "Cui et al. 2025, arXiv 2505.22617",
        {
            **clip_bounds(0.2, 0.2),
            **NO_KL,
            "aggregate.kind": "token_mean",
            "selection.covariance": "clip",
            "selection.covariance_share": 2e-4,
            "selection.covariance_low": 1.0,
            "selection.covariance_high": 5.0,
        },
        "Which tokens of the band leave is drawn by a hash of each token's own log-probability: the same batch gives "
        "the same tokens in any order and on any number of ranks. At least one leaves when one is in the band.",
        {
            "TRL": _ABSENT,
            "verl": 'loss_mode = "clip_cov": drawn at random, over each micro-batch.',
            "OpenRLHF": _ABSENT,
        },
    ),
    Preset(
        "kl_cov",
        "KL-Cov: |log ratio| on the tokens with the highest covariance of log-probability and advantage",
        "Cui et al. 2025, arXiv 2505.22617",
        {
            "surrogate.kind": "none",
            "surrogate.low": 0.0,
            "surrogate.high": 0.0,
            **NO_KL,
            "aggregate.kind": "token_mean",
            "selection.covariance": "kl",
            "selection.covariance_share": 2e-4,
            "selection.covariance_coefficient": 1.0,
        },
        "None known: an unclipped ratio, and at least one token is picked.",
        {"TRL": _ABSENT, "verl": 'loss_mode = "kl_cov": over each micro-batch.', "OpenRLHF": _ABSENT},
    ),
    Preset(
        "luffy",
        "LUFFY: a demonstration in the group, with π/(π + γ) in place of its ratio",
        "Yan et al. 2025, arXiv 2504.14945, and the released script",
        {
            **UNSCALED,
            "surrogate.kind": "none",
            "surrogate.low": 0.0,
            "surrogate.high": 0.0,
            "surrogate.demonstrations": "shaped",
            "surrogate.gamma": 0.1,
            **NO_KL,
            "aggregate.kind": "constant_length",
            "aggregate.length": 3000,
            "terms.entropy": 0.001,
        },
        "One demonstration of eight siblings is rollout.demonstrations = 1 with group_size = 8. The constant length is "
        "the run's budget; 3000 here.",
        {"TRL": _ABSENT, "verl": "the authors' fork.", "OpenRLHF": _ABSENT},
    ),
    Preset(
        "vespo",
        "VESPO: a smooth, detached weight of the product of token ratios",
        "arXiv 2602.10693",
        {
            "ratio.level": "sequence_product",
            **other_surrogate("gamma_gate", k_positive=2.0, lambda_positive=3.0, k_negative=3.0, lambda_negative=2.0),
            **NO_KL,
            "aggregate.kind": "token_mean",
        },
        "The constants are those of the public implementation.",
        {"TRL": 'loss_type = "vespo".', "verl": _ABSENT, "OpenRLHF": _ABSENT},
    ),
    Preset(
        "real",
        "REAL: right and wrong siblings told apart by their mean log-ratios",
        "arXiv 2602.05630",
        {**other_surrogate("classify", tau=0.5), **NO_KL},
        "None known. It looks at whole groups; value and gradient are those of the policy as it is at each update.",
        {"TRL": _ABSENT, "verl": _ABSENT, "OpenRLHF": _ABSENT},
    ),
)
