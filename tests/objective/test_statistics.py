"""The statistics laws, by enumeration of small categorical policies; the fixtures; the worked numbers by hand.

Every expectation runs through `assign` and `loss`: all groups (or tokens) of a small policy are evaluated, their
gradients in log-probabilities pushed to the logits by ∂ log π_a/∂ logits = onehot(a) − π, and weighted by probability.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from drawn import Array, Drawn, advantages, close, evaluate, response
from entries import entry, reads

from gropius import explain, explain_rewards
from gropius.errors import ObjectiveError
from gropius.objective.presets import resolve
from gropius.objective.selection import DEAD, Response, assign, group_state

NO_KL = {"kl.estimator": "none"}
KL_ONLY = {"kl.coefficient": 1.0, "aggregate.kind": "response_sum"}


def softmax(logits: Any) -> Array:
    values = np.exp(np.asarray(logits, np.float64))
    return values / values.sum()


def scores(pi: Array) -> Array:
    """[actions, logits] ∂ log π_a / ∂ logits."""
    return np.eye(len(pi)) - pi


# --- the group baseline -------------------------------------------------------------------------------------------


def expected_group_gradient(objective: Any, pi: Array, rewards: Array, size: int) -> Array:
    """E over all groups of `size` of the gradient of J = −loss in the logits; equal multisets are one term."""
    total = np.zeros(len(pi))
    for actions in itertools.combinations_with_replacement(range(len(pi)), size):
        counts = np.bincount(actions, minlength=len(pi))
        ways = math.factorial(size) / math.prod(math.factorial(int(c)) for c in counts)
        odds = ways * float(np.prod(pi**counts))
        drawn = [Drawn(response("q", float(rewards[a])), np.array([math.log(pi[a])])) for a in actions]
        gradient = evaluate(objective, drawn).gradient
        total -= odds * sum(g[0] * scores(pi)[a] for g, a in zip(gradient, actions, strict=True))
    return total


@reads("exact_self_inclusive_baseline_factor")
@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_self_inclusive_mean_scales_the_expected_gradient_by_k_minus_one_over_k(size: int) -> None:
    inputs, expected = entry("exact_self_inclusive_baseline_factor")
    pi, rewards = softmax(inputs["logits"]), np.array(inputs["rewards"])
    close(pi, expected["pi"])
    truth = scores(pi).T @ (pi * rewards)
    close(truth, expected["true_gradient_wrt_logits"])
    rows = expected["by_K"][str(size)]
    on_policy = {"ratio.level": "none", "surrogate.kind": "none", **NO_KL}
    for key, overrides in {
        "self_inclusive_mean": {"scale": "none"},
        "leave_one_out": {"scale": "none", "baseline": "leave_one_out"},
        "grpo_population_std": {"scale": "group_std"},
        "grpo_sample_std": {"scale": "group_std", "ddof": 1},
        "constant_batch_mean_of_truth": {"scale": "none", "baseline": "none"},
    }.items():
        objective = resolve("grpo", {**on_policy, "surrogate.low": 0.0, "surrogate.high": 0.0, "advantage": overrides})
        close(expected_group_gradient(objective, pi, rewards, size), rows[key])
    close(np.array(rows["self_inclusive_mean"]) / truth, [(size - 1) / size] * 5)
    close(rows["leave_one_out"], truth)
    close(math.fsum(pi**size), rows["probability_zero_variance_group"])


def test_the_group_std_is_not_a_rescaling_of_the_true_gradient() -> None:
    _, expected = entry("exact_self_inclusive_baseline_factor")
    truth = np.array(expected["true_gradient_wrt_logits"])
    grpo = np.array(expected["by_K"]["4"]["grpo_population_std"])
    close(grpo[2], 0.031527, atol=5e-7)
    close(grpo @ truth / np.linalg.norm(grpo) / np.linalg.norm(truth), 0.9937, atol=5e-5)


WEIGHTED = {
    "dr_grpo": ("dr_grpo", {}),
    "rloo": ("rloo", NO_KL),
    "grpo_population_std": ("grpo", {}),
    "grpo_sample_std": ("grpo", {"advantage.ddof": 1}),
    "maxrl_code": ("maxrl", {}),
}


@reads("exact_binary_prompt_weights")
@pytest.mark.parametrize("size", [2, 4, 8, 16])
@pytest.mark.parametrize("column", WEIGHTED)
def test_binary_rewards_weigh_a_prompt_by_its_difficulty(size: int, column: str) -> None:
    """Expected gradient ÷ gradient of p: Σ_c P(c) · [c A_right (1 − p) − (G − c) A_wrong p] / (G p (1 − p))."""
    _, expected = entry("exact_binary_prompt_weights")
    preset, overrides = WEIGHTED[column]
    objective = resolve(preset, overrides)
    by_count = [advantages(objective, [1.0] * c + [0.0] * (size - c)) for c in range(size + 1)]
    for row in expected["rows_by_G"][str(size)]:
        values = dict(zip(expected["columns"], row, strict=True))
        p = values["p"]
        weight = 0.0
        for c, given in enumerate(by_count):
            odds = math.comb(size, c) * p**c * (1 - p) ** (size - c)
            weight += odds * (math.fsum(given[:c]) * (1 - p) - math.fsum(given[c:]) * p) / (size * p * (1 - p))
        close(weight, values[column])
        close(1 / math.sqrt(p * (1 - p)), values["limit_1_over_std"])
        close(p**size + (1 - p) ** size, values["prob_zero_variance"])
        theory = next(key for key in values if key.startswith("maxrl_theory"))
        if column == "maxrl_code":
            close(weight, values[theory])


@reads("exact_passk_gradients")
def test_maxrl_follows_the_likelihood_series_truncated_below_the_group_size() -> None:
    """(R − mean)/mean gives Σ_{k<n} ∇pass@k / k; the pass@k weights of the entry belong to a later issue."""
    inputs, expected = entry("exact_passk_gradients")
    pi, success = softmax(inputs["logits"]), np.array(inputs["success"])
    close(pi @ success, expected["success_probability"])
    close(scores(pi).T @ (pi * success), expected["grad_success_probability"])
    close(scores(pi).T @ (pi * success) / (pi @ success), expected["grad_log_p"])
    got = expected_group_gradient(resolve("maxrl"), pi, success, inputs["n"])
    rows = expected["pkpo_by_k"]
    series = [np.array(rows[str(k)]["true_gradient"]) / k for k in range(1, inputs["n"] + 1)]
    close(got, sum(series[:-1]))
    close(sum(series), expected["maxrl_truncated_ml_gradient_T_eq_n"])


# --- KL on one prefix ---------------------------------------------------------------------------------------------


def kl_in_loss(estimator: str, gradient: str, pi: Array, ref: Array, sampler: Array) -> tuple[float, Array]:
    """(E value, E gradient in the logits) of a KL term of the loss, tokens drawn from `sampler`."""
    objective = resolve("grpo", {**KL_ONLY, "kl.estimator": estimator, "kl.gradient": gradient})
    value, total = 0.0, np.zeros(len(pi))
    for a, odds in enumerate(sampler):
        made = response("q", 0.0, advantage=0.0, anchor=np.log(sampler[[a]]), reference=np.log(ref[[a]]))
        result = evaluate(objective, [Drawn(made, np.log(pi[[a]]))])
        value += odds * float(result.flat("kl")[0])
        total += odds * result.gradient[0][0] * scores(pi)[a]
    return value, total


def kl_in_reward(estimator: str, pi: Array, ref: Array) -> Array:
    """E of the loss gradient when the KL is taken off the reward (β = 1), on policy."""
    overrides = {"kl.estimator": estimator, "kl.place": "reward", "kl.coefficient": 1.0}
    objective = resolve("reinforce", overrides)
    total = np.zeros(len(pi))
    for a, odds in enumerate(pi):
        made = response("q", 0.0, anchor=np.log(pi[[a]]), reference=np.log(ref[[a]]))
        total += odds * evaluate(objective, [Drawn(made, np.log(pi[[a]]))]).gradient[0][0] * scores(pi)[a]
    return total


def _two_policies() -> tuple[Array, Array, dict[str, Any]]:
    inputs, expected = entry("exact_kl_on_policy")
    return softmax(inputs["logits"]), softmax(inputs["logits_ref"]), expected


@reads("exact_kl_on_policy")
def test_on_policy_k1_in_the_loss_has_no_gradient_k2_the_reverse_and_k3_the_forward() -> None:
    pi, ref, expected = _two_policies()
    close(pi, expected["pi"])
    close(ref, expected["pi_ref"])
    directions = {"k1": np.zeros(5), "k2": expected["grad_reverse_KL"], "k3": expected["grad_forward_KL"]}
    for estimator, direction in directions.items():
        value, gradient = kl_in_loss(estimator, "direct", pi, ref, pi)
        close(value, expected[f"E_{estimator}"])
        close(gradient, expected["as_loss_expected_gradient"][estimator])
        close(gradient, direction)
    close(expected["E_k1"], expected["reverse_KL_pi_ref"])
    close(expected["grad_forward_KL"], pi - ref)
    close(math.fsum(ref * np.log(ref / pi)), expected["forward_KL_ref_pi"])


def test_on_policy_k1_in_the_reward_has_the_reverse_gradient() -> None:
    pi, ref, expected = _two_policies()
    for estimator in ("k1", "k2", "k3"):
        got = kl_in_reward(estimator, pi, ref)
        close(got, expected["in_reward_expected_gradient"][estimator])
        both = got + kl_in_loss(estimator, "direct", pi, ref, pi)[1]
        close(both, expected["loss_plus_reward_gradient"][estimator])
    close(kl_in_reward("k1", pi, ref), expected["grad_reverse_KL"])


def test_the_corrected_k3_has_the_reverse_gradient_under_any_sampler() -> None:
    pi, ref, expected = _two_policies()
    samplers = [pi, ref, np.full(5, 0.2), softmax([0.0, 0.9, -0.4, 0.3, 0.1]), softmax([2.0, -1.0, 0.0, 1.0, -2.0])]
    for sampler in samplers:
        value, gradient = kl_in_loss("k3", "score", pi, ref, sampler)
        close(value, expected["reverse_KL_pi_ref"])
        close(gradient, expected["grad_reverse_KL"])
        close(kl_in_loss("k1", "score", pi, ref, sampler)[1], expected["grad_reverse_KL"])
        close(kl_in_loss("k2", "weighted", pi, ref, sampler)[1], expected["grad_reverse_KL"])
        close(kl_in_loss("k3", "weighted", pi, ref, sampler)[1], expected["grad_forward_KL"])
    assert np.abs(kl_in_loss("k2", "direct", pi, ref, samplers[3])[1] - expected["grad_reverse_KL"]).max() > 1e-3
    assert abs(kl_in_loss("k3", "direct", pi, ref, samplers[3])[0] - expected["reverse_KL_pi_ref"]) > 1e-3


def test_straight_through_k3_has_the_value_of_k3_and_the_gradient_of_k2() -> None:
    pi, ref, expected = _two_policies()
    value, gradient = kl_in_loss("k3", "straight_through", pi, ref, pi)
    close(value, expected["E_k3"])
    close(gradient, expected["grad_reverse_KL"])


def _spread(estimator: str, pi: Array, ref: Array) -> tuple[float, float]:
    """(mean, standard deviation) of the estimator's value on policy."""
    objective = resolve("grpo", {**KL_ONLY, "kl.estimator": estimator})
    drawn = [Drawn(response(str(a), 0.0, reference=np.log(ref[[a]])), np.log(pi[[a]])) for a in range(len(pi))]
    values = evaluate(objective, drawn).flat("kl")
    centre = float(pi @ values)
    return centre, math.sqrt(float(pi @ (values - centre) ** 2))


