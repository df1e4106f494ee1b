"""Presets resolve and evaluate; every refusal names what to write instead."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import numpy as np
import pytest
from entries import batch, entry

from gropius import explain
from gropius.errors import ObjectiveError
from gropius.objective.explain import explain as explain_directly
from gropius.objective.formula import formula
from gropius.objective.presets import PRESETS, resolve
from gropius.objective.spec import AXES, Objective, flatten, override
from gropius.objective.validate import CONTRADICTIONS, EFFECTS, FINITE, check, field_value

NAMES = (
    "reinforce", "rloo", "grpo", "dr_grpo", "dapo", "gspo", "gspo_token", "cispo", "reinforce_pp",
    "reinforce_pp_baseline", "lite_ppo", "opo", "maxrl", "gpg", "sapo", "gmpo", "dppo", "scalerl", "ppo", "vapo",
    "grpo_process", "grpo_turn", "pass_at_k", "pkpo", "grpo_passk", "gdpo", "otb", "high_entropy", "clip_cov", "kl_cov",
    "luffy", "vespo", "real",
)  # fmt: skip
FRAMEWORKS = {"TRL", "verl", "OpenRLHF"}


def test_the_presets_of_the_design_are_there() -> None:
    assert tuple(PRESETS) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_preset_is_consistent_cited_and_compared_with_three_frameworks(name: str) -> None:
    row = PRESETS[name]
    assert resolve(name) == row.objective
    check(row.objective, row.values)
    assert any(ch.isdigit() for ch in row.citation)
    assert row.print_difference and row.title
    assert set(row.elsewhere) == FRAMEWORKS


@pytest.mark.parametrize("name", NAMES)
def test_a_preset_prints_a_formula_with_its_numbers(name: str) -> None:
    o = PRESETS[name].objective
    text = formula(o)
    assert text.startswith("loss = Σ_t " if o.surrogate.kind != "classify" else "loss = mean over groups of log(")
    assert any(f"A = {start}" in text for start in ("R_i", "(R_i", "GAE(r, V)", "(E[best", "4·E[best"))
    for kind, wanted in {
        "clip": (f"{1 - o.surrogate.low:.6g}", f"{1 + o.surrogate.high:.6g}"),
        "capped": (f"{o.surrogate.cap:g}",),
        "log_clip": (f"{o.surrogate.high:g}",),
        "soft_gate": (f"{o.surrogate.tau_negative:g}",),
        "divergence_mask": (f"{o.surrogate.threshold:g}",),
    }.items():
        if o.surrogate.kind == kind:
            assert all(number in text for number in wanted)
    if o.kl.estimator != "none":
        assert f"{o.kl.coefficient:g}" in text
    if o.aggregate.kind == "constant_length":
        assert f"C = {o.aggregate.length}" in text


@pytest.mark.parametrize("name", NAMES)
def test_a_preset_evaluates_a_full_batch(name: str) -> None:
    inputs, _ = entry("loss_grpo_deepseekmath")
    rollout, _ = entry("loss_scalerl")
    made = batch({**inputs, "logp_rollout": rollout["logp_rollout"]})
    for group in made["groups"]:
        for i, item in enumerate(group["responses"]):
            item |= {"values": [0.3] * item["length"], "energy": [0.5] * item["length"]}
            item |= {"policy_entropy": [0.7] * item["length"], "entropy": [0.1 * i + 0.2] * item["length"]}
    answer = explain(made, name, {"advantage.k": 2} if PRESETS[name].objective.advantage.k else None)
    json.dumps(answer, allow_nan=False)
    assert math.isfinite(answer["loss"])
    assert answer["notes"] == []
    tokens = [t for g in answer["groups"] for r in g["responses"] for t in r["tokens"]]
    assert any(t["gradient"] != 0 for t in tokens)
    np.testing.assert_allclose(math.fsum(t["contribution"] for t in tokens), answer["loss"], rtol=1e-12)


def test_every_field_is_printed_and_an_infinite_bound_is_text() -> None:
    printed = resolve("grpo").as_dict()
    assert set(printed) == set(AXES)
    for axis, kind in AXES.items():
        assert set(printed[axis]) == {f.name for f in dataclasses.fields(kind)}
    assert printed["ratio"]["correction_high"] == "inf"
    assert override(Objective(), {"ratio.correction_high": "inf"}) == Objective()


def test_the_printed_objective_resolves_to_itself() -> None:
    """What `as_dict` printed, every default included, may be written back on top of the same preset."""
    for name, row in PRESETS.items():
        assert override(Objective(), row.objective.as_dict()) == row.objective
        assert resolve(name, row.values) == row.objective


def test_the_block_of_the_design_is_grpo() -> None:
    """Every key of the documented table, written out with its documented value."""
    block: dict[str, dict[str, Any]] = {
        "advantage": {
            "baseline": "group_mean", "scale": "group_std", "scale_of": "rewards", "ddof": 0, "epsilon": 0.0,
            "whiten": "none", "combine": "sum_then_normalise",
        },
        "ratio": {
            "level": "token", "anchor": "snapshot", "correction": "none", "correction_low": 0.0,
            "correction_high": math.inf,
        },
        "surrogate": {"kind": "clip", "low": 0.2, "high": 0.2, "dual": 0.0, "ceiling": 0.0, "cap": 0.0},
        "kl": {"estimator": "k3", "place": "loss", "gradient": "direct", "coefficient": 0.04, "clamp": 0.0},
        "aggregate": {"kind": "response_mean", "length": 0, "count_masked": False},
        "selection": {"dead": "keep", "truncated": "keep"},
    }  # fmt: skip
    assert resolve("grpo", block) == resolve("grpo") == resolve() == Objective()


# --- refusals -----------------------------------------------------------------------------------------------------

# One row for each of CONTRADICTIONS, in its order: (preset, overrides, what the message must tell to write).
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("rloo", {"advantage.scale": "group_mean"}, 'advantage.baseline = "group_mean"'),
    ("dr_grpo", {"advantage.combine": "normalise_then_sum"}, 'scale = "group_std"'),
    ("grpo", {"advantage.combine": "normalise_then_sum", "kl.place": "reward"}, 'kl.place = "loss"'),
    ("grpo", {"kl.coefficient": math.inf}, "write a finite number"),
    ("grpo", {"advantage.epsilon": -1e-4}, "write 0 or a small positive number"),
    ("grpo", {"ratio.level": "none"}, 'surrogate.kind = "none"'),
    ("gmpo", {"ratio.level": "sequence"}, 'ratio.level = "token"'),
    ("dppo", {"ratio.level": "sequence"}, 'ratio.level = "token"'),
    ("dppo", {"surrogate.threshold": 0.0}, "surrogate.threshold > 0"),
    ("cispo", {"surrogate.cap": 0.0}, "cap = 5.0"),
    ("cispo", {"surrogate.cap": 0.28}, "write 1 + offset"),
    ("cispo", {"surrogate.cap_low": 6.0}, "surrogate.cap_low is above surrogate.cap"),
    ("sapo", {"surrogate.tau_negative": 0.0}, "above 0"),
    ("grpo", {"surrogate.low": -0.2}, "offsets from 1"),
    ("grpo", {"surrogate.low": 1.2}, "write low = 1.0"),
    ("grpo", {"surrogate.dual": 0.5}, "dual = 3.0, or 0 for off"),
    ("grpo", {"surrogate.ceiling": 1.1}, "ceiling = 4.0, or 0 for off"),
    (
        "grpo",
        {"ratio.anchor": "sampler", "ratio.correction": "truncate", "ratio.correction_high": 2.0},
        'ratio.anchor = "snapshot"',
    ),
    ("grpo", {"ratio.correction": "truncate"}, "ratio.correction_high"),
    (
        "grpo",
        {"ratio.correction": "mask", "ratio.correction_low": 3.0, "ratio.correction_high": 2.0},
        "between 0 and ratio.correction_high",
    ),
    ("grpo", {"kl.coefficient": 0.0}, 'kl.estimator = "none"'),
    ("grpo", {"kl.coefficient": -0.1}, "kl.coefficient cannot be negative"),
    ("grpo", {"kl.clamp": -1.0}, "0 is off"),
    ("grpo", {"kl.place": "reward", "kl.gradient": "score"}, 'place = "loss"'),
    (
        "grpo",
        {"kl.place": "reward", "kl.reward_form": "to_go", "advantage.whiten": "sequences"},
        'advantage.whiten = "tokens"',
    ),
    ("dr_grpo", {"aggregate.length": 0}, "length = 3000"),
    ("dapo", {"selection.truncated": "soft_penalty"}, "0 < cache <= max"),
    (
        "grpo",
        {
            "selection.truncated": "soft_penalty", "selection.overlong_max": 20, "selection.overlong_cache": 4,
            "advantage.combine": "normalise_then_sum",
        },
        "use the reward `length`",
    ),
    ("grpo", {"selection.entropy_top": 0.0}, "write 0.2, or 1.0 for all"),
    ("grpo", {"selection.off_policy_mask": -0.5}, "0 is off"),
    ("ppo", {"advantage.scale": "group_std"}, 'advantage.scale = "none"'),
    ("ppo", {"kl.reward_form": "to_go"}, 'kl.reward_form = "token"'),
    ("reinforce_pp", {"kl.reward_form": "token"}, 'kl.reward_form = "to_go"'),
    ("gdpo", {"advantage.transform": "best_of_k", "advantage.k": 2}, 'combine = "sum_then_normalise"'),
    ("pkpo", {"advantage.k": 0}, "advantage.k = 4"),
    ("pkpo", {"advantage.transform": "none"}, 'advantage.transform = "pkpo" or "best_of_k"'),
    ("grpo_turn", {"advantage.baseline": "runner_up", "advantage.scale": "none"}, '"leave_one_out" or "none"'),
    ("grpo_turn", {"advantage.scale": "batch_std"}, 'advantage.scale = "group_std" or "none"'),
    ("grpo_process", {"advantage.whiten": "sequences"}, 'advantage.whiten = "tokens"'),
    ("gdpo", {"advantage.credit": "turn", "advantage.whiten": "none"}, 'combine = "sum_then_normalise"'),
    ("ppo", {"advantage.whiten": "sequences"}, 'advantage.whiten = "tokens"'),
    ("ppo", {"advantage.discount": 1.5}, "write 1.0 for none"),
    ("ppo", {"advantage.gae_lambda": -0.1}, "write e.g. 0.95"),
    ("vapo", {"advantage.gae_alpha": -0.1}, "or 0 for off"),
    ("vapo", {"advantage.gae_lambda": 0.9}, "gae_lambda = 1.0 or gae_alpha = 0"),
    ("vespo", {"surrogate.k_negative": 0.0}, "2, 3, 3, 2"),
    ("real", {"surrogate.tau": 0.0}, "tau = 0.5"),
    ("real", {"ratio.level": "sequence"}, 'ratio.level = "token"'),
    ("real", {"aggregate.kind": "token_mean"}, 'aggregate.kind = "response_mean"'),
    ("luffy", {"surrogate.gamma": 0.0}, "gamma = 0.1"),
    ("kl_cov", {"selection.covariance_share": 0.0}, "write e.g. 0.0002"),
    ("kl_cov", {"selection.covariance_coefficient": 0.0}, "write e.g. 1.0"),
    ("clip_cov", {"selection.covariance_low": 9.0}, "above selection.covariance_high"),
    ("grpo", {"terms.imitation": -0.1}, "0 is off"),
    ("grpo", {"terms.entropy_target": 0.5}, "entropy_step = 0.005"),
]  # fmt: skip


def test_every_contradiction_has_a_test() -> None:
    assert len(REFUSED) == len(CONTRADICTIONS)


@pytest.mark.parametrize("row", range(len(REFUSED)))
def test_a_contradiction_is_refused_with_what_to_write(row: int) -> None:
    preset, overrides, tells = REFUSED[row]
    broken = [i for i, (rule, _) in enumerate(CONTRADICTIONS) if rule(override(PRESETS[preset].objective, overrides))]
    assert row in broken
    message = CONTRADICTIONS[row][1]
    assert tells in message
    with pytest.raises(ObjectiveError) as refused:
        resolve(preset, overrides)
    assert str(refused.value) == "objective: " + CONTRADICTIONS[broken[0]][1]


@pytest.mark.parametrize("name", FINITE)
def test_only_a_bound_may_be_infinite(name: str) -> None:
    with pytest.raises(ObjectiveError, match="write a finite number"):
        resolve("grpo", {name: math.inf})


# One row for each of EFFECTS: an override that would do nothing, and what the message says it needs.
USELESS: dict[str, tuple[str, dict[str, Any]]] = {
    "advantage.scale_of": ("grpo", {"advantage.scale_of": "residuals"}),
    "advantage.ddof": ("dr_grpo", {"advantage.ddof": 1}),
    "advantage.epsilon": ("dr_grpo", {"advantage.epsilon": 1e-6}),
    "ratio.anchor": ("reinforce", {"ratio.anchor": "sampler"}),
    "ratio.correction_low": ("grpo", {"ratio.correction_low": 0.5}),
    "ratio.correction_high": ("grpo", {"ratio.correction_high": 2.0}),
    "surrogate.low": ("cispo", {"surrogate.low": 0.2}),
    "surrogate.high": ("sapo", {"surrogate.high": 0.28}),
    "surrogate.dual": ("cispo", {"surrogate.dual": 3.0}),
    "surrogate.ceiling": ("gmpo", {"surrogate.ceiling": 4.0}),
    "surrogate.cap": ("grpo", {"surrogate.cap": 5.0}),
    "surrogate.cap_low": ("grpo", {"surrogate.cap_low": 0.5}),
    "surrogate.tau_positive": ("grpo", {"surrogate.tau_positive": 1.0}),
    "surrogate.tau_negative": ("grpo", {"surrogate.tau_negative": 1.0}),
    "surrogate.divergence": ("grpo", {"surrogate.divergence": "tv"}),
    "surrogate.threshold": ("grpo", {"surrogate.threshold": 0.1}),
    "kl.place": ("dapo", {"kl.place": "reward"}),
    "kl.gradient": ("rloo", {"kl.gradient": "straight_through", "kl.place": "loss", "kl.estimator": "none"}),
    "kl.reward_form": ("grpo", {"kl.reward_form": "to_go"}),
    "kl.coefficient": ("dapo", {"kl.coefficient": 0.04}),
    "kl.clamp": ("dapo", {"kl.clamp": 10.0}),
    "aggregate.length": ("grpo", {"aggregate.length": 3000}),
    "aggregate.count_dead": ("grpo", {"aggregate.count_dead": True}),
    "aggregate.count_corrected": ("grpo", {"aggregate.count_corrected": False}),
    "selection.overlong_max": ("dapo", {"selection.overlong_max": 20480}),
    "selection.overlong_cache": ("dapo", {"selection.overlong_cache": 4096}),
    "advantage.k": ("grpo", {"advantage.k": 4}),
    "advantage.pool": ("grpo_process", {"advantage.pool": "turn_index"}),
    "advantage.final": ("grpo", {"advantage.final": "in_return"}),
    "advantage.final_weight": ("grpo", {"advantage.final_weight": 0.5}),
    "advantage.discount": ("grpo_process", {"advantage.discount": 0.9}),
    "advantage.gae_lambda": ("grpo", {"advantage.gae_lambda": 0.9}),
    "advantage.gae_lambda_critic": ("grpo", {"advantage.gae_lambda_critic": 0.9}),
    "advantage.gae_alpha": ("grpo", {"advantage.gae_alpha": 0.05}),
    "surrogate.k_positive": ("grpo", {"surrogate.k_positive": 2.0}),
    "surrogate.k_negative": ("grpo", {"surrogate.k_negative": 2.0}),
    "surrogate.lambda_positive": ("grpo", {"surrogate.lambda_positive": 2.0}),
    "surrogate.lambda_negative": ("grpo", {"surrogate.lambda_negative": 2.0}),
    "surrogate.tau": ("grpo", {"surrogate.tau": 0.5}),
    "surrogate.gamma": ("grpo", {"surrogate.gamma": 0.1}),
    "selection.entropy_over": ("grpo", {"selection.entropy_over": "response"}),
    "selection.covariance_share": ("grpo", {"selection.covariance_share": 0.1}),
    "selection.covariance_low": ("kl_cov", {"selection.covariance_low": 1.0}),
    "selection.covariance_high": ("kl_cov", {"selection.covariance_high": 1.0}),
    "selection.covariance_coefficient": ("clip_cov", {"selection.covariance_coefficient": 1.0}),
    "selection.correct": ("grpo", {"selection.correct": 0.5}),
    "terms.entropy_step": ("grpo", {"terms.entropy_step": 0.1}),
}


def test_every_effect_has_a_test() -> None:
    assert set(USELESS) == set(EFFECTS)


@pytest.mark.parametrize("name", USELESS)
def test_a_key_that_would_do_nothing_is_refused_with_what_it_needs(name: str) -> None:
    preset, overrides = USELESS[name]
    with pytest.raises(ObjectiveError) as refused:
        resolve(preset, overrides)
    value = overrides[name]
    assert str(refused.value).startswith(f"objective.{name} = {value!r} would do nothing: it needs {EFFECTS[name][1]}")


@pytest.mark.parametrize("name", USELESS)
def test_a_key_written_to_switch_its_feature_off_is_never_useless(name: str) -> None:
    preset, overrides = USELESS[name]
    default = field_value(Objective(), name)
    off = {"surrogate.low": 0.0, "surrogate.high": 0.0, "kl.coefficient": 0.0}.get(name, default)
    rest = {key: value for key, value in overrides.items() if key != name and key != "kl.place"}
    assert field_value(resolve(preset, {**rest, name: off}), name) == off


@pytest.mark.parametrize(
    ("preset", "overrides", "message"),
    [
        ("gropo", {}, 'objective.preset = \'gropo\' is unknown; did you mean "grpo"?'),
        ("grpo", {"surogate.high": 0.3}, "objective.surogate.high: unknown axis 'surogate'; did you mean \"surrogate"),
        ("grpo", {"kl.coeff": 0.3}, "objective.kl.coeff: unknown key 'coeff' of kl; did you mean \"coefficient\"?"),
        ("grpo", {"kl": 0.3}, "objective.kl is a table, not 0.3; write objective.kl.KEY with KEY one of clamp, "),
        ("grpo", {"kl.estimator": "k33"}, "objective.kl.estimator = 'k33' is not a choice; did you mean \"k3\"?"),
        ("grpo", {"advantage.ddof": 2}, "objective.advantage.ddof = 2 is not a choice; choose from: 0, 1"),
        ("grpo", {"advantage.ddof": True}, "objective.advantage.ddof = True is not a choice; choose from: 0, 1"),
        ("grpo", {"kl.coefficient": "0.1"}, "objective.kl.coefficient = '0.1' has the wrong type; write a number"),
        ("grpo", {"kl.coefficient": math.nan}, "objective.kl.coefficient = nan has the wrong type; write a number"),
        ("grpo", {"kl.coefficient": True}, "objective.kl.coefficient = True has the wrong type; write a number"),
        ("grpo", {"aggregate.length": 3.5}, "objective.aggregate.length = 3.5 has the wrong type; write a whole"),
        ("grpo", {"aggregate.count_masked": 1}, "objective.aggregate.count_masked = 1 has the wrong type; write true"),
    ],
)  # fmt: skip
def test_unknown_names_and_wrong_types_say_what_to_write(preset: str, overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ObjectiveError) as refused:
        resolve(preset, overrides)
    assert str(refused.value).startswith(message)


def test_nested_tables_and_dotted_keys_are_one_form() -> None:
    nested = {"kl": {"coefficient": 0.1}, "objective.surrogate.high": 0.28}
    assert flatten(nested) == {"kl.coefficient": 0.1, "surrogate.high": 0.28}
    assert resolve("grpo", nested) == resolve("grpo", {"kl.coefficient": 0.1, "surrogate.high": 0.28})
    assert resolve("grpo", {"kl.coefficient": 1}).kl.coefficient == 1.0


def test_a_complete_objective_is_checked_and_takes_no_overrides() -> None:
    rows = {"groups": [{"id": "q", "responses": [{"reward": 1, "length": 1}, {"reward": 0, "length": 1}]}]}
    assert explain_directly(rows, Objective()) == explain_directly(rows, "grpo")
    with pytest.raises(ObjectiveError, match="an Objective is already complete"):
        explain_directly(rows, Objective(), {"kl.coefficient": 0.1})
    broken = dataclasses.replace(Objective(), kl=dataclasses.replace(Objective().kl, coefficient=-1.0))
    with pytest.raises(ObjectiveError, match="cannot be negative"):
        explain_directly(rows, broken)


def test_a_response_without_advantage_is_skipped_unless_a_kl_is_in_the_loss() -> None:
    assert PRESETS["grpo"].objective.kl_in_loss and PRESETS["grpo"].objective.needs_reference
    assert not PRESETS["rloo"].objective.kl_in_loss and PRESETS["rloo"].objective.needs_reference
    assert not PRESETS["dapo"].objective.needs_reference
