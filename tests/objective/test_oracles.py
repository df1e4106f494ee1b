"""Every oracle of tests/oracles/objective.json that speaks of an axis we have, in value and gradient."""

from __future__ import annotations

import importlib
import math
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from drawn import Drawn, advantages, close, evaluate, response
from entries import ENTRIES, READ, batch, entry, ragged, reads, responses

from gropius import explain, explain_rewards
from gropius.errors import ObjectiveError
from gropius.objective.kl import GRADIENTS
from gropius.objective.presets import PRESETS, resolve
from gropius.objective.ratio import Segments, log_ratio
from gropius.objective.selection import Response, assign, entropy_threshold, group_state, overlong_penalty
from gropius.objective.spec import Ratio, Selection

NO_KL = {"kl.estimator": "none"}
TOKEN_MEAN = {"aggregate.kind": "token_mean"}
CLIPPED = {**NO_KL, **TOKEN_MEAN}


# --- losses: value and gradient -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """The objective that an entry evaluates. given: the input that supplies advantages; None computes them from the
    rewards, and they must equal the entry's."""

    preset: str
    overrides: dict[str, Any] = field(default_factory=dict)
    given: str | None = None


def _corrected(kind: str, low: float = 0.0, high: float = math.inf, **more: Any) -> Case:
    bounds = {"ratio.correction": kind, "ratio.correction_low": low, "ratio.correction_high": high}
    return Case("grpo", {**CLIPPED, **bounds, **more})


DPPO = {"ratio.anchor": "snapshot", **TOKEN_MEAN}
LOSSES: dict[str, Case] = {
    "loss_reinforce_raw_reward": Case("reinforce"),
    "loss_reinforce_batch_mean_baseline": Case("reinforce", {"advantage.baseline": "batch_mean"}),
    "loss_rloo_sequence_action": Case("rloo", NO_KL),
    "loss_rloo_trl_sequence_product_clip": Case(
        "grpo",
        {
            "advantage.baseline": "leave_one_out",
            "advantage.scale": "none",
            "ratio.level": "sequence_product",
            **NO_KL,
        },
    ),
    "loss_ppo_clip_token_advantages": Case("ppo", NO_KL, "advantages_per_token"),
    "loss_ppo_dual_clip": Case("grpo", {**CLIPPED, "surrogate.dual": 3.0}),
    "loss_grpo_deepseekmath": Case("grpo"),
    "loss_grpo_trl_style": Case("grpo", {**NO_KL, "advantage.ddof": 1, "advantage.epsilon": 1e-4}),
    "loss_dr_grpo_C8": Case("dr_grpo", {"aggregate.length": 8}),
    "loss_dapo_token_mean": Case("dapo"),
    "loss_dapo_overlong_filtering_masked_denominator": Case("dapo", {"selection.truncated": "mask_loss"}),
    "loss_gspo_paper_3e-4_4e-4": Case("gspo"),
    "loss_gspo_token_paper_3e-4_4e-4": Case("gspo_token"),
    "loss_gspo_token_wide_0.05": Case("gspo_token", {"surrogate.low": 0.05, "surrogate.high": 0.05}),
    "loss_gspo_sequence_ratio_token_advantages": Case(
        "gspo", {"surrogate.low": 0.3, "surrogate.high": 0.3}, "advantages_per_token"
    ),
    "loss_cispo_upper_1.28": Case("cispo", {"surrogate.cap": 1.28}),
    "loss_cispo_trl_absolute_cap_5": Case("cispo"),
    "loss_cispo_unified_mask": Case("dapo", {"surrogate.kind": "clip_masked"}),
    "loss_sapo": Case("sapo"),
    "loss_gpg": Case("gpg"),
    "loss_reinforce_pp_baseline_k2": Case("reinforce_pp_baseline"),
    "loss_scalerl": Case("scalerl", {"surrogate.cap": 3.0}),
    "loss_mismatch_tis_token_C2": _corrected("truncate", high=2.0),
    "loss_mismatch_tis_token_0.5_2": _corrected("truncate", 0.5, 2.0),
    "loss_mismatch_mis_token_0.5_2": _corrected("mask", 0.5, 2.0),
    "loss_mismatch_mis_sequence_C3": _corrected("sequence_mask", high=3.0),
    "loss_mismatch_geo_rejection_0.8_1.25": _corrected("geometric_mask", 0.8, 1.25),
    "loss_mismatch_mis_token_denominator_shrinks": _corrected("mask", 0.5, 2.0, **{"aggregate.count_corrected": False}),
    "loss_v32_offpolicy_sequence_mask": Case("grpo", {"selection.off_policy_mask": 0.1}),
    "loss_dppo_binary_tv": Case("dppo", {**DPPO, "surrogate.threshold": 0.05}),
    "loss_dppo_binary_kl": Case("dppo", {**DPPO, "surrogate.divergence": "kl", "surrogate.threshold": 0.02}),
    "loss_entropy_top20": Case("dapo", {"selection.entropy_top": 0.2}),
}
reads(*LOSSES)


