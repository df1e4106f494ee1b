"""Two objectives on one fixture batch: loss, and the gradient of every token. Torch is imported when it is called."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gropius.errors import UsageError
from gropius.objective.spec import Objective

Array = NDArray[np.float64]
EQUAL = 1e-9


def fixture(seed: int = 0, on_policy: bool = False) -> dict[str, Any]:
    """Four prompts of four responses that reach every branch: ratios on both sides of every usual bound, a dead group
    on either side, fractional rewards, lengths 1 to 6, a truncated response, a sampler apart from the anchor.
    on_policy: the anchor is the policy itself, so that every ratio to it is 1.
    """
    random = np.random.default_rng(seed)
    rewards = ((1.0, 0.0, 0.0, 1.0), (0.125, 0.75, 0.375, 0.25), (0.0, 0.0, 0.0, 0.0), (1.0, 1.0, 1.0, 1.0))
    groups = []
    for g, row in enumerate(rewards):
        responses = []
        for i, reward in enumerate(row):
            length = 1 + (3 * g + 5 * i) % 6
            anchor = -random.exponential(0.9, length) - 0.4
            responses.append({
                "reward": reward,
                "anchor": anchor.tolist(),
                "policy": np.minimum(anchor + random.normal(0, 0.35, length), -0.01).tolist(),
                "sampler": np.minimum(anchor + random.normal(0, 0.15, length), -0.01).tolist(),
                "reference": np.minimum(anchor + random.normal(0, 0.3, length), -0.01).tolist(),
                "entropy": random.uniform(0.1, 2.5, length).tolist(),
                "truncated": (g, i) == (0, 3),
            })  # fmt: skip
        if on_policy:
            for response in responses:
                del response["anchor"]
        groups.append({"id": f"q{g}", "greedy_reward": 0.5, "responses": responses})
    return {"groups": groups}


def gradients(report: dict[str, Any]) -> Array:
    """[tokens] d loss / d log π of every token of an `explain` report, in order."""
    return np.array([t["gradient"] for g in report["groups"] for r in g["responses"] for t in r["tokens"]], np.float64)


def difference(
    first: Objective | None, second: Objective | None, batch: dict[str, Any] | None = None
) -> dict[str, Any]:
    """How far two objectives are apart on a batch (the fixture when none is given).

    loss: both values. gradient_largest: the largest absolute difference of a token's gradient. gradient_share: the
    norm of the difference over the norm of the first. cosine: of the two gradients; scale: norm of the second over the
    first; both 1 when they differ only by rounding. equal: no token differs by more than 1e-9.
    Errors: UsageError when one of them has no objective.
    """
    from gropius.objective.explain import explain

    if first is None or second is None:
        raise UsageError("one of the two configurations has no equivalent objective, so there is nothing to evaluate")
    data = batch or fixture()
    reports = [explain(data, first), explain(data, second)]
    a, b = (gradients(r) for r in reports)
    norm_a, norm_b = float(np.linalg.norm(a)), float(np.linalg.norm(b))
    both = norm_a > 0 and norm_b > 0
    rows = [
        {
            "group": g["id"],
            "response": i,
            "reward": r["reward"],
            "first": _sum(r),
            "second": _sum(other["responses"][i]),
        }
        for g, other in zip(reports[0]["groups"], reports[1]["groups"], strict=True)
        for i, r in enumerate(g["responses"])
    ]
    largest = float(np.abs(a - b).max())
    return {
        "tokens": len(a),
        "loss": [reports[0]["loss"], reports[1]["loss"]],
        "loss_difference": abs(reports[0]["loss"] - reports[1]["loss"]),
        "gradient_largest": largest,
        "gradient_share": float(np.linalg.norm(a - b)) / norm_a if norm_a else None,
        "cosine": float(a @ b) / (norm_a * norm_b) if both else None,
        "scale": norm_b / norm_a if norm_a else None,
        "equal": largest <= EQUAL,
        "responses": rows,
    }


def _sum(response: dict[str, Any]) -> float:
    return math.fsum(t["gradient"] for t in response["tokens"])


def fields_apart(first: Objective, second: Objective) -> list[tuple[str, Any, Any]]:
    """The fields in which two objectives differ, as (axis.key, first, second)."""
    a, b = first.as_dict(), second.as_dict()
    return [(f"{x}.{k}", a[x][k], b[x][k]) for x, fields in a.items() for k in fields if a[x][k] != b[x][k]]