@reads("exact_kl_estimator_spread")
def test_k3_is_quieter_than_k1_only_near_the_reference() -> None:
    inputs, expected = entry("exact_kl_estimator_spread")
    origin, direction = np.array(inputs["logits_ref"]), np.array(inputs["direction"])
    quieter = []
    for row in expected["rows"]:
        values = dict(zip(expected["columns"], row, strict=True))
        pi, ref = softmax(origin + values["scale"] * direction), softmax(origin)
        close(_spread("k1", pi, ref), (values["reverse_KL"], values["std_k1"]))
        close(_spread("k2", pi, ref), (values["E_k2"], values["std_k2"]))
        close(_spread("k3", pi, ref), (values["reverse_KL"], values["std_k3"]))
        quieter.append(values["std_k3"] < values["std_k1"])
    assert quieter[0] and not quieter[-1]
    pi, ref, expected = _two_policies()
    for name in ("k1", "k2", "k3"):
        close(_spread(name, pi, ref)[1], expected[f"std_{name}"])


# --- KL of whole sequences ----------------------------------------------------------------------------------------


class TwoStep:
    """A policy that draws two tokens of three; parameters: 3 first-step logits, then 3 × 3 second-step logits."""

    def __init__(self, first: Any, second: Any):
        self.first, self.second = softmax(first), np.array([softmax(row) for row in second])

    def logprobs(self, a: int, b: int) -> Array:
        return np.log([self.first[a], self.second[a][b]])

    def scores(self, a: int, b: int) -> Array:
        """[2 tokens, 12 parameters]"""
        out = np.zeros((2, 12))
        out[0, :3] = scores(self.first)[a]
        out[1, 3 + 3 * a : 6 + 3 * a] = scores(self.second[a])[b]
        return out


