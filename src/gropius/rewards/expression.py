"""A grammar for countdown answers: whole numbers, + - * / and parentheses, evaluated exactly. No torch, no `eval`.

    sum     = product { ("+" | "-") product }
    product = atom { ("*" | "/") atom }
    atom    = number | "(" sum ")"
    number  = ASCII digits without a leading zero

There is no unary sign, no power, no `//`, no decimal point, and two numbers never stand side by side.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from fractions import Fraction

MOST_CHARACTERS = 1000
DEEPEST = 50
_DIGITS = "0123456789"


class ExpressionFault(ValueError):
    """Why a text is not an answer; the message is the reason a reward gives."""


def tokens(text: str) -> list[str]:
    """Numbers, operators and parentheses of a text. Raises ExpressionFault for anything else.

    >>> tokens("(1 + 20)*3")
    ['(', '1', '+', '20', ')', '*', '3']
    """
    if len(text) > MOST_CHARACTERS:
        raise ExpressionFault(f"longer than {MOST_CHARACTERS} characters")
    found: list[str] = []
    place = 0
    while place < len(text):
        character = text[place]
        end = place + 1
        if character in _DIGITS:
            while end < len(text) and text[end] in _DIGITS:
                end += 1
            if character == "0" and end - place > 1:
                raise ExpressionFault("leading zero")
            found.append(text[place:end])
        elif text[place : place + 2] in ("**", "//"):
            raise ExpressionFault(f"operator not allowed: {text[place : place + 2]}")
        elif character in "+-*/()":
            found.append(character)
        elif character not in " \t":
            raise ExpressionFault(f"character not allowed: {character!a}")
        place = end
    if not found:
        raise ExpressionFault("no expression")
    return found


@dataclass
class _Parser:
    """Recursive descent over tokens; collects the expression in postfix order."""

    tokens: list[str]
    place: int = 0
    postfix: list[str] = field(default_factory=list)

    def peek(self) -> str:
        return self.tokens[self.place] if self.place < len(self.tokens) else ""

    def read_sum(self, depth: int) -> None:
        self._chain(("+", "-"), self._product, depth)

    def _product(self, depth: int) -> None:
        self._chain(("*", "/"), self._atom, depth)

    def _chain(self, operators: tuple[str, str], part: Callable[[int], None], depth: int) -> None:
        part(depth)
        while self.peek() in operators:
            operator = self.tokens[self.place]
            self.place += 1
            part(depth)
            self.postfix.append(operator)

    def _atom(self, depth: int) -> None:
        token = self.peek()
        self.place += 1
        if token == "(":
            if depth >= DEEPEST:
                raise ExpressionFault(f"nested more than {DEEPEST} deep")
            self.read_sum(depth + 1)
            if self.peek() != ")":
                raise ExpressionFault(self._why_not_closed())
            self.place += 1
        elif token[:1] in _DIGITS and token:
            self.postfix.append(token)
        elif token in ("+", "-") and token:
            raise ExpressionFault("unary sign")
        else:
            raise ExpressionFault("a number is missing")

    def _why_not_closed(self) -> str:
        return "parentheses do not match" if not self.peek() else self._why_left_over()

    def _why_left_over(self) -> str:
        token = self.peek()
        if token == ")":
            return "parentheses do not match"
        if token[0] in _DIGITS and self.tokens[self.place - 1][0] in _DIGITS:
            return "two numbers side by side"
        return "an operator is missing"


def parse(text: str) -> list[str]:
    """The expression in postfix order. Raises ExpressionFault with the rule it breaks.

    >>> parse("(1+2)*3")
    ['1', '2', '+', '3', '*']
    """
    parser = _Parser(tokens(text))
    parser.read_sum(0)
    if parser.peek():
        raise ExpressionFault(parser._why_left_over())
    return parser.postfix


def require_each_once(postfix: Iterable[str], numbers: Iterable[int]) -> None:
    """Every given number exactly once and no other. Raises ExpressionFault naming the number."""
    used = Counter(token for token in postfix if token[0] in _DIGITS)
    given = Counter(str(number) for number in numbers)
    for number, count in used.items():
        if number not in given:
            raise ExpressionFault(f"number not given: {number[:20]}")
        if count > given[number]:
            raise ExpressionFault(f"number used too often: {number}")
    for number, count in given.items():
        if used[number] < count:
            raise ExpressionFault(f"number not used: {number}")


def value(postfix: Iterable[str]) -> Fraction:
    """The exact value of a postfix expression. Raises ExpressionFault for a division by zero.

    >>> value(parse("7/(17-10)+7"))
    Fraction(8, 1)
    """
    stack: list[Fraction] = []
    for token in postfix:
        if token[0] in _DIGITS:
            stack.append(Fraction(int(token)))
            continue
        right, left = stack.pop(), stack.pop()
        if token == "/" and right == 0:
            raise ExpressionFault("division by zero")
        results = {"+": left.__add__, "-": left.__sub__, "*": left.__mul__, "/": left.__truediv__}
        stack.append(results[token](right))
    return stack.pop()
