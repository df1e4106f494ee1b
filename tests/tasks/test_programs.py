"""Laws of the task sets whose answers are programs, and of MATH."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gropius.errors import DataError
from gropius.rewards import load_scorer
from gropius.sandbox.tiers import probe
from gropius.tasks import load_tasks
from gropius.tasks.base import TaskSet
from gropius.tasks.competition import worked
from gropius.tasks.programs import BROKEN_MBPP
from gropius.types import Episode, Outcome, Task, Turn

HERE = Path(__file__).parents[2]
DATA = Path(os.environ.get("GROPIUS_DATA", HERE.parent / "shared" / "data"))
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="no data sets here (GROPIUS_DATA)")
needs_isolation = pytest.mark.skipif(
    all(probe(tier) for tier in ("bubblewrap", "landlock")), reason="this machine isolates no programs"
)


def tasks(name: str, path: Path, **options: Any) -> TaskSet:
    return load_tasks(name, {"path": str(path), **options}, 0, {}, None, HERE)


def outcomes(found: TaskSet, pairs: list[tuple[Task, str]]) -> list[Outcome]:
    scorer = load_scorer([{"name": name} for name in found.rewards], HERE)
    episodes = [
        Episode(task, f"000001-{i:04d}", 0, np.zeros(1, np.int64),
                (Turn("model", np.zeros(1, np.int64), reply),), (), "stop")
        for i, (task, reply) in enumerate(pairs)
    ]  # fmt: skip
    return [verdict.outcome for verdict in asyncio.run(scorer.score(episodes))]


@needs_data
def test_mbpp_has_its_official_split_without_the_two_rows_that_fail_their_own_tests() -> None:
    found = tasks("mbpp", DATA / "mbpp" / "mbpp.jsonl")
    ids = [task.metadata["task_id"] for task in (*found.train, *found.held_out)]
    assert (len(found.train), len(found.held_out)) == (373, 499) and not set(ids) & set(BROKEN_MBPP)
    assert any("367" in note and "927" in note for note in found.notes)
    assert all("one Python code block" in str(task.prompt) for task in found.train)


@needs_data
@needs_isolation
@pytest.mark.parametrize(("name", "file"), [("mbpp", "mbpp/mbpp.jsonl"), ("humaneval", "humaneval/HumanEval.jsonl.gz")])
def test_gold_programs_score_as_replies_and_another_tasks_program_does_not(name: str, file: str) -> None:
    found = tasks(name, DATA / file)
    some = found.held_out[:4]
    assert found.solution is not None
    gold = [found.solution(task) for task in some]
    assert [o.value for o in outcomes(found, list(zip(some, gold, strict=True)))] == [1.0] * 4
    turned = [*gold[1:], gold[0]]
    assert {o.status for o in outcomes(found, list(zip(some, turned, strict=True)))} == {"rejected"}


@needs_data
@needs_isolation
def test_a_humaneval_reply_may_be_the_body_alone() -> None:
    found = tasks("humaneval", DATA / "humaneval" / "HumanEval.jsonl.gz")
    task = found.held_out[0]
    assert outcomes(found, [(task, f"```python\n{task.answer}```")])[0].value == 1.0


@needs_isolation
def test_rows_with_tests_of_any_kind_are_code_tasks(tmp_path: Path) -> None:
    rows = [
        {"prompt": "Double it.", "inputs": ["2\n"], "outputs": ["4\n"], "program": "print(2 * int(input()))"},
        {"prompt": "Add one.", "test_list": ["assert f(1) == 2"], "program": "def f(x): return x + 1"},
        {"prompt": "Halve.", "cases": [{"input": "4", "output": "2"}], "program": "print(int(input()) // 2)"},
        {"prompt": "g", "test": "def check(candidate):\n    assert candidate(3) == 9", "entry_point": "g",
         "program": "def g(x): return 3 * x"},
    ]  # fmt: skip
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = tasks("code", file, answer="program", held_out=1)
    every = [*found.train, *found.held_out]
    assert found.solution is not None
    assert [(o.value, o.reason) for o in outcomes(found, [(t, found.solution(t)) for t in every])] == [(1.0, "")] * 4
    file.write_text('{"prompt": "no tests"}\n{"prompt": "none here"}\n')
    with pytest.raises(DataError, match="no tests in this row"):
        tasks("code", file)


@needs_data
def test_math_gold_solutions_score_and_levels_and_subjects_filter() -> None:
    found = tasks("math", DATA / "math500" / "test.jsonl", levels=[1], subjects=["Algebra"], held_out=5)
    every = [*found.train, *found.held_out]
    assert {(t.metadata["level"], t.metadata["subject"]) for t in every} == {(1, "Algebra")}
    assert found.solution is not None and found.system_prompt is not None
    assert {o.value for o in outcomes(found, [(t, found.solution(t)) for t in every])} == {1.0}


def test_a_worked_solution_ends_with_its_boxed_answer() -> None:
    text = "so $x = \\boxed{44}$.\n\nCheck: $17 \\cdot 44 = 748$."
    assert worked(Task("m", "q", "44", {"solution": text})) == "so $x = \\boxed{44}$."
    assert worked(Task("m", "q", "44", {"solution": "no box"})) == "\\boxed{44}"


def test_rows_of_another_kind_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "a", "answer": "1"}\n{"prompt": "b", "answer": "2"}\n')
    for name in ("mbpp", "humaneval", "math"):
        with pytest.raises(DataError, match=str(name)):
            tasks(name, file)
