"""The grammar above expressions: lists, tuples, intervals, sets, equations and inequalities.

answer   := item ((',' | ';' | 'and' | 'or') item)*
item     := chain | bracketed ('∪' bracketed)*
chain    := sum (relation sum)*            relation: = ≈ < ≤ > ≥ ∈
"""

from __future__ import annotations

import re
from itertools import pairwise

from gropius.rewards.answers.answer import Answer, Expression
from gropius.rewards.answers.errors import TOO_LARGE, UNPARSABLE, AnswerError
from gropius.rewards.answers.expressions import lift
from gropius.rewards.answers.parser import Parser
from gropius.rewards.answers.values import add, letter, letters, negate, rational, same

_RELATION = re.compile(
    r"=|\\approx(?![A-Za-z])|\\leq?(?![A-Za-z])|\\geq?(?![A-Za-z])|\\in(?![A-Za-z])|\\lt(?![A-Za-z])|\\gt(?![A-Za-z])|<=?|>=?"
)
_SEPARATOR = re.compile(r"\s*(?:,?\s*\b(?:and|or)\b|\\(?:and|or|text)\b|[,;])\s*")


def parse_items(text: str) -> list[Answer]:
    """The items of an answer: one, or several between commas, "and" or "or". Raises AnswerError."""
    parser = Parser(text)
    items = [_item(parser)]
    while True:
        match = _SEPARATOR.match(parser.text, parser.at)
        if match is None or match.end() == match.start():
            break
        parser.at = match.end()
        if not parser.peek():
            break
        items.append(_item(parser))
        if len(items) > 64:
            raise AnswerError(TOO_LARGE)
    if parser.peek():
        raise AnswerError(UNPARSABLE)
    return items


def _item(parser: Parser) -> Answer:
    start = parser.at
    first = _bracketed(parser)
    if first is None:
        return _chain(parser, start)
    parts = [first]
    while parser.take(r"\cup") or parser.take("U"):
        following = _bracketed(parser)
        if following is None:
            raise AnswerError(UNPARSABLE)
        parts.append(following)
    if len(parts) == 1:
        return first
    return Answer("union", parser.text[start : parser.at], items=tuple(parts))


def _bracketed(parser: Parser) -> Answer | None:
    """A tuple, an interval or a set when one starts here; None (nothing consumed) when it is an ordinary bracket."""
    start, opening = parser.at, parser.peek()
    is_set = parser.text.startswith("\\{", parser.at) or (opening == "{" and "," in parser.text)
    if opening not in ("(", "[") and not is_set:
        return None
    if parser.take("\\{"):
        pass
    else:
        parser.at += 1
    parser.deeper()
    parser.bracketed += 1
    items = []
    if not (is_set and (parser.text.startswith("\\}", parser.at) or parser.peek() == "}")):
        items.append(_item(parser))
        while parser.take(",") or parser.take(";"):
            items.append(_item(parser))
    parser.bracketed -= 1
    parser.depth -= 1
    if is_set:
        if not (parser.take("\\}") or parser.take("}")):
            raise AnswerError(UNPARSABLE)
        return Answer("set", parser.text[start : parser.at], items=tuple(items))
    closing = parser.peek()
    if closing not in (")", "]") or len(items) < 2:
        parser.at = start
        return None
    parser.at += 1
    return Answer("tuple", parser.text[start : parser.at], items=tuple(items), brackets=opening + closing)


def _chain(parser: Parser, start: int) -> Answer:
    """A sum, or sums joined by relations."""
    sides: list[Expression] = []
    relations: list[str] = []
    name = _left_name(parser)
    if name:
        sides.append(Expression((letter(name),)))
    else:
        sides.append(_leading_approximation(parser) or parser.sum())
    while True:
        parser.space()
        match = _RELATION.match(parser.text, parser.at)
        if match is None:
            break
        relations.append(_relation(match.group()))
        parser.at = match.end()
        if relations[-1] == "in":
            inside = _item(parser)
            return Answer(inside.kind, inside.text, inside.expression, inside.items, inside.brackets, name=name or "x")
        sides.append(parser.sum())
    text = parser.text[start : parser.at]
    if not relations:
        return Answer("expression", text, sides[0])
    if set(relations) <= {"=", "~"}:
        return _equality(text, sides, relations)
    return _inequality(text, sides, relations)


