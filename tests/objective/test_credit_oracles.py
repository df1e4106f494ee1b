"""The oracles of credit by position, critics, the best of k, marks and demonstrations, in value and gradient."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from drawn import Drawn, Result, advantages, close, evaluate, response
from entries import batch, entry, ragged, reads, responses

from gropius import explain
from gropius.errors import ObjectiveError
from gropius.objective.gae import gae, length_adaptive
from gropius.objective.presets import resolve
from gropius.objective.selection import assign
from gropius.objective.value import ValueLoss, value_terms

COVERED = {
    "vapo", "grpo_process", "pass_at_k", "pkpo", "grpo_passk", "gdpo", "otb", "high_entropy", "kl_cov", "luffy",
    "vespo", "real",
}  # fmt: skip
NO_ENTROPY = {"terms.entropy": 0.0}


def _with(drawn: list[Drawn], **fields: Any) -> list[Drawn]:
    """The responses with other fields; a list holds one value a response."""
    return [
        replace(d, response=replace(d.response, **{k: v[i] if isinstance(v, list) else v for k, v in fields.items()}))
        for i, d in enumerate(drawn)
    ]


def _equals(result: Result, expected: dict[str, Any]) -> None:
    close(result.loss, expected["loss"])
    close(ragged(result.gradient), ragged(expected["grad_logp"]))


# --- advantages ---------------------------------------------------------------------------------------------------


@reads("adv_grpo_process_supervision")
def test_step_scores_are_pooled_and_a_token_takes_what_ends_at_or_after_it() -> None:
    inputs, expected = entry("adv_grpo_process_supervision")
    rows = [response("q", 0.0, n, steps=steps) for n, steps in zip(inputs["lengths"], inputs["steps"], strict=True)]
    got = assign(resolve("grpo_process", {"kl.estimator": "none"}), rows)
    close(ragged([a.advantage for a in got.responses]), ragged(expected["token_advantages"]))
    answer = explain(
        {"groups": [{"id": "q", "responses": [{"reward": 0, "length": r.mask.size, "steps": r.steps} for r in rows]}]},
        "grpo_process",
    )
    close(ragged([r["advantage"] for r in answer["groups"][0]["responses"][:1]]), expected["token_advantages"][0])
    close(answer["groups"][0]["responses"][1]["advantage"], expected["token_advantages"][1][0])


def test_the_final_reward_stands_beside_the_steps_or_falls_at_the_last_token() -> None:
    rows = [response("q", 1.0, 3, steps=[(0, 1.0)]), response("q", 0.0, 3, steps=[(1, 0.0)])]
    beside = assign(resolve("grpo_process", {"kl.estimator": "none", "advantage.final_weight": 0.5}), rows)
    close([a.advantage for a in beside.responses], [[1.5, 0.5, 0.5], [-1.5, -1.5, -0.5]])
    within = resolve("grpo_process", {"kl.estimator": "none", "advantage.final": "in_return"})
    close([a.advantage for a in assign(within, rows).responses], [[2.0, 1.0, 1.0], [-2.0, -2.0, -1.0]])


def test_turn_credit_by_hand() -> None:
    """Two turns each: rewards (1, 0) and (0, 1) with γ = 1/2, so returns (1, 0) and (1/2, 1)."""
    mask = np.array([True, True, False, True])
    rows = [replace(response("q", 0.0, 4, steps=[(p, 1.0)]), mask=mask) for p in (1, 3)]
    plain = {"advantage.scale": "none", "advantage.discount": 0.5}
    same_turn = assign(resolve("grpo_turn", plain), rows)
    close([a.advantage for a in same_turn.responses], [[0.25, 0.25, 0, -0.5], [-0.25, -0.25, 0, 0.5]])
    pooled = assign(resolve("grpo_turn", {**plain, "advantage.pool": "group"}), rows)
    close([a.advantage for a in pooled.responses], [[0.375, 0.375, 0, -0.625], [-0.125, -0.125, 0, 0.375]])
    alone = assign(resolve("grpo_turn", {**plain, "advantage.baseline": "leave_one_out"}), rows)
    close([a.advantage for a in alone.responses], [[0.5, 0.5, 0, -1.0], [-0.5, -0.5, 0, 1.0]])


def test_under_outcome_credit_positions_only_add_up() -> None:
    rows = [response("q", 0.5, 3, steps=[(0, 0.5)]), response("q", 0.0, 3, steps=[(1, 0.25)])]
    summed = [response("q", 1.0, 3), response("q", 0.25, 3)]
    one, other = (assign(resolve("grpo"), r) for r in (rows, summed))
    assert [a.value for a in one.responses] == [a.value for a in other.responses] == [1.0, -1.0]


@reads("adv_pass_at_k_training")
def test_pass_at_k_training() -> None:
    inputs, expected = entry("adv_pass_at_k_training")
    objective = resolve("pass_at_k", {"advantage.k": inputs["k"]})
    rows = [response("q", r) for r in inputs["rewards"]]
    got = assign(objective, rows)
    close([a.value for a in got.responses], expected["advantages"])
    close(got.credit.baseline, [expected["mean_pass_at_k"]] * len(rows))
    close(got.credit.scale, [expected["sigma"]] * len(rows))


def test_the_best_of_k_over_all_subsets_is_its_closed_form() -> None:
    values, k = [0.2, 0.9, 0.5, 0.4, 0.9], 3
    subsets = list(itertools.combinations(range(5), k))
    best = {s: max(values[i] for i in s) for s in subsets}
    mine = [np.mean([b for s, b in best.items() if i in s]) for i in range(5)]
    others = [np.mean([max(values[j] for j in s) for s in itertools.combinations(_but(i, 5), k - 1)]) for i in range(5)]
    pkpo = {"advantage.k": k}
    close(advantages(resolve("pkpo", {**pkpo, "advantage.baseline": "none"}), values), k * np.array(mine))
    close(advantages(resolve("pkpo", pkpo), values), k * (np.array(mine) - others))
    scaled = resolve("pass_at_k", pkpo)
    close(advantages(scaled, values), (np.array(mine) - np.mean(mine)) / np.std(list(best.values())))


def _but(i: int, n: int) -> list[int]:
    return [j for j in range(n) if j != i]


@reads("adv_grpo_passk_max_minus_second")
def test_only_the_best_response_moves_by_its_lead() -> None:
    inputs, expected = entry("adv_grpo_passk_max_minus_second")
    close(advantages(resolve("grpo_passk"), inputs["rewards"]), expected["advantages_no_std"])
    assert advantages(resolve("grpo_passk"), [1.0, 1.0, 0.0]) == [0.0, 0.0, 0.0]


@reads("adv_pkpo_weights")
def test_pkpo_weights() -> None:
    """The entry sums over the group, the objective averages: the advantage is n times the weight."""
    inputs, expected = entry("adv_pkpo_weights")
    n, c = inputs["n"], inputs["c"]
    objective = resolve("pkpo", {"advantage.k": inputs["k"], "advantage.baseline": "none"})
    got = np.array(advantages(objective, [1.0] * c + [0.0] * (n - c))) / n
    close(got, [expected["weight_correct"]] * c + [expected["weight_wrong"]] * (n - c))


@reads("adv_optimal_token_baseline")
def test_the_optimal_token_baseline() -> None:
    inputs, expected = entry("adv_optimal_token_baseline")
    pairs = zip(inputs["returns"], inputs["per_token_energy"], strict=True)
    rows = [response("q", g[0], len(g), energy=np.array(e)) for g, e in pairs]
    got = assign(resolve("otb"), rows)
    close([a.advantage for a in got.responses], expected["advantages"])
    with pytest.raises(ObjectiveError, match="needs the energy of every token"):
        assign(resolve("otb"), [replace(r, energy=None) for r in rows])


# --- the critic ---------------------------------------------------------------------------------------------------


@reads("gae_basic")
def test_gae_and_returns_formed_before_whitening() -> None:
    inputs, expected = entry("gae_basic")
    rewards, values = np.array(inputs["rewards"]), np.array(inputs["values"])
    for suffix, lam in {"": inputs["lambda"], "_lambda1": 1.0, "_lambda0": 0.0}.items():
        close(gae(rewards, values, inputs["gamma"], lam), expected["advantages" + suffix])
        if "returns" + suffix in expected:
            close(gae(rewards, values, inputs["gamma"], lam) + values, expected["returns" + suffix])
    row = response("q", 1.0, 4, values=values, steps=[(1, -0.1)])
    variance = float(np.var(expected["advantages"], ddof=1))
    in_the_root = math.sqrt(variance + 1e-8) - math.sqrt(variance)  # that entry adds 1e-8 to the variance
    for key, whiten, ddof, epsilon in (
        ("advantages", "none", 0, 0.0),
        ("advantages_whitened_ddof0", "tokens", 0, 0.0),
        ("advantages_whitened_ddof1_eps1e-8", "tokens", 1, in_the_root),
    ):
        more = {} if whiten == "none" else {"advantage.ddof": ddof, "advantage.epsilon": epsilon}
        objective = resolve(
            "ppo", {"kl.estimator": "none", "advantage.credit": "step", "advantage.whiten": whiten, **more}
        )
        (got,) = assign(objective, [row]).responses
        close(got.advantage, expected[key])
        close(got.returns, expected["returns"])


def test_the_critics_target_has_its_own_lambda_and_the_kl_is_in_each_tokens_reward() -> None:
    anchor, reference, values = np.array([-1.0, -2.0]), np.array([-1.5, -1.8]), np.array([0.3, 0.6])
    row = response("q", 1.0, 2, values=values, anchor=anchor, reference=reference)
    objective = resolve("ppo", {"advantage.whiten": "none", "advantage.gae_lambda": 0.0, "kl.coefficient": 0.1})
    (got,) = assign(objective, [row]).responses
    rewards = np.array([-0.1 * 0.5, 1.0 + 0.1 * 0.2])
    close(got.advantage, gae(rewards, values, 1.0, 0.0))
    close(got.returns, gae(rewards, values, 1.0, 0.95) + values)


@reads("vapo_length_adaptive_lambda")
def test_lambda_by_length_is_kept_in_zero_to_one() -> None:
    inputs, expected = entry("vapo_length_adaptive_lambda")
    close([length_adaptive(inputs["alpha"], n) for n in inputs["lengths"]], expected["clamped_lambda"])
    close([1 - 1 / (inputs["alpha"] * n) for n in inputs["lengths"]], expected["raw_lambda"])
    values = np.linspace(0.1, 0.9, 40)
    (got,) = assign(resolve("vapo"), [response("q", 1.0, 40, values=values)]).responses
    close(got.advantage, gae(np.append(np.zeros(39), 1.0), values, 1.0, 0.5))
    close(got.returns, np.ones(40))


@reads("ppo_value_loss_clipped")
def test_the_value_loss_clipped_and_not() -> None:
    inputs, expected = entry("ppo_value_loss_clipped")
    old, returns = (torch.tensor(inputs[name], dtype=torch.float64) for name in ("values_old", "returns"))
    for clip, loss in ((inputs["clip"], expected["loss"]), (0.0, expected["loss_unclipped"])):
        values = torch.tensor(inputs["values"], dtype=torch.float64, requires_grad=True)
        terms, flat = value_terms(ValueLoss(clip=clip), values, old, returns)
        close(terms.mean().item(), loss)
        if clip:
            terms.mean().backward()
            close(values.grad, expected["grad_values"])
            close(flat.double().mean(), expected["clip_fraction"])


def test_hubers_value_loss_is_the_square_inside_and_linear_outside() -> None:
    values = torch.tensor([0.1, 3.0], dtype=torch.float64, requires_grad=True)
    terms, _ = value_terms(ValueLoss(huber=0.5), values, values.detach(), torch.zeros(2, dtype=torch.float64))
    close(terms.detach(), [0.5 * 0.01, 0.5 * 2 * 0.5 * (3.0 - 0.25)])
    terms.sum().backward()
    close(values.grad, [0.1, 0.5])


# --- losses -------------------------------------------------------------------------------------------------------


@reads("loss_vapo_positive_lm")
def test_the_supervised_term_is_the_mean_over_tokens_of_right_responses() -> None:
    inputs, expected = entry("loss_vapo_positive_lm")
    overrides = {"terms.imitation": inputs["mu"], "kl.estimator": "none"}
    drawn = _with(responses(inputs), advantage=0.0)
    _equals(evaluate(resolve("grpo", overrides), drawn), expected)
    skipped = [a.skipped for a in assign(resolve("grpo", overrides), [d.response for d in drawn]).responses]
    assert skipped == [not right for right in inputs["correct"]]
    answer = explain(
        {"groups": [{**g, "responses": [{**r, "advantage": 0} for r in g["responses"]]} for g in _groups(inputs)]},
        "grpo",
        overrides,
    )
    close(answer["loss"], expected["loss"])


def _groups(inputs: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = batch(inputs)["groups"]
    return found


@reads("loss_vespo")
def test_vespo() -> None:
    inputs, expected = entry("loss_vespo")
    result = evaluate(resolve("vespo"), responses(inputs))
    close([a.value for a in result.assignment.responses], inputs["advantages"])
    close([n["ratio"][0] for n in result.numbers], expected["W"])
    _equals(result, expected)
    close(explain(batch(inputs), "vespo")["loss"], expected["loss"])


@reads("loss_kl_cov_top1")
def test_kl_cov_penalises_the_token_with_the_highest_covariance() -> None:
    inputs, expected = entry("loss_kl_cov_top1")
    overrides = {
        "selection.covariance_share": inputs["k"] / sum(inputs["lengths"]),
        "selection.covariance_coefficient": inputs["ppo_kl_coef"],
    }
    drawn = [replace(d, response=replace(d.response, policy=d.policy)) for d in responses(inputs)]
    result = evaluate(resolve("kl_cov", overrides), drawn)
    marks = ragged([a.penalised for a in result.assignment.responses])
    assert np.flatnonzero(marks).tolist() == [expected["selected_flat_index"]]
    _equals(result, expected)
    close(explain(batch(inputs), "kl_cov", overrides)["loss"], expected["loss"])


def test_clip_cov_takes_the_policy_term_from_tokens_of_its_band_alone() -> None:
    inputs, expected = entry("loss_kl_cov_top1")
    share = {"selection.covariance_share": 3 / 18, "selection.covariance_low": 0.5, "selection.covariance_high": 1.5}
    drawn = [replace(d, response=replace(d.response, policy=d.policy)) for d in responses(inputs)]
    full = evaluate(resolve("clip_cov", {"selection.covariance": "none"}), drawn)
    marked = evaluate(resolve("clip_cov", share), drawn)
    gone = ragged([~a.keep for a in marked.assignment.responses]).astype(bool)
    values = ragged(expected["covariance"])
    assert gone.sum() == 3 and np.all((values[gone] >= 0.5) & (values[gone] <= 1.5))
    assert not ragged(marked.gradient)[gone].any()
    close(ragged(marked.gradient)[~gone], ragged(full.gradient)[~gone])


@reads("loss_luffy")
def test_a_demonstration_in_the_group_has_its_own_weight() -> None:
    inputs, expected = entry("loss_luffy")
    teacher = [i == inputs["off_policy_response"] for i in range(len(inputs["lengths"]))]
    overrides = {"aggregate.length": inputs["C"], "surrogate.gamma": inputs["gamma"], **NO_ENTROPY}
    result = evaluate(resolve("luffy", overrides), _with(responses(inputs), demonstration=teacher))
    close([a.value for a in result.assignment.responses], inputs["advantages"])
    _equals(result, expected)


@reads("loss_real")
def test_real_is_a_loss_over_groups_with_its_gradient() -> None:
    inputs, expected = entry("loss_real")
    drawn = [
        replace(d, response=replace(d.response, policy=d.policy, raw=label))
        for d, label in zip(responses(inputs), inputs["labels"], strict=True)
    ]
    objective = resolve("real", {"surrogate.tau": inputs["tau"]})
    _equals(evaluate(objective, drawn), expected)
    _equals(evaluate(objective, drawn, parts=[[0, 5], [1, 2, 3], [4, 6, 7]]), expected)


def test_real_on_unequal_groups_is_the_mean_over_groups_by_autograd() -> None:
    rng = np.random.default_rng(0)
    drawn, rows = [], []
    for group, right in (("a", [1, 0, 0]), ("b", [1, 1]), ("c", [0, 0])):
        for label in right:
            policy, anchor = -rng.exponential(1, 3), -rng.exponential(1, 3)
            made = response(group, float(label), 3, anchor=anchor, policy=policy)
            drawn.append(Drawn(made, policy))
            rows.append((group, label, anchor))
    leaves = [torch.tensor(d.policy, requires_grad=True) for d in drawn]
    scores = [(leaf - torch.tensor(r[2])).mean() / 0.5 for leaf, r in zip(leaves, rows, strict=True)]
    total = torch.zeros((), dtype=torch.float64)
    for name in "abc":
        for label, sign in ((1, -1), (0, 1)):
            own = [s for s, r in zip(scores, rows, strict=True) if r[0] == name and r[1] == label]
            total = total + torch.log1p(sum((torch.exp(sign * s) for s in own), torch.zeros(())))
    (total / 3).backward()
    result = evaluate(resolve("real"), drawn)
    close(result.loss, total.item() / 3)
    close(ragged(result.gradient), ragged([leaf.grad for leaf in leaves]))


def test_the_entropy_bonus_is_a_term_with_the_tokens_weight() -> None:
    inputs, _ = entry("loss_entropy_top20")
    drawn = [replace(d, entropy=np.array(e)) for d, e in zip(responses(inputs), inputs["entropy"], strict=True)]
    plain = evaluate(resolve("dapo"), drawn).loss
    got = evaluate(resolve("dapo", {"terms.entropy": 0.1}), drawn).loss
    close(got, plain - 0.1 * np.mean(ragged(inputs["entropy"])))


def test_an_entropy_mask_of_each_response_keeps_a_share_of_each() -> None:
    inputs, _ = entry("loss_entropy_top20")
    objective = resolve("high_entropy", {"selection.entropy_over": "response"})
    kept = [a.keep for a in assign(objective, [d.response for d in responses(inputs)]).responses]
    for keep, values in zip(kept, inputs["entropy"], strict=True):
        assert keep.tolist() == [v >= np.quantile(values, 0.8) for v in values]


# --- branches -----------------------------------------------------------------------------------------------------


def _branching() -> list[Drawn]:
    """Three siblings: member 1 begins with two tokens of member 0, member 2 is alone and draws the same first id."""
    rng = np.random.default_rng(1)
    origin = [np.array([0, 0, 0]), np.array([0, 0, 1]), np.array([2, 2, 2])]
    start = -rng.exponential(1, 2)
    rows = []
    for m, reward in enumerate((1.0, 0.0, 0.0)):
        anchor = -rng.exponential(1, 3)
        anchor[:2] = start if m < 2 else anchor[:2]
        made = response("q", reward, 3, anchor=anchor, member=m, origin=origin[m])
        rows.append(Drawn(made, anchor + 0.1))
    return rows


def test_shared_tokens_take_the_mean_credit_and_are_trained_once() -> None:
    objective = resolve("rloo", {"kl.estimator": "none"})
    got = assign(objective, [d.response for d in _branching()])
    close([a.advantage for a in got.responses], [[0.25, 0.25, 1.0], [0.25, 0.25, -0.5], [-0.5, -0.5, -0.5]])
    assert [(a.weight > 0).tolist() for a in got.responses] == [[True] * 3, [False, False, True], [True] * 3]
    assert got.layout.tokens == 7
    each = assign(
        resolve("rloo", {"kl.estimator": "none", "aggregate.shared": "each"}), [d.response for d in _branching()]
    )
    close(each.responses[0].weight, [2 / 3, 2 / 3, 1 / 3])


def test_weighing_a_shared_token_for_each_branch_is_the_gradient_of_the_rows_written_out() -> None:
    objective = resolve("rloo", {"kl.estimator": "none", "aggregate.shared": "each"})
    tree = evaluate(objective, _branching())
    apart = evaluate(objective, _with(_branching(), origin=None))
    close(tree.gradient[0][:2], apart.gradient[0][:2] + apart.gradient[1][:2])
    close(tree.gradient[1][:2], [0.0, 0.0])
    close([g[2] for g in tree.gradient], [g[2] for g in apart.gradient])


@pytest.mark.parametrize("name", ["reinforce_pp", "gspo", "grpo", "dapo"])
def test_a_void_owner_leaves_its_shared_tokens_to_the_next_branch(name: str) -> None:
    drawn = _with(_branching(), reference=np.array([-1.0, -1.0, -1.0]))
    drawn.append(replace(drawn[2], response=replace(drawn[2].response, member=3, origin=None, reward=1.0)))
    drawn[0] = replace(drawn[0], response=replace(drawn[0].response, status="void", reward=None))
    got = assign(resolve(name), [d.response for d in drawn])
    assert got.responses[1].weight.all() and not got.responses[0].weight.any()
    assert math.isfinite(evaluate(resolve(name), drawn).loss)


def test_gspo_and_gspo_token_differ_once_tokens_have_their_own_credit() -> None:
    inputs, _ = entry("loss_gspo_token_wide_0.05")
    steps = [[(0, float(i % 2)), (n - 1, 0.5)] for i, n in enumerate(inputs["lengths"])]
    wide = {"advantage.credit": "step", "surrogate.low": 5.0, "surrogate.high": 5.0}
    wide["surrogate.low"] = 1.0
    one, other = (
        evaluate(resolve(name, wide), _with(responses(inputs), steps=steps)) for name in ("gspo", "gspo_token")
    )
    close(one.loss, other.loss)
    for got, of_tokens, a in zip(one.gradient, other.gradient, one.assignment.responses, strict=True):
        assert np.ptp(got) < 1e-15  # one ratio a response: its tokens share the mean credit
        close(of_tokens.sum(), got.sum())
        assert np.ptp(of_tokens) > 1e-6 or np.ptp(a.advantage) < 1e-12
