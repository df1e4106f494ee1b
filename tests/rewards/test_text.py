"""Laws of the text rewards: exact values, one reason a fault, linear time whatever the model wrote."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gropius.errors import RecipeError
from gropius.rewards import REWARDS
from gropius.rewards.expression import ExpressionFault, parse, value
from gropius.rewards.number import NumberTooLong, last_number_in, whole_text_number
from gropius.rewards.pattern import Pattern, PatternFault
from gropius.rewards.text import overlong_penalty
from gropius.tasks.countdown import countdown as countdown_tasks
from gropius.types import EnvironmentStep, Episode, Outcome, Task, Turn


def episode(reply: str, answer: str | None = "42", tokens: int = 3, **fields: Any) -> Episode:
    task = Task("t:1", "q", answer, fields.pop("metadata", {}))
    turn = Turn("model", np.zeros(tokens, np.int64), reply)
    fields.setdefault("finish_reason", "stop")
    return Episode(task, "000001-0000", 0, np.zeros(2, np.int64), (turn,), task.messages(), **fields)


def judge(name: str, reply: str, answer: str | None = "42", **options: Any) -> Outcome:
    return REWARDS[name](**options)(episode(reply, answer))


def test_exact_trims_and_compares_nothing_else() -> None:
    assert judge("exact", " 42\n").value == 1.0
    assert judge("exact", "042").reason == "wrong"
    assert judge("exact", "  ").reason == "empty reply"
    assert judge("exact", "Paris", "paris").status == "rejected"
    assert judge("exact", "Paris", "paris", ignore_case=True).value == 1.0
    assert judge("exact", "x", None).status == "void"


NUMBERS = {
    "6 times 7 is 42.": 42,
    "first 41, then 42": 42,
    "It costs $1,042.50!": Fraction("1042.5"),
    "1{,}000": 1000,
    "minus −5": -5,
    "x=-5": -5,
    "-$5": -5,
    "＋3": 3,
    "10-5": 5,
    "f(x)-5": 5,
    "10 -5": -5,
    "2–3": 3,
    ".5": Fraction(1, 2),
    "0.50": Fraction(1, 2),
    "1,00": 0,
    "1,2345": 2345,
    "1234,567": 567,
    "1.2.3": 3,
    "４２": 42,
    "٤٢": 42,
    "**42**": 42,
    "none": None,
    "": None,
    "²": None,
}


@pytest.mark.parametrize("text", list(NUMBERS), ids=[ascii(text) for text in NUMBERS])
def test_the_last_number_is_read_exactly(text: str) -> None:
    assert last_number_in(text) == NUMBERS[text]


@given(st.integers(-(10**12), 10**12), st.integers(0, 6), st.sampled_from(["-", "−"]), st.booleans())
def test_a_number_reads_back_however_it_is_written(digits: int, places: int, minus: str, grouped: bool) -> None:
    exact = Fraction(digits, 10**places)
    padded = str(abs(digits)).zfill(places + 1)
    whole, rest = padded[: len(padded) - places], padded[len(padded) - places :]
    text = (minus if digits < 0 else "") + (f"{int(whole):,}" if grouped else whole) + ("." + rest if rest else "")
    assert whole_text_number(f" {text} ") == exact
    assert last_number_in(f"7 apples: {text}.") == exact


@given(st.text(max_size=80))
def test_no_text_breaks_the_number_reader(text: str) -> None:
    found = last_number_in(text)
    assert found is None or isinstance(found, Fraction)


def test_last_number_outcomes() -> None:
    assert judge("last_number", "so it is 42.0", "42").value == 1.0
    assert judge("last_number", "42 or 43").reason == "wrong"
    assert judge("last_number", "no idea").reason == "no number"
    assert judge("last_number", "9" * 5000).reason == "a number of 5000 characters"
    assert judge("last_number", "0.1", "1/10").status == "void"
    assert judge("last_number", "42", None).status == "void"
    assert judge("last_number", "42", "7" * 5000).status == "void"
    with pytest.raises(NumberTooLong):
        last_number_in("1" * 5000)


GIVEN = {"numbers": [3, 7, 8, 8], "target": 24}
COUNTDOWN = {
    "8*3*(8-7)": "",
    " ( 8 - 7 ) * 8 * 3 = 24": "",
    "thinking 1 2 3\n8*3*(8-7)\n\n": "",
    "I try <answer> 1 </answer> no, <answer>8*3*(8-7)</answer> done": "",
    "8*3": "number not used: 7",
    "8*3*(8-7)+8-8": "number used too often: 8",
    "8*3+0*7*8": "number not given: 0",
    "88-3-7": "number not given: 88",
    "8*3*(8-7)*1": "number not given: 1",
    "3+7+8+8": "wrong value",
    "8/(8-8)*3*7": "number used too often: 8",
    "7/(8-8)+3": "division by zero",
    "7**7": "operator not allowed: **",
    "8//8": "operator not allowed: //",
    "-3+7": "unary sign",
    "3*-7": "unary sign",
    "3+(-7)": "unary sign",
    "+3": "unary sign",
    "8 8 - 3 - 7": "two numbers side by side",
    "(8 8)": "two numbers side by side",
    "8(3)": "an operator is missing",
    "(8-7)(3)": "an operator is missing",
    "08*3": "leading zero",
    "8*3*": "a number is missing",
    "()": "a number is missing",
    "(8*3": "parentheses do not match",
    "8*3)": "parentheses do not match",
    "8.0*3": "character not allowed: '.'",
    "８*3*(8-7)": "character not allowed: '\\uff18'",
    "8*3*(8-7) # yes": "character not allowed: '#'",
    "8×3": "character not allowed: '\\xd7'",
    "__import__('os').system('touch canary')": "character not allowed: '_'",
    "8*3*(8-7) = 25": "claims another result",
    "8*3*(8-7) = 24 = 24": "claims another result",
    "": "no expression",
    "= 24": "no expression",
    "(" * 400 + "1" + ")" * 400: "nested more than 50 deep",
    "1+" * 2000 + "1": "longer than 1000 characters",
}


@pytest.mark.parametrize("reply", list(COUNTDOWN), ids=[ascii(reply)[:40] for reply in COUNTDOWN])
def test_each_broken_countdown_rule_is_its_own_reason(reply: str) -> None:
    outcome = REWARDS["countdown"]()(episode(reply, metadata=GIVEN))
    assert outcome.reason == COUNTDOWN[reply]
    assert outcome.value == float(not COUNTDOWN[reply])


@pytest.mark.parametrize("metadata", [{}, {"numbers": [], "target": 1}, {"numbers": ["3"], "target": 1}, {"nums": [3]}])
def test_countdown_without_numbers_is_void(metadata: dict[str, Any]) -> None:
    assert REWARDS["countdown"]()(episode("3", metadata=metadata)).status == "void"


def test_countdown_division_by_zero_needs_the_right_numbers_first() -> None:
    assert REWARDS["countdown"]()(episode("3/(8-8)", metadata={"nums": [3, 8, 8], "target": "1"})).reason == (
        "division by zero"
    )


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 6), st.sampled_from(["bare", "question"]))
def test_every_countdown_solution_scores_one(seed: int, count: int, style: str) -> None:
    reward = REWARDS["countdown"]()
    for task in countdown_tasks(seed=seed, count=count, rows=(6, 2), style=style).train:
        assert reward(episode(task.answer or "", metadata=task.metadata)).value == 1.0
        other = {**task.metadata, "target": task.metadata["target"] + 1}
        assert reward(episode(task.answer or "", metadata=other)).reason == "wrong value"


Tree = Any
TREES: st.SearchStrategy[Tree] = st.recursive(
    st.integers(0, 30), lambda inner: st.tuples(inner, st.sampled_from("+-*/"), inner), max_leaves=8
)


def written(tree: Tree) -> str:
    return str(tree) if isinstance(tree, int) else f"({written(tree[0])} {tree[1]}{written(tree[2])})"


def exactly(tree: Tree) -> Fraction:
    if isinstance(tree, int):
        return Fraction(tree)
    left, right = exactly(tree[0]), exactly(tree[2])
    return {"+": left + right, "-": left - right, "*": left * right}[tree[1]] if tree[1] != "/" else left / right


@given(TREES)
def test_the_grammar_evaluates_every_tree_exactly(tree: Tree) -> None:
    try:
        expected = exactly(tree)
    except ZeroDivisionError:
        with pytest.raises(ExpressionFault, match="division by zero"):
            value(parse(written(tree)))
    else:
        assert value(parse(written(tree))) == expected


@given(st.lists(st.integers(0, 30), min_size=1, max_size=6), st.lists(st.sampled_from("+-*"), min_size=5, max_size=5))
def test_operators_bind_as_usual_without_parentheses(numbers: list[int], signs: list[str]) -> None:
    text = str(numbers[0]) + "".join(sign + str(n) for sign, n in zip(signs, numbers[1:], strict=False))
    groups = [np.prod([int(n) for n in re.split(r"\*", group)]) for group in re.split(r"[+-]", text)]
    total = groups[0] + sum(
        g if sign == "+" else -g for sign, g in zip(re.findall(r"[+-]", text), groups[1:], strict=True)
    )
    assert value(parse(text)) == int(total)


@given(st.text(alphabet="0123456789+-*/() .=x", max_size=30))
def test_any_text_parses_or_is_refused_with_a_reason(text: str) -> None:
    try:
        value(parse(text))
    except ExpressionFault as why:
        assert str(why)


TAGGED = {
    "<think>a</think><answer>4</answer>": "",
    " <think>a</think>\n <answer>4</answer>\n": "",
    "<think>a</think>": "<answer> is missing",
    "<think>a</think><answer>4": "</answer> is missing",
    "<think></think><answer>4</answer>": "<think> is empty",
    "<think>a</think><answer> \n</answer>": "<answer> is empty",
    "<answer>4</answer><think>a</think>": "text between the tags before <answer>",
    "<think>a<answer>4</think></answer>": "text between the tags before <answer>",
    "<think>a</think><think>b</think><answer>4</answer>": "<think> stands 2 times",
    "<think><think>a</think></think><answer>4</answer>": "<think> stands 2 times",
    "I use <think>a</think><answer>4</answer>": "text before <think>",
    "<think>a</think> so <answer>4</answer>": "text between the tags before <answer>",
    "<think>a</think><answer>4</answer> done": "text after </answer>",
    "</think>a<think><answer>4</answer>": "x",
}


@pytest.mark.parametrize("reply", list(TAGGED))
def test_tags_pay_only_for_the_whole_form(reply: str) -> None:
    outcome = judge("format", reply, tags=["think", "answer"])
    assert (outcome.value == 1.0) == (not TAGGED[reply])
    if TAGGED[reply] not in ("", "x") and not reply.startswith("<answer>"):
        assert outcome.reason == TAGGED[reply]


PATTERNS = [
    r"<think>.*?</think>\s*<answer>.+</answer>",
    r"(?s)^a.b$",
    r"a*b+c?",
    r"(ab|cd){2,3}x{2}",
    r"[^a-c\]]+[\d.-]{0,2}",
    r"(?:a|)b",
    r"(?P<n>a+)+\.",
    r"a{1,}b{,2}",
    r"\$\d+\\",
    r"",
    r"a|b|",
    r"a\\\\$",
    r"(a?){4}a{4}",
]


@pytest.mark.parametrize("source", PATTERNS)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_patterns_match_what_re_matches(source: str, data: st.DataObject) -> None:
    reference = re.compile(source, re.DOTALL)
    text = data.draw(st.text("abcdx.]-$1\\\n ", max_size=9) | st.from_regex(reference, fullmatch=True))
    assert Pattern(source).fullmatch(text) == (reference.fullmatch(text) is not None)


def test_ignoring_case_is_asked_for() -> None:
    assert Pattern("(?i)abc").fullmatch("aBC")
    assert not Pattern("abc").fullmatch("aBC")


@pytest.mark.parametrize("source", ["(a+)+", "(a|a)*b", "(.*)*x", ".*.*.*.*=.*", "(a?){100}a{100}"])
def test_no_text_makes_a_pattern_backtrack(source: str) -> None:
    pattern = Pattern(source)
    pattern.fullmatch("a" * 20_000 + "!")
    assert len(pattern._remembered) <= 500


@pytest.mark.parametrize(
    "source",
    [r"(a)\1", r"(?=a)", r"(?<!a)b", r"\bword", "(", ")", "a)", "[a", "*a", "a**", "a{3,1}", "a^b", "a$b", "a{999}"],
)
def test_patterns_that_need_more_are_refused(source: str) -> None:
    with pytest.raises(PatternFault):
        Pattern(source)
    with pytest.raises(RecipeError, match="reward format"):
        REWARDS["format"](pattern=source)


def test_format_needs_one_of_pattern_and_tags() -> None:
    for options in ({}, {"pattern": "a", "tags": ["b"]}, {"tags": "think"}, {"tags": ["a b"]}):
        with pytest.raises(RecipeError, match="reward format"):
            REWARDS["format"](**options)
    assert judge("format", " abc ", pattern="a.c").value == 1.0
    assert judge("format", "abcd", pattern="a.c").reason == "the pattern does not match"


def test_length_counts_tokens_of_the_model_only() -> None:
    turns = (
        Turn("model", np.zeros(3, np.int64), "a"),
        Turn("environment", np.zeros(50, np.int64), "b"),
        Turn("model", np.zeros(2, np.int64), "c"),
    )
    one = episode("x")
    both = Episode(one.task, "g", 0, one.prompt_ids, turns, (), "stop")
    assert REWARDS["length"](minimum=5, maximum=5)(both).value == 1.0
    assert REWARDS["length"](minimum=6)(both).reason == "too short"
    assert REWARDS["length"](maximum=4)(both).reason == "too long"


@pytest.mark.parametrize(
    ("n", "penalty"), [(16384, 0.0), (16385, -1 / 4096), (18432, -0.5), (20480, -1.0), (99999, -1.0)]
)
def test_overlong_penalty_is_dapo_equation_13(n: int, penalty: float) -> None:
    assert overlong_penalty(n, 20480, 4096) == penalty
    assert REWARDS["length"](maximum=20480, cache=4096)(episode("x", tokens=n)).value == penalty


@pytest.mark.parametrize(
    "options",
    [{}, {"minimum": 5, "maximum": 3}, {"maximum": -1}, {"cache": 2}, {"maximum": 4, "minimum": 1, "cache": 2}],
)
def test_lengths_that_do_nothing_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(RecipeError, match="reward length"):
        REWARDS["length"](**options)


def test_environment_reads_the_last_step() -> None:
    done = EnvironmentStep(done=True, parts={"success": 0.0, "narrowing": 0.25}, raw=0.0)
    assert REWARDS["environment"]()(episode("x", outcome_step=done)).value == 0.0
    assert REWARDS["environment"](shaped=True)(episode("x", outcome_step=done)).value == 0.25
    early = episode("x", outcome_step=EnvironmentStep(), finish_reason="length")
    assert REWARDS["environment"]()(early).reason == "the episode ended before its environment did (length)"
    assert REWARDS["environment"]()(episode("x", finish_reason="length")).status == "rejected"
    assert REWARDS["environment"]()(episode("x")).status == "void"
    assert REWARDS["environment"]()(episode("x", outcome_step=EnvironmentStep(done=True))).status == "void"
