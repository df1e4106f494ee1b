"""Rewards: functions from an episode to an outcome, and the scorer that runs and weighs them. No torch.

`REWARDS` is the table of named rewards (factories that take their options by keyword); `open_scorer` takes what a
recipe writes. A person's own function is named `module:function` or `path/to/file.py:function`; it runs in killable
processes, ours in this one.
"""

from __future__ import annotations

import math as numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gropius.errors import RecipeError, did_you_mean
from gropius.naming import check_options, names_a_function
from gropius.rewards import groupwise, own, process, text
from gropius.rewards.base import (
    BatchedReward,
    InProcessScorer,
    Metric,
    Reward,
    RewardPart,
    Scorer,
    outcome_as_metric,
    unit_of,
)
from gropius.rewards.mixed import MixedScorer, Pooled, PoolSettings
from gropius.rewards.pool import PooledScorer
from gropius.rewards.remote import remote
from gropius.types import Episode, Outcome

__all__ = [
    "METRICS",
    "REWARDS",
    "InProcessScorer",
    "MixedScorer",
    "PoolSettings",
    "Reward",
    "RewardPart",
    "Scorer",
    "load_scorer",
    "open_scorer",
]

KEYS = ("name", "weight", "options", "floor", "range", "part")


def open_scorer(
    parts: Sequence[Mapping[str, Any]], base_dir: Path, settings: PoolSettings | None = None, floor: float = 0.0
) -> InProcessScorer | MixedScorer:
    """The scorer of a recipe's `[[reward]]` tables, as training uses it: a person's functions in a pool. Close it.

    parts, base_dir, floor: as in `load_scorer`. The functions are looked at in a child process, never imported here.
    Raises RecipeError naming the part.
    """
    parts = with_second_opinions(parts)
    where = ["own" if _is_own(config) else "apart" if config.get("name") in APART else "here" for config in parts]
    if set(where) <= {"here"}:
        return load_scorer(parts, base_dir, floor)
    functions = [i for i, place in enumerate(where) if place == "own"]
    looks = own.look([(str(parts[i]["name"]), parts[i].get("options") or {}) for i in functions], base_dir)
    if refusals := [look.refused for look in looks if look.refused]:
        raise RecipeError("\n".join(refusals))
    found = {**{i: own.Look("built-in") for i, place in enumerate(where) if place == "apart"},
             **dict(zip(functions, looks, strict=True))}  # fmt: skip
    built = _named([_part(config, base_dir, found.get(i)) for i, config in enumerate(parts)])
    inline = [part for part, place in zip(built, where, strict=True) if place == "here"]
    chosen = settings or PoolSettings()
    pools = []
    for kind in ("own", "apart"):
        if places := [i for i, place in enumerate(where) if place == kind]:
            configs = [{**dict(parts[i]), "part": built[i].name} for i in places]
            deadline_s = max(chosen.deadline_s, APART_S) if kind == "apart" else chosen.deadline_s
            pool = PooledScorer(configs, base_dir, floor, chosen.workers, deadline_s)
            pools.append(Pooled(tuple(built[i].name for i in places), pool))
    here = InProcessScorer(inline, floor, unit_of(inline)) if inline else None
    return MixedScorer(tuple(built), here, pools)


def load_scorer(parts: Sequence[Mapping[str, Any]], base_dir: Path, floor: float = 0.0) -> InProcessScorer:
    """The scorer that a recipe's `[[reward]]` tables describe, everything in this process (a worker, a notebook).

    parts: mappings with `name` (in `REWARDS`, or a person's function), `weight` (default 1), `options`, `floor` (the
    value of a rejection of this part) and `range` ([low, high] of a scored value, checked). A name that stands twice
    gets a number: format, format.2. base_dir: where a person's functions are looked up. floor: the value of a rejected
    part that has none of its own. The task metric is the first part that declares one (`METRICS`), else the first
    function of the person, else the only part. Raises RecipeError naming the part.
    """
    built = _named([_part(config, base_dir, None) for config in with_second_opinions(parts)])
    return InProcessScorer(tuple(built), floor, unit_of(built))


