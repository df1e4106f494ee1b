"""The workbench answers with the package's numbers; golden vectors hold both it and the page to them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient

from gropius.objective.explain import explain_rewards
from gropius.objective.presets import PRESETS

GOLDEN = json.loads((Path(__file__).parent / "golden.json").read_text(encoding="utf-8"))


def ask(client: TestClient, bench: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = client.post(f"/api/bench/{bench}", json=body)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


@pytest.mark.parametrize("case", GOLDEN["group"], ids=lambda case: case["name"])
def test_a_group_is_worked_as_by_hand(client: TestClient, case: dict[str, Any]) -> None:
    found = ask(client, "group", case["body"])
    assert found["mean"] == pytest.approx(case["mean"], abs=1e-15)
    assert found["std"] == pytest.approx(case["std"], abs=1e-15)
    assert found["state"] == case["state"]
    steps = {step["name"]: step["values"] for step in found["steps"]}
    assert steps["centred"] == pytest.approx(case["centred"], abs=1e-15)
    assert found["advantages"] == pytest.approx(case["advantages"], abs=1e-15)


def test_the_group_bench_is_the_package_for_every_preset(client: TestClient) -> None:
    for name in PRESETS:
        try:
            expected = explain_rewards([1.0, 0.0, 0.25, 1.0], name)
        except Exception as error:
            answer = client.post("/api/bench/group", json={"rewards": [1.0, 0.0, 0.25, 1.0], "preset": name})
            assert answer.status_code == 400 and answer.json()["error"] == str(error)
            continue
        assert ask(client, "group", {"rewards": [1.0, 0.0, 0.25, 1.0], "preset": name}) == json.loads(
            json.dumps(expected)
        )


@pytest.mark.parametrize("case", GOLDEN["weights"], ids=lambda case: case["name"])
def test_token_weights_are_those_worked_by_hand(client: TestClient, case: dict[str, Any]) -> None:
    found = ask(client, "weights", case["body"])["kinds"]
    for kind, loss in case.get("loss", {}).items():
        assert found[kind]["loss"] == pytest.approx(loss, abs=1e-15)
    for kind, values in case.get("per_token_times_n", {}).items():
        for answer, value in zip(found[kind]["answers"], values, strict=True):
            assert answer["per_token"][0] * 2 == pytest.approx(value, abs=1e-15)


@pytest.mark.parametrize("case", GOLDEN["batch"], ids=lambda case: case["name"])
def test_the_worked_batch_is_that_of_the_lesson(client: TestClient, case: dict[str, Any]) -> None:
    found = ask(client, "batch", case["body"])
    assert found["loss"] == pytest.approx(case["loss"], abs=1e-12)
    tokens = [response["tokens"] for response in found["groups"][0]["responses"]]
    for i, terms in enumerate(case.get("terms", [])):
        assert [token["surrogate"] for token in tokens[i]] == pytest.approx(terms, abs=1e-12)
    for name, key in (("gradients", "gradient"), ("kl", "kl")):
        for place, value in case.get(name, {}).items():
            i, j = map(int, place.split(","))
            assert tokens[i][j][key] == pytest.approx(value, abs=1e-12)


def test_the_clip_bench_is_flat_where_the_clip_is(client: TestClient) -> None:
    found = ask(client, "ratio", {"preset": "grpo"})
    ratio = np.array(found["ratio"])
    above, below = (np.array(found["curves"][sign]["flat"]) for sign in ("positive", "negative"))
    assert (above == (ratio > 1.2)).all() and (below == (ratio < 0.8)).all()
    value = np.array(found["curves"]["positive"]["value"])
    assert value == pytest.approx(np.minimum(ratio, 1.2), abs=1e-12)
    gradient = np.array(found["curves"]["negative"]["gradient"])
    assert gradient == pytest.approx(np.where(below, 0.0, -ratio), abs=1e-12)


def test_every_preset_with_a_ratio_has_finite_curves(client: TestClient) -> None:
    for name, preset in PRESETS.items():
        if preset.objective.ratio.level != "none":
            found = ask(client, "ratio", {"preset": name, "high": 10})
            values = [curve[key] for curve in found["curves"].values() for key in ("value", "gradient")]
            assert np.isfinite(values).all(), name


def test_k2_has_the_reverse_gradient_and_k3_the_forward_one(client: TestClient) -> None:
    found = ask(client, "kl", {"policy": [5, 3, 2], "reference": [2, 2, 6]})
    p, q = np.array(found["policy"]), np.array(found["reference"])
    reverse = p * (np.log(p / q) - (p * np.log(p / q)).sum())
    gradients = {name: row["gradient"] for name, row in found["estimators"].items()}
    assert gradients["k1"] == pytest.approx([0, 0, 0], abs=1e-12)
    assert gradients["k2"] == pytest.approx(reverse, abs=1e-12)
    assert gradients["k3"] == pytest.approx(p - q, abs=1e-12)
    assert found["true"]["reverse_gradient"] == pytest.approx(reverse, abs=1e-12)
    assert found["true"]["forward_gradient"] == pytest.approx(p - q, abs=1e-12)
    for name in ("k1", "k3"):
        assert found["estimators"][name]["mean"] == pytest.approx((p * np.log(p / q)).sum(), abs=1e-12)
    assert min(found["estimators"]["k3"]["values"]) >= 0


def test_the_budget_bench_is_the_plan(client: TestClient) -> None:
    found = ask(client, "budget", {"responses": 512, "mixture": [{"weight": 1, "rate": 0.02, "concentration": 1e4}]})
    row = next(row for row in found["rows"] if row["group_size"] == 8)
    assert row["dead"]["value"] == pytest.approx(0.98**8 + 0.02**8, abs=2e-3)
    assert row["dead"]["low"] == row["dead"]["value"] == row["dead"]["high"]
    assert row["prompts"] == 64


@pytest.mark.parametrize(
    ("bench", "body", "words"),
    [
        ("group", {"rewards": []}, "rewards: write a list of 1 to 64 numbers"),
        ("group", {"rewards": [1] * 65}, "1 to 64"),
        ("group", {"rewards": [1, "x"]}, "rewards, entry 1"),
        ("group", {"rewards": [1, True]}, "rewards, entry 1"),
        ("group", {"rewards": [1, 0], "preset": "grop"}, "grpo"),
        ("group", {"rewards": [1, 0], "overrides": {"advantage.epsilom": 1}}, "epsilon"),
        ("group", {"rewards": [1e308, -1e308]}, "too large"),
        ("weights", {"lengths": [0]}, "from 1 to"),
        ("weights", {"lengths": [5, 5], "losses": [1]}, "1 entries for 2 answers"),
        ("ratio", {"anchor": 2}, "anchor = 2"),
        ("ratio", {"low": 3, "high": 1}, "low must lie below high"),
        ("batch", {"answers": [{"ratios": [0, 1]}]}, "above 0"),
        ("batch", {"answers": [{"ratios": [1, 1], "reference": [0.5]}]}, "1 numbers for 2 tokens"),
        ("kl", {"policy": [1, 0], "reference": [1, 1]}, "above 0"),
        ("budget", {"mixture": []}, "1 to 4 components"),
        ("budget", {"mixture": [{"rate": 1.5}]}, "rate = 1.5"),
    ],
)
def test_a_request_that_means_nothing_is_refused_with_what_to_write(
    client: TestClient, bench: str, body: dict[str, Any], words: str
) -> None:
    answer = client.post(f"/api/bench/{bench}", json=body)
    assert answer.status_code == 400
    assert words in answer.json()["error"]


def test_the_server_is_imported_without_torch() -> None:
    code = (
        "import sys; import gropius.viewer.server, gropius.viewer.report, gropius.viewer.notebook;"
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'matplotlib', 'vllm', 'ray')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
