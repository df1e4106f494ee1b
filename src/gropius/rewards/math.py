"""The mathematical verifier: is the final answer of a reply the gold answer?

Pure functions: no interpreter, no signals, no threads, no timers. Sizes are limited before work begins, so a verdict
takes milliseconds whatever the model wrote, in any thread, task or process.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache

from gropius.rewards.answers.answer import Answer
from gropius.rewards.answers.compare import compare, parse_answer
from gropius.rewards.answers.errors import UNPARSABLE, AnswerError
from gropius.rewards.answers.extract import Final, extract_final, tidy
from gropius.types import Episode, Outcome, rejected, scored, void

__all__ = ["extract_final", "gold_of", "math", "parse_answer", "verify"]


def verify(reply: str, gold: str, simplified: bool = True) -> Outcome:
    """scored(1) when the final answer of `reply` is `gold`, rejected(reason) when not, void when gold is unusable.

    reply: what the model wrote, thinking included. gold: an answer, or a solution that ends with `####` or `\\boxed{}`.
    simplified: the answer must be worked out as far as the gold answer (6·7 is not 42). Reasons: answers/errors.py.

    >>> verify("So she has \\\\boxed{1,000} eggs.", "1000").value
    1.0
    >>> verify("The answer is 41 or 42.", "42").reason
    'several answers'
    """
    try:
        expected = read_gold(gold)
    except AnswerError as problem:
        return void(f"the gold answer cannot be used: {problem.reason}")
    try:
        final: Final = extract_final(reply)
        answer = parse_answer(final.text if expected.kind == "text" else tidy(final.text))
        if expected.kind == "text" and answer.kind != "text":
            answer = parse_answer(tidy(final.text))
        reason = compare(answer, expected, simplified)
    except AnswerError as problem:
        return rejected(problem.reason)
    return rejected(reason) if reason else scored(1.0)


def gold_of(text: str) -> str:
    """The answer inside a gold solution: after its last `####`, or its last `\\boxed{}`, or the text itself.

    >>> gold_of("6 * 7 = 42\\n#### 42"), gold_of("\\\\boxed{5}"), gold_of(" 5 ")
    ('42', '5', '5')
    """
    if "####" in text:
        return text.rpartition("####")[2].strip()
    if re.search(r"\\f?boxed\s*\{", text):
        return extract_final(text).text
    return text.strip()


def math(simplified: bool = True) -> Callable[[Episode], Outcome]:
    """A reward: 1 when the last reply's final answer is the task's answer, else rejected with the reason.

    simplified: see `verify`. A task without an answer is void.
    """

    def reward(episode: Episode) -> Outcome:
        gold = episode.task.answer
        if gold is None or not gold.strip():
            return void(f"task {episode.task.key} has no answer to compare with")
        return verify(episode.last_reply, gold, simplified)

    return reward


def read_gold(gold: str) -> Answer:
    """The answer of a gold solution as it is compared with. Raises AnswerError when it cannot be used."""
    return _read_gold(gold_of(gold))


@lru_cache(maxsize=4096)
def _read_gold(text: str) -> Answer:
    """Gold that the grammar cannot read is compared word by word."""
    if text.strip(" +-").casefold() in ("nan", "inf", "none", "null"):
        raise AnswerError(UNPARSABLE)
    try:
        return parse_answer(text)
    except AnswerError as problem:
        words = re.sub(r"\s+", " ", text).strip().casefold()
        if problem.reason != UNPARSABLE or not words or len(words) > 200:
            raise
        return Answer("text", words)