def expected_sequence_gradient(objective: Any, policy: TwoStep, ref: TwoStep) -> Array:
    total = np.zeros(12)
    for a, b in itertools.product(range(3), range(3)):
        own, target = policy.logprobs(a, b), ref.logprobs(a, b)
        made = response("q", 0.0, 2, anchor=own, reference=target)
        gradient = evaluate(objective, [Drawn(made, own)]).gradient[0]
        total += math.exp(own.sum()) * (gradient @ policy.scores(a, b))
    return total


@reads("exact_kl_two_step_sequence")
def test_a_fixed_prefix_statement_is_not_one_for_whole_sequences() -> None:
    inputs, expected = entry("exact_kl_two_step_sequence")
    policy = TwoStep(inputs["logits_step1"], inputs["logits_step2_by_prefix"])
    ref = TwoStep(inputs["ref_logits_step1"], inputs["ref_logits_step2_by_prefix"])
    rows = expected["expected_gradients"]
    in_reward = {"kl.estimator": "k1", "kl.place": "reward", "kl.coefficient": 1.0}
    reinforce = {
        "k1_in_reward_full_sum": in_reward,
        "k1_in_reward_to_go": {**in_reward, "kl.reward_form": "to_go"},
        "k2_loss_per_token": {"kl.estimator": "k2", "kl.coefficient": 1.0},
        "k3_loss_per_token": {"kl.estimator": "k3", "kl.coefficient": 1.0},
        "k1_loss": {"kl.estimator": "k1", "kl.coefficient": 1.0},
    }
    got = {key: expected_sequence_gradient(resolve("reinforce", o), policy, ref) for key, o in reinforce.items()}
    for key in reinforce:
        close(got[key], rows[key])
    close(got["k1_in_reward_full_sum"], expected["grad_sequence_reverse_KL"])
    close(got["k1_in_reward_to_go"], expected["grad_sequence_reverse_KL"])
    gap = np.abs(got["k2_loss_per_token"] - expected["grad_sequence_reverse_KL"])
    close(gap.max(), expected["max_abs_gap_k2_per_token_vs_sequence"])
    assert gap[3:].max() < 1e-12
    whole = [(policy.logprobs(a, b).sum(), ref.logprobs(a, b).sum()) for a in range(3) for b in range(3)]
    close(math.fsum(math.exp(p) * (p - r) for p, r in whole), expected["sequence_reverse_KL"])
    close(math.fsum(math.exp(r) * (r - p) for p, r in whole), expected["sequence_forward_KL"])


