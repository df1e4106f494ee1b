"""The exception tree. Every error a person can cause derives from `GropiusError` and says where and what to do.

GropiusError
├── UsageError            the command line or the call is wrong                          exit 2
│   ├── RecipeError       a recipe key is unknown, useless or contradictory
│   ├── ObjectiveError    an objective that cannot be evaluated as asked
│   ├── DataError         a data set, a row or a column
│   ├── ModelError        a model or tokenizer that cannot be used as asked
│   └── RunFolderError    a run folder that is taken, missing or damaged
├── RunHalted             a run stopped at a safe point, with a named cause              exit 1
│   ├── MismatchError     sampler and trainer disagree about a token's log-probability
│   ├── RewardError       a reward function broke its contract
│   └── EngineError       a rollout engine died, with its own last words
├── SafetyRefusal         refused for safety (no isolation, untrusted code)              exit 3
└── Interrupted           the person asked the run to stop; the state is saved           exit 130
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class GropiusError(Exception):
    """An error with a message for a person: where it is, what is wrong, what to write instead."""

    exit_code = 1


class UsageError(GropiusError):
    """The command line or the call is wrong."""

    exit_code = 2


class RecipeError(UsageError):
    """A recipe key is unknown, has no effect, or contradicts another."""


class ObjectiveError(UsageError):
    """An objective that cannot be evaluated as asked, or a batch that it cannot be evaluated on."""


class DataError(UsageError):
    """A data set, a row or a column is missing or malformed."""


class ModelError(UsageError):
    """A model or tokenizer cannot be loaded or used as asked."""


class RunFolderError(UsageError):
    """A run folder is taken, missing or damaged."""


class RunHalted(GropiusError):
    """A run stopped at a safe point. The message names the cause and how to go on."""


class MismatchError(RunHalted):
    """Sampler and trainer disagree about the log-probability of a token."""


class RewardError(RunHalted):
    """A reward function returned something its contract does not allow."""


class EngineError(RunHalted):
    """A rollout engine died or hung; the message carries its own last words."""


class SafetyRefusal(GropiusError):
    """Refused for safety."""

    exit_code = 3


class Interrupted(GropiusError):
    """The person asked the run to stop; the state is saved and the message says how to go on."""

    exit_code = 130


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Suggest the nearest known word: `did you mean "x"?`, else the list of choices.

    >>> did_you_mean("epsilom", ["epsilon", "ddof"])
    'did you mean "epsilon"?'
    >>> did_you_mean("zzz", ["epsilon", "ddof"])
    'choose from: ddof, epsilon'
    """
    names = sorted(known)
    near = difflib.get_close_matches(word, names, n=1, cutoff=0.6)
    if near:
        return f'did you mean "{near[0]}"?'
    return "choose from: " + ", ".join(names)