def _objective(case: Case) -> Any:
    return resolve(case.preset, case.overrides)


@pytest.mark.parametrize("name", LOSSES)
def test_loss_gradient_and_advantages_equal_the_oracle_in_float64(name: str) -> None:
    inputs, expected = entry(name)
    case = LOSSES[name]
    result = evaluate(_objective(case), responses(inputs, case.given))
    for advantage in ("advantages", "advantages_per_token"):
        if advantage in inputs:
            rows = zip(inputs[advantage], inputs["lengths"], strict=True)
            wanted = np.concatenate([np.broadcast_to(a, (n,)) for a, n in rows])
            close(ragged([a.advantage for a in result.assignment.responses]), wanted)
    close(result.loss, expected["loss"])
    close(ragged(result.gradient), ragged(expected["grad_logp"]))


@pytest.mark.parametrize("name", LOSSES)
def test_loss_and_gradient_equal_the_oracle_in_float32(name: str) -> None:
    inputs, expected = entry(name)
    case = LOSSES[name]
    result = evaluate(_objective(case), responses(inputs, case.given), dtype=torch.float32)
    close(result.loss, expected["loss"], 2e-5, 1e-6)
    close(ragged(result.gradient), ragged(expected["grad_logp"]), 2e-5, 1e-6)


@pytest.mark.parametrize("name", LOSSES)
def test_explain_gives_the_oracle_and_its_contributions_add_up(name: str) -> None:
    inputs, expected = entry(name)
    case = LOSSES[name]
    answer = explain(batch(inputs, case.given), case.preset, case.overrides)
    tokens = [t for g in answer["groups"] for r in g["responses"] for t in r["tokens"]]
    close(answer["loss"], expected["loss"])
    close([t["gradient"] for t in tokens], ragged(expected["grad_logp"]))
    close(math.fsum(t["contribution"] for t in tokens), expected["loss"])


@pytest.mark.parametrize("name", [n for n in LOSSES if "active" in ENTRIES[n]["expected"]])
def test_the_flat_branch_is_where_the_oracle_says_the_clip_is_not_active(name: str) -> None:
    inputs, expected = entry(name)
    case = LOSSES[name]
    result = evaluate(_objective(case), responses(inputs, case.given))
    active = [np.broadcast_to(a, (n,)) for a, n in zip(expected["active"], inputs["lengths"], strict=True)]
    assert (1 - result.flat("flat")).tolist() == ragged(active).tolist()


@pytest.mark.parametrize(
    "name",
    [n for n in LOSSES if {"sequence_ratio", "sequence_product_ratio"} & set(ENTRIES[n]["expected"])],
)
def test_the_sequence_ratio_equals_the_oracle(name: str) -> None:
    inputs, expected = entry(name)
    result = evaluate(_objective(LOSSES[name]), responses(inputs))
    wanted = expected.get("sequence_ratio") or expected["sequence_product_ratio"]
    close([n["ratio"][0] for n in result.numbers], wanted)


@pytest.mark.parametrize("name", [n for n in LOSSES if "weight" in ENTRIES[n]["expected"]])
def test_the_correction_weight_equals_the_oracle(name: str) -> None:
    inputs, expected = entry(name)
    result = evaluate(_objective(LOSSES[name]), responses(inputs))
    close(result.flat("correction"), ragged(expected["weight"]))


def test_ratio_outside_the_interval_and_flat_branch_are_two_fractions() -> None:
    inputs, expected = entry("loss_ppo_clip_token_advantages")
    case = LOSSES["loss_ppo_clip_token_advantages"]
    answer = explain(batch(inputs, case.given), case.preset, case.overrides)
    close(answer["metrics"]["clip_fraction"], expected["fraction_clipped_branch"])
    ratios = [t["ratio"] for g in answer["groups"] for r in g["responses"] for t in r["tokens"]]
    close(np.mean([abs(r - 1) > 0.2 for r in ratios]), expected["fraction_ratio_outside"])


def test_grpo_is_its_policy_loss_plus_beta_times_its_k3() -> None:
    inputs, expected = entry("loss_grpo_deepseekmath")
    policy = evaluate(resolve("grpo", NO_KL), responses(inputs))
    close(policy.loss, expected["policy_loss"])
    full = evaluate(resolve("grpo"), responses(inputs))
    weights = ragged([a.weight for a in full.assignment.responses])
    close(float(weights @ full.flat("kl")), expected["kl_k3_loss"])


def test_masked_truncated_tokens_may_stay_in_the_denominator() -> None:
    inputs, expected = entry("loss_dapo_overlong_filtering_masked_denominator")
    filtered = {"selection.truncated": "mask_loss"}
    full = evaluate(resolve("dapo", {**filtered, "aggregate.count_masked": True}), responses(inputs))
    close(full.loss, expected["loss"] * 14 / 18)
    close(full.loss, 0.046878, atol=5e-7)