# --- fixtures of public reports -----------------------------------------------------------------------------------

F1_LOSSES = [("p", 2, 1.0), ("p", 4, 2.0), ("q", 1, 3.0), ("q", 3, 4.0)]


def _constant_losses(rows: list[tuple[str, int, float]], overrides: dict[str, Any], masked: int = 0) -> float:
    """The aggregate of per-token losses (advantage −loss, on policy) and of `masked` responses without loss tokens."""
    drawn = [Drawn(response(g, 0.0, n, advantage=-v), np.full(n, -1.0)) for g, n, v in rows]
    for _ in range(masked):
        drawn.append(Drawn(Response("q", 0.0, np.zeros(2, np.bool_), advantage=0.0), np.full(2, -1.0)))
    return evaluate(resolve("grpo", {**NO_KL, **overrides}), drawn).loss


@pytest.mark.parametrize(
    ("overrides", "value"),
    [
        ({"aggregate.kind": "token_mean"}, 2.5),
        ({"aggregate.kind": "response_mean"}, 2.5),
        ({"aggregate.kind": "response_sum"}, 6.25),
        ({"aggregate.kind": "constant_length", "aggregate.length": 10}, 0.625),
        ({"aggregate.kind": "constant_length", "aggregate.length": 4}, 1.5625),
        ({"aggregate.kind": "prompt_mean"}, 2.708333),
    ],
)
def test_f1_one_batch_six_denominators(overrides: dict[str, Any], value: float) -> None:
    close(_constant_losses(F1_LOSSES, overrides), value, atol=5e-7)


