"""Values and questions: what crosses the pipe, and what is asked."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gropius.sandbox.base import PROTOCOL, TYPE, WRONG
from gropius.sandbox.driver import make_encoder
from gropius.sandbox.questions import NotAQuestion, as_check, questions_of
from gropius.sandbox.seccomp import build_filter
from gropius.sandbox.session import ProgramFailed
from gropius.sandbox.values import decode, difference, near, to_source

plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@settings(max_examples=200, deadline=None)
@given(plain)
def test_a_plain_value_survives_the_pipe_and_its_own_source(value: object) -> None:
    import json

    back = decode(json.loads(make_encoder()(value)))
    assert difference(back, value) == ""
    assert type(back) is type(value)
    names = {"inf": float("inf"), "nan": float("nan"), "set": set, "frozenset": frozenset}
    assert difference(eval(to_source(value), {"__builtins__": {}}, names), value) == ""


@pytest.mark.parametrize(
    ("actual", "expected", "reason"),
    [
        (3, 3.0, ""),
        (True, 1, ""),
        (-0.0, 0.0, ""),
        ([1, (2,)], [1, (2,)], ""),
        ({1, 2}, {2, 1}, ""),
        (float("inf"), float("inf"), ""),
        (float("nan"), float("nan"), WRONG),
        (2, 3, WRONG),
        ("a", "b", WRONG),
        ([1], [1, 2], WRONG),
        ({"a": 1}, {"a": 2}, WRONG),
        ([1], (1,), TYPE),
        ("1", 1, TYPE),
        (None, 0, TYPE),
        ([[1]], [(1,)], TYPE),
        ({1}, [1], TYPE),
    ],
)
def test_values_are_compared_by_type_and_value(actual: object, expected: object, reason: str) -> None:
    assert difference(actual, expected) == reason


def test_a_tolerance_holds_for_numbers_only() -> None:
    assert near(2.0000001, 2.0, 0.0, 1e-6) == ""
    assert near(2.1, 2.0, 0.0, 1e-6) == WRONG
    assert near(float("nan"), 2.0, 1.0, 1.0) == WRONG
    assert near("2", 2.0, 0.0, 1e-6) == TYPE


@pytest.mark.parametrize(
    "forged", [None, [], ["q"], ["i"], ["i", "x"], ["l", 3], ["d", [["a"]]], ["e", [["l", []]]], 7]
)
def test_a_forged_value_is_a_breach_of_protocol(forged: object) -> None:
    with pytest.raises(ProgramFailed) as caught:
        decode(forged)
    assert caught.value.reason == PROTOCOL


def test_assertions_become_questions_without_their_answers() -> None:
    asked = questions_of(
        "assert f(1, [2]) == {'a': (1, 2)}\nassert f(x=1)\nassert not f(2)\nassert abs(f(3) - 2.5) < 1e-6", "f"
    )
    assert [q.ask for q in asked] == ["f(1, [2])", "True if (f(x=1)) else False", "not (f(2))", "f(3)"]
    assert asked[0].expected == {"a": (1, 2)}
    assert [q.judge(v) for q, v in zip(asked, [{"a": (1, 2)}, True, True, 2.5], strict=True)] == [""] * 4
    inside = questions_of("def check(candidate):\n    assert candidate(2) == 3, 'text'\n    assert True", "g")
    assert [(q.ask, q.expected) for q in inside] == [("g(2)", 3)]
    assert [q.ask for q in questions_of("def check(c): assert c(2) == 3", "g")] == ["g(2)"]
    assert [q.ask for q in questions_of("def test_g(): assert g(2) == 3", "g")] == ["g(2)"]


@pytest.mark.parametrize(
    "source",
    ["for i in range(3):\n    assert f(i) == i", "assert f(1) == g(1)", "x = f(1)\nassert x == 1", "assert f(1) == (",
     "LIMIT = 3\ndef check(candidate):\n    assert candidate(LIMIT) == 3",
     "def check(candidate, other):\n    assert candidate(1) == 3",
     "assert isinstance(f(1), int)", "assert all(f(1))", "assert not any(f(1))", "assert is_right(f(1)) == True"],
)  # fmt: skip
def test_other_tests_are_not_split(source: str) -> None:
    with pytest.raises(NotAQuestion):
        questions_of(source, "f")


def test_tests_that_run_themselves_run_whatever_their_form() -> None:
    for source in ("for i in range(3):\n    assert f(i) == i", "def check (candidate):\n    for i in (1, 2): assert i"):
        scope: dict[str, object] = {}
        exec(as_check(source), scope)
        assert callable(scope["check"])
    both = as_check("def test_a():\n    assert f(1)\ndef test_b():\n    assert f(2)")
    assert both.endswith("def check(candidate):\n    test_a()\n    test_b()")
    for nothing in ("x = 1", "def helper(x): assert x", "class A: pass", ""):
        with pytest.raises(ValueError, match="checks nothing"):
            as_check(nothing)


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_a_filter_is_whole_instructions_and_ends_with_permission(machine: str) -> None:
    for own_pids in (True, False):
        program = build_filter(own_pids, machine)
        assert len(program) % 8 == 0
        assert program[-8:] == b"\x06\x00\x00\x00\x00\x00\xff\x7f"
