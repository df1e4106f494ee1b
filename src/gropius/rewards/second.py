"""A second opinion on a mathematical answer: the library `math-verify` (extra `tasks`), in a confined child. No torch.

The library hands what a model wrote to SymPy and bounds it by signals, so it never runs in the trainer's process: one
confined fork of a pool worker judges one answer and is killed at its deadline (see `confined.py`). Beside our own
verifier it is evidence, not a verdict: its part weighs nothing, both outcomes are recorded, and
`second_opinion/disagreement` counts where they differ.
"""

from __future__ import annotations

import importlib
from typing import Any

from gropius.errors import RecipeError
from gropius.rewards.answers.extract import without_thinking
from gropius.rewards.base import Reward
from gropius.rewards.confined import NO_NUMBER, apart
from gropius.rewards.math import gold_of
from gropius.types import Episode, Outcome, rejected, scored, void

WRONG = "wrong"
MOST_REPLY = 20_000


def math_verify(*, wall_s: float = 0.7, memory_mb: int = 2048) -> Reward:
    """What `math-verify` says of the reply after its thinking, by its defaults: 1 or rejected.

    wall_s, memory_mb: of judging one answer, killed beyond them. Rejected with "wrong", or, where the library came to
    no judgement, with "time", "memory", "crash: …", "error: …". Void without a gold answer, or with one that the
    library cannot read. Raises RecipeError when it is not installed.
    """
    try:
        library = importlib.import_module("math_verify")
        library.verify(library.parse("$1$"), library.parse("$1$"))  # what it imports late, it imports before any fork
    except ModuleNotFoundError as missing:
        raise RecipeError(
            f'reward math_verify needs the extra: pip install "gropius[tasks]" (no module {missing.name})'
        ) from None

    def _score(episode: Episode) -> Outcome:
        gold = episode.task.answer
        if gold is None or not gold.strip():
            return void(f"task {episode.task.key} has no answer to compare with")
        reply = without_thinking(episode.last_reply)
        if not reply.strip():
            return rejected("empty")
        if len(reply) > MOST_REPLY:
            return rejected(f"a reply of more than {MOST_REPLY} characters")
        said = apart(lambda: _judged(library, gold_of(gold), reply), wall_s, memory_mb, "math_verify")
        if "void" in said:
            return void(str(said["void"]))
        score = said.get("score")
        if not isinstance(score, float):
            return rejected(str(said.get("failed", NO_NUMBER)))
        if score < 0:
            return void("math-verify cannot read the gold answer")
        return scored(1.0) if score >= 1.0 else rejected(WRONG)

    return _score


def _judged(library: Any, gold: str, reply: str) -> float:
    """Runs in the child: 1 or 0, −1 when the gold answer cannot be read. Its own timers are off; the kill is ours."""
    expected = library.parse(f"\\boxed{{{gold}}}", parsing_timeout=None)
    if not expected:
        return -1.0
    found = library.parse(reply, parsing_timeout=None)
    return float(bool(library.verify(expected, found, timeout_seconds=None)))