def test_mask_and_token_values_of_single_entries() -> None:
    inputs, expected = entry("loss_entropy_top20")
    result = evaluate(_objective(LOSSES["loss_entropy_top20"]), responses(inputs))
    close(ragged([a.keep for a in result.assignment.responses]), ragged(expected["mask"]))
    close(entropy_threshold([np.array(e) for e in inputs["entropy"]], 0.2), expected["threshold"])
    inputs, expected = entry("loss_v32_offpolicy_sequence_mask")
    result = evaluate(_objective(LOSSES["loss_v32_offpolicy_sequence_mask"]), responses(inputs))
    assert [bool(n["correction"][0]) for n in result.numbers] == expected["keep"]
    for name in ("loss_dppo_binary_tv", "loss_dppo_binary_kl"):
        inputs, expected = entry(name)
        result = evaluate(_objective(LOSSES[name]), responses(inputs))
        assert (1 - result.flat("flat")).tolist() == ragged(expected["keep"]).tolist()


def test_gmpo_divides_s_times_a_among_its_unclipped_tokens() -> None:
    """B0 by hand: S is the geometric mean of one-sidedly clipped ratios; g = −S A/(n L) where not clipped, else 0."""
    inputs, _ = entry("loss_grpo_deepseekmath")
    result = evaluate(resolve("gmpo"), responses(inputs))
    loss, gradient = 0.0, []
    for new, old, a in zip(inputs["logp"], inputs["logp_old"], inputs["advantages"], strict=True):
        raw = np.array(new) - np.array(old)
        kept = np.minimum(raw, 0.4) if a > 0 else np.maximum(raw, -0.4)
        ratio = math.exp(kept.mean())
        loss -= ratio * a / 8
        clipped = (raw > 0.4) if a > 0 else (raw < -0.4) if a < 0 else np.zeros(len(raw), bool)
        gradient.append(np.where(clipped, 0.0, -ratio * a / (8 * len(raw))))
    close(result.loss, loss)
    close(ragged(result.gradient), ragged(gradient))


@reads("grad_ratio_one_shared_by_all_clip_losses")
@pytest.mark.parametrize("name", ["grpo", "gspo", "gspo_token", "gmpo", "sapo", "cispo", "dapo", "dppo"])
def test_at_ratio_one_all_clip_losses_share_one_gradient(name: str) -> None:
    inputs, expected = entry("grad_ratio_one_shared_by_all_clip_losses")
    shared = {**NO_KL, "aggregate.kind": "response_mean"}
    anchor = {"ratio.anchor": "snapshot"} if name == "dppo" else {}
    drawn = responses({**inputs, "logp": inputs["logp_old"]})
    result = evaluate(resolve(name, {**shared, **anchor}), drawn)
    close(ragged(result.gradient), ragged(expected["grad_logp"]))
    values = {"sapo": "loss_sapo", "cispo": "loss_cispo"}
    close(result.loss, expected[values.get(name, "loss_grpo_gspo_gmpo")])


# --- advantages ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [n for n in ENTRIES if n.startswith("lesson_group_adv_")])
@reads(*[n for n in ENTRIES if n.startswith("lesson_group_adv_")])
def test_group_advantages_of_the_lessons(name: str) -> None:
    inputs, expected = entry(name)
    rewards = inputs["rewards"]
    checked = {"mean", "centered", "std_population"}
    replay = explain_rewards(rewards)
    close(replay["mean"], expected["mean"])
    close(replay["steps"][2]["values"], expected["centered"])
    close(replay["std"], expected["std_population"])
    for key, wanted in expected.items():
        kind, _, epsilon = key.partition("_std_eps")
        if epsilon:
            ddof = 0 if kind == "adv_population" else 1
            overrides = {"advantage.ddof": ddof, "advantage.epsilon": float(epsilon)}
            close(explain_rewards(rewards, "grpo", overrides)["advantages"], wanted)
        elif key == "std_sample":
            close(explain_rewards(rewards, "grpo", {"advantage.ddof": 1})["std"], wanted)
        elif key == "adv_rloo" and len(rewards) > 1:
            close(explain_rewards(rewards, "rloo")["advantages"], wanted)
        elif key == "adv_rloo":
            with pytest.raises(ObjectiveError, match="no other response"):
                explain_rewards(rewards, "rloo")
        else:
            assert key in checked


@reads("lesson_binary_closed_form")
def test_binary_rewards_have_the_closed_form() -> None:
    for size, right, correct, wrong in entry("lesson_binary_closed_form")[1]["rows"]:
        got = advantages(resolve("grpo"), [1.0] * right + [0.0] * (size - right))
        close(got, [correct] * right + [wrong] * (size - right))


