"""Laws of the task sets with tools."""

from __future__ import annotations

import pytest

from gropius.errors import DataError
from gropius.sandbox.tiers import probe
from gropius.tasks.base import TaskSet
from gropius.tasks.tools import calculator, python_tool, run_python

ISOLATED = any(not probe(tier) for tier in ("bubblewrap", "landlock"))
needs_isolation = pytest.mark.skipif(not ISOLATED, reason="this machine isolates no programs")


def replay(tasks: TaskSet, index: int) -> None:
    task = tasks.train[index]
    environment = tasks.environment(task)
    assert tuple(environment.start()) == task.messages()
    conversation = tasks.demonstration(task)
    for place, message in enumerate(conversation):
        if message["role"] == "assistant":
            step = environment.step(message["content"])
            if place + 1 < len(conversation):
                assert step.messages == conversation[place + 1 : place + 2]
    assert step.done and step.raw == 1.0


def test_calculator_demonstrations_replay_and_score() -> None:
    tasks = calculator(rows=[30, 5], seed=3)
    for index in range(30):
        replay(tasks, index)


@needs_isolation
def test_python_demonstrations_replay_and_score_in_the_sandbox() -> None:
    tasks = python_tool(rows=[8, 2])
    assert tasks.sandbox == "landlock"
    for index in range(8):
        replay(tasks, index)


@needs_isolation
@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("print(6 * 7)", "42"),
        ("x = 1", "(nothing was printed)"),
        ("print(2); 1 / 0", "2\nfailed: ZeroDivisionError: division by zero"),
        ("def", "failed: syntax"),
        ("while True: pass", "failed: time"),
        ("print('x' * 10 ** 7)", "failed: output"),
    ],
)
def test_a_program_is_answered_by_what_it_prints_or_why_it_failed(program: str, said: str) -> None:
    assert run_python(program, wall_s=2.0) == said


def test_without_isolation_the_program_is_not_run(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setattr("gropius.sandbox.tiers.probe", lambda tier: "forbidden here")
    canary = tmp_path / "ran"
    with pytest.raises(RuntimeError, match="the sandbox cannot be used"):
        run_python(f"open({str(canary)!r}, 'w')", wall_s=2.5)
    assert not canary.exists()


@pytest.mark.parametrize(
    ("build", "options", "words"),
    [
        (calculator, {"digits": 0}, "digits"),
        (calculator, {"calls": 21}, "calls"),
        (calculator, {"digits": 1, "terms": 2, "rows": [300, 1]}, "different questions"),
        (python_tool, {"minimum": "docker"}, "minimum"),
    ],
)
def test_senseless_options_are_refused(build, options, words: str) -> None:
    with pytest.raises(DataError, match=words):
        build(**options)
