"""A recipe on its way to being resolved, and what a rule about it is. No torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Set
from dataclasses import dataclass

from gropius.objective.spec import Objective
from gropius.recipe.schema import Recipe

GROUP_BASELINES = ("group_mean", "leave_one_out", "length_weighted", "runner_up", "subset")
GROUP_SCALES = ("group_std", "group_mean", "subset_std")
# Nats that trainer and sampler may differ on a sampled token before the run stops, by the type of the weights.
MISMATCH_BOUND = {"float32": 0.01, "float16": 0.5, "bfloat16": 1.0}


@dataclass(frozen=True)
class Draft:
    """A recipe whose tables are typed and whose objective is resolved, with the keys that a person wrote (dotted)."""

    recipe: Recipe
    objective: Objective
    explicit: Set[str] = frozenset()

    @property
    def responses(self) -> int:
        """Responses of one rollout batch."""
        return self.recipe.rollout.prompts * self.recipe.rollout.group_size

    @property
    def names(self) -> list[str]:
        """Every name that may be one of a person's own functions."""
        recipe = self.recipe
        return [recipe.data.source, *(part.name for part in recipe.reward), *recipe.rollout.tools.functions]

    @property
    def begun(self) -> int:
        """Responses that one round of a rollout batch begins, over-sampled ones included."""
        rollout = self.recipe.rollout
        return max(rollout.prompts, math.ceil(rollout.prompts * rollout.oversample - 1e-9)) * rollout.group_size

    @property
    def episode_tokens(self) -> int:
        """Tokens after the prompt at most; over several turns the environment has as much room as the model."""
        rollout = self.recipe.rollout
        if rollout.max_episode_tokens is not None:
            return rollout.max_episode_tokens
        return rollout.max_tokens if rollout.max_turns == 1 else 2 * rollout.max_tokens * rollout.max_turns

    @property
    def mismatch_bound(self) -> float:
        """That of the coarser of the two formats that log-probabilities are computed in."""
        own, rollout = self.recipe.model.dtype, self.recipe.rollout
        engine = own if rollout.engine == "torch" or rollout.vllm.dtype == "auto" else rollout.vllm.dtype
        return max(MISMATCH_BOUND[own], MISMATCH_BOUND[engine])

    @property
    def reads_sampler(self) -> bool:
        """True when the sampler's log-probabilities enter the loss."""
        ratio = self.objective.ratio
        return ratio.correction != "none" or (ratio.anchor == "sampler" and ratio.level != "none")

    @property
    def compares_siblings(self) -> bool:
        """True when a response's advantage needs a sibling."""
        advantage = self.objective.advantage
        return advantage.baseline in GROUP_BASELINES or advantage.scale in GROUP_SCALES


@dataclass(frozen=True)
class Contradiction:
    """A pair of keys that cannot both hold. `key` is to blame; `message` says what to write instead."""

    key: str
    broken: Callable[[Draft], bool]
    message: Callable[[Draft], str]


@dataclass(frozen=True)
class Effect:
    """A key (with a final dot: every key of a table) that does nothing unless `effective`; `needs` says what then."""

    key: str
    effective: Callable[[Draft], bool]
    needs: str


def divisor(total: int, near: int) -> int:
    """The divisor of a number that is nearest to another."""
    return min((n for n in range(1, total + 1) if total % n == 0), key=lambda n: (abs(n - near), n))
