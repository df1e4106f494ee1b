"""Rewards that read a reply as text: exact, last_number, countdown, format, length; and what an environment said.

Each factory takes its options by keyword and returns a `Reward`: Episode → Outcome. A wrong answer is `rejected` with
its reason; a task whose gold answer cannot be used is `void`. No torch.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from gropius.errors import RecipeError
from gropius.rewards.answers.extract import without_thinking
from gropius.rewards.base import Reward
from gropius.rewards.expression import ExpressionFault, parse, require_each_once, value
from gropius.rewards.number import NumberTooLong, last_number_in, whole_text_number
from gropius.rewards.pattern import Pattern, PatternFault
from gropius.types import Episode, Outcome, rejected, scored, void


def exact(*, ignore_case: bool = False) -> Reward:
    """1 when the last reply is the gold answer, blanks around both trimmed. A task without an answer is void."""

    def _score(episode: Episode) -> Outcome:
        if episode.task.answer is None:
            return void("the task has no gold answer")
        reply, gold = episode.last_reply.strip(), episode.task.answer.strip()
        if ignore_case:
            reply, gold = reply.casefold(), gold.casefold()
        if not reply:
            return rejected("empty reply")
        return scored(1.0) if reply == gold else rejected("wrong")

    return _score


def last_number() -> Reward:
    """1 when the last number in the last reply equals the gold number, compared as exact rationals.

    What counts as a number is said in `gropius.rewards.number`. Thinking is left out, all of it where it never ends. No
    number in the reply is rejected; a gold answer that is no number is void. It reads no sentence: "not 42" ends with
    42; the reward `math` does.
    """

    def _score(episode: Episode) -> Outcome:
        try:
            gold = whole_text_number(episode.task.answer or "")
        except NumberTooLong as why:
            return void(f"the gold answer is {why}")
        if gold is None:
            return void("the gold answer is not a number")
        try:
            found = last_number_in(without_thinking(episode.last_reply))
        except NumberTooLong as why:
            return rejected(str(why))
        if found is None:
            return rejected("no number")
        return scored(1.0) if found == gold else rejected("wrong")

    return _score


def countdown(*, tag: str = "answer") -> Reward:
    """1 when the reply's expression uses every given number exactly once and equals the target, exactly.

    The expression is the content of the last <tag>…</tag> where there is one, else the last line that is not blank; a
    trailing `= target` is allowed. Grammar and rules: `gropius.rewards.expression`; each broken rule is its own reason.
    The numbers are the task's metadata `numbers` or `nums`, the target `target`; void without them.
    """

    def _score(episode: Episode) -> Outcome:
        given = _numbers_and_target(episode.task.metadata)
        if given is None:
            return void("the task has no usable numbers and target in its metadata")
        numbers, target = given
        try:
            left, equals, right = _expression_of(without_thinking(episode.last_reply), tag).partition("=")
            postfix = parse(left)
            require_each_once(postfix, numbers)
            if value(postfix) != target:
                raise ExpressionFault("wrong value")
            if equals and whole_text_number(right) != target:
                raise ExpressionFault("claims another result")
        except (ExpressionFault, NumberTooLong) as why:
            return rejected(str(why))
        return scored(1.0)

    return _score


def _expression_of(reply: str, tag: str) -> str:
    start, end = f"<{tag}>", f"</{tag}>"
    stop = reply.rfind(end)
    begin = reply.rfind(start, 0, stop) if stop >= 0 else -1
    if begin >= 0:
        return reply[begin + len(start) : stop].strip()
    return next((line.strip() for line in reversed(reply.splitlines()) if line.strip()), "")


def _numbers_and_target(metadata: Any) -> tuple[list[int], Fraction] | None:
    numbers, target = metadata.get("numbers", metadata.get("nums")), metadata.get("target")
    whole = isinstance(numbers, (list, tuple)) and all(isinstance(n, int) and n >= 0 for n in numbers)
    if not whole or not numbers or isinstance(target, bool) or not isinstance(target, (int, float, str)):
        return None
    try:
        return list(numbers), Fraction(target)
    except (ValueError, OverflowError, ZeroDivisionError):
        return None


def format(*, pattern: str = "", tags: Sequence[str] = ()) -> Reward:
    """1 when the last reply has the asked form, 0 with the reason otherwise. Time linear in the reply.

    pattern: a regular expression that describes the whole trimmed reply (`gropius.rewards.pattern` says which syntax is
    taken; `.` matches line ends too). tags: names of tag pairs, such as ["think", "answer"], that make up the reply:
    each exactly once, in this order, none empty, nothing but blanks outside. Give one of the two.
    """
    if bool(pattern) == bool(tags):
        raise RecipeError('reward format: give either pattern = "..." or tags = ["think", "answer"]')
    if pattern:
        try:
            compiled = Pattern(pattern)
        except PatternFault as why:
            raise RecipeError(f"reward format: pattern = {pattern!r}: {why}") from None
        return lambda episode: (
            scored(1.0) if compiled.fullmatch(episode.last_reply.strip()) else rejected("the pattern does not match")
        )
    if isinstance(tags, str) or not all(isinstance(tag, str) and re.fullmatch(r"[\w-]+", tag) for tag in tags):
        raise RecipeError(f'reward format: tags = {tags!r}; write a list of names, for example ["think", "answer"]')

    def _score(episode: Episode) -> Outcome:
        fault = fault_of_tags(episode.last_reply, tags)
        return rejected(fault) if fault else scored(1.0)

    return _score


def fault_of_tags(text: str, tags: Sequence[str]) -> str:
    """What is wrong with a text that should be made of these tag pairs and nothing else; "" when it is right.

    >>> fault_of_tags("<think>a</think><answer></answer>", ["think", "answer"])
    '<answer> is empty'
    """
    for tag in tags:
        for mark in (f"<{tag}>", f"</{tag}>"):
            count = text.count(mark)
            if count != 1:
                return f"{mark} is missing" if count == 0 else f"{mark} stands {count} times"
    rest = text
    for tag in tags:
        before, _, rest = rest.partition(f"<{tag}>")
        content, closed, rest = rest.partition(f"</{tag}>")
        if before.strip():
            return f"text before <{tag}>" if tag == tags[0] else f"text between the tags before <{tag}>"
        if not closed:
            return "tags out of order"
        if not content.strip():
            return f"<{tag}> is empty"
    return f"text after </{tags[-1]}>" if rest.strip() else ""


def length(*, minimum: int = 0, maximum: int = 0, cache: int = 0) -> Reward:
    """Pay for length, counted in tokens the model wrote (its stop token included), all turns together.

    With cache = 0: 1 for minimum ≤ n ≤ maximum, 0 outside (maximum = 0: no upper bound).
    With cache > 0, the soft overlong penalty (DAPO, 2503.14476, eq. 13), M = maximum, C = cache:
    0 for n ≤ M − C;  ((M − C) − n) / C for M − C < n ≤ M;  −1 for n > M.
    Raises RecipeError for bounds that cannot hold or do nothing.
    """
    if min(minimum, maximum, cache) < 0 or (maximum and minimum > maximum):
        raise RecipeError(f"reward length: minimum = {minimum}, maximum = {maximum}, cache = {cache} cannot hold")
    if not minimum and not maximum:
        raise RecipeError("reward length: give minimum, maximum, or maximum and cache; without them it does nothing")
    if cache and (minimum or cache > maximum):
        raise RecipeError(
            "reward length: cache needs maximum >= cache and no minimum (the overlong penalty has no floor)"
        )

    def _score(episode: Episode) -> Outcome:
        n = int(episode.loss_mask.sum())
        if cache:
            return scored(overlong_penalty(n, maximum, cache))
        if n < minimum:
            return scored(0.0, "too short")
        return scored(0.0, "too long") if maximum and n > maximum else scored(1.0)

    return _score


def overlong_penalty(n: int, maximum: int, cache: int) -> float:
    """DAPO eq. 13: 0 up to maximum − cache, then falling linearly to −1 at maximum, −1 beyond. In tokens.

    >>> [overlong_penalty(n, 20480, 4096) for n in (16384, 18432, 20480, 30000)]
    [0.0, -0.5, -1.0, -1.0]
    """
    start = maximum - cache
    return 0.0 if n <= start else max((start - n) / cache, -1.0)


def environment(*, shaped: bool = False) -> Reward:
    """What the environment gave on its last step: its raw metric, or with `shaped` the sum of its parts.

    An episode that ended before its environment did (truncated, say) is rejected. A task without an environment, and an
    environment that ended without the number asked for, are void.
    """

    def _score(episode: Episode) -> Outcome:
        step = episode.outcome_step
        if step is None and not episode.truncated:
            return void("no environment answered in this episode")
        if step is None or not step.done:
            return rejected(f"the episode ended before its environment did ({episode.finish_reason})")
        if shaped and step.parts:
            return scored(sum(step.parts.values()))
        return scored(step.raw) if step.raw is not None and not shaped else void("the environment gave no score")

    return _score


def environment_metric(episode: Episode, outcome: Outcome) -> float | None:
    """The unshaped metric of an episode with an environment: its raw value, 0 when it never got to its end."""
    step = episode.outcome_step
    if outcome.status == "void":
        return None
    return step.raw if step is not None and step.done else 0.0
