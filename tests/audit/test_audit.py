"""Laws of the audit: what is read and refused, what has no effect, what a recipe is, how two configurations differ."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gropius.audit import DIALECTS, audit, audit_file, recipe
from gropius.audit.against import difference, fixture, gradients
from gropius.audit.dialect import Parsed
from gropius.audit.report import nearest_preset
from gropius.errors import GropiusError, SafetyRefusal, UsageError
from gropius.objective.explain import explain
from gropius.objective.presets import resolve
from gropius.recipe.load import from_mapping

TRL = DIALECTS["trl"]


def trl(**options: Any) -> Any:
    return audit(Parsed(options), TRL)


def verl(text: str) -> Any:
    return audit(DIALECTS["verl"].parse(text, ".sh"), DIALECTS["verl"])


def openrlhf(text: str) -> Any:
    return audit(DIALECTS["openrlhf"].parse(text, ".sh"), DIALECTS["openrlhf"])


def kinds(read: Any, kind: str) -> list[str]:
    return [key for remark in read.remarks if remark.kind == kind for key in remark.keys]


def written(tmp_path: Path, name: str, text: str) -> Path:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return path


# --- every row of every table


@pytest.mark.parametrize("name", DIALECTS)
def test_every_option_that_a_caveat_names_is_an_option(name):
    dialect = DIALECTS[name]
    assert {key for caveat in dialect.caveats for key in caveat.keys} <= set(dialect.options)


@pytest.mark.parametrize("name", DIALECTS)
def test_every_rule_and_caveat_names_its_place_upstream(name):
    assert all(row.where for row in (*DIALECTS[name].rules, *DIALECTS[name].caveats))
    assert DIALECTS[name].version and DIALECTS[name].files


@pytest.mark.parametrize("name", DIALECTS)
def test_the_defaults_of_a_framework_are_read_without_a_false_alarm_about_effects(name):
    read = audit(Parsed({}), DIALECTS[name])
    assert kinds(read, "no_effect") == []
    axes = {s.axis for s in read.statements}
    assert {"ratio", "surrogate", "kl", "aggregate", "selection"} <= axes
    json.dumps(read.as_dict(), allow_nan=False)


# --- readings


def test_one_trl_configuration_is_the_same_in_python_yaml_json_and_on_a_command_line(tmp_path):
    files = [
        written(
            tmp_path, "a.py", 'import trl\nargs = trl.GRPOConfig(loss_type="dapo", beta=0.04, epsilon_high=0.28)\n'
        ),
        written(tmp_path, "a.yaml", "loss_type: dapo\nbeta: 4e-2\nepsilon_high: 0.28\n"),
        written(tmp_path, "a.json", '{"loss_type": "dapo", "beta": 0.04, "epsilon_high": 0.28}'),
        written(tmp_path, "a.sh", "trl grpo --loss_type dapo \\\n  --beta 0.04 --epsilon_high=0.28  # clip higher\n"),
    ]
    objectives = [audit_file(path, "trl").objective for path in files]
    assert objectives[0].kl.coefficient == 0.04 and objectives[0].surrogate.high == 0.28
    assert all(o == objectives[0] for o in objectives)


def test_python_is_never_executed_and_what_is_no_literal_is_unread(tmp_path):
    canary = tmp_path / "canary"
    text = f"GRPOConfig(epsilon=open({str(canary)!r}, 'w').write('x'), beta=[0.1][0], loss_type='grpo', **more)"
    read = audit_file(written(tmp_path, "c.py", text), "trl")
    assert not canary.exists()
    assert kinds(read, "unread") == ["epsilon", "beta"] and not read.exact
    assert "**" in read.strangers


def test_an_unread_value_that_the_objective_does_not_rest_on_leaves_it_exact(tmp_path):
    read = audit_file(written(tmp_path, "c.py", "GRPOConfig(learning_rate=args.lr, beta=0.0)"), "trl")
    assert read.exact and kinds(read, "unread") == ["learning_rate"]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [("a.py", "x = 1", "no call of GRPOConfig"), ("a.py", "GRPOConfig()\nGRPOConfig()", "2 calls"),
    ("a.py", "def (", "not Python"),
     ("a.json", "[1]", "no table"), ("a.json", "{", "not JSON"), ("a.yaml", "a: [", "not YAML"),
     ("a.yaml", "loss_type: grop", 'did you mean "grpo"'), ("a.yaml", "beta: lots", "not a number"),
     ("a.sh", "trl grpo --beta '0.1", "not a command line")],
)  # fmt: skip
def test_a_file_that_cannot_be_read_is_refused_by_its_name(tmp_path, name, text, message):
    with pytest.raises(UsageError, match=message) as caught:
        audit_file(written(tmp_path, name, text), "trl")
    assert name in str(caught.value)


def test_a_pickle_is_refused_for_safety_and_an_unknown_framework_with_a_suggestion(tmp_path):
    with pytest.raises(SafetyRefusal, match="runs code"):
        audit_file(written(tmp_path, "training_args.bin", "x"), "trl")
    with pytest.raises(UsageError, match='did you mean "verl"'):
        audit_file(written(tmp_path, "a.yaml", "{}"), "vrl")
    with pytest.raises(UsageError, match="cannot be read"):
        audit_file(tmp_path / "absent.yaml", "trl")


def test_a_yaml_file_cannot_build_objects(tmp_path):
    path = written(tmp_path, "a.yaml", "beta: !!python/object/apply:os.getcwd []\n")
    with pytest.raises(UsageError, match="not YAML"):
        audit_file(path, "trl")


def test_yaml_references_that_nest_without_end_are_refused(tmp_path):
    for text in ("a: &a\n  b: *a\n", "\n".join(
        [f"a0: &a0 {{{', '.join(f'k{i}: 1' for i in range(9))}}}"]
        + [f"a{n}: &a{n} {{{', '.join(f'k{i}: *a{n - 1}' for i in range(9))}}}" for n in range(1, 9)]
    )):  # fmt: skip
        with pytest.raises(UsageError, match="no configuration"):
            audit_file(written(tmp_path, "bomb.yaml", text), "verl")


def test_shell_variables_that_the_script_assigns_are_put_in_and_others_are_unread():
    read = verl("high=0.28\npython -m x algorithm.adv_estimator=grpo actor_rollout_ref.actor.clip_ratio_high=${high} "
                "data.train_batch_size=$((4 * 8)) ++actor_rollout_ref.rollout.n=$N")  # fmt: skip
    assert read.objective.surrogate.high == 0.28
    assert set(kinds(read, "unread")) == {"data.train_batch_size", "actor_rollout_ref.rollout.n"}


def test_a_nested_verl_yaml_and_its_overrides_are_one_configuration(tmp_path):
    text = "algorithm:\n  adv_estimator: rloo\nactor_rollout_ref:\n  actor:\n    loss_agg_mode: seq-mean-token-sum\n"
    nested = audit_file(written(tmp_path, "v.yaml", text), "verl")
    flat = verl("algorithm.adv_estimator=rloo actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum")
    assert nested.objective == flat.objective and nested.objective.advantage.baseline == "leave_one_out"


# --- what a person would not expect


@pytest.mark.parametrize(
    ("options", "kind", "key"),
    [
        ({"loss_type": "dr_grpo"}, "trap", "scale_rewards"),
        ({"loss_type": "cispo"}, "trap", "epsilon_high"),
        ({"loss_type": "dapo"}, "trap", "loss_type"),
        ({"top_p": 0.9}, "trap", "top_p"),
        ({"loss_type": "dapo", "importance_sampling_level": "sequence"}, "contradiction", "importance_sampling_level"),
        ({"steps_per_generation": 2, "generation_batch_size": 16}, "contradiction", "generation_batch_size"),
        ({"num_generations": 3}, "contradiction", "num_generations"),
        ({"epsilon": 0.1}, "no_effect", "epsilon"),
        ({"use_bias_correction_kl": False}, "no_effect", "use_bias_correction_kl"),
        ({"sapo_temperature_pos": 2.0}, "no_effect", "sapo_temperature_pos"),
        ({"vllm_importance_sampling_mode": "token_mask"}, "no_effect", "vllm_importance_sampling_mode"),
        ({"multi_objective_aggregation": "normalize_then_sum", "scale_rewards": "none"}, "no_effect", "scale_rewards"),
        ({"loss_type": "vespo"}, "inexpressible", "loss_type"),
        ({"entropy_coef": 0.01}, "inexpressible", "entropy_coef"),
        ({"loss_type": "bnpo", "gradient_accumulation_steps": 2}, "inexpressible", "loss_type"),
        ({"steps_per_generation": 4, "gradient_accumulation_steps": 2}, "inexpressible", "steps_per_generation"),
        ({"delta": 1.1}, "inexpressible", "delta"),
        ({"beta": 0.1, "importance_sampling_level": "sequence", "loss_type": "grpo"}, "inexpressible",
        "use_bias_correction_kl"),
    ],
)  # fmt: skip
def test_trl_options_that_mislead_are_named(options, kind, key):
    assert key in kinds(trl(**options), kind)


A = "actor_rollout_ref.actor."


@pytest.mark.parametrize(
    ("text", "kind", "key"),
    [
        ("", "inexpressible", "algorithm.adv_estimator"),
        ("algorithm.adv_estimator=grpo", "trap", A + "clip_ratio_c"),
        ("algorithm.adv_estimator=grpo", "inexpressible", "actor_rollout_ref.rollout.n"),
        (f"algorithm.adv_estimator=grpo {A}clip_ratio=0.3", "no_effect", A + "clip_ratio"),
        (f"algorithm.adv_estimator=grpo {A}kl_loss_coef=0.1", "no_effect", A + "kl_loss_coef"),
        (f"algorithm.adv_estimator=grpo {A}policy_loss.loss_mode=gspo {A}loss_agg_mode=token-mean", "no_effect",
        A + "loss_agg_mode"),
        (f"algorithm.adv_estimator=grpo {A}use_kl_loss=True algorithm.use_kl_in_reward=True", "contradiction",
        A + "use_kl_loss"),
        ("algorithm.adv_estimator=rloo algorithm.norm_adv_by_std_in_grpo=False", "no_effect",
        "algorithm.norm_adv_by_std_in_grpo"),
        (f"algorithm.adv_estimator=grpo {A}entropy_coeff=0.001", "inexpressible", A + "entropy_coeff"),
        (f"algorithm.adv_estimator=grpo {A}loss_agg_mode=token-sum", "inexpressible", A + "loss_agg_mode"),
        ("algorithm.adv_estimator=grpo algorithm.rollout_correction.rollout_rs=token_k1 "
         "algorithm.rollout_correction.rollout_rs_threshold='0.5_2.0'", "inexpressible",
         "algorithm.rollout_correction.rollout_rs"),
    ],
)  # fmt: skip
def test_verl_keys_that_mislead_are_named(text, kind, key):
    assert key in kinds(verl(text), kind)


G = "--algo.advantage.estimator group_norm --rollout.n_samples_per_prompt 8"


@pytest.mark.parametrize(
    ("text", "kind", "key"),
    [
        ("", "inexpressible", "algo.advantage.estimator"),
        (G, "trap", "algo.kl.init_coef"),
        ("--algo.advantage.estimator dr_grpo --rollout.n_samples_per_prompt 8", "trap", "algo.advantage.estimator"),
        ("--algo.advantage.estimator rloo", "contradiction", "rollout.n_samples_per_prompt"),
        (f"{G} --actor.eps_clip 0.1 --actor.eps_clip_low_high 0.2 0.28", "no_effect", "actor.eps_clip"),
        (f"{G} --algo.kl.use_loss --algo.kl.estimator k1", "contradiction", "algo.kl.use_loss"),
        (f"{G} --algo.advantage.no_std_norm", "no_effect", "algo.advantage.no_std_norm"),
        (f"{G} --algo.kl.target 6", "inexpressible", "algo.kl.target"),
        (f"{G} --actor.entropy_coef 0.01", "inexpressible", "actor.entropy_coef"),
        (f"{G} --algo.dynamic_filtering_enable", "trap", "algo.dynamic_filtering_enable"),
        (f"{G} --actor.policy_loss_type gspo --algo.kl.use_loss --algo.kl.estimator k3", "inexpressible",
        "algo.kl.use_loss"),
    ],
)  # fmt: skip
def test_openrlhf_flags_that_mislead_are_named(text, kind, key):
    assert key in kinds(openrlhf(text), kind)


def test_a_critic_has_no_equivalent_and_no_recipe_is_made_up():
    read = verl("actor_rollout_ref.rollout.n=8")
    assert read.objective is None and "critic" in read.formula and read.as_dict()["recipe"] is None


# --- junk

JUNK = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 5000), st.floats(-10, 1e6), st.floats(allow_nan=True),
    st.text(max_size=6),
    st.lists(st.floats(0, 2), max_size=3),
    st.sampled_from(["0.5_2.0", "token", "sequence", "1e-6", "seq_mean_k1", "-1_x"]),
)  # fmt: skip


@pytest.mark.parametrize("name", DIALECTS)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_values_are_read_or_refused_in_words(name, data):
    dialect = DIALECTS[name]
    keys = data.draw(st.lists(st.sampled_from(sorted(dialect.options)), max_size=6, unique=True))
    given_values = {
        key: data.draw(
            st.one_of(st.sampled_from(dialect.options[key].choices), JUNK) if dialect.options[key].choices else JUNK
        )
        for key in keys
    }
    try:
        read = audit(Parsed(given_values), dialect)
    except GropiusError as error:
        assert str(error)
        return
    json.dumps(read.as_dict(), allow_nan=False)
    if read.objective is not None:
        tomllib.loads(recipe(read))


@settings(max_examples=150, deadline=None)
@given(text=st.text(max_size=200), suffix=st.sampled_from([".py", ".yaml", ".json", ".sh", ".txt", ""]))
@pytest.mark.parametrize("name", DIALECTS)
def test_any_text_is_read_or_refused_in_words(name, text, suffix):
    try:
        audit(DIALECTS[name].parse(text, suffix), DIALECTS[name])
    except GropiusError as error:
        assert str(error)


# --- units


def test_batch_sizes_are_put_in_one_language():
    u = trl(per_device_train_batch_size=4, gradient_accumulation_steps=4, num_generations=8).units
    assert (u.prompts, u.responses, u.update_responses, u.micro_batches) == (2, 16, 16, 4)
    u = audit(Parsed({"per_device_train_batch_size": 4, "num_generations": 8}), TRL, processes=4).units
    assert (u.prompts, u.ranks, u.micro_batches) == (2, 4, 1)
    n = "algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=4 data.train_batch_size=8 "
    u = verl(n + f"{A}ppo_mini_batch_size=4 {A}ppo_micro_batch_size_per_gpu=2 trainer.n_gpus_per_node=2").units
    assert (u.responses, u.update_responses, u.updates, u.micro_batches) == (32, 16, 2, 4)
    u = openrlhf(G + " --rollout.batch_size 32 --train.batch_size 64 --train.micro_batch_size 4").units
    assert (u.responses, u.updates, u.micro_batches) == (256, 4, 2)


def test_several_generations_of_a_batch_are_updates_and_iterations_are_passes():
    read = trl(steps_per_generation=4, num_iterations=2, num_generations=8)
    assert (read.units.updates, read.units.epochs, read.on_policy) == (4, 2, False)
    assert trl(num_generations=8).on_policy


# --- the recipe

EVERY = {
    "trl": [
        {"loss_type": t, "num_iterations": 2, "epsilon_high": 1.5 if t == "cispo" else None}
        for t in ("grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo")
    ] + [
        {"beta": 0.1}, {"scale_rewards": "batch"}, {"scale_rewards": False}, {"mask_truncated_completions": True},
        {"use_vllm": True}, {"importance_sampling_level": "sequence", "loss_type": "grpo"},
        {"delta": 4.0, "num_iterations": 2},
        {"multi_objective_aggregation": "normalize_then_sum"}, {"off_policy_mask_threshold": 0.5},
    ],
    "verl": [
        {"algorithm.adv_estimator": e}
        for e in ("grpo", "rloo", "opo", "remax", "reinforce_plus_plus", "reinforce_plus_plus_baseline")
    ] + [
        {"algorithm.adv_estimator": "grpo", A + "policy_loss.loss_mode": m} for m in ("gspo", "sapo", "gpg",
        "geo_mean", "cispo")
    ] + [
        {"algorithm.adv_estimator": "grpo", "algorithm.use_kl_in_reward": True},
        {"algorithm.adv_estimator": "grpo", A + "use_kl_loss": True, A + "kl_loss_type": "k3+"},
        {"algorithm.adv_estimator": "grpo", "algorithm.rollout_correction.rollout_is": "token"},
        {"algorithm.adv_estimator": "grpo", "algorithm.filter_groups.enable": True,
        "algorithm.filter_groups.metric": "acc"},
        {"algorithm.adv_estimator": "grpo", "reward.reward_kwargs.overlong_buffer_cfg.enable": True,
         "reward.reward_kwargs.overlong_buffer_cfg.len": 64},
    ],
    "openrlhf": [
        {"algo.advantage.estimator": e, "rollout.n_samples_per_prompt": 8}
        for e in ("reinforce", "rloo", "reinforce_baseline", "group_norm", "dr_grpo")
    ] + [
        {"algo.advantage.estimator": "group_norm", "algo.kl.use_loss": True, "algo.kl.estimator": "k3"},
        {"algo.advantage.estimator": "group_norm", "algo.advantage.is_correction_enable": True},
        {"algo.advantage.estimator": "group_norm", "actor.policy_loss_type": "gspo"},
    ],
}  # fmt: skip


@pytest.mark.parametrize(("name", "options"), [(name, row) for name, table in EVERY.items() for row in table])
def test_the_recipe_that_is_emitted_is_accepted_and_runs_the_stated_objective(name, options):
    read = audit(Parsed(options), DIALECTS[name])
    tables = tomllib.loads(recipe(read))
    written_objective = tables["objective"]
    loaded = from_mapping(tables)
    fields = {k: v for k, v in written_objective.items() if k != "preset"}
    assert resolve(written_objective["preset"], fields) == read.objective
    assert loaded.recipe.rollout.group_size == read.units.group_size


def test_the_nearest_preset_of_a_preset_is_itself():
    for name in ("grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "opo", "sapo", "gmpo"):
        assert nearest_preset(resolve(name)) == (name, {})


def test_what_cannot_be_expressed_stands_at_the_head_of_the_recipe():
    text = recipe(trl(entropy_coef=0.1))
    assert text.splitlines()[1].startswith("# NOT EXPRESSED: an entropy bonus")


# --- two configurations


def test_dr_grpo_of_three_frameworks_is_three_objectives_and_the_settings_that_make_them_one_are_found():
    names = [
        trl(loss_type="dr_grpo", num_iterations=2),
        verl("algorithm.adv_estimator=grpo algorithm.norm_adv_by_std_in_grpo=False"),
        openrlhf("--algo.advantage.estimator dr_grpo --rollout.n_samples_per_prompt 8 --algo.kl.init_coef 0"),
    ]
    pairs = [(0, 1), (0, 2)]
    assert all(not difference(names[a].objective, names[b].objective)["equal"] for a, b in pairs)
    one = trl(loss_type="dr_grpo", scale_rewards=False, max_completion_length=100, num_iterations=2)
    other = verl(
        "algorithm.adv_estimator=grpo algorithm.norm_adv_by_std_in_grpo=False "
        f"{A}loss_agg_mode=seq-mean-token-sum-norm {A}loss_scale_factor=100 {A}clip_ratio_c=1000"
    )
    assert difference(one.objective, other.objective)["equal"]


def test_the_difference_of_two_numbers_is_that_of_two_explanations():
    first, second = (
        trl(num_iterations=2).objective,
        trl(num_iterations=2, epsilon_high=0.28, loss_type="grpo").objective,
    )
    told = difference(first, second)
    reports = [explain(fixture(), o) for o in (first, second)]
    a, b = map(gradients, reports)
    assert told["loss"] == [r["loss"] for r in reports]
    assert told["gradient_largest"] == np.abs(a - b).max() > 0
    assert told["cosine"] == pytest.approx(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


def test_the_fixture_reaches_a_clip_on_either_side_and_both_kinds_of_dead_groups():
    report = explain(fixture(), "grpo")
    tokens = [(r["advantage"], t) for g in report["groups"] for r in g["responses"] for t in r["tokens"]]
    assert {a > 0 for a, t in tokens if t["clipped"]} == {True, False}
    assert [g["state"] for g in report["groups"]][2:] == ["all_failed", "all_solved"]
    assert max(t["ratio"] for _, t in tokens) > 1.28 and min(t["ratio"] for _, t in tokens) < 0.8