def test_f1_token_and_response_means_differ_once_the_coincidence_is_removed() -> None:
    changed = [*F1_LOSSES[:3], ("q", 3, 8.0)]
    close(_constant_losses(changed, {"aggregate.kind": "token_mean"}), 3.7)
    close(_constant_losses(changed, {"aggregate.kind": "response_mean"}), 3.5)


def test_f1_a_dead_prompt_stays_in_the_token_count_or_leaves_it_as_declared() -> None:
    rows = [("p", 2, 0.0, 1.0), ("p", 4, 0.0, 1.0), ("q", 1, -3.0, 0.0), ("q", 3, -4.0, 1.0)]

    def aggregate(overrides: dict[str, Any]) -> float:
        drawn = [Drawn(response(g, r, n, advantage=a), np.full(n, -1.0)) for g, n, a, r in rows]
        return evaluate(resolve("grpo", {**NO_KL, "aggregate.kind": "token_mean", **overrides}), drawn).loss

    close(aggregate({}), 1.5)
    close(aggregate({"selection.dead": "drop"}), 3.75)
    close(aggregate({"selection.dead": "drop", "aggregate.count_dead": True}), 1.5)


def test_f1_a_fully_masked_response_counts_as_declared() -> None:
    close(_constant_losses(F1_LOSSES, {}, masked=1), 2.5)
    close(_constant_losses(F1_LOSSES, {"aggregate.count_masked": True}, masked=1), 2.0)
    for counted in (False, True):
        overrides = {"aggregate.kind": "token_mean", "aggregate.count_masked": counted}
        close(_constant_losses(F1_LOSSES, overrides, masked=1), 2.5)


