"""The objective stated for verl and OpenRLHF equals their formulas, transcribed independently in `transcribed.py`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.audit import transcribed
from tests.audit.batches import as_batch, rows

from gropius.audit import DIALECTS, audit
from gropius.audit.against import gradients
from gropius.objective.explain import explain

ACTOR, CORR = "actor_rollout_ref.actor.", "algorithm.rollout_correction."
GRPO = "algorithm.adv_estimator=grpo"


def low_high(low: float, high: float) -> str:
    return f"{ACTOR}clip_ratio_low={low} {ACTOR}clip_ratio_high={high}"


VERL: dict[str, tuple[str, dict[str, Any]]] = {
    "grpo": (GRPO, {"adv_estimator": "grpo"}),
    "dr_grpo": (
        f"{GRPO} algorithm.norm_adv_by_std_in_grpo=False {ACTOR}loss_agg_mode=seq-mean-token-sum-norm "
        f"{ACTOR}loss_scale_factor=40",
        {"adv_estimator": "grpo", "norm": False, "loss_agg_mode": "seq-mean-token-sum-norm", "loss_scale_factor": 40},
    ),
    "rloo": ("algorithm.adv_estimator=rloo", {"adv_estimator": "rloo"}),
    "opo": ("algorithm.adv_estimator=opo", {"adv_estimator": "opo"}),
    "reinforce++": ("algorithm.adv_estimator=reinforce_plus_plus", {"adv_estimator": "reinforce_plus_plus"}),
    "reinforce++ with KL to go": (
        "algorithm.adv_estimator=reinforce_plus_plus algorithm.use_kl_in_reward=True algorithm.kl_ctrl.kl_coef=0.05",
        {"adv_estimator": "reinforce_plus_plus", "use_kl_in_reward": True, "kl_coef": 0.05},
    ),
    "reinforce++ baseline": (
        "algorithm.adv_estimator=reinforce_plus_plus_baseline", {"adv_estimator": "reinforce_plus_plus_baseline"},
    ),
    "KL in the reward, before the group": (
        f"{GRPO} algorithm.use_kl_in_reward=True algorithm.kl_penalty=k2 algorithm.kl_ctrl.kl_coef=0.1",
        {"adv_estimator": "grpo", "use_kl_in_reward": True, "kl_penalty": "k2", "kl_coef": 0.1},
    ),
    "clip higher, dual 10": (
        f"{GRPO} {low_high(0.2, 0.28)} {ACTOR}clip_ratio_c=10.0",
        {"adv_estimator": "grpo", "high_clip": 0.28, "clip_ratio_c": 10.0},
    ),
    "dual clip that binds": (f"{GRPO} {ACTOR}clip_ratio_c=1.3", {"adv_estimator": "grpo", "clip_ratio_c": 1.3}),
    "response sum": (
        f"{GRPO} {ACTOR}loss_agg_mode=seq-mean-token-sum",
        {"adv_estimator": "grpo", "loss_agg_mode": "seq-mean-token-sum"},
    ),
    "response mean": (
        f"{GRPO} {ACTOR}loss_agg_mode=seq-mean-token-mean",
        {"adv_estimator": "grpo", "loss_agg_mode": "seq-mean-token-mean"},
    ),
    "gspo": (
        f"{GRPO} {ACTOR}policy_loss.loss_mode=gspo {low_high(0.03, 0.04)}",
        {"adv_estimator": "grpo", "loss_mode": "gspo", "low_clip": 0.03, "high_clip": 0.04},
    ),
    "sapo": (f"{GRPO} {ACTOR}policy_loss.loss_mode=sapo", {"adv_estimator": "grpo", "loss_mode": "sapo"}),
    "cispo": (
        f"{GRPO} {ACTOR}policy_loss.loss_mode=cispo {low_high(0.1, 0.3)}",
        {"adv_estimator": "grpo", "loss_mode": "cispo", "low_clip": 0.1, "high_clip": 0.3},
    ),
    "geo_mean": (
        f"{GRPO} {ACTOR}policy_loss.loss_mode=geo_mean {ACTOR}ppo_micro_batch_size_per_gpu=1024 {low_high(0.3, 0.4)}",
        {"adv_estimator": "grpo", "loss_mode": "geo_mean", "low_clip": 0.3, "high_clip": 0.4},
    ),
    "k1 loss": (
        f"{GRPO} {ACTOR}use_kl_loss=True {ACTOR}kl_loss_type=kl {ACTOR}kl_loss_coef=0.1",
        {"adv_estimator": "grpo", "use_kl_loss": True, "kl_loss_type": "k1", "kl_loss_coef": 0.1},
    ),
    "k3 loss": (
        f"{GRPO} {ACTOR}use_kl_loss=True {ACTOR}kl_loss_type=low_var_kl {ACTOR}kl_loss_coef=0.1",
        {"adv_estimator": "grpo", "use_kl_loss": True, "kl_loss_type": "k3", "kl_loss_coef": 0.1},
    ),
    "k3+ loss": (
        f"{GRPO} {ACTOR}use_kl_loss=True {ACTOR}kl_loss_type=k3+ {ACTOR}kl_loss_coef=0.1",
        {"adv_estimator": "grpo", "use_kl_loss": True, "kl_loss_type": "k3+", "kl_loss_coef": 0.1},
    ),
    "token TIS": (
        f"{GRPO} {CORR}rollout_is=token {CORR}rollout_is_threshold=1.1",
        {"adv_estimator": "grpo", "rollout_is": "token", "threshold": 1.1},
    ),
    "sequence TIS": (
        f"{GRPO} {CORR}rollout_is=sequence {CORR}rollout_is_threshold=1.2",
        {"adv_estimator": "grpo", "rollout_is": "sequence", "threshold": 1.2},
    ),
    "IcePop": (
        f"{GRPO} {CORR}rollout_is=token {CORR}rollout_is_threshold='0.8_1.2'",
        {"adv_estimator": "grpo", "rollout_is": "icepop", "low": 0.8, "high": 1.2},
    ),
    "geometric rejection": (
        f"{GRPO} {CORR}rollout_rs=seq_mean_k1 {CORR}rollout_rs_threshold='0.95_1.2'",
        {"adv_estimator": "grpo", "rollout_rs": "seq_mean_k1", "low": 0.95, "high": 1.2},
    ),
    "bypass": (f"{GRPO} {CORR}bypass_mode=True", {"adv_estimator": "grpo", "bypass_mode": True}),
}  # fmt: skip
GRADIENT_ONLY: dict[str, tuple[str, dict[str, Any]]] = {
    "gpg loss": (f"algorithm.adv_estimator=grpo {ACTOR}policy_loss.loss_mode=gpg",
    {"adv_estimator": "grpo", "loss_mode": "gpg"}),
    "dppo_tv": (
        f"{GRPO} {ACTOR}policy_loss.loss_mode=dppo_tv {low_high(0.05, 0.05)} {ACTOR}clip_ratio_c=1.4",
        {"adv_estimator": "grpo", "loss_mode": "dppo_tv", "low_clip": 0.05, "high_clip": 0.05, "clip_ratio_c": 1.4},
    ),
}  # fmt: skip

EST = "--algo.advantage.estimator"
OPENRLHF: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (f"{EST} {name}", {"estimator": name})
       for name in ("reinforce", "rloo", "reinforce_baseline", "group_norm", "dr_grpo")},
    "no KL": (f"{EST} group_norm --algo.kl.init_coef 0", {"estimator": "group_norm", "kl": 0.0}),
    "k3 loss": (
        f"{EST} group_norm --algo.kl.use_loss --algo.kl.estimator k3 --algo.kl.init_coef 1e-1",
        {"estimator": "group_norm", "kl": 0.1, "kl_estimator": "k3", "kl_loss": True},
    ),
    "k2 in the reward": (
        f"{EST} reinforce_baseline --algo.kl.estimator k2 --algo.kl.init_coef 0.2",
        {"estimator": "reinforce_baseline", "kl": 0.2, "kl_estimator": "k2"},
    ),
    "asymmetric clip": (
        f"{EST} rloo --actor.eps_clip_low_high 0.2 0.28", {"estimator": "rloo", "high_clip": 0.28},
    ),
    "dual clip": (f"{EST} rloo --actor.dual_clip 1.3", {"estimator": "rloo", "dual_clip": 1.3}),
    "gspo": (
        f"{EST} group_norm --actor.policy_loss_type gspo --actor.eps_clip_low_high 0.03 0.04",
        {"estimator": "group_norm", "gspo": True, "low_clip": 0.03, "high_clip": 0.04},
    ),
    "gspo against the sampler": (
        f"{EST} group_norm --actor.policy_loss_type gspo --algo.advantage.is_correction_enable --actor.eps_clip 0.05",
        {"estimator": "group_norm", "gspo": True, "low_clip": 0.05, "high_clip": 0.05, "is_type": "tis"},
    ),
    "tis": (
        f"{EST} group_norm --algo.advantage.is_correction_enable --algo.advantage.is_correction_threshold 0.9 1.1",
        {"estimator": "group_norm", "is_type": "tis", "is_band": (0.9, 1.1)},
    ),
    "icepop": (
        f"{EST} group_norm --algo.advantage.is_correction_enable --algo.advantage.is_correction_type icepop "
        "--algo.advantage.is_correction_threshold 0.8 1.2",
        {"estimator": "group_norm", "is_type": "icepop", "is_band": (0.8, 1.2)},
    ),
    "flags of older releases": (
        "--advantage_estimator group_norm --init_kl_coef 1e-3 --eps_clip 0.1",
        {"estimator": "group_norm", "kl": 1e-3, "low_clip": 0.1, "high_clip": 0.1},
    ),
}  # fmt: skip


def both(framework: str, text: str, settings: dict[str, Any], seed: int) -> tuple[float, float, float, float]:
    """Loss and largest gradient entry of upstream, and how far ours are from them."""
    dialect = DIALECTS[framework]
    extra = " actor_rollout_ref.rollout.n=4" if framework == "verl" else " --rollout.n_samples_per_prompt 4"
    read = audit(dialect.parse(text + extra, ".sh"), dialect)
    assert read.exact, [r.text for r in read.remarks]
    assert read.objective is not None
    table = rows(seed, tools=seed % 2 == 1)
    theirs, theirs_gradient = getattr(transcribed, framework)(table, settings)
    report = explain(as_batch(table), read.objective)
    apart = np.abs(gradients(report) - np.array(theirs_gradient)).max()
    return theirs, abs(report["loss"] - theirs), float(np.abs(theirs_gradient).max()), float(apart)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", VERL)
def test_loss_and_gradient_stated_for_verl_are_its_formulas(name, seed):
    _, loss_apart, size, apart = both("verl", *VERL[name], seed)
    assert size > 1e-4 and loss_apart < 1e-6 and apart < 1e-6


@pytest.mark.parametrize("name", GRADIENT_ONLY)
def test_gradient_stated_for_verl_is_its_formula_where_only_the_value_differs(name):
    _, _, size, apart = both("verl", *GRADIENT_ONLY[name], 0)
    assert size > 1e-4 and apart < 1e-6


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", OPENRLHF)
def test_loss_and_gradient_stated_for_openrlhf_are_its_formulas(name, seed):
    _, loss_apart, size, apart = both("openrlhf", *OPENRLHF[name], seed)
    assert size > 1e-4 and loss_apart < 1e-6 and apart < 1e-6
