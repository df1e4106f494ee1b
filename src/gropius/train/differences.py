"""What may change between the beginning of a run and its continuation, and what may not. No torch.

The harmless keys decide how long a run goes, what is logged, measured and kept, and never a bit of a step's result.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

# Keys, or tables with a trailing dot, that a continued run may change.
HARMLESS = (
    "name", "out", "train.steps", "train.max_time_s", "train.deadline_s", "void_limit", "eval.", "record.",
    "checkpoint.", "doctor.", "cluster.", "rollout.vllm.python", "rollout.vllm.address", "rollout.vllm.devices",
    "rollout.vllm.start_timeout_s", "rollout.vllm.hang_s",
)  # fmt: skip
# Of those, what moves the learning rate: harmless only where the schedule does not look at it.
SCHEDULED = "train.steps"


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Keys of nested tables whose values differ, dotted, with both values; None where a side lacks the key.

    >>> differences({"train": {"steps": 3}, "seed": 0}, {"train": {"steps": 5}, "seed": 0})
    {'train.steps': (3, 5)}
    """
    left, right = dict(_leaves(before)), dict(_leaves(now))
    keys = dict.fromkeys((*left, *right))
    return {key: (left.get(key), right.get(key)) for key in keys if left.get(key) != right.get(key)}


def harmless(key: str, tables: Mapping[str, Any]) -> bool:
    """True when a continued run may change the key.

    >>> tables = {"train": {"schedule": "cosine"}}
    >>> harmless("checkpoint.every", tables), harmless("train.steps", tables), harmless("train.learning_rate", tables)
    (True, False, False)
    """
    if key == SCHEDULED and tables.get("train", {}).get("schedule", "constant") != "constant":
        return False
    return any(key == name or (name.endswith(".") and key.startswith(name)) for name in HARMLESS)


def in_words(found: Mapping[str, tuple[Any, Any]], before: str = "when the run began") -> list[str]:
    """One line a difference.

    >>> in_words({"train.updates": (1, 2)})
    ['train.updates: 1 when the run began, 2 now']
    """
    return [f"{key}: {_shown(left)} {before}, {_shown(right)} now" for key, (left, right) in found.items()]


def _shown(value: Any) -> str:
    text = "absent" if value is None else repr(value)
    return text if len(text) <= 60 else text[:57] + "…"


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _leaves(inner, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list | tuple) and any(isinstance(item, Mapping) for item in value):
        for index, item in enumerate(value):
            yield from _leaves(item, f"{path}.{index}")
    else:
        yield path, list(value) if isinstance(value, tuple) else value