@reads("lesson_equal_nondyadic_rewards")
def test_equal_rewards_that_binary_cannot_hold_give_exactly_zero() -> None:
    inputs, expected = entry("lesson_equal_nondyadic_rewards")
    for rewards in (inputs["rewards"], inputs["float32_rewards"], [float(np.float32(0.7))] * 7):
        for epsilon in (0.0, 1e-8, 1e-4):
            got = advantages(resolve("grpo", {"advantage.epsilon": epsilon}), rewards)
            assert got == expected["required_advantages"][: len(rewards)]


@reads("lesson_global_mean_versus_group_stats")
def test_a_batch_baseline_keeps_task_difficulty_and_a_group_baseline_does_not() -> None:
    inputs, expected = entry("lesson_global_mean_versus_group_stats")
    flat = [r for row in inputs["rewards"] for r in row]
    groups = [g for g, row in enumerate(inputs["rewards"]) for _ in row]
    centred = resolve("grpo", {"advantage.baseline": "batch_mean", "advantage.scale": "none"})
    whitened = resolve("grpo", {"advantage.baseline": "batch_mean", "advantage.scale": "batch_std"})
    close(flat[0] - advantages(centred, flat, groups)[0], expected["batch_mean"])
    close(advantages(centred, flat, groups), ragged(expected["global_centred"]))
    close(advantages(whitened, flat, groups), ragged(expected["global_whitened"]))
    close(
        np.divide(ragged(expected["global_centred"]), advantages(whitened, flat, groups)),
        [expected["batch_std_population"]] * 20,
    )
    close(advantages(resolve("grpo"), flat, groups), ragged(expected["group_population_z"]))


@reads("lesson_group_mean_is_mse_optimal_constant")
def test_the_group_mean_is_the_constant_of_least_squared_error() -> None:
    inputs, expected = entry("lesson_group_mean_is_mse_optimal_constant")
    rewards = np.array(inputs["rewards"])
    baseline = explain_rewards(inputs["rewards"])["steps"][1]["values"][0]
    close(baseline, expected["argmin"])
    for b, mse, slope in zip(inputs["probe_b"], expected["mse"], expected["dmse_db"], strict=True):
        close(((rewards - b) ** 2).mean(), mse)
        close(2 * (b - baseline), slope)


SIMPLE = {
    "adv_grpo_population": ("grpo", {}, "advantages"),
    "adv_dr_grpo": ("dr_grpo", {}, "advantages"),
    "adv_rloo": ("rloo", NO_KL, "advantages"),
}


@reads(*SIMPLE, "adv_grpo_sample_std")
@pytest.mark.parametrize(
    ("name", "preset", "overrides", "key"),
    [(n, *row) for n, row in SIMPLE.items()]
    + [
        ("adv_grpo_sample_std", "grpo", {"advantage.ddof": 1, "advantage.epsilon": float(e)}, f"advantages_eps{e}")
        for e in ("0", "1e-6", "1e-4")
    ],
)
def test_advantages_of_the_shared_batch(name: str, preset: str, overrides: dict[str, Any], key: str) -> None:
    inputs, expected = entry(name)
    close(advantages(resolve(preset, overrides), inputs["rewards"], inputs["groups"]), expected[key])


def test_leave_one_out_is_k_over_k_minus_one_times_the_centred_reward() -> None:
    inputs, expected = entry("adv_rloo")
    centred = advantages(resolve("dr_grpo"), inputs["rewards"], inputs["groups"])
    close(4 / 3 * np.array(centred), expected["via_K_over_K_minus_1"])


def _epsilon_under_the_root(objective: Any, rows: list[Response]) -> dict[str, float]:
    """verl adds 1e-8 to the variance; this is the epsilon on the std that does the same."""
    axis = replace(objective.advantage, whiten="none", epsilon=0.0)
    values = assign(replace(objective, advantage=axis), rows).responses
    variance = ragged([a.advantage for a in values]).var(ddof=axis.ddof)
    return {"advantage.epsilon": float(np.sqrt(variance + 1e-8) - np.sqrt(variance))}


@reads("adv_reinforce_pp_baseline")
@pytest.mark.parametrize(
    ("whiten", "ddof", "key"),
    [
        ("sequences", 0, "adv_sequence_level_ddof0"),
        ("sequences", 1, "adv_sequence_level_ddof1"),
        ("tokens", 0, "adv_token_level_ddof0_openrlhf"),
        ("tokens", 1, "adv_token_level_bessel_verl"),
    ],
)
def test_reinforce_pp_baseline_whitens_over_sequences_or_tokens(whiten: str, ddof: int, key: str) -> None:
    inputs, expected = entry("adv_reinforce_pp_baseline")
    overrides = {"advantage.whiten": whiten, "advantage.ddof": ddof}
    objective, drawn = resolve("reinforce_pp_baseline", overrides), [d.response for d in responses(inputs)]
    if key.endswith("verl"):
        overrides |= _epsilon_under_the_root(objective, drawn)
        objective = resolve("reinforce_pp_baseline", overrides)
    assignment = assign(objective, drawn)
    close(assignment.credit.centred, expected["centered"])
    rows = zip(expected[key], inputs["lengths"], strict=True)
    wanted = np.concatenate([np.broadcast_to(a, (n,)) for a, n in rows])
    close(ragged([a.advantage for a in assignment.responses]), wanted)


