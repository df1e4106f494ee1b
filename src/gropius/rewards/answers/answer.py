"""What an answer is once it has been read."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from gropius.rewards.answers.values import Value

Form = Literal["numeral", "fraction", "ten", "expression"]
POWER_OF_TEN = -1  # in `Expression.digits`: this is 10ⁿ written with an exponent
Kind = Literal["expression", "list", "tuple", "set", "union", "matrix", "equation", "based", "text"]


@dataclass(frozen=True)
class Expression:
    """A value and how it was written.

    values: one, or two for a ± sign (plus first).
    form: "numeral" (42, 4.2, 4.2·10³, 1 1/2), "fraction" (a/b of integers), "ten" (10¹ to 10³ with an exponent:
    a numeral only as a factor) or "expression".
    terms: number of summands in the whole tree. factors: how many sums with letters are multiplied.
    digits: significant digits of a decimal numeral, 0 when it is not one; places: digits after its point.
    """

    values: tuple[Value, ...]
    form: Form = "expression"
    terms: int = 1
    factors: int = 0
    digits: int = 0
    places: int = 0


@dataclass(frozen=True)
class Answer:
    """An answer as it was read.

    kind "expression": `expression` holds it. "list" (bare), "set", "union" (of intervals): `items`, unordered.
    "tuple": `items` in order in `brackets` ("()", "(]", …); an interval is a tuple of two. "matrix": `items` are rows.
    "equation": `expression` is left − right. "based": digits of another base. "text": words.
    unit: "" or the unit's name. name: the single letter on the left of `x = …`, "" when there is none.
    """

    kind: Kind
    text: str
    expression: Expression | None = None
    items: tuple[Answer, ...] = ()
    brackets: str = ""
    unit: str = ""
    name: str = ""
    factor: Fraction = Fraction(1)
