"""Reading one answer, and deciding whether it is the gold answer.

The rules (each has a test):

    numbers       equal as exact rationals: 1,000 = 1000 = 1e3 = 10^3; 042 = 42; ½ = 0.5 = 1/2 = 2/4 = 50 %; 3/2 = 1 1/2
    decimals      of a fraction that does not end: eight significant digits or more, rounded or cut (0.33333333 for 1/3)
    simplified    a number must be written as a number: 6·7 is not accepted for 42, nor 84/2; a sum may not have more
                  summands than the gold answer, nor other factors (an echoed exercise is not its solution)
    percent       50 % is 0.5, and also 50 where the gold answer is a bare number above 1
    units         a unit that the gold answer has must be the same or absent; where it has none, any unit may follow
    lists, sets   in any order; tuples, intervals, matrices in order; brackets must agree; a ± b is two values
    equations     `x = 5` is 5; a line is the same line times a constant; `y = 2x + 3` may be written `2x + 3`
    words         without case, articles and punctuation; (C) is C
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from fractions import Fraction

from gropius.rewards.answers.answer import Answer, Expression
from gropius.rewards.answers.errors import FORM, SEVERAL, TOO_LARGE, UNIT, UNPARSABLE, UNSIMPLIFIED, WRONG, AnswerError
from gropius.rewards.answers.items import parse_items
from gropius.rewards.answers.parser import FUNCTIONS
from gropius.rewards.answers.text import plain
from gropius.rewards.answers.units import split_unit
from gropius.rewards.answers.values import add, letter, letters, multiply, negate, number, proportional, rational, same

MAX_CHARS = 1000
MIN_DIGITS = 8
_MATRIX = re.compile(r"\\begin\s*\{([pbvBV]?matrix|array)\}(?:\s*\{[clr|]*\})?(.*?)\\end\s*\{\1\}", re.S)
_BASED = re.compile(r"([0-9A-Fa-f]+)\s*_\s*\{?\s*(\d{1,2}|[a-z]+)\s*\}?|([0-9A-F]+) \(?base (\d{1,2}|[a-z]+)\)?")
_BASES = {
    "two": "2",
    "three": "3",
    "four": "4",
    "five": "5",
    "six": "6",
    "seven": "7",
    "eight": "8",
    "nine": "9",
    "ten": "10",
}
_CHOICE = re.compile(r"\(?\s*([A-Ja-j])\s*[).:]?")
_CHOICE_AND_TEXT = re.compile(r"(?:\(([A-J])\)|([A-J])[).:])\s*\S.*", re.S)
_ANOTHER_CHOICE = re.compile(r"\([A-J]\)|\b(?:and|or|nor)\s+[A-J]\b|^\W*[A-J]\W*$")
_ARTICLE = re.compile(r"^(?:the|an?)\s+")


def parse_answer(text: str) -> Answer:
    """Read an answer, LaTeX or plain. Raises AnswerError when it cannot be read or is too large.

    >>> parse_answer("\\\\frac{1}{2}").kind, parse_answer("(3, 4]").brackets, parse_answer("5.4 cents").unit
    ('expression', '(]', 'cent')
    """
    if len(text) > MAX_CHARS:
        raise AnswerError(TOO_LARGE)
    spelled = _unwrap(plain(text))
    if not spelled:
        raise AnswerError(UNPARSABLE)
    words = _words(spelled)
    if words is not None:
        return Answer("text", words)
    based = _BASED.fullmatch(spelled)
    if based:
        digits, base = based.group(1) or based.group(3), based.group(2) or based.group(4)
        base = _BASES.get(base, base)
        if base.isdigit() and digits.upper() != digits.upper().strip("0123456789ABCDEF") + digits.upper():
            raise AnswerError(UNPARSABLE)
        if base.isdigit() and (digits.isdigit() or digits.isupper()):
            return Answer("based", f"{digits.lstrip('0') or '0'}_{base}")
    if "\\begin" in spelled:
        return _matrix(spelled)
    return _with_unit(spelled)


def compare(answer: Answer, gold: Answer, simplified: bool = True) -> str:
    """ "" when `answer` is the gold answer, else one of the reasons of errors.py.

    simplified: False accepts an answer that is worth the gold value however it is written (6·7 for 42).
    """
    if gold.kind == "text" or answer.kind == "text":
        return _compare_text(answer, gold)
    if gold.kind == "based" or answer.kind == "based":
        return "" if answer.kind == gold.kind and answer.text == gold.text else WRONG
    unit = _compare_unit(answer, gold)
    if unit is not None:
        return unit if unit else _compare_body(answer, gold, simplified)
    return _compare_percent(answer, gold, simplified)


def _unwrap(text: str) -> str:
    """Take off an enclosing \\boxed, quotes, a final full stop and doubled outer braces."""
    for _ in range(4):
        before = text
        text = text.strip().strip('"').strip()
        boxed = re.fullmatch(r"\\f?boxed\s*\{(.*)\}", text, re.S)
        if boxed:
            text = boxed.group(1)
        if text.endswith(".") and not text.endswith(".."):
            text = text[:-1]
        text = re.sub(r"^(?:approximately|about|roughly|exactly|only|just)\s+(?=[\d\\¤.-])", "", text)
        if text == before:
            break
    return text.strip()


def _words(text: str) -> str | None:
    """The normalised words of an answer that is words, None when it is mathematics."""
    choice = _CHOICE.fullmatch(text)
    if choice and (text.strip("() .:").isupper() or "(" in text) and not re.fullmatch(r"[a-z]", text):
        return choice.group(1).lower()
    long = _CHOICE_AND_TEXT.fullmatch(text)
    if long and not _ANOTHER_CHOICE.search(text, max(long.end(1), long.end(2))):
        return (long.group(1) or long.group(2)).lower()
    if not re.fullmatch(r"[A-Za-z][A-Za-z'\- ]*[.!]?", text) or (len(text) == 1 and text.islower()):
        return None
    if re.fullmatch(r"pi|e|i|sqrt", text) or re.search(r"\b(?:or|and)\b", text):
        return None
    if all(len(word) < 2 for word in re.split(r"[ -]+", text)) and len(text) > 2:
        return None  # p - q
    if any(re.search(rf"\b{name}\b", text) for name in FUNCTIONS):
        return None
    return _ARTICLE.sub("", re.sub(r"\s+", " ", text.strip(" .!").casefold()))


def _matrix(text: str) -> Answer:
    match = _MATRIX.fullmatch(text.strip().removeprefix("(").removesuffix(")").strip())
    if match is None:
        raise AnswerError(UNPARSABLE)
    rows = []
    for row in re.split(r"\\\\", match.group(2)):
        if row.strip():
            cells = tuple(_single(cell) for cell in row.split("&"))
            rows.append(Answer("tuple", row, items=cells, brackets="()"))
    return Answer("matrix", text, items=tuple(rows))


def _single(text: str) -> Answer:
    items = parse_items(text.strip())
    if len(items) != 1:
        raise AnswerError(UNPARSABLE)
    return items[0]


def _with_unit(text: str) -> Answer:
    body, unit, factor = split_unit(text)
    items = parse_items(body)
    answer = items[0] if len(items) == 1 else Answer("list", body, items=tuple(items))
    if factor != 1 and (answer.expression is None or answer.expression.form not in ("numeral", "fraction")):
        raise AnswerError(UNPARSABLE)
    return replace(answer, unit=unit, factor=factor)


def _compare_text(answer: Answer, gold: Answer) -> str:
    if answer.kind == gold.kind:
        return "" if answer.text == gold.text else WRONG
    other = answer if gold.kind == "text" else gold
    if other.kind == "list":
        return SEVERAL if gold.kind == "text" else WRONG
    spelled = re.sub(r"[()\s.]", "", other.text).casefold()
    word = (gold if gold.kind == "text" else answer).text
    return "" if spelled == word and len(word) == 1 else WRONG


def _compare_unit(answer: Answer, gold: Answer) -> str | None:
    """ "" units agree, UNIT they do not, None when a percent sign on one side decides."""
    if answer.unit == gold.unit or (not answer.unit and gold.unit != "%"):
        return ""
    if "%" in (answer.unit, gold.unit):
        return None if {answer.unit, gold.unit} <= {"%", ""} else UNIT
    return "" if not gold.unit else UNIT


def _compare_percent(answer: Answer, gold: Answer, simplified: bool) -> str:
    hundredth = Fraction(1, 100)
    as_number = _compare_body(answer, gold, simplified)
    if gold.unit == "%":
        scaled = replace(gold, unit="", factor=gold.factor * hundredth)
        return as_number and _compare_body(answer, scaled, simplified)
    scaled = replace(answer, unit="", factor=answer.factor * hundredth)
    if not _compare_body(scaled, gold, simplified):
        return ""
    value = _rational_of(gold)
    return as_number if value is not None and abs(value) > 1 else (as_number or UNIT)


def _compare_body(answer: Answer, gold: Answer, simplified: bool) -> str:
    mine, theirs = _flat(answer), _flat(gold)
    if gold.kind == "equation" or answer.kind == "equation":
        return _compare_equation(answer, gold)
    unordered = ("list", "set", "union")
    if gold.kind in unordered or len(theirs) > 1:
        if answer.kind == "tuple" and gold.kind in ("list", "expression") and answer.brackets == "()":
            mine = _flat(replace(answer, kind="list"))
        elif answer.kind == "tuple" and gold.kind != "set":
            return WRONG
        if gold.kind == "union" and any(i.kind != "tuple" for i in mine):
            return WRONG
        return _compare_unordered(mine, theirs, simplified)
    if gold.kind in ("tuple", "matrix"):
        if answer.kind != gold.kind or answer.brackets != gold.brackets or len(answer.items) != len(gold.items):
            return WRONG
        return _first(_compare_body(a, g, simplified) for a, g in zip(answer.items, gold.items, strict=True))
    if answer.kind in unordered or len(mine) > 1:
        return SEVERAL if len(mine) > 1 else _compare_body(mine[0], gold, simplified)
    if answer.kind != "expression" or answer.expression is None or gold.expression is None:
        return WRONG
    if answer.name and gold.name and answer.name != gold.name:
        return WRONG
    return _compare_expression(answer, gold, simplified)


def _flat(answer: Answer) -> list[Answer]:
    """The members of a list, set or union, with a ± opened up; the answer itself otherwise."""
    if answer.kind in ("list", "set", "union"):
        return [member for item in answer.items for member in _flat(item)]
    expression = answer.expression
    if answer.kind == "expression" and expression is not None and len(expression.values) > 1:
        return [replace(answer, expression=replace(expression, values=(v,))) for v in expression.values]
    return [answer]


def _compare_unordered(mine: Sequence[Answer], theirs: Sequence[Answer], simplified: bool) -> str:
    if len(mine) != len(theirs):
        return WRONG
    left, reason = list(mine), WRONG
    for gold in theirs:
        found = None
        for i, candidate in enumerate(left):
            verdict = _compare_body(candidate, gold, simplified)
            if not verdict:
                found = i
                break
            reason = verdict if verdict in (FORM, UNSIMPLIFIED) else reason
        if found is None:
            return reason
        left.pop(found)
    return ""


def _compare_equation(answer: Answer, gold: Answer) -> str:
    a, g = _as_equation(answer), _as_equation(gold)
    if a.kind != "equation" or g.kind != "equation" or a.expression is None or g.expression is None:
        return WRONG
    return "" if proportional(a.expression.values[0], g.expression.values[0]) else WRONG


def _as_equation(side: Answer) -> Answer:
    """`y = 2x + 3`, read as the value 2x + 3 with a name, as the equation y − (2x + 3) = 0."""
    if side.kind != "expression" or not side.name or side.expression is None:
        return side
    moved = add(letter(side.name), negate(side.expression.values[0]))
    return replace(side, kind="equation", expression=replace(side.expression, values=(moved,)))


def _compare_expression(answer: Answer, gold: Answer, simplified: bool) -> str:
    mine, theirs = answer.expression, gold.expression
    assert mine is not None and theirs is not None
    a = multiply(mine.values[0], number(answer.factor)) if answer.factor != 1 else mine.values[0]
    g = multiply(theirs.values[0], number(gold.factor)) if gold.factor != 1 else theirs.values[0]
    if not same(a, g):
        x, y = rational(a), rational(g)
        return "" if x is not None and y is not None and _rounds_to(x, mine, y) else WRONG
    return _form(mine, theirs) if simplified else ""


def _form(mine: Expression, theirs: Expression) -> str:
    """Was the answer worked out as far as the gold answer?"""
    value = rational(theirs.values[0])
    if value is not None and theirs.form in ("numeral", "fraction"):
        if mine.form == "numeral" or (mine.form == "fraction" and value.denominator != 1):
            return ""
        return UNSIMPLIFIED
    if mine.terms > theirs.terms:
        return UNSIMPLIFIED
    if letters(theirs.values[0]) and max(mine.factors, 1) != max(theirs.factors, 1):
        return FORM
    return ""


def _rounds_to(x: Fraction, written: Expression, exact: Fraction) -> bool:
    """A long decimal stands for a fraction that does not end when it is that fraction rounded or cut at its end."""
    rest = exact.denominator
    for p in (2, 5):
        while rest % p == 0:
            rest //= p
    if rest == 1 or written.digits < MIN_DIGITS:
        return False
    return abs(x - exact) < Fraction(1, 10**written.places)


def _rational_of(answer: Answer) -> Fraction | None:
    if answer.expression is None or len(answer.expression.values) != 1:
        return None
    value = rational(answer.expression.values[0])
    return None if value is None else value * answer.factor


def _first(reasons: Iterable[str]) -> str:
    return next((r for r in reasons if r), "")


__all__ = ["MAX_CHARS", "compare", "parse_answer"]
