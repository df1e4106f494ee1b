"""Random batches for the audit's tests: one row a response, every per-token array, rewards that include dead groups."""

from __future__ import annotations

from typing import Any

import numpy as np

Row = dict[str, Any]


def rows(seed: int, prompts: int = 4, group: int = 4, parts: int = 1, tools: bool = False) -> list[Row]:
    """[prompts x group] responses in order of their prompt; the last group's rewards are all equal."""
    random = np.random.default_rng(seed)
    out = []
    for q in range(prompts):
        for i in range(group):
            length = int(random.integers(1, 7))
            anchor = -random.exponential(0.8, length) - 0.3
            near = {
                name: np.minimum(anchor + random.normal(0, s, length), -0.005).tolist()
                for name, s in (("policy", 0.4), ("sampler", 0.25), ("reference", 0.3))
            }
            rewards = random.choice([0.0, 0.25, 0.5, 1.0], parts).tolist() if q < prompts - 1 else [0.5] * parts
            mask = random.random(length) < 0.7 if tools else np.ones(length, bool)
            mask[-1] = True
            out.append({
                "group": q, "rewards": rewards, "anchor": anchor.tolist(), **near, "mask": mask.astype(int).tolist(),
                "entropy": random.uniform(0.05, 3.0, length).tolist(), "truncated": bool(random.random() < 0.3 and i),
            })  # fmt: skip
    return out


def as_batch(table: list[Row], on_policy: bool = False, weights: list[float] | None = None) -> dict[str, Any]:
    """The same responses as a batch of `explain`; on_policy leaves the anchor out."""
    groups: dict[int, list[Row]] = {}
    for row in table:
        several = len(row["rewards"]) > 1
        item = {
            "reward": {f"f{k}": x for k, x in enumerate(row["rewards"])} if several else row["rewards"][0],
            **{k: row[k] for k in ("policy", "sampler", "reference", "entropy", "mask", "truncated")},
        }
        if not on_policy:
            item["anchor"] = row["anchor"]
        groups.setdefault(row["group"], []).append(item)
    batch: dict[str, Any] = {"groups": [{"id": f"q{q}", "responses": r} for q, r in groups.items()]}
    if weights:
        batch["weights"] = {f"f{k}": w for k, w in enumerate(weights)}
    return batch