@pytest.mark.parametrize(
    ("overrides", "one_of_four", "one_of_two"),
    [
        ({"ddof": 1, "epsilon": 1e-6}, [1.499997, -0.499999], 0.707106),
        ({"ddof": 1, "epsilon": 1e-4}, [1.499700, -0.499900], 0.707007),
        ({"ddof": 0, "epsilon": 1e-8}, [1.732051, -0.577350], 1.0),
        ({"baseline": "leave_one_out", "scale": "none"}, [1.0, -1 / 3], 1.0),
        ({"scale": "none"}, [0.75, -0.25], 0.5),
    ],
)
def test_f2_advantages_under_five_rules(overrides: dict[str, Any], one_of_four: list[float], one_of_two: float) -> None:
    objective = resolve("grpo", {"advantage": overrides})
    close(advantages(objective, [1, 0, 0, 0]), one_of_four[:1] + one_of_four[1:] * 3, atol=6e-7)
    close(advantages(objective, [1, 0]), [one_of_two, -one_of_two], atol=6e-7)
    assert advantages(objective, [0.1, 0.1, 0.1]) == [0.0, 0.0, 0.0]


def test_f2_duplicating_a_group_moves_the_sample_std_and_not_the_population_std() -> None:
    for ddof, once, twice in ((1, 0.7071, 0.8660), (0, 1.0, 1.0)):
        objective = resolve("grpo", {"advantage.ddof": ddof})
        close(advantages(objective, [1, 0])[0], once, atol=5e-5)
        close(advantages(objective, [1, 0, 1, 0])[0], twice, atol=5e-5)


def test_f3_a_group_is_an_explicit_id_and_never_a_stride() -> None:
    assert advantages(resolve("grpo"), [1, 0, 1, 0], ["a", "b", "a", "b"]) == [0, 0, 0, 0]


def test_f4_uneven_groups_are_never_pooled() -> None:
    objective = resolve("grpo", {"advantage.ddof": 1})
    got = advantages(objective, [1, 0, 5, 5, 5, 2], ["a", "a", "b", "b", "b", "c"])
    close(got, [math.sqrt(0.5), -math.sqrt(0.5), 0, 0, 0, 0])
    assert got[2:] == [0, 0, 0, 0]
    with pytest.raises(ObjectiveError, match="group c: leave_one_out has no other response"):
        advantages(resolve("rloo", NO_KL), [1, 0, 5, 5, 5, 2], ["a", "a", "b", "b", "b", "c"])


def test_f5_kl_gradients_of_two_tokens() -> None:
    pi, ref = np.array([0.5, 0.5]), np.array([0.8, 0.2])
    rows = [("k1", "direct", 0.0), ("k2", "direct", -0.346574), ("k3", "direct", -0.3), ("k3", "score", -0.346574)]
    for estimator, gradient, slope in rows:
        close(kl_in_loss(estimator, gradient, pi, ref, pi)[1][0], slope, atol=5e-7)
    values = {"k1": 0.223144, "k3": 0.223144, "k2": 0.265123, "abs": 0.693147}
    for estimator, value in values.items():
        close(kl_in_loss(estimator, "direct", pi, ref, pi)[0], value, atol=5e-7)


def test_f7_an_overflow_at_a_masked_place_changes_nothing() -> None:
    for dtype in (torch.float64, torch.float32):
        for garbage in (200.0, 1e9, math.inf, -math.inf, math.nan):
            whole, without = [], []
            for reward in (1.0, 0.0):
                ones = np.full(3, -1.0)
                made = Response("q", reward, np.array([True, True, False]), anchor=ones, reference=ones)
                whole.append(Drawn(made, np.array([-1.0, -1.0, garbage])))
                short = response("q", reward, 2, anchor=ones[:2], reference=ones[:2])
                without.append(Drawn(short, ones[:2]))
            got, wanted = (evaluate(resolve("grpo"), d, dtype=dtype) for d in (whole, without))
            assert got.loss == wanted.loss
            for g, w in zip(got.gradient, wanted.gradient, strict=True):
                assert g.tolist() == [*w.tolist(), 0.0]


