"""Laws of the calculator: exact where Python's fractions are, bounded, and never an evaluator."""

from __future__ import annotations

import time
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gropius.envs.calculator import CalculatorFault, calculate

NUMBERS = st.integers(0, 999).map(lambda n: (str(n), Fraction(n)))


def joined(inner):  # type: ignore[no-untyped-def]
    def combine(left, operator, right):  # type: ignore[no-untyped-def]
        a, b = left[1], right[1]
        if operator == "/" and b == 0:
            operator = "+"
        value = {"+": a + b, "-": a - b, "*": a * b}.get(operator) if operator != "/" else a / b
        return f"({left[0]} {operator} {right[0]})", value

    return st.builds(combine, inner, st.sampled_from("+-*/"), inner)


@settings(deadline=None, max_examples=40)
@given(st.recursive(NUMBERS, joined, max_leaves=8))
def test_every_tree_has_its_exact_value(tree) -> None:
    text, value = tree
    found = calculate(text)
    if value.denominator == 1:
        assert found == str(value)
    else:
        assert abs(Fraction(found) - value) <= abs(value) * Fraction(1, 10**10)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2+3*4", "14"), ("(2+3)*4", "20"), ("2**3**2", "512"), ("-2**2", "-4"), ("2**-2", "0.25"), ("2^10", "1024"),
        ("7//2", "3"), ("-7//2", "-4"), ("-7 % 3", "2"), ("1,234 + 1", "1235"), (".5+.5", "1"), ("6 × 7 ÷ 2", "21"),
        ("5 − 7", "-2"), ("--3", "3"), ("2*-3", "-6"), ("1/3", "0.333333333333"), ("2/3", "0.666666666667"),
        ("100000/3", "33333.3333333"), ("0.1+0.2", "0.3"), ("(-1)**1000001", "-1"), ("0**0", "1"),
        ("1/8000", "0.000125"),
    ],
)  # fmt: skip
def test_the_usual_rules_hold(text: str, value: str) -> None:
    assert calculate(text) == value


@pytest.mark.parametrize(
    "text",
    [
        "", "   ", "()", "1+", "*2", "1 2", "(1", "1)", "1/0", "5 % 0", "0**-1", "2**0.5", "9**9**9**9", "9**99999999",
        "2" * 501, "(" * 200 + "1" + ")" * 200, "__import__('os')", "1; 2", "abs(3)", "x", "1e999",
        "٣+1", "４", "1,23", "1.2.3",
        "**2", "2**" * 60 + "2", "-" * 600 + "1",
    ],
)  # fmt: skip
def test_what_has_no_value_is_said_and_at_once(text: str) -> None:
    began = time.process_time()
    with pytest.raises(CalculatorFault) as caught:
        calculate(text)
    assert time.process_time() - began < 1.0 and str(caught.value)


@settings(deadline=None)
@given(st.text(max_size=60))
def test_any_text_has_a_value_or_a_fault(text: str) -> None:
    try:
        Fraction(calculate(text))
    except CalculatorFault as fault:
        assert str(fault)