@reads("adv_reinforce_pp_base")
@pytest.mark.parametrize(
    ("ddof", "key"),
    [(0, "adv_whitened_tokens_ddof0"), (1, "adv_whitened_tokens_bessel_eps1e-8")],
)
def test_reinforce_pp_charges_the_kl_to_go_and_whitens_over_tokens(ddof: int, key: str) -> None:
    inputs, expected = entry("adv_reinforce_pp_base")
    rows = [d.response for d in responses(inputs)]
    overrides = {"kl.coefficient": inputs["beta"], "advantage.ddof": ddof}
    if key.endswith("1e-8"):
        overrides |= _epsilon_under_the_root(resolve("reinforce_pp", overrides), rows)
    whitened = assign(resolve("reinforce_pp", overrides), rows)
    close(ragged([a.advantage for a in whitened.responses]), ragged(expected[key]))
    plain = assign(resolve("reinforce_pp", {"kl.coefficient": inputs["beta"], "advantage.whiten": "none"}), rows)
    close(ragged([a.advantage for a in plain.responses]), ragged(expected["reward_to_go"]))


@reads("adv_kl_in_reward_sequence")
def test_a_kl_in_the_reward_is_subtracted_before_the_baseline() -> None:
    inputs, expected = entry("adv_kl_in_reward_sequence")
    rows = [d.response for d in responses(inputs)]
    for key, advantage in {
        "adv_rloo": {"baseline": "leave_one_out", "scale": "none"},
        "adv_centered": {"baseline": "group_mean", "scale": "none"},
        "adv_grpo_population": {"baseline": "group_mean", "scale": "group_std"},
    }.items():
        overrides = {"advantage": advantage, "kl.coefficient": inputs["beta"]}
        got = assign(resolve("rloo", overrides), rows)
        close([a.value for a in got.responses], expected[key])
        close([a.reward for a in got.responses], expected["shaped_rewards"])


@reads("adv_gpg_alpha")
def test_gpg_rescales_by_the_live_share() -> None:
    inputs, expected = entry("adv_gpg_alpha")
    got = advantages(resolve("gpg"), inputs["rewards"], inputs["groups"])
    close(got, expected["advantages"])
    plain = advantages(resolve("gpg", {"advantage.rescale_live": False}), inputs["rewards"], inputs["groups"])
    close(got[4] / plain[4], expected["alpha"])
    assert expected["alpha"] != expected["verl_alpha_nonzero_rewards"]


@reads("adv_gdpo")
def test_gdpo_normalises_each_reward_then_sums_then_whitens() -> None:
    inputs, expected = entry("adv_gdpo")
    pairs = zip(inputs["groups"], inputs["reward_1"], inputs["reward_2"], strict=True)
    rows = [response(str(g), {"one": a, "two": b}) for g, a, b in pairs]
    weights = dict(zip(("one", "two"), inputs["weights"], strict=True))
    apart = {"advantage.ddof": 1, "advantage.combine": "normalise_then_sum"}
    for key, overrides in {
        "weighted_sum": apart,
        "advantages": {**apart, "advantage.whiten": "sequences"},
        "grpo_on_summed_reward": {"advantage.ddof": 1},
    }.items():
        got = assign(resolve("grpo", overrides), rows, weights)
        close([a.value for a in got.responses], expected[key])
    for name, wanted in zip(("one", "two"), expected["per_reward_adv"], strict=True):
        alone = {"one": 0.0, "two": 0.0} | {name: 1.0}
        close([a.value for a in assign(resolve("grpo", apart), rows, alone).responses], wanted)


@reads("adv_remax")
def test_remax_subtracts_the_greedy_reward() -> None:
    inputs, expected = entry("adv_remax")
    rows = [response("q", r, greedy_reward=inputs["greedy_reward"]) for r in inputs["rewards"]]
    got = assign(resolve("reinforce", {"advantage.baseline": "greedy"}), rows)
    close([a.value for a in got.responses], expected["advantages"])


# --- aggregation --------------------------------------------------------------------------------------------------

KINDS = {
    "token_mean": {"aggregate.kind": "token_mean"},
    "seq_mean_token_mean": {"aggregate.kind": "response_mean"},
    "seq_mean_token_sum": {"aggregate.kind": "response_sum"},
    "seq_mean_token_sum_norm_C8": {"aggregate.kind": "constant_length", "aggregate.length": 8},
    "prompt_mean": {"aggregate.kind": "prompt_mean"},
}


