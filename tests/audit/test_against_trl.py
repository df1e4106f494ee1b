"""The objective that the audit states is the one that TRL's own trainer computes: loss and gradient, rule by rule.

Needs a Python with TRL 1.16.0, named by GROPIUS_TRL_PYTHON (see docs of the audit); skipped without it.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.audit.batches import as_batch, rows

from gropius.audit import DIALECTS, audit
from gropius.audit.against import gradients
from gropius.audit.dialect import Parsed, Values
from gropius.audit.trl_options import OPTIONS, on_policy
from gropius.objective.explain import explain

pytestmark = pytest.mark.slow
PYTHON = os.environ.get("GROPIUS_TRL_PYTHON", "")
OFF_POLICY = {"num_iterations": 2}
LOSSES = ("grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo")

EXACT: dict[str, dict[str, Any]] = {
    "defaults": {},
    "defaults, off-policy": OFF_POLICY,
    **{f"{t} off-policy": {"loss_type": t, **OFF_POLICY} for t in LOSSES if t not in ("cispo",)},
    **{f"{t} on-policy": {"loss_type": t} for t in LOSSES if t not in ("cispo",)},
    "cispo with an absolute cap": {"loss_type": "cispo", "epsilon_high": 1.3, **OFF_POLICY},
    **{f"{t} sequence ratio": {"loss_type": t, "importance_sampling_level": "sequence", "epsilon": 0.05, **OFF_POLICY}
       for t in LOSSES if t != "cispo"},
    "cispo sequence ratio": {"loss_type": "cispo", "importance_sampling_level": "sequence", "epsilon_high": 1.1,
    **OFF_POLICY},
    "asymmetric clip": {"epsilon": 0.1, "epsilon_high": 0.3, **OFF_POLICY},
    "two-sided clip": {"delta": 1.5, **OFF_POLICY},
    "batch std": {"scale_rewards": "batch", **OFF_POLICY},
    "no scale": {"scale_rewards": "none", **OFF_POLICY},
    "dr_grpo proper": {"loss_type": "dr_grpo", "scale_rewards": False, "max_completion_length": 50, **OFF_POLICY},
    "several rewards summed": {"reward_weights": [1.0, 0.5, -0.25], **OFF_POLICY},
    "several rewards normalised apart": {
        "multi_objective_aggregation": "normalize_then_sum", "reward_weights": [1.0, 0.5, 0.25], **OFF_POLICY},
    "kl through the ratio": {"beta": 0.1, **OFF_POLICY},
    "kl direct": {"beta": 0.1, "use_bias_correction_kl": False, **OFF_POLICY},
    "kl on-policy": {"beta": 0.04, "loss_type": "grpo"},
    "kl direct under a sequence ratio": {
        "beta": 0.1, "use_bias_correction_kl": False, "importance_sampling_level": "sequence", "loss_type": "grpo",
        **OFF_POLICY},
    **{f"truncated masked, {t}": {"loss_type": t, "mask_truncated_completions": True, **OFF_POLICY}
       for t in ("grpo", "dr_grpo", "dapo", "luspo")},
    "off-policy mask": {"off_policy_mask_threshold": 0.05, "beta": 0.02, **OFF_POLICY},
    **{f"correction {m}": {"use_vllm": True, "vllm_importance_sampling_mode": m,
    "vllm_importance_sampling_clip_max": 1.2,
                           "vllm_importance_sampling_clip_min": 0.8, "beta": 0.05}
       for m in ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")},
    "correction by default": {"use_vllm": True},
    "correction switched off": {"use_vllm": True, "vllm_importance_sampling_correction": False},
    "two micro-batches, dapo": {"gradient_accumulation_steps": 2, "num_iterations": 2},
    "two micro-batches, grpo": {"gradient_accumulation_steps": 2, "loss_type": "grpo", "num_iterations": 2},
    "two micro-batches, dr_grpo": {"gradient_accumulation_steps": 2, "loss_type": "dr_grpo"},
    "tool text masked": {"loss_type": "grpo", "beta": 0.03, **OFF_POLICY},
}  # fmt: skip
INEXACT: dict[str, dict[str, Any]] = {
    "bnpo over two micro-batches": {"loss_type": "bnpo", "gradient_accumulation_steps": 2, "num_iterations": 2},
    "kl through a sequence ratio": {
        "beta": 0.5, "importance_sampling_level": "sequence", "loss_type": "grpo", **OFF_POLICY},
    "entropy bonus": {"entropy_coef": 0.1, **OFF_POLICY},
    "off-policy mask from the sampler": {
        "off_policy_mask_threshold": 0.05, "use_vllm": True, "vllm_importance_sampling_correction": False,
        **OFF_POLICY},
    "top entropy": {"top_entropy_quantile": 0.4, **OFF_POLICY},
}  # fmt: skip
# The threshold is that of the whole step here, and the probe's entropies do not depend on the policy.
AGREES_ANYWAY = {"top entropy"}
CASES = EXACT | INEXACT


def case(name: str, seed: int) -> dict[str, Any]:
    """One configuration with its own random batch, in the shape of the probe."""
    config = dict(CASES[name])
    vllm = config.pop("use_vllm", False)
    parts = len(config.get("reward_weights", [0]))
    table = rows(seed, parts=parts, tools=name == "tool text masked")
    steps = config.get("gradient_accumulation_steps", 1)
    config |= {"num_generations": 4, "per_device_train_batch_size": len(table) // steps}
    return {"name": name, "config": config, "use_vllm": vllm, "rows": table}


@pytest.fixture(scope="module")
def answers() -> dict[str, list[tuple[dict[str, Any], dict[str, Any]]]]:
    """Every case under TRL, three batches each, in one process."""
    if not PYTHON:
        pytest.skip("GROPIUS_TRL_PYTHON names no Python with TRL 1.16.0")
    cases = [case(name, 100 * k + i) for i, name in enumerate(CASES) for k in range(3)]
    probe = Path(__file__).with_name("trl_probe.py")
    done = subprocess.run(
        [PYTHON, str(probe)], input=json.dumps(cases), capture_output=True, text=True, timeout=900,
        env={**os.environ, "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    out: dict[str, list[tuple[dict[str, Any], dict[str, Any]]]] = {}
    for asked, answer in zip(cases, json.loads(done.stdout), strict=True):
        out.setdefault(asked["name"], []).append((asked, answer))
    return out


def ours(asked: dict[str, Any]) -> tuple[float, np.ndarray, bool]:
    """Loss, gradient and exactness of the audited objective on the same batch."""
    config = asked["config"] | ({"use_vllm": True} if asked["use_vllm"] else {})
    read = audit(Parsed(config), DIALECTS["trl"])
    assert read.objective is not None
    alone = on_policy(Values(OPTIONS, config, {}))
    batch = as_batch(asked["rows"], alone, config.get("reward_weights"))
    report = explain(batch, read.objective)
    return report["loss"], gradients(report), read.exact


@pytest.mark.parametrize("name", EXACT)
def test_loss_and_gradient_of_the_stated_objective_are_trls(answers, name):
    for asked, answer in answers[name]:
        assert "error" not in answer, answer
        loss, gradient, exact = ours(asked)
        theirs = np.concatenate([np.array(g) for g in answer["gradient"]])
        assert exact
        assert np.linalg.norm(theirs) > 1e-6
        assert loss == pytest.approx(answer["loss"], abs=1e-6)
        assert np.abs(gradient - theirs).max() < 1e-6


@pytest.mark.parametrize("name", INEXACT)
def test_what_the_audit_calls_inexpressible_is(answers, name):
    apart = []
    for asked, answer in answers[name]:
        assert "error" not in answer, answer
        loss, gradient, exact = ours(asked)
        assert not exact
        theirs = np.concatenate([np.array(g) for g in answer["gradient"]])
        apart.append(max(np.abs(gradient - theirs).max(), abs(loss - answer["loss"])))
    assert name in AGREES_ANYWAY or max(apart) > 1e-4
