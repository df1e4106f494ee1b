"""Words around an answer that take it back: an alternative offered after it, a denial before it, a doubt beside it."""

from __future__ import annotations

import re

from gropius.rewards.answers.compare import compare, parse_answer
from gropius.rewards.answers.errors import HEDGED, NEGATED, SEVERAL, AnswerError

NEAR = 160  # characters looked at on each side
_CLOSING = r"^[\s.)$*}\],;:]*"
_ALTERNATIVE = re.compile(
    rf"{_CLOSING}(?:\\(?:text|quad|,|;)?[\s{{]*)*\(?(?:or|alternatively|otherwise)\b[^\n]{{0,40}}?"
    r"(?P<value>[-−]?[$€£]?\d[\d,]*(?:\.\d+)?(?:\s?/\s?\d+)?(?:\s?\\?%)?)",
    re.I,
)
_UNSURE = re.compile(
    r"\b(?:give\s+or\s+take|more\s+or\s+less|(?:i\s+am|i'm|im)\s+not\s+(?:\w+\s+)?(?:sure|certain)|not\s+(?:sure|certain)"
    r"|but\s+(?:it|this|that)\s+(?:may|might|could)\b|if\s+i\s+had\s+to\s+guess)|\bor\s+so\b",
    re.I,
)
_DENIED = re.compile(
    r"\b(?:false|untrue|incorrect|wrong|doubt\w*|unlikely|den(?:y|ies)|disagree|disbelieve)\s+(?:that|whether|if|it|with)\b"
    r"(?:\s+[\w']+){0,6}[\s:=$*(\\\[{¤]*$",
    re.I,
)
_ROUGHLY = re.compile(r"\b(?:about|around|roughly|approximately|circa|some(?:thing)?\s+like)[\s$*]*$", re.I)
_CALLED_WRONG = re.compile(r"\d\S*\s+(?:is|are|was|were)\s+(?:not\b|wrong|incorrect|false|impossible)", re.I)


def refuse_doubted(text: str, place: tuple[int, int], said: str, bare: bool) -> None:
    """Refuse an answer that the words around it do not stand by. Raises AnswerError.

    place: where the answer begins and ends in `text`. said: the answer itself. bare: nothing marks it as the answer,
    so a word such as "about" before it counts as well.
    """
    said = said[: 2 * NEAR]  # a longer one is no answer, and is refused by its size
    before, after = text[max(0, place[0] - NEAR) : place[0]], text[place[1] : place[1] + NEAR]
    lead = re.split(r"(?<=[.!?])\s|\n", before)[-1]
    if _DENIED.search(lead) or _CALLED_WRONG.search(said):
        raise AnswerError(NEGATED)
    if re.search(r"~~\s*$", lead) or (said.strip().startswith("~~") and said.strip().endswith("~~")):
        raise AnswerError(NEGATED)  # struck out
    if _UNSURE.search(said) or _UNSURE.match(re.sub(r"^[\s.)$*}\],;:(]*(?:(?:but|though|although)\s)?", "", after)):
        raise AnswerError(HEDGED)
    if bare and _ROUGHLY.search(lead):
        raise AnswerError(HEDGED)
    for stated, rest in ((said, after), (said.partition("(")[0], said.partition("(")[2][:NEAR])):
        other = _ALTERNATIVE.match(rest)
        if other is not None and _differs(other["value"], stated.strip()):
            raise AnswerError(SEVERAL)


def _differs(value: str, said: str) -> bool:
    """True when the alternative is not the same answer spelled otherwise."""
    try:
        one, other = parse_answer(value), parse_answer(said)
    except AnswerError:
        return True
    return bool(compare(one, other, simplified=False) and compare(other, one, simplified=False))