@reads("aggregation_weights_b0")
@pytest.mark.parametrize("kind", KINDS)
def test_five_denominators_on_the_same_token_losses(kind: str) -> None:
    inputs, expected = entry("aggregation_weights_b0")
    result = evaluate(resolve("grpo", {**NO_KL, **KINDS[kind]}), responses(inputs))
    close(-result.flat("surrogate"), ragged(expected["token_loss"]))
    close(result.loss, expected["loss"][kind])
    if kind in expected["weights"]:
        close(ragged([a.weight for a in result.assignment.responses]), ragged(expected["weights"][kind]))


def test_the_token_mean_is_of_the_batch_and_not_of_micro_batches() -> None:
    inputs, expected = entry("aggregation_weights_b0")
    split = evaluate(resolve("grpo", CLIPPED), responses(inputs), parts=[range(3), range(3, 8)])
    close(split.loss, expected["token_mean_global"])
    assert abs(split.loss - expected["mean_of_microbatch_token_means_split_3_5"]) > 0.02


def _constant_losses(token_losses: list[list[float]], overrides: dict[str, Any]) -> float:
    """The aggregate of given token losses: advantages −loss on policy."""
    rows = [
        Response("q", 0.0, np.ones(len(row), np.bool_), advantage=-np.array(row), anchor=np.full(len(row), -1.0))
        for row in token_losses
    ]
    drawn = [Drawn(row, np.full(len(row.mask), -1.0)) for row in rows]
    return evaluate(resolve("grpo", {**NO_KL, **overrides}), drawn).loss


@reads("lesson_aggregation_three_denominators")
def test_three_denominators_of_the_lesson() -> None:
    inputs, expected = entry("lesson_aggregation_three_denominators")
    constant = {"aggregate.kind": "constant_length", "aggregate.length": inputs["fixed_length"]}
    for key, overrides in {**KINDS, "seq_mean_token_sum_norm": constant}.items():
        if key in expected:
            close(_constant_losses(inputs["token_losses"], overrides), expected[key])


@reads("lesson_length_weights")
def test_a_constant_length_weighs_long_and_short_tokens_alike() -> None:
    inputs, expected = entry("lesson_length_weights")
    rows = [response("q", 0.0, n, advantage=inputs["advantage"]) for n in inputs["lengths"]]
    constant = {"aggregate.kind": "constant_length", "aggregate.length": inputs["constant_C"]}
    for key, overrides in {"own_length": {}, "constant": constant}.items():
        got = assign(resolve("grpo", overrides), rows).responses
        per_token = [2 * a.weight[0] * a.advantage[0] for a in got]  # the lesson leaves out 1/n
        close(per_token, expected[f"per_token_weight_{key}"])
        close(np.multiply(per_token, inputs["lengths"]), expected[f"total_weight_{key}"])


@reads("masking_padding_and_tool_tokens")
def test_padding_and_tool_tokens_touch_neither_value_nor_gradient_nor_denominator() -> None:
    inputs, expected = entry("masking_padding_and_tool_tokens")
    drawn = []
    for i, mask in enumerate(inputs["mask"]):
        made = Response(
            "q",
            0.0,
            np.array(mask, np.bool_),
            advantage=inputs["advantages"][i],
            anchor=np.array(inputs["logp_old"][i]),
        )
        drawn.append(Drawn(made, np.array(inputs["logp"][i])))
    token_mean = evaluate(resolve("grpo", CLIPPED), drawn)
    close(token_mean.loss, expected["token_mean"])
    close(ragged(token_mean.gradient), ragged(expected["grad_token_mean"]))
    close(evaluate(resolve("grpo", NO_KL), drawn).loss, expected["seq_mean_token_mean"])


# --- worked numbers of the lessons --------------------------------------------------------------------------------


@reads("lesson_grpo_4x2_objective")
def test_the_worked_group_of_four_answers() -> None:
    inputs, expected = entry("lesson_grpo_4x2_objective")
    inputs = {**inputs, "groups": [0] * 4, "lengths": [2] * 4}
    task = evaluate(resolve("grpo", NO_KL), responses(inputs))
    close([a.value for a in task.assignment.responses], inputs["advantages"])
    close(task.flat("surrogate"), ragged(expected["token_objective"]))
    close([n["surrogate"].mean() for n in task.numbers], expected["per_response_mean"])
    close(-task.loss, expected["J_task"])
    close(-ragged(task.gradient), ragged(expected["grad_J_task"]))
    full = evaluate(resolve("grpo", {"kl.coefficient": inputs["beta"]}), responses(inputs))
    close(full.numbers[0]["kl"][0], expected["k3_first_token"])
    close(-full.loss, expected["J_full"])
    close(full.loss, expected["loss"])
    close(-ragged(full.gradient), ragged(expected["grad_J_full"]))
    close(ragged(full.gradient), ragged(expected["grad_loss"]))


