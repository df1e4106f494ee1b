"""From a whole reply to the one answer it commits to.

Looked for in this order: <answer> tags, \\boxed, ####, "the answer is", and last a reply (or its last sentence) that is
itself an answer. Text inside thinking tags never counts. An answer that is negated ("not 42", "rule out 42") or hedged
("could be 42"), or that has rivals of another value, is not an answer.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import islice
from typing import Literal

from gropius.rewards.answers.compare import MAX_CHARS, compare, parse_answer
from gropius.rewards.answers.doubt import refuse_doubted
from gropius.rewards.answers.errors import (
    EMPTY,
    HEDGED,
    NEGATED,
    NO_FINAL,
    ONLY_THINKING,
    SEVERAL,
    TOO_LARGE,
    UNPARSABLE,
    AnswerError,
)

Source = Literal["tag", "boxed", "hashes", "phrase", "bare"]
MAX_REPLY_CHARS = 400_000
MAX_CANDIDATES = 200

_THINK_OPEN = re.compile(r"<(think|thinking|thought|reasoning|scratchpad)>", re.I)
_THINK_CLOSE = re.compile(r"</(?:think|thinking|thought|reasoning|scratchpad)>", re.I)
_ANSWER_OPEN = re.compile(r"<answer>", re.I)
_ANSWER_CLOSE = re.compile(r"</answer>", re.I)
_HASHES = re.compile(r"^[ \t]*####[ \t]*([^\n]*)$", re.M)
_PHRASE = re.compile(
    r"\b(?:(?:final|correct|right|overall|total)\s+)?(?:answers?|solutions?|result|option|choice)\b\*{0,2}"
    r"(?:\s+(?:to|of|for)\s+(?:the|this|that)\s+(?:problem|question|exercise|task))?"
    r"(?:\s*(?:\*\*)?\s*[:=]\s*(?:\*\*)?|\s+(?:is|are|must\s+be|should\s+be|will\s+be|would\s+be|equals|comes\s+to)\b\s*:?)"
    r"[ \t]*(?:\n[ \t]*(?=[\\$\d(\[*-]))?",
    re.I,
)
_FILLER = (
    r"(?:be|equal|to|the|an?|answer|exactly|simply|just|certainly|definitely|really|actually|value|that|it|is|correct"
    r"|of|think|thought|believe|suppose|say|know|sure|seem|seems)"
)
_TAIL = r"[\s:=$*(\\\[{¤]*$"
_NEGATED_BEFORE = re.compile(
    rf"(?:\b(?:not|never|cannot|neither|nor|can't)\b|n't\b|≠|\\neq?\b)(?:\s+{_FILLER})*{_TAIL}"
    rf"|\b(?:rule[sd]?\s+out|ruling\s+out|exclud\w+|eliminat\w+|instead\s+of|rather\s+than|other\s+than|except(?:\s+for)?"
    rf"|anything\s+but|unlike|ignor\w+|discard\w+|reject\w+|far\s+from)(?:\s+{_FILLER})*{_TAIL}",
    re.I,
)
_HEDGED_BEFORE = re.compile(
    rf"\b(?:(?:could|might|may|can)(?:\s+(?:also|well|possibly))?\s+be|maybe|perhaps|possibly|probably|presumably|either"
    rf"|(?:i|i'd|one|would|might|i'll|my|a)\s+(?:\w+\s+)?guess(?:\s+is)?|not\s+sure\s+(?:if|whether|but)|one\s+of|among|between)"
    rf"(?:\s+{_FILLER})*{_TAIL}",
    re.I,
)
_NEGATED_AFTER = re.compile(
    r"^[\s.)$*}\]]*(?:\(?(?:is|are|was|would\s+be|seems|looks|cannot|can't|isn't|does\s+not|doesn't)\s*"
    r"(?:be\s+|also\s+|definitely\s+|certainly\s+|clearly\s+)?"
    r"(?:not\b|n't|wrong|incorrect|false|impossible|invalid|ruled\s+out|excluded|eliminated|right\b(?=\s*\?)|be\b|work\b|correct\b(?=\s*\?)|the\s+answer\b(?=\s*\?)|the\s+wrong)"
    r"|\(?(?:wrong|incorrect|rejected|false)\b|\?)",
    re.I,
)
_CANNOT_AFTER = re.compile(r"^[\s)$*}\]]*(?:cannot|can't|isn't|is\s+not|are\s+not|doesn't|does\s+not)\b", re.I)
_COMPARED_BEFORE = re.compile(
    rf"\b(?:(?:more|less|fewer|greater|larger|smaller|other|higher|lower)\s+than|at\s+least|at\s+most|up\s+to|nearly|almost"
    rf"|over|under|above|below|between|from)(?:\s+{_FILLER})*{_TAIL}",
    re.I,
)
_WITHDRAWN = re.compile(r"(?:^|[.!?\n])[\s*]*(?:wait|oops|correction|on second thought|actually|no)\b[,:.!]?\s", re.I)
_CORRECTION = re.compile(
    r"\b(?:wait|actually|correction|recheck|re-check|mistake|let me check|on second thought|oops)\b", re.I
)
_CLAUSE = re.compile(
    r"[,;]?\s+\b(?:because|since|which|so that|as we|as this|where|whereas|giving|therefore|hence)\b|\s+\((?!\d)", re.I
)
_NUMERAL = re.compile(
    r"(?<![\w.,/^\\{-])(?:[-−]\s?)?[$€£]?\s?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:\s?/\s?\d+)?(?:\s?\\?%)?(?![\w/^}])"
)
_CHANGES_A_NUMBER = re.compile(
    r"\b(?:not|no|never|or|and|but|except|than|least|most|nearly|almost|about|between|over|under|above|below|plus|minus"
    r"|times|hundred|thousand|million|billion|dozen|half|percent|squared|of|anything|everything|any|all)\b|n't",
    re.I,
)


@dataclass(frozen=True)
class Final:
    """The answer a reply commits to: its text, and how it was marked."""

    text: str
    source: Source


@dataclass(frozen=True)
class _Candidate:
    text: str
    source: Source
    start: int
    end: int


def extract_final(reply: str) -> Final:
    """The one answer of a reply. Raises AnswerError with the reason when there is none, or more than one.

    >>> extract_final("<think>41?</think> So the answer is \\\\boxed{42}.")
    Final(text='42', source='boxed')
    """
    if len(reply) > MAX_REPLY_CHARS:
        raise AnswerError(TOO_LARGE)
    if not reply.strip():
        raise AnswerError(EMPTY)
    text = _narrow(without_thinking(reply))
    if not text.strip():
        raise AnswerError(ONLY_THINKING)
    candidates = _marked(text)
    if len(candidates) > MAX_CANDIDATES:
        raise AnswerError(SEVERAL)
    if not candidates:
        bare = _bare(text)
        if bare is None:
            raise AnswerError(NO_FINAL)
        candidates = [bare]
    for candidate in candidates[-1:] if candidates[-1].source == "phrase" else candidates:
        _refuse_unsure(text, candidate)
    final = candidates[-1]
    refuse_doubted(text, (final.start, final.end), final.text, final.source == "bare")
    _refuse_rivals(text, candidates)
    last = candidates[-1]
    if _WITHDRAWN.search(text[last.end : last.end + 2000]):
        raise AnswerError(SEVERAL)
    if not last.text.strip(" .$*"):
        raise AnswerError(NO_FINAL)
    return Final(last.text.strip(), last.source)


def without_thinking(reply: str) -> str:
    """The reply with its thinking removed; nothing of a reply that ends while it is thinking (again).

    >>> without_thinking("<think>a</think>b"), without_thinking("a</think>b"), without_thinking("b<think>no, c")
    ('b', 'b', '')
    """
    opened = _THINK_OPEN.search(reply)
    first_close = _THINK_CLOSE.search(reply)
    if first_close and (opened is None or first_close.start() < opened.start()):
        reply = reply[first_close.end() :]  # the template had opened the thinking
    kept, at = [], 0
    while True:
        opened = _THINK_OPEN.search(reply, at)
        if opened is None:
            kept.append(reply[at:])
            break
        kept.append(reply[at : opened.start()])
        closed = _THINK_CLOSE.search(reply, opened.end())
        if closed is None:
            return ""
        at = closed.end()
    return _THINK_CLOSE.sub(" ", "".join(kept))


def _marked(text: str) -> list[_Candidate]:
    """The candidates of the strongest kind of mark, and any later statement that competes with them."""
    found = _tagged(text)
    inner = [c for c in found if "boxed" in c.text]
    if found:
        opened = [b for c in inner for b in _boxes(c.text)] if len(inner) == len(found) else []
        return opened or found
    boxes = _boxes(text)
    hashes = [
        _Candidate(m.group(1), "hashes", m.start(1), m.end())
        for m in islice(_HASHES.finditer(text), MAX_CANDIDATES + 1)
    ]
    hashes = [h for h in hashes if not re.match(r"[A-Za-z ]+:?$", h.text) or not boxes]
    if boxes:
        return boxes + [h for h in hashes if "boxed" not in h.text] + _phrases(text, boxes[-1].end)
    if hashes:
        return hashes + _phrases(text, hashes[-1].end)
    return _phrases(text, 0)


def _narrow(text: str) -> str:
    """Runs of blanks as one blank and runs of empty lines as one line end: every later pattern is linear on this."""
    return re.sub(r" ?\n[ \n]*", "\n", re.sub(r"[^\S\n]+", " ", text))


def _tagged(text: str) -> list[_Candidate]:
    """Every <answer>…</answer>; an opening tag without an end is no answer."""
    out: list[_Candidate] = []
    at = 0
    while opened := _ANSWER_OPEN.search(text, at):
        closed = _ANSWER_CLOSE.search(text, opened.end())
        if closed is None:
            break
        out.append(_Candidate(text[opened.end() : closed.start()], "tag", opened.start(), closed.end()))
        at = closed.end()
        if len(out) > MAX_CANDIDATES:
            break
    return out


def _boxes(text: str) -> list[_Candidate]:
    """Every \\boxed{…} with balanced braces; one that never closes counts as unreadable."""
    out = []
    for match in re.finditer(r"\\f?boxed\s*(?=[{\d])", text):
        if match.end() < len(text) and text[match.end()] != "{":
            out.append(_Candidate(text[match.end()], "boxed", match.start(), match.end() + 1))
            continue
        depth, at = 0, match.end()
        limit = min(len(text), at + 50 * MAX_CHARS)
        while at < limit:
            c = text[at]
            if c == "\\":
                at += 1
            elif c == "{":
                depth += 1
            elif c == "}":
                depth -= 1
                if depth == 0:
                    break
            at += 1
        if depth != 0 or at >= limit:
            raise AnswerError(TOO_LARGE if limit < len(text) else UNPARSABLE)
        out.append(_Candidate(text[match.end() + 1 : at], "boxed", match.start(), at + 1))
        if len(out) > MAX_CANDIDATES:
            raise AnswerError(SEVERAL)
    return out


def _phrases(text: str, start: int) -> list[_Candidate]:
    out = []
    for match in _PHRASE.finditer(text, start):
        value = _statement(text, match.end())
        if value.strip(" .*$"):
            out.append(_Candidate(value, "phrase", match.start(), match.end() + len(value)))
        if len(out) > MAX_CANDIDATES:
            break
    if len(out) > 1:  # what was said before a correction no longer counts
        for i in range(len(out) - 1, 0, -1):
            if _CORRECTION.search(text[out[i - 1].end : out[i].start]):
                return out[i:]
    return out


def _statement(text: str, at: int) -> str:
    """From `at` to the end of the sentence or line (at most 300 characters)."""
    piece = text[at : at + 300]
    if piece.lstrip().startswith("\\["):
        piece = piece.partition("\\]")[0] + "\\]"
    elif piece.lstrip().startswith("$$"):
        opening, _, rest = piece.partition("$$")
        piece = opening + "$$" + rest.partition("$$")[0] + "$$"
    else:
        piece = piece.split("\n")[0]
    end = re.search(r"[.!?;](?=\s+[A-Z\"'(*<#]|\s*$|\s*\*\*)|[?]", piece)
    return piece[: end.end() if end and end.group() == "?" else end.start()] if end else piece


def _bare(text: str) -> _Candidate | None:
    """A reply without any mark: its whole text when that is an answer, else the end of its last sentence."""
    whole = text.strip()
    if "\n" not in whole and len(whole) <= 200 and not whole.endswith("?") and readable(whole):
        return _Candidate(whole, "bare", text.find(whole), text.find(whole) + len(whole))
    lines = [line for line in whole.splitlines() if line.strip()]
    if re.fullmatch(r"\s*(?:\$\$|\\\])\s*", lines[-1]) and len(lines) > 1:
        lines.pop()
    line = lines[-1].strip()
    sentence = re.split(r"(?<=[.!?])\s+(?=[A-Z])", line)[-1].strip()
    if sentence.endswith("?") or len(sentence) > 600:
        return None
    start = text.rfind(sentence)
    if readable(sentence) and re.search(r"\d|\\", sentence):
        return _Candidate(sentence, "bare", start, start + len(sentence))
    ends = list(re.finditer(r"(?:\b(?:is|are|equals|be|total(?:s|ing)?|of|gives?|get|has|have)\b|=|:)\s*", sentence))
    for match in reversed(ends[-3:]):
        tail = sentence[match.end() :].strip()
        if tail and re.search(r"\d|\\|\*\*", tail) and readable(tail):
            return _Candidate(tail, "bare", start + match.end(), start + len(sentence))
    numbers = list(_NUMERAL.finditer(sentence))
    if len(numbers) == 1 and not re.search(r"[=<>≈]|\\", sentence):
        only = numbers[0]
        return _Candidate(only.group(), "bare", start + only.start(), start + only.end())
    return None


def readable(text: str) -> bool:
    """True when the grammar can read `text`; what is too large to evaluate is refused here and now."""
    try:
        parse_answer(text)
    except AnswerError as problem:
        if problem.reason == TOO_LARGE and len(text) <= MAX_CHARS:
            raise
        return False
    return True


def tidy(text: str) -> str:
    """A stated answer without the clause that explains it, and a lone number out of a short sentence."""
    if readable(text):
        return text
    cut = _CLAUSE.split(text, maxsplit=1)[0].strip(" ,")
    if cut != text and cut and readable(cut):
        return cut
    numbers = list(_NUMERAL.finditer(cut))
    words = re.sub(_NUMERAL, " ", cut)
    if len(numbers) == 1 and re.fullmatch(r"[A-Za-z'’,.:\- $*]*", words) and not _CHANGES_A_NUMBER.search(words):
        return numbers[0].group().strip()
    return text


def _refuse_unsure(text: str, candidate: _Candidate) -> None:
    inside = re.match(r"[\s:*]*", candidate.text)
    lead = text[max(0, candidate.start - 120) : candidate.start]
    lead = re.split(r"(?<=[.!?])\s|\n", lead)[-1]
    if candidate.source == "bare" and _COMPARED_BEFORE.search(lead):
        raise AnswerError(HEDGED)
    if candidate.source in ("boxed", "bare", "hashes"):
        if _NEGATED_BEFORE.search(lead):
            raise AnswerError(NEGATED)
        if _HEDGED_BEFORE.search(lead):
            raise AnswerError(HEDGED)
    value = candidate.text[inside.end() if inside else 0 :]
    if re.match(r"(?:\w+\s+){0,2}(?:not|never)\b(?!\s+(?:only|just)\b)|[^\d]{0,40}n't\b", value, re.I):
        raise AnswerError(NEGATED)
    if re.match(r"(?:\w+\s+){0,2}(?:maybe|perhaps|possibly|probably|either|one of|between|among)\b", value, re.I):
        raise AnswerError(HEDGED)
    after = text[candidate.end : candidate.end + 80].split("\n")[0]
    if candidate.source != "tag" and (_NEGATED_AFTER.match(after) or _CANNOT_AFTER.match(after)):
        raise AnswerError(NEGATED)


def _refuse_rivals(text: str, candidates: list[_Candidate]) -> None:
    """Several marked answers must all have one value."""
    if len(candidates) < 2:
        return
    seen = {c.text.strip() for c in candidates}
    if len(seen) == 1:
        return
    if len(seen) > 20:
        raise AnswerError(SEVERAL)
    last = candidates[-1]
    try:
        chosen = parse_answer(tidy(last.text))
    except AnswerError as problem:
        raise AnswerError(SEVERAL if problem.reason == UNPARSABLE else problem.reason) from problem
    for rival in candidates[:-1]:
        try:
            other = parse_answer(tidy(rival.text))
        except AnswerError as problem:
            if problem.reason == TOO_LARGE:
                raise
            if rival.source == "phrase" and last.source == "phrase" and len(rival.text) > 60:
                continue  # prose about the answer, not an answer
            raise AnswerError(SEVERAL) from problem
        if compare(other, chosen, simplified=False) and compare(chosen, other, simplified=False):
            raise AnswerError(SEVERAL)
