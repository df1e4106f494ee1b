"""The scorers of `reasoning-gym` (extra `tasks`), which evaluate what a model wrote: one confined child an answer.

See `confined.py`. An answer that makes a scorer raise, hang or die is rejected; a child that could not be confined is
void. No torch.
"""

from __future__ import annotations

import importlib
import json
import math
from functools import lru_cache
from typing import Any

from gropius.errors import RecipeError
from gropius.rewards.answers.extract import without_thinking
from gropius.rewards.base import Reward
from gropius.rewards.confined import NO_NUMBER, apart
from gropius.types import Episode, Outcome, rejected, scored, void

MOST_REPLY = 20_000


def reasoning_gym(*, tag: str = "answer", partial: bool = False, wall_s: float = 5.0, memory_mb: int = 2048) -> Reward:
    """What the family's own scorer says of the answer, in 0..1.

    The answer is what stands in the last <tag>…</tag>, else the whole last reply. partial: the scorer's part credit
    (many families pay for an answer that merely contains the right one); else only full credit counts. wall_s,
    memory_mb: of scoring one answer. Raises RecipeError when the library is not installed.
    """
    try:
        importlib.import_module("reasoning_gym")
    except ModuleNotFoundError as missing:
        raise RecipeError(
            f'reward reasoning_gym needs the extra: pip install "gropius[tasks]" (no module {missing.name})'
        ) from None

    def _score(episode: Episode) -> Outcome:
        answer = answer_in(episode.last_reply, tag)
        if not answer:
            return rejected("no answer")
        if len(answer) > MOST_REPLY:
            return rejected(f"an answer of more than {MOST_REPLY} characters")
        try:
            data, item = _item(json.dumps(dict(episode.task.metadata), sort_keys=True))
        except (KeyError, TypeError, ValueError) as fault:
            return void(f"task {episode.task.key} is no reasoning-gym task: {fault}")
        said = apart(lambda: float(data.score_answer(answer=answer, entry=item)), wall_s, memory_mb, "reasoning_gym")
        if "void" in said:
            return void(str(said["void"]))
        score = said.get("score")
        if not isinstance(score, float) or not math.isfinite(score):
            return rejected(str(said.get("failed", NO_NUMBER)))
        if score >= 1.0:
            return scored(1.0)
        return scored(max(score, 0.0)) if partial and score > 0 else rejected("wrong")

    return _score


def answer_in(reply: str, tag: str) -> str:
    """The content of the last <tag>…</tag> outside the thinking, else all outside it, trimmed.

    >>> answer_in("so <answer> 42 </answer>.", "answer"), answer_in("<think>1</think> 42", "answer")
    ('42', '42')
    >>> answer_in("<think><answer>42</answer>", "answer")  # a reply that never stops thinking has none
    ''
    """
    reply = without_thinking(reply)
    before, closed, _ = reply.rpartition(f"</{tag}>")
    if closed:
        return before.rpartition(f"<{tag}>")[2].strip() if f"<{tag}>" in before else ""
    return reply.strip()


@lru_cache(maxsize=64)
def _data(origin: str) -> Any:
    given = json.loads(origin)
    library = importlib.import_module("reasoning_gym")
    return library.create_dataset(given["family"], seed=given["seed"], size=given["size"], **given["parameters"])


@lru_cache(maxsize=4096)
def _item(metadata: str) -> tuple[Any, dict[str, Any]]:
    """(data set, item) that a task's metadata names, drawn again from its seed."""
    given = json.loads(metadata)
    data = _data(json.dumps({name: given[name] for name in ("family", "seed", "size", "parameters")}, sort_keys=True))
    return data, data[given["index"]]