@reads("lesson_on_policy_zero_value_nonzero_grad")
def test_on_policy_the_value_is_zero_and_the_gradient_is_not() -> None:
    inputs, expected = entry("lesson_on_policy_zero_value_nonzero_grad")
    drawn = [Drawn(response("q", 0.0, 2, advantage=a), np.full(2, -1.0)) for a in inputs["advantages"]]
    result = evaluate(resolve("grpo", NO_KL), drawn)
    close(-result.loss, expected["J_task"])
    close(-ragged(result.gradient), ragged(expected["grad_J_task"]))


def _ratio(level: str, token_log_ratios: list[float], dtype: torch.dtype = torch.float64) -> float:
    new = torch.tensor(token_log_ratios, dtype=dtype)
    segments = Segments(torch.zeros(len(new), dtype=torch.int64), torch.ones(len(new), dtype=torch.bool), 1)
    return float(log_ratio(Ratio(level=level), new, torch.zeros_like(new), segments).exp()[0])


@reads("lesson_gspo_geometric_mean")
def test_the_sequence_ratio_is_a_geometric_mean() -> None:
    inputs, expected = entry("lesson_gspo_geometric_mean")
    got = _ratio("sequence", np.log(inputs["token_ratios"]).tolist())
    close(got, expected["sequence_ratio"])
    assert abs(got - expected["arithmetic_mean_not_gspo"]) > 1


@reads("lesson_gspo_long_sequence_underflow")
def test_the_geometric_mean_stays_in_range_where_the_product_underflows() -> None:
    inputs, expected = entry("lesson_gspo_long_sequence_underflow")
    long = [math.log(inputs["token_ratio"])] * inputs["length"]
    small = [math.log(inputs["token_ratio_small"])] * inputs["length_small"]
    close(_ratio("sequence_product", long), expected["product"])
    close(math.log(_ratio("sequence_product", long)), expected["log_product"])
    close(_ratio("sequence", long), expected["geometric_mean"])
    close(_ratio("sequence", small), expected["geometric_mean_small"])
    assert _ratio("sequence_product", small) == expected["product_small"]
    assert _ratio("sequence_product", small, torch.float32) == 0.0
    close(_ratio("sequence", small, torch.float32), expected["geometric_mean_small"], 2e-5)


def _live_probability(size: int, p: float) -> float:
    """Probability of a group with a signal, over all counts of right answers."""
    states = [group_state([1.0] * c + [0.0] * (size - c), size) for c in range(size + 1)]
    odds = [math.comb(size, c) * p**c * (1 - p) ** (size - c) for c in range(size + 1)]
    return math.fsum(o for o, s in zip(odds, states, strict=True) if s == "informative")


@reads("lesson_budget_split", "dapo_keep_probability")
def test_the_share_of_groups_with_a_signal() -> None:
    inputs, expected = entry("lesson_budget_split")
    for size, prompts in inputs["splits"]:
        for i, p in enumerate(inputs["p"]):
            live = _live_probability(size, p)
            close(1 - live, expected["zero_variance_probability"][str(size)][i])
            close(prompts * live, expected["expected_live_prompts"][str(size)][i])
            failed = (1 - p) ** size
            close(1 - failed, expected["probability_at_least_one_correct"][str(size)][i])
    inputs, expected = entry("dapo_keep_probability")
    for size in inputs["G"]:
        for i, p in enumerate(inputs["p"]):
            close(_live_probability(size, p), expected["keep_probability"][str(size)][i])
            close(1 / _live_probability(size, p), expected["expected_prompts_sampled_per_kept"][str(size)][i])


@reads("dapo_soft_overlong_punishment")
def test_the_overlong_penalty_is_linear_over_the_cache_and_floored() -> None:
    inputs, expected = entry("dapo_soft_overlong_punishment")
    axis = Selection(truncated="soft_penalty", overlong_max=inputs["L_max"], overlong_cache=inputs["L_cache"])
    close([overlong_penalty(n, axis) for n in inputs["lengths"]], expected["penalty"])


@reads("dapo_dynamic_sampling_filter")
def test_dynamic_sampling_looks_at_accuracy_and_not_at_the_shaped_reward() -> None:
    inputs, expected = entry("dapo_dynamic_sampling_filter")
    cells = [
        (g, shaped, accuracy)
        for g, (shaped_row, raw_row) in enumerate(zip(inputs["shaped_reward"], inputs["accuracy"], strict=True))
        for shaped, accuracy in zip(shaped_row, raw_row, strict=True)
    ]
    rows = [response(str(g), float(shaped), raw=float(accuracy)) for g, shaped, accuracy in cells]
    kept = [not g.dropped for g in assign(resolve("dapo"), rows).groups]
    assert kept == expected["keep_by_accuracy"]
    unlabelled = [replace(row, raw=None) for row in rows]
    kept = [not g.dropped for g in assign(resolve("dapo"), unlabelled).groups]
    assert kept == expected["keep_by_shaped_reward_std"]


