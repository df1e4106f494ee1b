"""Exactness by construction: what must not change the loss, and what every choice of every axis keeps.

Random ragged batches with uneven, interleaved groups, environment tokens, void and truncated siblings; float64.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, get_args, get_type_hints

import numpy as np
import pytest
from drawn import Drawn, Result, advantages, evaluate, response
from hypothesis import given, settings
from hypothesis import strategies as st

from gropius.objective.advantage import BASELINES
from gropius.objective.aggregate import AGGREGATES
from gropius.objective.kl import ESTIMATORS, GRADIENTS
from gropius.objective.presets import PRESETS, resolve
from gropius.objective.ratio import CORRECTIONS, LEVELS
from gropius.objective.selection import SAMPLED, Response, assign
from gropius.objective.spec import AXES, Objective
from gropius.objective.surrogate import DIVERGENCES, SURROGATES

ARRAYS = ("policy", "anchor", "sampler", "reference", "entropy")
GARBAGE = (math.inf, -math.inf, math.nan, 1e9)
ALL_EQUAL = {"atol": 1e-13, "rtol": 1e-11}


def examples(count: int) -> Any:
    return settings(max_examples=count, deadline=None, derandomize=True, database=None)


# --- every choice of every axis -----------------------------------------------------------------------------------

NEEDED: dict[str, dict[str, Any]] = {
    "advantage.whiten": {"advantage.scale": "none"},
    "advantage.scale_of": {"advantage.scale": "batch_std"},
    "ratio.level=none": {"surrogate.kind": "none", "surrogate.low": 0.0, "surrogate.high": 0.0},
    "ratio.correction": {"ratio.correction_low": 0.5, "ratio.correction_high": 2.0},
    "surrogate.kind=none": {"surrogate.low": 0.0, "surrogate.high": 0.0},
    "surrogate.kind=capped": {"surrogate.cap": 1.3, "surrogate.low": 0.0, "surrogate.high": 0.0},
    "surrogate.kind=soft_gate": {
        "surrogate.tau_positive": 1.0, "surrogate.tau_negative": 1.05, "surrogate.low": 0.0, "surrogate.high": 0.0,
    },
    "surrogate.kind=divergence_mask": {
        "surrogate.divergence": "tv", "surrogate.threshold": 0.05, "surrogate.low": 0.0, "surrogate.high": 0.0,
    },
    "surrogate.divergence": {
        "surrogate.kind": "divergence_mask", "surrogate.threshold": 0.05, "surrogate.low": 0.0, "surrogate.high": 0.0,
    },
    "kl.place=reward": {"kl.estimator": "k1"},
    "kl.reward_form": {"kl.place": "reward"},
    "kl.reward_form=token": {"advantage.baseline": "critic", "advantage.scale": "none"},
    "advantage.baseline=critic": {"advantage.scale": "none"},
    "advantage.baseline=optimal_token": {"advantage.scale": "none"},
    "advantage.baseline=subset": {"advantage.transform": "pkpo", "advantage.k": 2},
    "advantage.scale=subset_std": {"advantage.k": 2},
    "advantage.transform": {"advantage.k": 2},
    "advantage.pool": {"advantage.credit": "turn", "advantage.discount": 0.9},
    "advantage.final": {"advantage.credit": "step"},
    "surrogate.kind=gamma_gate": {
        "surrogate.k_positive": 2.0, "surrogate.lambda_positive": 3.0, "surrogate.k_negative": 3.0,
        "surrogate.lambda_negative": 2.0, "surrogate.low": 0.0, "surrogate.high": 0.0,
    },
    "surrogate.kind=classify": {"surrogate.tau": 0.5, "surrogate.low": 0.0, "surrogate.high": 0.0},
    "surrogate.demonstrations=shaped": {"surrogate.gamma": 0.1},
    "selection.entropy_over": {"selection.entropy_top": 0.4},
    "selection.covariance": {"selection.covariance_share": 0.2},
    "selection.covariance=clip": {"selection.covariance_low": -0.5, "selection.covariance_high": 5.0},
    "selection.covariance=kl": {"selection.covariance_coefficient": 1.0},
    "aggregate.kind=constant_length": {"aggregate.length": 7},
    "aggregate.count_dead": {"selection.dead": "drop"},
    "aggregate.count_corrected": {
        "ratio.correction": "mask", "ratio.correction_low": 0.5, "ratio.correction_high": 2.0,
    },
    "aggregate.count_masked": {"selection.truncated": "mask_loss"},
    "selection.truncated=soft_penalty": {"selection.overlong_max": 5, "selection.overlong_cache": 3},
}  # fmt: skip


def _choices() -> dict[str, Objective]:
    """An objective for every choice of every axis, around grpo."""
    out: dict[str, Objective] = {}
    for axis, kind in AXES.items():
        for key, hint in get_type_hints(kind).items():
            name = f"{axis}.{key}"
            choices = get_args(hint) or ((False, True) if hint is bool else ())
            for choice in choices:
                label = f"{name}={choice}"
                if label == "surrogate.divergence=none":
                    continue
                overrides = {**NEEDED.get(name, {}), **NEEDED.get(label, {}), name: choice}
                if choice == "none" and label not in NEEDED:
                    overrides = {name: choice}
                out[label] = resolve("grpo", overrides)
    out["surrogate.dual"] = resolve("grpo", {"surrogate.dual": 1.5})
    out["surrogate.ceiling"] = resolve("grpo", {"surrogate.ceiling": 1.4})
    out["kl.clamp"] = resolve("grpo", {"kl.clamp": 0.2})
    out["selection.entropy_top"] = resolve("grpo", {"selection.entropy_top": 0.4})
    out["terms.entropy"] = resolve("grpo", {"terms.entropy": 0.01})
    out["terms.imitation"] = resolve("grpo", {"terms.imitation": 0.1, "selection.correct": 0.5})
    out["credit of a critic by step"] = resolve("vapo", {"advantage.credit": "step", "advantage.discount": 0.9})
    out["selection.off_policy_mask"] = resolve("grpo", {"selection.off_policy_mask": 0.1})
    return out


_PRESETS = {name: preset.objective for name, preset in PRESETS.items()}
_FRESH = {objective: label for label, objective in _choices().items() if objective not in _PRESETS.values()}
OBJECTIVES = _PRESETS | {label: objective for objective, label in _FRESH.items()}
everywhere = pytest.mark.parametrize("name", OBJECTIVES)


@pytest.mark.parametrize(
    ("table", "axis", "key", "without"),
    [
        (BASELINES, "advantage", "baseline", set()),
        (LEVELS, "ratio", "level", set()),
        (CORRECTIONS, "ratio", "correction", set()),
        (SURROGATES, "surrogate", "kind", set()),
        (DIVERGENCES, "surrogate", "divergence", {"none"}),
        (ESTIMATORS, "kl", "estimator", {"none"}),
        (SAMPLED, "kl", "estimator", {"none"}),
        (GRADIENTS, "kl", "gradient", set()),
        (AGGREGATES, "aggregate", "kind", set()),
    ],
)
def test_a_table_has_one_row_for_each_choice(table: dict[str, Any], axis: str, key: str, without: set[str]) -> None:
    assert set(table) == set(get_args(get_type_hints(AXES[axis])[key])) - without


# --- random batches -----------------------------------------------------------------------------------------------


@st.composite
def batches(draw: st.DrawFn, singletons: bool = False, void: bool = True, steps: bool = False) -> list[Drawn]:
    """Up to four groups of two to four siblings (or one), interleaved, one to five tokens each, some masked."""
    sizes = draw(st.lists(st.integers(1 if singletons else 2, 4), min_size=1, max_size=4))
    members = [str(g) for g, size in enumerate(sizes) for _ in range(size)]
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    drawn = [_drawn(rng, members[i], void) for i in rng.permutation(len(members))]
    return drawn if steps else [replace(d, response=replace(d.response, steps=())) for d in drawn]


def _drawn(rng: np.random.Generator, group: str, void: bool) -> Drawn:
    length = int(rng.integers(1, 6))
    mask = rng.random(length) > 0.2
    mask[rng.integers(length)] = True
    anchor = -rng.exponential(1.0, length) - 0.01
    away = {name: anchor + rng.normal(0, 0.4, length) for name in ("policy", "sampler", "reference")}
    is_void = void and rng.random() < 0.15
    made = Response(
        group=group,
        reward=None if is_void else float(rng.choice([0.0, 0.25, 0.5, 1.0])),
        steps=() if is_void else [(int(rng.integers(length)), float(rng.choice([0.0, 0.5])))],
        turns=np.cumsum(rng.random(length) > 0.6) - 0,
        values=rng.normal(0, 1, length),
        energy=rng.random(length),
        policy=away["policy"],
        demonstration=bool(rng.random() < 0.2),
        mask=mask,
        status="void" if is_void else "scored",
        truncated=bool(rng.random() < 0.2),
        anchor=anchor,
        reference=away["reference"],
        entropy=rng.exponential(1.0, length),
        greedy_reward=0.5,
    )
    return Drawn(made, away["policy"], away["sampler"], rng.exponential(1.0, length))


def _rewarded(d: Drawn, reward: float) -> Drawn:
    """The response with another reward; a void one stays void."""
    return d if d.response.reward is None else replace(d, response=replace(d.response, reward=reward))


def same(got: Result, wanted: Result, order: Any = None) -> None:
    order = range(len(wanted.gradient)) if order is None else order
    np.testing.assert_allclose(got.loss, wanted.loss, **ALL_EQUAL)
    for i, j in enumerate(order):
        np.testing.assert_allclose(got.gradient[i], wanted.gradient[j], **ALL_EQUAL)


@everywhere
@given(data=st.data())
@examples(6)
def test_micro_batches_do_not_change_loss_or_gradient(name: str, data: st.DataObject) -> None:
    drawn = data.draw(batches(steps=True))
    home = data.draw(st.lists(st.integers(0, 3), min_size=len(drawn), max_size=len(drawn)))
    parts = [[i for i, part in enumerate(home) if part == p] for p in range(4)]
    whole = evaluate(OBJECTIVES[name], drawn)
    split = evaluate(OBJECTIVES[name], drawn, parts=parts)
    same(split, whole)


@everywhere
@given(data=st.data())
@examples(4)
def test_ranks_add_up_to_the_gradient_of_the_parameters(name: str, data: st.DataObject) -> None:
    """Three ranks, sequences dealt in turn (a rank may have none); gradients of shared parameters are summed."""
    drawn = data.draw(batches(steps=True))
    rng = np.random.default_rng(len(drawn))
    features = [rng.normal(size=(len(d.policy), 3)) for d in drawn]
    whole = evaluate(OBJECTIVES[name], drawn)
    wanted = sum(g @ f for g, f in zip(whole.gradient, features, strict=True))
    ranks = [list(range(r, len(drawn), 3)) for r in range(3)]
    parts = [evaluate(OBJECTIVES[name], drawn, parts=[[i] for i in rank]) for rank in ranks]
    reduced = sum(sum((p.gradient[i] @ features[i] for i in r), np.zeros(3)) for p, r in zip(parts, ranks, strict=True))
    np.testing.assert_allclose(reduced, wanted, rtol=1e-10, atol=1e-13)
    np.testing.assert_allclose(math.fsum(p.loss for p in parts), whole.loss, **ALL_EQUAL)


def padded(d: Drawn, where: list[int], garbage: list[float]) -> Drawn:
    """The response with masked positions inserted, every array holding garbage there."""
    fill = np.array(garbage)

    def grown(values: Any) -> Any:
        return None if values is None else np.insert(np.asarray(values, np.float64), where, fill)

    r = d.response
    mask = np.insert(r.mask, where, False)
    names = ("anchor", "reference", "entropy", "values", "energy", "policy")
    arrays: dict[str, Any] = {name: grown(getattr(r, name)) for name in names}
    arrays["turns"] = np.insert(np.asarray(r.turns), where, 0)
    arrays["steps"] = [(t + sum(w <= t for w in where), score) for t, score in r.steps]
    return Drawn(replace(r, mask=mask, **arrays), grown(d.policy), grown(d.sampler), grown(d.entropy))


@everywhere
@given(data=st.data())
@examples(5)
def test_masked_positions_may_hold_anything(name: str, data: st.DataObject) -> None:
    drawn = data.draw(batches(steps=True))
    grown, places = [], []
    for d in drawn:
        where = data.draw(st.lists(st.integers(0, len(d.policy)), max_size=3))
        garbage = data.draw(st.lists(st.sampled_from(GARBAGE), min_size=len(where), max_size=len(where)))
        grown.append(padded(d, where, garbage))
        places.append(np.insert(np.zeros(len(d.policy), bool), where, True))
    wanted, got = evaluate(OBJECTIVES[name], drawn), evaluate(OBJECTIVES[name], grown)
    np.testing.assert_allclose(got.loss, wanted.loss, **ALL_EQUAL)
    for inserted, gradient, own in zip(places, got.gradient, wanted.gradient, strict=True):
        assert np.all(gradient[inserted] == 0)
        np.testing.assert_allclose(gradient[~inserted], own, **ALL_EQUAL)


@everywhere
@given(data=st.data())
@examples(5)
def test_the_order_of_siblings_and_groups_does_not_change_a_bit(name: str, data: st.DataObject) -> None:
    drawn = data.draw(batches(steps=True))
    order = data.draw(st.permutations(range(len(drawn))))
    wanted = evaluate(OBJECTIVES[name], drawn)
    got = evaluate(OBJECTIVES[name], [drawn[i] for i in order])
    for i, j in enumerate(order):
        one, other = got.assignment.responses[i], wanted.assignment.responses[j]
        assert one.advantage.tolist() == other.advantage.tolist()
        assert one.weight.tolist() == other.weight.tolist()
        assert one.skipped == other.skipped
    same(got, wanted, order)


@everywhere
@given(data=st.data())
@examples(5)
def test_a_skipped_sequence_has_exactly_no_gradient(name: str, data: st.DataObject) -> None:
    drawn = data.draw(batches(steps=True))
    dead = data.draw(st.sampled_from([None, 0.0, 1.0]))
    if dead is not None:  # make one group dead, so that there is something to skip
        group = drawn[0].response.group
        drawn = [_rewarded(d, dead) if d.response.group == group else d for d in drawn]
    whole = evaluate(OBJECTIVES[name], drawn)
    skipped = [a.skipped for a in whole.assignment.responses]
    for gradient, skip in zip(whole.gradient, skipped, strict=True):
        if skip:
            assert np.all(gradient == 0)
    run = evaluate(OBJECTIVES[name], drawn, parts=[[i for i, skip in enumerate(skipped) if not skip]])
    np.testing.assert_allclose(run.loss, whole.loss, **ALL_EQUAL)


@everywhere
@given(data=st.data())
@examples(5)
def test_a_batch_with_void_siblings_is_the_batch_without_them(name: str, data: st.DataObject) -> None:
    """Groups with fewer than two valid of several siblings go as a whole."""
    drawn = data.draw(batches(steps=True))
    valid = [d for d in drawn if d.response.status != "void"]
    alive = {g for g in {d.response.group for d in valid} if sum(d.response.group == g for d in valid) >= 2}
    rest = [i for i, d in enumerate(drawn) if d.response.status != "void" and d.response.group in alive]
    whole = evaluate(OBJECTIVES[name], drawn)
    for i, a in enumerate(whole.assignment.responses):
        if i not in rest:
            assert a.skipped and not a.weight.any() and not a.advantage.any()
            assert np.all(whole.gradient[i] == 0)
    if rest:
        alone = evaluate(OBJECTIVES[name], [drawn[i] for i in rest])
        np.testing.assert_allclose(alone.loss, whole.loss, **ALL_EQUAL)
        for i, gradient in zip(rest, alone.gradient, strict=True):
            np.testing.assert_allclose(gradient, whole.gradient[i], **ALL_EQUAL)


# --- rewards ------------------------------------------------------------------------------------------------------

GROUP_BASELINES = ("group_mean", "leave_one_out", "length_weighted")
SCALES = ("none", "group_std", "batch_std", "group_mean")


def _pairs() -> list[tuple[str, str]]:
    return [
        (baseline, scale)
        for baseline in ("none", "batch_mean", *GROUP_BASELINES)
        for scale in SCALES
        if scale != "group_mean" or baseline in ("none", "group_mean")
    ]


def _advantages(objective: Objective, drawn: list[Drawn], shift: float = 0.0, factor: float = 1.0) -> np.ndarray:
    rows = [d.response for d in drawn]
    moved = [r if r.reward is None else replace(r, reward=r.reward * factor + shift) for r in rows]
    return np.array([a.value for a in assign(objective, moved).responses])


@pytest.mark.parametrize(("baseline", "scale"), _pairs())
@given(data=st.data())
@examples(15)
def test_a_shift_of_all_rewards_changes_nothing_unless_declared(baseline: str, scale: str, data: st.DataObject) -> None:
    drawn = data.draw(batches())
    shift = data.draw(st.integers(0, 64)) / 8
    objective = resolve("dr_grpo", {"advantage": {"baseline": baseline, "scale": scale}})
    before, after = _advantages(objective, drawn), _advantages(objective, drawn, shift=shift)
    credit = assign(objective, [d.response for d in drawn]).credit
    if scale == "group_mean":  # divides by a mean that moves with the shift
        moved = credit.scale + shift
        live = np.array([a.weight.any() for a in assign(objective, [d.response for d in drawn]).responses])
        top = credit.centred + (shift if baseline == "none" else 0.0)
        equal = _equal_groups(drawn)
        wanted = np.where(live & ~equal & (moved > 0), top / np.where(moved > 0, moved, 1.0), 0.0)
        np.testing.assert_allclose(after, wanted, rtol=1e-9, atol=1e-12)
    elif baseline == "none":  # R/scale: the shift over the scale is added
        spread = np.where(credit.scale > 0, credit.scale, 1.0)
        live = np.array([a.weight.any() for a in assign(objective, [d.response for d in drawn]).responses])
        added = np.where(live & (credit.scale > 0), shift / spread, 0.0)
        np.testing.assert_allclose(after, before + added, rtol=1e-9, atol=1e-12)
    else:
        np.testing.assert_allclose(after, before, rtol=1e-9, atol=1e-12)


def _equal_groups(drawn: list[Drawn]) -> np.ndarray:
    """[n] True where all valid siblings of the response have one reward."""
    rewards: dict[str, set[float]] = {}
    for d in drawn:
        if d.response.reward is not None:
            rewards.setdefault(d.response.group, set()).add(float(d.response.reward))  # type: ignore[arg-type]
    return np.array([len(rewards.get(d.response.group, {0.0})) == 1 for d in drawn])


@pytest.mark.parametrize(("baseline", "scale"), _pairs())
@given(data=st.data())
@examples(10)
def test_a_factor_on_all_rewards_is_linear_without_a_scale_and_nothing_with_one(
    baseline: str, scale: str, data: st.DataObject
) -> None:
    drawn = data.draw(batches())
    factor = data.draw(st.floats(1e-3, 1e3))
    objective = resolve("dr_grpo", {"advantage": {"baseline": baseline, "scale": scale}})
    before, after = _advantages(objective, drawn), _advantages(objective, drawn, factor=factor)
    np.testing.assert_allclose(after, before * (factor if scale == "none" else 1.0), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("whiten", ["sequences", "tokens"])
@given(data=st.data())
@examples(15)
def test_whitening_undoes_shift_and_factor_of_raw_rewards(whiten: str, data: st.DataObject) -> None:
    drawn = data.draw(batches())
    objective = resolve("grpo", {"advantage": {"baseline": "none", "scale": "none", "whiten": whiten}})
    before = _advantages(objective, drawn)
    after = _advantages(objective, drawn, shift=data.draw(st.integers(-8, 8)) / 4, factor=data.draw(st.floats(0.1, 10)))
    np.testing.assert_allclose(after, before, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("scale", ["none", "group_std", "batch_std", "group_mean"])
@pytest.mark.parametrize("baseline", GROUP_BASELINES)
@given(data=st.data())
@examples(10)
def test_centred_advantages_sum_to_zero_in_every_group(baseline: str, scale: str, data: st.DataObject) -> None:
    if scale == "group_mean" and baseline != "group_mean":
        return
    drawn = data.draw(batches(singletons=baseline != "leave_one_out"))
    objective = resolve("grpo", {"advantage": {"baseline": baseline, "scale": scale}})
    assigned = assign(objective, [d.response for d in drawn]).responses
    sums: dict[str, float] = {}
    for d, a in zip(drawn, assigned, strict=True):
        weight = int(d.response.mask.sum()) if baseline == "length_weighted" else 1
        sums[d.response.group] = sums.get(d.response.group, 0.0) + weight * a.value
    assert all(abs(total) < 1e-10 for total in sums.values())


@given(
    reward=st.floats(allow_nan=False, allow_infinity=False),
    size=st.integers(1, 40),
    ddof=st.sampled_from([0, 1]),
    epsilon=st.sampled_from([0.0, 1e-8, 1e-4]),
    pair=st.sampled_from([(b, s) for b, s in _pairs() if b in GROUP_BASELINES]),
)
@examples(300)
def test_equal_rewards_give_exactly_zero(
    reward: float, size: int, ddof: int, epsilon: float, pair: tuple[str, str]
) -> None:
    baseline, scale = pair
    if scale == "group_mean":
        reward = abs(reward)
    size += baseline == "leave_one_out"
    axis = {"baseline": baseline, "scale": scale}
    if scale != "none":
        axis |= {"ddof": ddof, "epsilon": epsilon} if scale != "group_mean" else {"epsilon": epsilon}
    rows = [response("dead", reward, 1 + i % 3) for i in range(size)] + [response("live", r, 2) for r in (0.0, 1.0)]
    assigned = assign(resolve("grpo", {"advantage": axis}), rows).responses
    assert [a.value for a in assigned[:size]] == [0.0] * size


@given(reward=st.floats(-1e6, 1e6), size=st.integers(2, 20))
@examples(50)
def test_equal_rewards_stay_exactly_zero_through_sequence_whitening(reward: float, size: int) -> None:
    objective = resolve("reinforce_pp_baseline")
    got = advantages(objective, [reward] * size + [0.1, 0.4, 0.7], ["dead"] * size + ["live"] * 3)
    assert got[:size] == [0.0] * size
    assert any(got[size:])


@given(scale=st.integers(-280, 280), size=st.integers(2, 9))
@examples(60)
def test_the_standard_score_does_not_depend_on_the_unit_of_the_reward(scale: int, size: int) -> None:
    rewards = [1.0] + [0.0] * (size - 1)
    wanted = advantages(resolve("grpo"), rewards)
    np.testing.assert_allclose(advantages(resolve("grpo"), [r * 10.0**scale for r in rewards]), wanted, rtol=1e-9)


# --- rows at the edges --------------------------------------------------------------------------------------------

KINDS = ("response_mean", "token_mean", "prompt_mean", "response_sum", "constant_length")


def _kind(kind: str, **more: Any) -> Objective:
    length = {"aggregate.length": 7} if kind == "constant_length" else {}
    return resolve("grpo", {"aggregate.kind": kind, **length, **more})


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@examples(10)
def test_a_fully_masked_response_counts_only_when_declared(kind: str, data: st.DataObject) -> None:
    """Alone in its group, it changes nothing; counted, the responses (or prompts) are one more, the tokens are not."""
    drawn = data.draw(batches(void=False))
    length = data.draw(st.integers(0, 3))
    empty = Response("empty", 1.0, np.zeros(length, np.bool_), anchor=np.zeros(length), reference=np.zeros(length))
    more = [*drawn, Drawn(empty, np.zeros(length))]
    before = evaluate(_kind(kind), drawn)
    left_out = evaluate(_kind(kind), more)
    counted = evaluate(_kind(kind, **{"aggregate.count_masked": True}), more)
    same(left_out, before, range(len(drawn)))
    prompts = len({d.response.group for d in drawn})
    share = {"token_mean": 1.0, "prompt_mean": prompts / (prompts + 1)}.get(kind, len(drawn) / (len(drawn) + 1))
    np.testing.assert_allclose(counted.loss, before.loss * share, **ALL_EQUAL)
    assert left_out.assignment.responses[-1].skipped


@pytest.mark.parametrize("counted", [False, True])
@given(data=st.data())
@examples(15)
def test_masking_truncated_responses_keeps_their_reward_in_the_group(counted: bool, data: st.DataObject) -> None:
    drawn = data.draw(batches())
    rows = [d.response for d in drawn]
    kept = assign(resolve("dapo"), rows)
    masked = assign(resolve("dapo", {"selection.truncated": "mask_loss", "aggregate.count_masked": counted}), rows)
    for row, one, other in zip(rows, kept.responses, masked.responses, strict=True):
        assert one.value == other.value
        assert not (row.truncated and other.weight.any())
    if counted:
        assert masked.layout.tokens == kept.layout.tokens
    else:
        assert masked.layout.tokens == sum(int(np.count_nonzero(a.weight)) for a in masked.responses)


@given(data=st.data())
@examples(25)
def test_excluding_truncated_responses_is_the_batch_without_them(data: st.DataObject) -> None:
    drawn = data.draw(batches())
    valid = [d for d in drawn if d.response.status != "void" and not d.response.truncated]
    alive = {g for g in {d.response.group for d in valid} if sum(d.response.group == g for d in valid) >= 2}
    rest = [d for d in valid if d.response.group in alive]
    got = evaluate(resolve("grpo", {"selection.truncated": "exclude_from_baseline"}), drawn)
    if rest:
        np.testing.assert_allclose(got.loss, evaluate(resolve("grpo"), rest).loss, **ALL_EQUAL)
    else:
        assert got.loss == 0


@pytest.mark.parametrize("dead", ["keep", "drop", "refill", "grow"])
@pytest.mark.parametrize("counted", [False, True])
@given(data=st.data())
@examples(6)
def test_dead_groups_leave_or_stay_as_declared(dead: str, counted: bool, data: st.DataObject) -> None:
    drawn = data.draw(batches(void=False))
    drawn += [_drawn(np.random.default_rng(i), "dead", void=False) for i in range(3)]
    drawn = [_rewarded(d, 1.0) if d.response.group == "dead" else d for d in drawn]
    drawn = [replace(d, response=replace(d.response, steps=())) for d in drawn]
    overrides = {"selection.dead": dead, "aggregate.kind": "token_mean", "kl.estimator": "none"}
    if dead == "drop":
        overrides |= {"aggregate.count_dead": counted}
    result = evaluate(resolve("grpo", overrides), drawn)
    by_group = {g.id: g for g in result.assignment.groups}
    assert by_group["dead"].state == "all_solved"
    assert by_group["dead"].dropped == (dead != "keep")
    tokens = {d.response.group: 0 for d in drawn}
    for d in drawn:
        tokens[d.response.group] += int(d.response.mask.sum())
    stays = [g for g in tokens if not by_group[g].dropped or (dead == "drop" and counted)]
    assert result.assignment.layout.tokens == sum(tokens[g] for g in stays)


def test_a_singleton_gets_zero_and_an_empty_batch_gives_nothing() -> None:
    assert advantages(resolve("grpo"), [0.7]) == [0.0]
    assert assign(resolve("grpo"), [response("q", 0.7)]).groups[0].state == "singleton"
    empty = assign(resolve("grpo"), [])
    assert (empty.responses, empty.groups, empty.layout.responses) == ([], [], 0)


def test_a_batch_without_a_loss_token_is_zero_and_not_nan() -> None:
    for kind in KINDS:
        for counted in (False, True):
            made = Response("q", 1.0, np.zeros(3, np.bool_), anchor=np.zeros(3), reference=np.zeros(3))
            result = evaluate(_kind(kind, **{"aggregate.count_masked": counted}), [Drawn(made, np.full(3, math.nan))])
            assert result.loss == 0
            assert result.gradient[0].tolist() == [0, 0, 0]


def test_fewer_than_two_valid_siblings_drop_the_group() -> None:
    rows = [response("q", 1.0), response("q", None, status="void"), response("p", 1.0), response("p", 0.0)]
    got = assign(resolve("grpo"), rows)
    assert [(g.state, g.dropped) for g in got.groups] == [("too_few_valid", True), ("informative", False)]
    assert [a.skipped for a in got.responses] == [True, True, False, False]
    assert got.layout.responses == 2
    for count_dead in (False, True):  # a group without enough siblings is not a dead group
        overrides = {"selection.dead": "drop", "aggregate.count_dead": count_dead}
        assert assign(resolve("grpo", overrides), rows).layout.responses == 2


def test_a_part_that_does_not_apply_takes_no_part_in_its_statistics() -> None:
    rewards: list[dict[str, float]] = [{"right": 1.0, "short": 0.2}, {"right": 0.0}, {"right": 0.0, "short": 0.8}]
    rows = [response("q", reward) for reward in rewards]
    got = assign(resolve("grpo", {"advantage.combine": "normalise_then_sum"}), rows)
    root = math.sqrt(2)
    np.testing.assert_allclose([a.value for a in got.responses], [root - 1, -root / 2, -root / 2 + 1], rtol=1e-12)
    assert [a.reward for a in got.responses] == [1.2, 0.0, 0.8]


def test_weights_of_reward_parts_decide_whether_a_group_is_dead() -> None:
    rows = [response("q", {"right": 1.0, "form": form}) for form in (0.0, 1.0)]
    assert assign(resolve("dapo"), rows, {"form": 0.5}).groups[0].state == "informative"
    assert assign(resolve("dapo"), rows, {"form": 0.0}).groups[0].state == "all_solved"


@pytest.mark.parametrize("surrogate", [{}, {"surrogate.dual": 3.0}, {"surrogate.ceiling": 4.0}])
@pytest.mark.parametrize("level", ["token", "sequence_product"])
def test_an_overflowing_ratio_in_the_flat_branch_has_no_gradient(surrogate: dict[str, float], level: str) -> None:
    """In float32 exp(200) is infinite; where the clip chose a constant, 0 · inf must not poison the batch."""
    import torch

    overrides = {"kl.estimator": "none", "ratio.level": level, **surrogate}
    signs = [1.0, 0.0, -1.0] if surrogate else [1.0, 0.0]
    drawn = [Drawn(response("q", 0.0, advantage=a, anchor=np.array([-201.0])), np.array([-1.0])) for a in signs]
    result = evaluate(resolve("grpo", overrides), drawn, dtype=torch.float32)
    assert math.isfinite(result.loss)
    assert all(g.tolist() == [0.0] for g in result.gradient)
