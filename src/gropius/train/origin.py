"""What a run began with, as digests: enough to refuse to continue it with anything else, and to say what is another."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from gropius.models.load import LoadedModel
from gropius.recipe import canonical_json, code_digests
from gropius.recipe.resolve import Resolved
from gropius.tasks.base import TaskSet

PACKAGES = ("gropius", "torch", "transformers", "safetensors", "numpy")
# What is refused when it differs, and how a person would call it.
DECISIVE = {
    "tasks": "the tasks",
    "tokenizer": "the tokenizer",
    "code": "the code",
    "base": "the weights of model.source",
    "start": "the weights that training starts from",
}
WEIGHTS = ("base", "start")  # of these, what was not looked at is not compared


def origin(
    resolved: Resolved, tasks: TaskSet, loaded: LoadedModel, judge: Sequence[str], began: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Facts of a run's beginning, JSON-ready. judge: how the scorer describes itself, its isolation included.

    base: digest of the weights that model.source gives; start: of those that training starts from, a given adapter
    included, before a warm start. began: of a run that goes on from a checkpoint, what it began with. Then the weights
    are the checkpoint's (whose own digest it holds), so `start` is taken over, and `base` too unless the base was read
    again, as it is beside an adapter.
    """
    base: str | None = None if loaded.adapter is None else loaded.adapter.base_digest
    start: str | None
    if began is None:
        start = loaded.digest()
        base = base or start
    else:
        start, base = began.get("start"), base or began.get("base")
    return {
        "base": base,
        "start": start,
        "tasks": tasks.fingerprint,
        "tokenizer": tokenizer_digest(loaded),
        "code": code_digests(resolved),
        "reward": list(judge),
        "machine": {
            **{name: _version(name) for name in PACKAGES},
            "python": platform.python_version(),
            "processor": platform.machine(),
            "device": loaded.model.device.type,
            "threads": torch.get_num_threads(),
        },
    }


def changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """One line for each decisive thing that is not what it was."""
    lines = []
    for key, words in DECISIVE.items():
        left, right = before.get(key), now.get(key)
        if key in WEIGHTS and None in (left, right):
            continue
        if isinstance(left, Mapping) and isinstance(right, Mapping):
            lines += [
                f"{words} of {name}: {_short(left.get(name))} when the run began, {_short(right.get(name))} now"
                for name in dict.fromkeys((*left, *right))
                if left.get(name) != right.get(name)
            ]
        elif left != right:
            lines.append(f"{words}: {_short(left)} when the run began, {_short(right)} now")
    return lines


def other_machine(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """What of versions and machine is another, in one line, or "". It may change bits, never the meaning."""
    left, right = before.get("machine", {}), now.get("machine", {})
    found = [f"{name} {left.get(name)} → {right.get(name)}" for name in right if left.get(name) != right.get(name)]
    return f"not to the same bits, perhaps: {', '.join(found)}" if found else ""


def tokenizer_digest(loaded: LoadedModel) -> str:
    """Sha256 over vocabulary, added tokens, chat template and end tokens; the same after saving and loading."""
    tokenizer = loaded.tokenizer
    document = {
        "vocabulary": tokenizer.get_vocab(),
        "template": tokenizer.chat_template,
        "special": {name: str(value) for name, value in sorted(tokenizer.special_tokens_map.items())},
        "stops": list(loaded.stop_token_ids),
    }
    return hashlib.sha256(canonical_json(document).encode("utf-8", "surrogatepass")).hexdigest()


def _short(digest: Any) -> str:
    return digest[:12] if isinstance(digest, str) else "absent" if digest is None else str(digest)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"