def test_f9_share_of_useless_groups_and_needed_oversampling() -> None:
    table = {0.02: (92.2, 85.1, 72.4), 0.1: (65.6, 43.1, 18.5), 0.5: (12.5, 0.78, 0.0)}
    needed = {0.02: (12.9, 6.70, 3.62), 0.1: (2.91, 1.76, 1.23), 0.5: (1.14, 1.008, 1.0)}
    for p, shares in table.items():
        for size, share, factor in zip((4, 8, 16), shares, needed[p], strict=True):
            dead = [group_state([1.0] * c + [0.0] * (size - c), size) in DEAD for c in range(size + 1)]
            odds = [math.comb(size, c) * p**c * (1 - p) ** (size - c) for c in range(size + 1)]
            useless = math.fsum(o for o, d in zip(odds, dead, strict=True) if d)
            close(100 * useless, share, atol=0.06)
            close(1 / (1 - useless), factor, rtol=5e-3)


@pytest.mark.parametrize(("dual", "loss"), [(0.0, 5.0), (3.0, 3.0), (1.4, 1.4)])
def test_f10_the_dual_clip_floors_a_bad_token_with_a_large_ratio(dual: float, loss: float) -> None:
    made = response("q", 0.0, advantage=-1.0, anchor=np.array([-3.0]))
    overrides = {**NO_KL, "surrogate.dual": dual}
    result = evaluate(resolve("grpo", overrides), [Drawn(made, np.array([-3.0 + math.log(5.0)]))])
    close(result.loss, loss)
    close(result.gradient[0], [5.0 if dual == 0 else 0.0])


def test_the_two_sided_clip_bounds_a_bad_token_at_its_ceiling() -> None:
    made = response("q", 0.0, advantage=-1.0, anchor=np.array([-3.0]))
    for ratio, loss, slope in ((3.9, 3.9, 3.9), (5.0, 4.0, 0.0)):
        objective = resolve("grpo", {**NO_KL, "surrogate.ceiling": 4.0})
        result = evaluate(objective, [Drawn(made, np.array([-3.0 + math.log(ratio)]))])
        close(result.loss, loss)
        close(result.gradient[0], [slope])


def test_f11_gspo_ratio_is_length_normalised() -> None:
    made = response("q", 0.0, 3, advantage=1.0, anchor=np.zeros(3))
    drawn = [Drawn(made, np.array([0.1, 0.3, -0.1]))]
    close(evaluate(resolve("gspo"), drawn).numbers[0]["ratio"][0], 1.105171, atol=5e-7)
    product = resolve("gspo", {"ratio.level": "sequence_product"})
    close(evaluate(product, drawn).numbers[0]["ratio"][0], 1.349859, atol=5e-7)


def test_a_partial_group_is_a_singleton_and_carries_nothing() -> None:
    """Report 23: [1, 2, 3] in groups of two leaves one row alone; it gets 0, not a residual over a std of 0."""
    close(advantages(resolve("grpo"), [1, 2, 3], ["a", "a", "b"]), [-1, 1, 0])


# --- numbers of the lessons that no oracle holds ------------------------------------------------------------------


def test_the_running_example_of_four_attempts() -> None:
    steps = {s["name"]: s["values"] for s in explain_rewards([1, 1, 0, 0])["steps"]}
    assert steps["baseline"] == [0.5] * 4
    assert steps["centred"] == [0.5, 0.5, -0.5, -0.5]
    assert steps["scale"] == [0.5] * 4
    assert steps["advantage"] == [1.0, 1.0, -1.0, -1.0]


def test_an_empty_group_is_an_error_and_not_zero() -> None:
    with pytest.raises(ObjectiveError, match="empty group"):
        explain_rewards([])