def _leading_approximation(parser: Parser) -> Expression | None:
    return parser.sum() if parser.take(r"\approx") else None


def _left_name(parser: Parser) -> str:
    """`f(x)` or `\\angle ABC` on the left of an equals sign, consumed; "" when there is none."""
    match = re.match(
        r"\s*(?:([A-Za-z])\s*\(\s*[a-z]\s*\)"
        r"|\\(?:angle|overline|vec)\s*\{?\s*([A-Za-z ]{1,6})\}?|([A-Z]{2,4}))\s*(?==)",
        parser.text[parser.at :],
    )
    if match is None:
        return ""
    parser.at += match.end()
    return next(g for g in match.groups() if g).strip()


def _relation(symbol: str) -> str:
    return {"=": "=", r"\approx": "~", r"\in": "in", "<": "<", r"\lt": "<", ">": ">", r"\gt": ">"}.get(
        symbol, "<=" if symbol in ("<=", r"\le", r"\leq") else ">="
    )


def _equality(text: str, sides: list[Expression], relations: list[str]) -> Answer:
    """`x = 6·7 = 42` is 42 when the sides agree; `5x − 7y = 4` stays an equation."""
    name = ""
    if relations[0] == "=" and len(sides[0].values) == 1 and not sides[0].values[0].den.keys() - {()}:
        monomials = list(sides[0].values[0].num.items())
        if len(monomials) == 1 and monomials[0][1] == 1 and len(monomials[0][0]) == 1 and monomials[0][0][0][1] == 1:
            name = monomials[0][0][0][0]
            name = "" if name in ("π", "e", "i", "∞") or "(" in name or name.startswith("√") else name
    rest, links = (sides[1:], relations[1:]) if name else (sides, relations)
    if not name and any(len(s.values) > 1 or letters(s.values[0]) for s in rest):
        if len(rest) != 2 or links != ["="] or any(len(s.values) > 1 for s in rest):
            raise AnswerError(UNPARSABLE)
        difference = add(rest[0].values[0], negate(rest[1].values[0]))
        return Answer("equation", text, Expression((difference,), terms=rest[0].terms + rest[1].terms))
    last = len(rest) - 1
    while last > 0 and links[last - 1] == "~":
        _check_approximation(rest[last - 1], rest[last])
        last -= 1
    for a, b in pairwise(rest[: last + 1]):
        if len(a.values) != len(b.values) or not all(same(x, y) for x, y in zip(a.values, b.values, strict=True)):
            raise AnswerError(UNPARSABLE)
    return Answer("expression", text, rest[last], name=name)


def _check_approximation(exact: Expression, near: Expression) -> None:
    """`14/3 ≈ 4.67`: the right side must be close to the left one, where both are rational."""
    a, b = rational(exact.values[0]), rational(near.values[0])
    if a is not None and b is not None and abs(a - b) * 100 > abs(a):
        raise AnswerError(UNPARSABLE)


def _inequality(text: str, sides: list[Expression], relations: list[str]) -> Answer:
    """`−2 ≤ x < 7`, `x > 5`: the interval they describe."""
    flip = {"<": ">", ">": "<", "<=": ">=", ">=": "<="}
    if "=" in relations or "~" in relations or len(sides) > 3:
        raise AnswerError(UNPARSABLE)
    where = [i for i, s in enumerate(sides) if len(s.values) == 1 and len(letters(s.values[0])) == 1]
    if len(where) != 1 or (len(sides) == 3 and where[0] != 1):
        raise AnswerError(UNPARSABLE)
    if relations[0] in (">", ">="):
        sides, relations = sides[::-1], [flip[r] for r in relations[::-1]]
        where = [len(sides) - 1 - where[0]]
    if any(r in (">", ">=") for r in relations):
        raise AnswerError(UNPARSABLE)
    infinity = Expression((letter("∞"),))
    low, high = lift(negate, infinity), infinity
    opening, closing = "(", ")"
    if where[0] > 0:
        low, opening = sides[0], "[" if relations[0] == "<=" else "("
    if where[0] < len(sides) - 1:
        high, closing = sides[-1], "]" if relations[-1] == "<=" else ")"
    ends = (Answer("expression", "", low), Answer("expression", "", high))
    return Answer(
        "tuple", text, items=ends, brackets=opening + closing, name=next(iter(letters(sides[where[0]].values[0])))
    )