# --- KL -----------------------------------------------------------------------------------------------------------

KL_FORMS = {
    "k1": ("k1", "direct"),
    "abs": ("abs", "direct"),
    "k2": ("k2", "direct"),
    "k3": ("k3", "direct"),
    "k3_plus_straight_through": ("k3", "straight_through"),
    "ratio_k3_grad_through_ratio": ("k3", "score"),
    "sg_ratio_k3": ("k3", "weighted"),
    "sg_ratio_k2": ("k2", "weighted"),
    "ratio_k1_grad_through_ratio": ("k1", "score"),
}


def _kl_alone(estimator: str, gradient: str, swapped: bool = False) -> tuple[Any, Any, Any]:
    """Per token: value, derivative and x, with the policy term switched off by advantages of 0."""
    inputs, _ = entry("kl_terms_per_token")
    if swapped:
        inputs = {**inputs, "logp": inputs["logp_ref"], "logp_ref": inputs["logp"]}
    drawn = [replace(d, response=replace(d.response, advantage=0.0)) for d in responses(inputs)]
    kl = {"kl.estimator": estimator, "kl.gradient": gradient, "kl.coefficient": 1.0}
    result = evaluate(resolve("grpo", {**kl, "aggregate.kind": "response_sum"}), drawn)
    x = ragged(inputs["logp"]) - ragged(inputs["logp_ref"])
    return result.flat("kl"), ragged(result.gradient) * len(drawn), x


@reads("kl_terms_per_token")
@pytest.mark.parametrize("form", KL_FORMS)
def test_kl_value_and_derivative_of_every_form(form: str) -> None:
    expected = entry("kl_terms_per_token")[1][form]
    value, derivative, x = _kl_alone(*KL_FORMS[form])
    close(value, ragged(expected["value"]))
    defined = x != 0 if form == "abs" else np.ones(len(x), bool)
    close(derivative[defined], ragged(expected["dvalue_dlogp"])[defined])


def test_every_kl_form_of_the_oracle_is_named_and_the_swapped_one_is_rejected() -> None:
    expected = entry("kl_terms_per_token")[1]
    assert set(expected) - set(KL_FORMS) == {"reversed_log_ratio_bug"}
    assert {gradient for _, gradient in KL_FORMS.values()} == set(GRADIENTS)
    wrong = ragged(expected["reversed_log_ratio_bug"]["value"])
    value, _, x = _kl_alone("k3", "direct")
    apart = np.abs(x) > 0.04
    assert np.all(np.abs(value - wrong)[apart] > 1e-5)
    close(_kl_alone("k3", "direct", swapped=True)[0], wrong)


@reads("mismatch_sequence_quantities")
def test_sampler_corrections_of_a_token_a_sequence_and_its_geometric_mean() -> None:
    inputs, expected = entry("mismatch_sequence_quantities")
    inputs = {**inputs, "logp": inputs["logp_old"]}
    token = evaluate(_objective(_corrected("truncate", high=1e9)), responses(inputs))
    close(token.flat("correction"), ragged(expected["token_ratio"]))
    product = evaluate(_objective(_corrected("sequence_truncate", high=1e9)), responses(inputs))
    close([n["correction"][0] for n in product.numbers], expected["sequence_product"])
    for i, mean in enumerate(expected["sequence_geometric_mean"]):
        for low, high, kept in ((mean * 0.999, mean * 1.001, 1.0), (mean * 1.001, mean * 1.002, 0.0)):
            got = evaluate(_objective(_corrected("geometric_mask", low, high)), responses(inputs))
            assert got.numbers[i]["correction"][0] == kept


def test_a_truncated_sequence_product_gives_the_printed_loss() -> None:
    inputs, _ = entry("loss_mismatch_tis_token_C2")
    got = evaluate(_objective(_corrected("sequence_truncate", high=2.0)), responses(inputs))
    close(got.loss, -0.590528, atol=5e-7)


# --- nothing forgotten --------------------------------------------------------------------------------------------


def test_every_oracle_is_tested() -> None:
    importlib.import_module("test_statistics")
    importlib.import_module("test_credit_oracles")
    assert set(ENTRIES) == READ


def test_every_preset_has_an_oracle_or_a_number_by_hand() -> None:
    by_hand = {"gmpo", "opo", "maxrl", "lite_ppo", "reinforce_pp", "grpo_turn", "clip_cov"}
    of_credit = importlib.import_module("test_credit_oracles").COVERED
    assert set(PRESETS) == {case.preset for case in LOSSES.values()} | by_hand | of_credit