def test_all_failed_and_all_solved_are_both_zero_and_told_apart() -> None:
    for reward, state in ((0.0, "all_failed"), (1.0, "all_solved"), (0.5, "all_equal"), (-1.0, "all_failed")):
        replay = explain_rewards([reward] * 4)
        assert replay["advantages"] == [0.0] * 4
        assert replay["state"] == state


def test_in_a_dead_group_the_kl_still_has_a_gradient() -> None:
    drawn = [Drawn(response("q", 1.0, reference=np.array([-2.0])), np.array([-1.0])) for _ in range(4)]
    result = evaluate(resolve("grpo"), drawn)
    assert not any(a.skipped for a in result.assignment.responses)
    close(result.gradient, [[0.04 * (1 - math.exp(-1.0)) / 4]] * 4)


def test_a_negative_advantage_means_below_the_mean_and_not_bad() -> None:
    assert advantages(resolve("grpo"), [0.9, 1.0, 1.0])[0] < 0


def test_a_token_objective_with_its_kl() -> None:
    """Probabilities 0.20 (anchor), 0.22 (policy), 0.11 (reference), β = 0.1: k3 = log 2 − 1/2, token 1.080685."""
    made = response("q", 0.0, advantage=1.0, anchor=np.log([0.20]), reference=np.log([0.11]))
    result = evaluate(resolve("grpo", {"kl.coefficient": 0.1}), [Drawn(made, np.log([0.22]))])
    close(result.numbers[0]["kl"], [math.log(2) - 0.5])
    close(-result.loss, 1.080685, atol=5e-7)


def test_the_pessimistic_clip_keeps_a_bad_ratio_and_bounds_a_good_one() -> None:
    for advantage, term, slope in ((1.0, 1.2, 0.0), (-1.0, -1.3, -1.3)):
        made = response("q", 0.0, advantage=advantage, anchor=np.array([-1.0]))
        result = evaluate(resolve("grpo", NO_KL), [Drawn(made, np.array([-1.0 + math.log(1.3)]))])
        close(result.numbers[0]["surrogate"], [term])
        close(-result.gradient[0], [slope])
        close(result.numbers[0]["ratio"], [1.3])  # the ratio itself may leave the interval


def test_the_kl_does_not_enter_score_or_advantage() -> None:
    rows = [{"reward": r, "length": 1, "policy": [-1.0], "reference": [-3.0]} for r in (1, 0)]
    answer = explain({"groups": [{"id": "q", "responses": rows}]}, "grpo", {"kl.coefficient": 5.0})
    assert [r["advantage"] for r in answer["groups"][0]["responses"]] == [1.0, -1.0]
    assert [r["reward"] for r in answer["groups"][0]["responses"]] == [1.0, 0.0]


B0 = {
    "rewards": [1, 0, 0, 1, 0.125, 0.75, 0.375, 0.25],
    "groups": [0] * 4 + [1] * 4,
    "lengths": [3, 1, 2, 4, 2, 3, 1, 2],
}


@pytest.mark.parametrize(
    ("preset", "overrides", "second_group"),
    [
        ("lite_ppo", {}, [1.264911, -0.632456, 0.948683, 0, -0.316228]),
        ("lite_ppo", {"advantage.scale_of": "residuals"}, [1.281025, -0.640513, 0.960769, 0, -0.320256]),
        ("opo", {}, [0.3, -0.296875, 0.328125, -0.046875, -0.171875]),
    ],
)
def test_printed_advantages_of_the_shared_batch(
    preset: str, overrides: dict[str, Any], second_group: list[float]
) -> None:
    rows = [
        response(str(g), r, n) for g, r, n in zip(B0["groups"], B0["rewards"], B0["lengths"], strict=True)
    ]  # fmt: skip
    got = [a.value for a in assign(resolve(preset, overrides), rows).responses]
    close([got[0], *got[4:]], second_group, atol=5e-7)
