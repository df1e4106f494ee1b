"""What a plan is asked, as one flat table of keys that `--set` writes. No torch."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gropius.errors import UsageError, did_you_mean
from gropius.objective.spec import Objective
from gropius.plan.cost import Workload
from gropius.plan.split import GROUP_SIZES, Budget


@dataclass(frozen=True)
class Question:
    """objective: preset whose scale weighs prompts. grow_limit: siblings at most of a grown group. prompts, group_size:
    of the cost's step; 0 = as recommended, else as the budget. The others are those of `Workload`.
    """

    objective: str = "grpo"
    group_sizes: tuple[int, ...] = GROUP_SIZES
    grow_limit: int = 64
    response_tokens: float = 0.0
    prompt_tokens: float = 128.0
    prompts: int = 0
    group_size: int = 0
    steps: int = 100
    epochs: int = 1
    rows: int = 0
    pack_tokens: int = 8192
    length_spread: float = 1.0
    shared_prompt: bool = True
    anchor_pass: bool = False
    reference: bool = False
    recompute: bool = False
    seed: int = 0


def question(settings: Mapping[str, Any]) -> Question:
    """A question from keys and values. Errors: UsageError for an unknown key or a value of another type.

    >>> question({"group_sizes": [4, 8]}).group_sizes
    (4, 8)
    """
    return Question(**typed(settings, {f.name: f.default for f in dataclasses.fields(Question)}))


def typed(settings: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    """The settings as values of the types of the defaults. Errors: UsageError for an unknown key or another type."""
    values: dict[str, Any] = {}
    for key, value in settings.items():
        if key not in known:
            raise UsageError(f"--set {key}: plan has no such key; {did_you_mean(key, known)}")
        values[key] = _typed(key, value, known[key])
    return values


def _typed(key: str, value: Any, default: Any) -> Any:
    if isinstance(default, tuple) and isinstance(default[0], float):
        numbers = value if isinstance(value, list) else [value]
        if numbers and all(isinstance(x, int | float) and not isinstance(x, bool) and 0 <= x < 1000 for x in numbers):
            return tuple(float(x) for x in numbers)
        raise UsageError(f"--set {key}: write a list of numbers of at least 0, e.g. {key}=[0.5, 1, 4]")
    if isinstance(default, tuple):
        if isinstance(value, list) and value and all(isinstance(g, int) and g >= 2 for g in value):
            return tuple(value)
        raise UsageError(f"--set {key}: write a list of group sizes of at least 2, e.g. {key}=[4, 8, 16]")
    if isinstance(default, float) and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if type(value) is not type(default) or (isinstance(value, int | float) and not 0 <= value < float("inf")):
        raise UsageError(f"--set {key}: {value!r} is no {type(default).__name__} of at least 0")
    return value


def scale_of(objective: Objective) -> tuple[str, str]:
    """The estimator of `signal.ESTIMATORS` that an objective's advantage is, and a note when it is only the nearest.

    >>> from gropius.objective.presets import resolve
    >>> scale_of(resolve("dr_grpo"))
    ('none', '')
    """
    axis = objective.advantage
    if axis.scale == "group_std":
        return ("group_std" if axis.ddof == 0 else "group_std_sample"), ""
    if axis.scale == "group_mean":
        return "group_mean", ""
    if axis.baseline == "leave_one_out":
        return "leave_one_out", ""
    note = "" if axis.baseline == "group_mean" and axis.scale == "none" and axis.whiten == "none" else (
        "signal and efficiency are those of the centred reward: a batch-level scale multiplies every prompt alike"
    )  # fmt: skip
    return "none", note


def budget(text: str, asked: Question, response_tokens: float) -> Budget:
    """`512` responses or `65536tokens`. Errors: UsageError for anything else.

    >>> budget("65536tokens", Question(), 128.0).responses
    512
    """
    match = re.fullmatch(r"(\d+)\s*(responses|tokens|)", text.strip())
    if not match or int(match[1]) < 1:
        raise UsageError(f"--budget {text!r}: write responses a step, e.g. 512, or tokens, e.g. 65536tokens")
    return Budget(int(match[1]), match[2] or "responses", asked.response_tokens or response_tokens, asked.grow_limit)


def workload(asked: Question, split: tuple[int, int], response_tokens: float, live_share: float) -> Workload:
    """The step whose cost is asked; split: prompts and group size where the question leaves them open."""
    return Workload(
        prompts=asked.prompts or split[0],
        group_size=asked.group_size or split[1],
        prompt_tokens=asked.prompt_tokens,
        response_tokens=asked.response_tokens or response_tokens or 256.0,
        epochs=max(asked.epochs, 1),
        steps=max(asked.steps, 1),
        shared_prompt=asked.shared_prompt,
        anchor_pass=asked.anchor_pass,
        reference=asked.reference,
        recompute=asked.recompute,
        live_share=live_share,
        rows=asked.rows,
        length_spread=max(asked.length_spread, 1.0),
        pack_tokens=max(asked.pack_tokens, 1),
    )
