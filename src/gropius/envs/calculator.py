"""A calculator with a grammar of its own: exact, bounded, no `eval`. No torch.

sum     = product { ("+" | "-") product }
product = sign { ("*" | "/" | "//" | "%" | "×" | "÷") sign }
sign    = { "+" | "-" } power
power   = atom [ ("**" | "^") sign ]
atom    = number | "(" sum ")"
number  = digits [ "." digits ], commas between groups of three allowed
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

MOST_CHARACTERS, DEEPEST, MOST_BITS, SHOWN_DIGITS = 500, 40, 4000, 12
_TOKEN = re.compile(r"\s*(?:(\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)|(\*\*|//|[-+*/%^()×÷−]))", re.ASCII)


class CalculatorFault(ValueError):
    """Why an expression has no value; the message is what the model reads."""


def calculate(text: str) -> str:
    """The value of an expression: a whole number in full, any other to 12 significant digits.

    Raises CalculatorFault: unknown characters, no expression, division by zero, numbers or powers that are too large.

    >>> calculate("2 * (3 + 4) - 1"), calculate("1/3"), calculate("-2^2"), calculate("7 // 2 + 7 % 2")
    ('13', '0.333333333333', '-4', '4')
    """
    return _written(_Reader(_tokens(text)).whole())


def _tokens(text: str) -> list[str]:
    if len(text) > MOST_CHARACTERS:
        raise CalculatorFault(f"longer than {MOST_CHARACTERS} characters")
    found, place, text = [], 0, text.rstrip()
    while place < len(text):
        match = _TOKEN.match(text, place)
        if match is None:
            raise CalculatorFault(f"not understood from {text[place:].strip()[:20]!a}")
        found.append(match.group(1) or match.group(2))
        place = match.end()
    if not found:
        raise CalculatorFault("no expression")
    return found


@dataclass
class _Reader:
    tokens: list[str]
    place: int = 0
    depth: int = 0

    def whole(self) -> Fraction:
        """The value of all tokens."""
        value = self._sum()
        if self.place < len(self.tokens):
            raise CalculatorFault(f"not understood from {' '.join(self.tokens[self.place :])[:20]!a}")
        return value

    def _next(self, *wanted: str) -> str:
        if self.place < len(self.tokens) and self.tokens[self.place] in wanted:
            self.place += 1
            return self.tokens[self.place - 1]
        return ""

    def _sum(self) -> Fraction:
        value = self._product()
        while operator := self._next("+", "-", "−"):
            right = self._product()
            value = _bounded(value + right if operator == "+" else value - right)
        return value

    def _product(self) -> Fraction:
        value = self._sign()
        while operator := self._next("*", "/", "//", "%", "×", "÷"):
            value = _bounded(_OPERATIONS[operator](value, self._sign()))
        return value

    def _sign(self) -> Fraction:
        negative = False
        while sign := self._next("+", "-", "−"):
            negative ^= sign != "+"
        value = self._power()
        return -value if negative else value

    def _power(self) -> Fraction:
        base = self._atom()
        return _bounded(_raised(base, self._nested(self._sign))) if self._next("**", "^") else base

    def _atom(self) -> Fraction:
        if self._next("("):
            value = self._nested(self._sum)
            if not self._next(")"):
                raise CalculatorFault("a parenthesis is not closed")
            return value
        token = self.tokens[self.place] if self.place < len(self.tokens) else ""
        if not token or not (token[0].isdigit() or token[0] == "."):
            raise CalculatorFault("a number is missing")
        self.place += 1
        return _bounded(Fraction(token.replace(",", "")))

    def _nested(self, inner: Callable[[], Fraction]) -> Fraction:
        self.depth += 1
        if self.depth > DEEPEST:
            raise CalculatorFault(f"nested more than {DEEPEST} deep")
        value = inner()
        self.depth -= 1
        return value


def _divided(left: Fraction, right: Fraction) -> Fraction:
    if right == 0:
        raise CalculatorFault("division by zero")
    return left / right


_OPERATIONS: dict[str, Callable[[Fraction, Fraction], Fraction]] = {
    "*": lambda left, right: left * right,
    "×": lambda left, right: left * right,
    "/": _divided,
    "÷": _divided,
    "//": lambda left, right: Fraction(math.floor(_divided(left, right))),
    "%": lambda left, right: left - right * math.floor(_divided(left, right)),
}


def _raised(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        raise CalculatorFault("only whole exponents")
    if base == 0 and exponent < 0:
        raise CalculatorFault("division by zero")
    size = max(base.numerator.bit_length(), base.denominator.bit_length())
    if abs(exponent.numerator) * (size if abs(base) != 1 else 0) > MOST_BITS:
        raise CalculatorFault("the power is too large")
    if base in (0, 1, -1):
        return Fraction(1) if exponent == 0 else base if exponent.numerator % 2 else base * base
    return base**exponent.numerator


def _bounded(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MOST_BITS:
        raise CalculatorFault("the number is too large")
    return value


def _written(value: Fraction) -> str:
    if value.denominator == 1:
        return str(value.numerator)
    digits = SHOWN_DIGITS - 1 - _magnitude(value)
    scaled = round(abs(value) * Fraction(10) ** digits)
    text = str(scaled).rjust(max(digits, 0) + 1, "0") if digits >= 0 else str(scaled) + "0" * -digits
    shown = f"{text[:-digits]}.{text[-digits:]}".rstrip("0").rstrip(".") if digits > 0 else text
    return f"-{shown}" if value < 0 else shown


def _magnitude(value: Fraction) -> int:
    """Exponent of the first significant digit."""
    guess = math.floor((value.numerator.bit_length() - value.denominator.bit_length()) * math.log10(2))
    while abs(value) < Fraction(10) ** guess:
        guess -= 1
    while abs(value) >= Fraction(10) ** (guess + 1):
        guess += 1
    return guess
