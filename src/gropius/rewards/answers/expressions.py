"""Arithmetic on values together with how they were written."""

from __future__ import annotations

from collections.abc import Callable

from gropius.rewards.answers.answer import POWER_OF_TEN, Expression, Form
from gropius.rewards.answers.errors import TOO_LARGE, AnswerError
from gropius.rewards.answers.values import Value, add, divide, key, letter, letters, multiply, negate, number, rational


def lift(f: Callable[[Value], Value], a: Expression, form: Form = "expression") -> Expression:
    """f applied to every value of `a`; the sizes stay."""
    return Expression(
        tuple(f(v) for v in a.values), form, a.terms, a.factors, a.digits if form == "numeral" else 0, a.places
    )


def pair(
    f: Callable[[Value, Value], Value],
    a: Expression,
    b: Expression,
    form: Form = "expression",
    terms: int = 0,
    factors: int = 0,
) -> Expression:
    """f applied to every pair of values; a ± on both sides makes more."""
    if len(a.values) * len(b.values) > 8:
        raise AnswerError(TOO_LARGE)
    values = tuple(f(x, y) for x in a.values for y in b.values)
    return Expression(values, form, terms or a.terms + b.terms - 1, factors)


def plus(a: Expression, b: Expression, sign: int) -> Expression:
    """a + b, or a − b for sign −1: one more summand."""
    f = add if sign > 0 else lambda x, y: add(x, negate(y))
    lettered = any(letters(v) for v in a.values + b.values)
    return pair(f, a, b, terms=a.terms + b.terms, factors=1 if lettered else 0)


def times(a: Expression, b: Expression) -> Expression:
    """a · b; a numeral times 10ⁿ is still a numeral."""
    form: Form = "expression"
    if a.form == "numeral" and b.digits == POWER_OF_TEN:
        form = "numeral"  # scientific notation: 1.5 · 10³
    return pair(multiply, a, b, form, factors=a.factors + b.factors)


def over(a: Expression, b: Expression) -> Expression:
    """a / b; a quotient of numerals is a fraction."""
    form: Form = "fraction" if a.form == b.form == "numeral" else "expression"
    return pair(divide, a, b, form, factors=a.factors + b.factors)


def absolute(v: Value) -> Value:
    """|v|, opaque unless v is a number."""
    x = rational(v)
    return number(abs(x)) if x is not None else letter(f"abs({key(v)})")