def with_second_opinions(parts: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The tables with `second` of `math` written out: a part of its own behind it, of weight 0.

    Raises RecipeError for a second opinion that does not exist.
    """
    written: list[Mapping[str, Any]] = []
    for config in parts:
        options = dict(config.get("options") or {})
        second = options.pop("second", "") if config.get("name") == "math" else ""
        written.append({**config, "options": options} if second else config)
        if second and second not in SECOND_OPINIONS:
            raise RecipeError(f'reward math: second = "{second}"; {did_you_mean(str(second), SECOND_OPINIONS)}')
        if second:
            written.append({"name": SECOND_OPINIONS[second], "weight": 0.0})
    return written


def _named(parts: Sequence[RewardPart]) -> list[RewardPart]:
    """The parts with names of their own and one task metric."""
    if not parts:
        raise RecipeError('no reward: write [[reward]] with name = "exact" (or another), or name your function')
    built: list[RewardPart] = []
    for part in parts:
        count = sum(other.name.partition(".")[0] == part.name for other in built)
        built.append(replace(part, name=f"{part.name}.{count + 1}") if count else part)
    if not any(part.metric for part in built):
        place = next((i for i, part in enumerate(built) if part.own), 0 if len(built) == 1 else None)
        if place is not None:
            built[place] = replace(built[place], metric=outcome_as_metric)
    return built


def _is_own(config: Mapping[str, Any]) -> bool:
    name = config.get("name")
    return isinstance(name, str) and name not in REWARDS and names_a_function(name)


def _part(config: Mapping[str, Any], base_dir: Path, look: own.Look | None) -> RewardPart:
    """One part. look: what a child found out about a person's function, which is then not imported here."""
    unknown = [key for key in config if key not in KEYS]
    if unknown:
        raise RecipeError(f"reward: unknown key {unknown[0]}; {did_you_mean(unknown[0], KEYS[:-1])}")
    name, weight, options = config.get("name"), config.get("weight", 1.0), config.get("options") or {}
    if not isinstance(name, str) or not name:
        raise RecipeError("reward: a part without a name")
    if not _is_number(weight):
        raise RecipeError(f"reward {name}: weight = {weight!r}; write a finite number")
    floor = config.get("floor")
    if floor is not None and not _is_number(floor):
        raise RecipeError(f"reward {name}: floor = {floor!r}; write a finite number")
    low, high = _range(name, config.get("range"))
    if name in REWARDS:
        checked = check_options(f"reward {name}", REWARDS[name], options, RecipeError)
        function = REWARDS[name](**checked) if look is None else _elsewhere
        part = RewardPart(name, float(weight), function, METRICS.get(name), threaded=name in BLOCKING)
        part = replace(part, source=str(checked.get("url", "")))  # where prompts and replies are sent
    elif not names_a_function(name):
        raise RecipeError(f'reward "{name}" is unknown; {did_you_mean(name, REWARDS)} Your own: "module:function"')
    else:
        signature, function = (look.signature, _elsewhere) if look else own.load(name, options, base_dir)
        part = RewardPart(name.rpartition(":")[2], float(weight), function, None, signature, name)
    own_name = config.get("part") or part.name
    return replace(part, name=own_name, low=low, high=high, floor=None if floor is None else float(floor))


def _range(name: str, given: Any) -> tuple[float, float]:
    if given is None:
        return RANGES.get(name, (-numbers.inf, numbers.inf))
    pair = isinstance(given, (list, tuple)) and len(given) == 2 and all(map(_is_number, given))
    if not pair or given[0] >= given[1]:
        raise RecipeError(f"reward {name}: range = {given!r}; write [low, high], for example [0.0, 1.0]")
    return float(given[0]), float(given[1])


def _is_number(value: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, (int, float)) and numbers.isfinite(value)


def _elsewhere(episode: Episode) -> Outcome:
    raise AssertionError("a pooled function is never called here")


def _math(*, simplified: bool = True, second: str = "") -> Reward:
    """The mathematical verifier, imported when it is asked for. simplified: see `gropius.rewards.math.verify`.

    second: "math-verify" adds that library's opinion as a part of weight 0; it is written out before this is called.
    """
    from gropius.rewards import math

    return math.math(simplified=simplified)


def _code(
    *,
    minimum: str = "landlock",
    wall_s: float = 10.0,
    memory_mb: int = 512,
    partial: bool = False,
    slots: int = 0,
    remote: Any = None,
) -> Reward:
    """Run the reply's program against the task's tests in the sandbox; see `gropius.rewards.code.code`.

    remote: the address of a SandboxFusion service, or a table {url, token_env, retries, backoff_s}.
    """
    from gropius.rewards import code
    from gropius.sandbox.base import TIERS
    from gropius.sandbox.remote import service_of

    if minimum not in TIERS:
        raise RecipeError(f'reward code: minimum = "{minimum}"; {did_you_mean(minimum, TIERS)}')
    tier = next(tier for tier in TIERS if tier == minimum)
    try:
        service = service_of(remote) if remote is not None else None
    except (TypeError, ValueError) as problem:
        raise RecipeError(f"reward code: {problem}") from None
    return code.code(code.Place(tier, slots, service), wall_s=wall_s, memory_mb=memory_mb, partial=partial)


def _reasoning_gym(*, tag: str = "answer", partial: bool = False, wall_s: float = 5.0, memory_mb: int = 2048) -> Reward:
    """The family's own scorer, in a confined child; see `gropius.rewards.gym.reasoning_gym`."""
    from gropius.rewards import gym

    return gym.reasoning_gym(tag=tag, partial=partial, wall_s=wall_s, memory_mb=memory_mb)


def _math_verify(*, wall_s: float = 0.7, memory_mb: int = 2048) -> Reward:
    """The library's verdict, in a confined child; see `gropius.rewards.second.math_verify`."""
    from gropius.rewards import second

    return second.math_verify(wall_s=wall_s, memory_mb=memory_mb)


def _verifiers() -> Callable[[Episode], Any]:
    """The rewards of a task of the library `verifiers`; see `gropius.rewards.verifiers`."""
    from gropius.rewards import verifiers

    return verifiers.verifiers()


def _passed(episode: Episode, outcome: Outcome) -> float | None:
    """1 when everything passed, 0 otherwise, None when void: what partial credit does not change."""
    return None if outcome.status == "void" else float(outcome.status == "scored" and outcome.value == 1.0)


REWARDS: dict[str, Callable[..., Callable[[Episode], Any] | BatchedReward]] = {
    "exact": text.exact,
    "last_number": text.last_number,
    "countdown": text.countdown,
    "format": text.format,
    "length": text.length,
    "environment": text.environment,
    "math": _math,
    "math_verify": _math_verify,
    "code": _code,
    "reasoning_gym": _reasoning_gym,
    "verifiers": _verifiers,
    "remote": remote,
    "diversity": groupwise.diversity,
    "brevity": groupwise.brevity,
    "arithmetic_steps": process.arithmetic_steps,
    "guess_progress": process.guess_progress,
}

METRICS: dict[str, Metric] = {
    "exact": outcome_as_metric,
    "last_number": outcome_as_metric,
    "countdown": outcome_as_metric,
    "environment": text.environment_metric,
    "math": outcome_as_metric,
    "math_verify": outcome_as_metric,
    "code": _passed,
    "reasoning_gym": _passed,
    "verifiers": outcome_as_metric,
}

# Bounds of a scored value; what is not here has none unless a recipe declares them.
RANGES: dict[str, tuple[float, float]] = {
    "exact": (0.0, 1.0),
    "last_number": (0.0, 1.0),
    "countdown": (0.0, 1.0),
    "format": (0.0, 1.0),
    "length": (-1.0, 1.0),
    "math": (0.0, 1.0),
    "math_verify": (0.0, 1.0),
    "code": (0.0, 1.0),
    "reasoning_gym": (0.0, 1.0),
    "diversity": (0.0, 1.0),
    "brevity": (0.0, 1.0),
}

SECOND_OPINIONS = {"math-verify": "math_verify"}  # of the reward math: what a recipe writes, and the part it becomes
CONFINED = frozenset({"reasoning_gym", "math_verify"})  # let a library evaluate model text: never in the trainer
APART = CONFINED | {"verifiers"}  # in killable processes; code of others, like a person's own functions
APART_S = 60.0  # these bound every answer themselves; this is for a library that hangs outside of that
BLOCKING = frozenset({"code"})  # waits for other processes, so it runs in a thread
