"""The oracles: entries by name, which test reads which, and an entry's inputs as a batch."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from drawn import Drawn

from gropius.objective.selection import Response

_FILE = Path(__file__).parent.parent / "oracles" / "objective.json"
ENTRIES: dict[str, dict[str, Any]] = {e["name"]: e for e in json.loads(_FILE.read_text(encoding="utf-8"))["oracles"]}
READ: set[str] = set()


def reads(*names: str) -> Callable[[Any], Any]:
    """Mark a test as the one that checks these entries."""
    READ.update(names)
    return lambda test: test


def entry(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """(inputs, expected) of an entry."""
    return ENTRIES[name]["inputs"], ENTRIES[name]["expected"]


def responses(inputs: dict[str, Any], advantages: str | None = None) -> list[Drawn]:
    """The entry's batch; `advantages` names the input that overrides the computed ones."""

    def row(name: str, i: int) -> Any:
        return None if name not in inputs else np.array(inputs[name][i], np.float64)

    out = []
    for i, length in enumerate(inputs["lengths"]):
        given = inputs[advantages][i] if advantages else None
        truncated = bool(inputs["truncated"][i]) if "truncated" in inputs else False
        made = Response(
            group=str(inputs["groups"][i]),
            reward=float(inputs["rewards"][i]),
            mask=np.ones(length, np.bool_),
            truncated=truncated,
            advantage=np.array(given) if isinstance(given, list) else given,
            anchor=row("logp_old", i),
            reference=row("logp_ref", i),
            entropy=row("entropy", i),
        )
        policy = row("logp", i)
        out.append(Drawn(made, np.zeros(length) if policy is None else policy, row("logp_rollout", i)))
    return out


def batch(inputs: dict[str, Any], advantages: str | None = None) -> dict[str, Any]:
    """The entry as BATCH.json."""
    names = {"logp": "policy", "logp_old": "anchor", "logp_ref": "reference", "logp_rollout": "sampler"}
    groups: dict[str, list[dict[str, Any]]] = {}
    for i, length in enumerate(inputs["lengths"]):
        item = {"reward": inputs["rewards"][i], "length": length}
        item |= {ours: inputs[theirs][i] for theirs, ours in names.items() if theirs in inputs}
        if "entropy" in inputs:
            item["entropy"] = inputs["entropy"][i]
        if "truncated" in inputs:
            item["truncated"] = inputs["truncated"][i]
        if advantages:
            item["advantage"] = inputs[advantages][i]
        groups.setdefault(str(inputs["groups"][i]), []).append(item)
    return {"groups": [{"id": name, "responses": items} for name, items in groups.items()]}


def ragged(arrays: Any) -> Any:
    """One flat array of a list of lists."""
    return np.concatenate([np.asarray(a, np.float64) for a in arrays])
