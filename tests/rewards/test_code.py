"""Laws of the code reward: what counts as the program, what its outcome is, and that data-set solutions score."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from gropius.records.metrics import SHOWN_ONLY
from gropius.rewards import code as code_reward
from gropius.rewards.code import NoCode, code, extract_code, outcome_of, with_prompt
from gropius.sandbox.base import Grade, Limits, SandboxUnavailable
from gropius.sandbox.grade import FunctionTests, InputTests, grade, grade_all
from gropius.sandbox.tiers import Sandbox, open_sandbox, probe
from gropius.types import Episode, Task, Turn

DATA = Path(os.environ.get("GROPIUS_DATA", Path(__file__).resolve().parents[2].parent / "shared" / "data"))
isolated = pytest.mark.skipif(
    bool(probe("bubblewrap")) and bool(probe("landlock")), reason="neither bubblewrap nor Landlock is offered here"
)
needs_data = pytest.mark.skipif(not (DATA / "mbpp").exists(), reason="set GROPIUS_DATA to the folder of data sets")
GOOD = "def f(x):\n    return x + 1\n"
MBPP = {"test_list": ["assert f(1) == 2", "assert f(2) == 3"], "test_setup_code": ""}
UNUSABLE_MBPP = {367, 927}  # their own solutions do not pass


def episode(reply: str, metadata: dict[str, object], answer: str | None = None, prompt: str = "q") -> Episode:
    turn = Turn("model", np.zeros(1, np.int64), reply)
    return Episode(Task("t", prompt, answer, metadata), "000001-0000", 0, np.zeros(1, np.int64), (turn,), (), "stop")


def fenced(program: str, language: str = "python") -> str:
    return f"Here it is:\n\n```{language}\n{program}```\nThat is all."


@pytest.mark.parametrize(
    "reply",
    [
        fenced(GOOD), fenced(GOOD, ""), fenced(GOOD, "py"), GOOD, f"<think>```python\nx\n```</think>{fenced(GOOD)}",
        f"~~~python\n{GOOD}~~~", fenced(GOOD) + fenced(GOOD), fenced(GOOD) + "Use it so:\n" + fenced("print(f(1))\n"),
        fenced("$ pip install nothing\n", "bash") + fenced(GOOD), f"```` python\n{GOOD}````",
    ],
)  # fmt: skip
def test_the_program_of_a_reply_is_found(reply: str) -> None:
    assert extract_code(reply) == GOOD


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        ("", code_reward.NO_CODE),
        ("I cannot do this.", code_reward.NO_CODE),
        (f"<think>{fenced(GOOD)}</think> Done.", code_reward.NO_CODE),
        (f"<think>{fenced(GOOD)}</think>", code_reward.ONLY_THINKING),
        (f"<think>{fenced(GOOD)}", code_reward.ONLY_THINKING),
        (fenced("int f(int x) { return x + 1; }\n", "cpp"), code_reward.OTHER_LANGUAGE),
        (fenced(GOOD) + fenced(GOOD.replace("1", "2")), code_reward.SEVERAL_BLOCKS),
        (f"```python\n{GOOD}", code_reward.UNCLOSED),
        (fenced("\n"), code_reward.NO_CODE),
    ],
)
def test_a_reply_without_one_program_is_rejected_for_its_own_reason(reply: str, reason: str) -> None:
    with pytest.raises(NoCode) as caught:
        extract_code(reply)
    assert caught.value.reason == reason


@isolated
def test_the_reward_tells_right_wrong_and_missing_apart() -> None:
    reward = code(wall_s=10.0)
    assert reward(episode(fenced(GOOD), MBPP)).value == 1.0
    assert reward(episode(fenced("def f(x):\n    return 2\n"), MBPP)).reason == "wrong"
    assert reward(episode(fenced("def g(x):\n    return 2\n"), MBPP)).reason == "function missing"
    assert reward(episode(fenced("def f(x) return 2\n"), MBPP)).reason == "syntax"
    assert reward(episode(fenced("def f(x):\n    raise ValueError\n"), MBPP)).reason == "error: ValueError"
    assert reward(episode("no idea", MBPP)).reason == code_reward.NO_CODE
    assert reward(episode(fenced(GOOD), {})).status == "void"
    partial = code(wall_s=10.0, partial=True)
    assert partial(episode(fenced("def f(x):\n    return 2\n"), MBPP)).value == 0.5
    assert partial(episode(fenced("def f(x):\n    return 7\n"), MBPP)).status == "rejected"


@isolated
def test_a_program_cannot_put_its_own_names_around_a_question() -> None:
    tests = {"entry_point": "f", "test": "assert isinstance(f(1), list)\nassert all(f(1))\nassert not any(f(2))"}
    cheat = "isinstance = all = lambda *_: True\nany = lambda *_: False\ndef f(x):\n    return 0\n"
    honest = "def f(x):\n    return [x == 1]\n"
    reward = code(wall_s=10.0)
    assert reward(episode(fenced(honest), tests)).value == 1.0
    assert reward(episode(fenced(cheat), tests)).status == "rejected"


@isolated
@pytest.mark.parametrize(
    "test",
    [
        "def check(c): assert c(1) == 2",
        "def check (candidate):\n    for n in range(3):\n        assert candidate(n) == n + 1",
        "def test_a():\n    for n in (1, 2):\n        assert f(n) == n + 1\ndef test_b():\n    assert f(3) == 4",
        "ONE = 1\ndef check(candidate):\n    assert candidate(ONE) == 2",
        "for n in range(3): assert f(n) == n + 1",
    ],
)
def test_tests_of_every_form_tell_right_from_wrong(test: str) -> None:
    task = {"entry_point": "f", "test": test}
    assert code(wall_s=10.0)(episode(fenced(GOOD), task)).value == 1.0
    assert code(wall_s=10.0)(episode(fenced("def f(x):\n    return 9\n"), task)).reason == "wrong"


@pytest.mark.parametrize("test", ["def helper(x):\n    assert f(x) == 1", "x = 1", "class Tests: pass"])
def test_tests_that_check_nothing_are_void_and_never_passed(test: str) -> None:
    outcome = code()(episode(fenced(GOOD), {"entry_point": "f", "test": test}))
    assert outcome.status == "void" and "checks nothing" in outcome.reason


@isolated
def test_a_table_of_the_shown_tests_is_told_from_other_wrong_programs() -> None:
    prompt = "Write f that adds one.\nassert f(1) == 2"
    table, wrong = "def f(x):\n    return {1: 2}[x]\n", "def f(x):\n    return 7\n"
    reward, partial = code(wall_s=10.0), code(wall_s=10.0, partial=True)
    hidden_first = {"test_list": ["assert f(2) == 3", "assert f(1) == 2"]}
    for tests in (MBPP, hidden_first):
        assert reward(episode(fenced(table), tests, prompt=prompt)).reason == f"error: KeyError{SHOWN_ONLY}"
        assert reward(episode(fenced(wrong), tests, prompt=prompt)).reason == "wrong"
        assert reward(episode(fenced(GOOD), tests, prompt=prompt)).value == 1.0
        assert partial(episode(fenced(table), tests, prompt=prompt)).value == 0.5
    assert reward(episode(fenced(table), MBPP)).reason == "error: KeyError"
    cases = {"inputs": ["5 6\n", "1 2\n"], "outputs": ["11\n", "3\n"]}
    told = "Add two numbers.\nInput:\n1 2\nOutput:\n3\n"
    assert reward(episode(fenced("print(3)\n"), cases, prompt=told)).reason == f"wrong{SHOWN_ONLY}"
    assert reward(episode(fenced("print(4)\n"), cases, prompt=told)).reason == "wrong"


@isolated
def test_scripts_are_judged_by_standard_input_and_output() -> None:
    reward = code(wall_s=10.0)
    task = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7\n"]}
    assert reward(episode(fenced("a, b = map(int, input().split())\nprint(a + b)\n"), task)).value == 1.0
    assert reward(episode(fenced("print(3)\n"), task)).reason == "wrong"


@isolated
def test_a_program_whose_results_differ_is_flaky() -> None:
    program = "import time\ndef f(x):\n    return x + (1 if time.time_ns() % 2000 < 1000 else 2)\n"
    many = {"test_list": ["assert f(1) == 2"]}
    reasons = {code(wall_s=10.0, repeats=12)(episode(fenced(program), many)).reason for _ in range(2)}
    assert code_reward.FLAKY in reasons
    assert code(wall_s=10.0, repeats=3)(episode(fenced(GOOD), MBPP)).value == 1.0


def test_missing_isolation_is_void_and_never_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> Sandbox:
        raise SandboxUnavailable("nothing here isolates")

    monkeypatch.setattr(code_reward, "_shared_sandbox", refuse)
    outcome = code()(episode(fenced(GOOD), MBPP))
    assert (outcome.status, outcome.value) == ("void", None)
    assert outcome_of(Grade("unavailable", "no")).status == "void"


def test_the_shapes_of_tests_are_recognised() -> None:
    assert code_reward.read_tests(Task("t", "q", None, MBPP)) == FunctionTests("f", tuple(MBPP["test_list"]))
    human = {"entry_point": "g", "test": "def check(candidate):\n    assert candidate(1) == 1", "prompt": "def g(x):\n"}
    assert code_reward.read_tests(Task("t", "q", None, human)).entry == "g"
    assert code_reward.read_tests(Task("t", "q", json.dumps(MBPP), {})).entry == "f"
    assert code_reward.read_tests(Task("t", "q", None, {"cases": [{"input": "1", "output": "2"}]})) == InputTests(
        (("1", "2"),)
    )
    with pytest.raises(ValueError, match="no tests"):
        code_reward.read_tests(Task("t", "q", "42", {}))
    with pytest.raises(ValueError, match="inputs"):
        code_reward.read_tests(Task("t", "q", None, {"inputs": ["1"], "outputs": ["1", "2"]}))


def test_a_continuation_gets_its_prompt_and_a_whole_program_the_imports_before_it() -> None:
    prompt = 'from typing import List\n\ndef g(x: List[int]):\n    """Doc."""\n'
    assert with_prompt("    return x", prompt, "g") == prompt + "    return x"
    assert with_prompt("def g(x: List[int]):\n    return x", prompt, "g").startswith("from typing import List")


def humaneval() -> list[tuple[str, str, FunctionTests]]:
    """(id, reference program, tests) of every HumanEval task."""
    with gzip.open(DATA / "humaneval" / "HumanEval.jsonl.gz", "rt", encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    return [
        (
            row["task_id"],
            with_prompt(row["canonical_solution"], row["prompt"], row["entry_point"]),
            code_reward.read_tests(Task("t", "q", None, row)),
        )
        for row in rows
    ]


def mbpp() -> list[tuple[int, str, FunctionTests]]:
    """(id, reference program, tests) of the MBPP tasks whose solutions pass their own tests."""
    rows = [json.loads(line) for line in (DATA / "mbpp" / "mbpp.jsonl").open(encoding="utf-8")]
    return [
        (
            row["task_id"],
            row["code"],
            code_reward.read_tests(Task("t", "q", None, {k: row[k] for k in ("test_list", "test_setup_code")})),
        )
        for row in rows
        if row["task_id"] not in UNUSABLE_MBPP
    ]


def failures(
    tasks: list[tuple[object, str, FunctionTests]], program_of: Callable[[str, FunctionTests], str]
) -> list[object]:
    patient = Limits(wall_s=60.0)  # MBPP 123 works for seconds, and a busy machine is no fault of a program
    results = grade_all(
        open_sandbox(limits=patient), [(program_of(program, tests), tests) for _, program, tests in tasks]
    )
    return [(name, result) for (name, _, _), result in zip(tasks, results, strict=True) if result.status != "passed"]


def constant(program: str, tests: FunctionTests) -> str:
    """A program that returns the same wrong thing always."""
    return f"def {tests.entry}(*args, **kwargs):\n    return 'a wrong constant'\n"


@isolated
@needs_data
def test_a_sample_of_reference_solutions_scores_and_wrong_constants_do_not() -> None:
    running = {"HumanEval/32", "HumanEval/33", "HumanEval/38", "HumanEval/50", "HumanEval/53"}
    sample = [task for n, task in enumerate(humaneval()) if n % 12 == 0 or task[0] in running]
    sample += [task for n, task in enumerate(mbpp()) if n % 60 == 0 or task[0] in (590, 596)]
    assert failures(sample, lambda program, _: program) == []
    assert len(failures(sample, constant)) == len(sample)


@pytest.mark.slow
@isolated
@needs_data
def test_every_reference_solution_scores_and_every_wrong_constant_does_not() -> None:
    tasks = [*humaneval(), *mbpp()]
    assert len(tasks) == 164 + 972
    assert failures(tasks, lambda program, _: program) == []
    assert len(failures(tasks, constant)) == len(tasks)


@isolated
@needs_data
def test_the_reward_scores_a_reply_with_a_data_set_row_as_it_is() -> None:
    row = json.loads((DATA / "mbpp" / "mbpp.jsonl").open(encoding="utf-8").readline())
    assert code()(episode(fenced(row["code"] + "\n"), row)).value == 1.0
    assert grade(open_sandbox(), row["code"], code_reward.read_tests(Task("t", "q", None, row))).status == "passed"
