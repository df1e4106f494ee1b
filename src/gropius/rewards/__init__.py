"""Rewards: functions from an episode to an outcome, and the scorer that runs and weighs them. No torch.

`REWARDS` is the table of named rewards (factories that take their options by keyword); `load_scorer` takes what a
recipe writes. A person's own function is named `module:function` or `path/to/file.py:function`.
"""

from __future__ import annotations

import functools
import inspect
import math as numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gropius.errors import RecipeError, did_you_mean
from gropius.naming import check_options, load_function, names_a_function
from gropius.rewards import text
from gropius.rewards.base import InProcessScorer, Metric, Reward, RewardPart, Scorer, outcome_as_metric
from gropius.rewards.foreign import adapt

__all__ = ["METRICS", "REWARDS", "InProcessScorer", "Reward", "RewardPart", "Scorer", "load_scorer"]


def load_scorer(parts: Sequence[Mapping[str, Any]], base_dir: Path, floor: float = 0.0) -> InProcessScorer:
    """The scorer that a recipe's `[[reward]]` tables describe.

    parts: mappings with `name` (in `REWARDS`, or a person's function), `weight` (default 1) and `options`. A name that
    stands twice gets a number: format, format.2. base_dir: where a person's functions are looked up. floor: the value
    of a rejected part. The task metric is the first part that declares one (`METRICS`), else the first function of
    the person, else the only part. Raises RecipeError naming the part.
    """
    if not parts:
        raise RecipeError('no reward: write [[reward]] with name = "exact" (or another), or name your function')
    built: list[RewardPart] = []
    for config in parts:
        part = _part(config, base_dir)
        count = sum(other.name.partition(".")[0] == part.name for other in built)
        built.append(replace(part, name=f"{part.name}.{count + 1}") if count else part)
    if not any(part.metric for part in built):
        place = next(
            (i for i, part in enumerate(built) if part.signature != "built-in"), 0 if len(built) == 1 else None
        )
        if place is not None:
            built[place] = replace(built[place], metric=outcome_as_metric)
    return InProcessScorer(tuple(built), floor)


def _part(config: Mapping[str, Any], base_dir: Path) -> RewardPart:
    unknown = [key for key in config if key not in ("name", "weight", "options")]
    if unknown:
        raise RecipeError(
            f"reward: unknown key {unknown[0]}; {did_you_mean(unknown[0], ('name', 'weight', 'options'))}"
        )
    name, weight, options = config.get("name"), config.get("weight", 1.0), config.get("options", {})
    if not isinstance(name, str) or not name:
        raise RecipeError("reward: a part without a name")
    if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not numbers.isfinite(weight):
        raise RecipeError(f"reward {name}: weight = {weight!r}; write a finite number")
    if name in REWARDS:
        function = REWARDS[name](**check_options(f"reward {name}", REWARDS[name], options, RecipeError))
        return RewardPart(name, float(weight), function, METRICS.get(name))
    if not names_a_function(name):
        raise RecipeError(f'reward "{name}" is unknown; {did_you_mean(name, REWARDS)} Your own: "module:function"')
    return _own(name, float(weight), options, base_dir)


def _own(name: str, weight: float, options: Mapping[str, Any], base_dir: Path) -> RewardPart:
    function = load_function(name, base_dir, RecipeError)
    if options:
        known = inspect.signature(function).parameters
        unknown = [key for key in options if key not in known]
        if unknown:
            raise RecipeError(
                f"reward {name}: the function has no parameter {unknown[0]}; {did_you_mean(unknown[0], known)}"
            )
        function = functools.partial(function, **options)
    signature, adapted = adapt(name, function)
    return RewardPart(name.rpartition(":")[2], weight, adapted, None, signature, name)


def _math(*, simplified: bool = True) -> Reward:
    """The mathematical verifier, imported when it is asked for. simplified: see `gropius.rewards.math.verify`."""
    from gropius.rewards import math

    return math.math(simplified=simplified)


REWARDS: dict[str, Callable[..., Reward]] = {
    "exact": text.exact,
    "last_number": text.last_number,
    "countdown": text.countdown,
    "format": text.format,
    "length": text.length,
    "environment": text.environment,
    "math": _math,
}

METRICS: dict[str, Metric] = {
    "exact": outcome_as_metric,
    "last_number": outcome_as_metric,
    "countdown": outcome_as_metric,
    "environment": text.environment_metric,
    "math": outcome_as_metric,
}
