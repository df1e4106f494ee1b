"""Gold answers and tests that the rewards of a recipe cannot use, found without a model; nothing is run."""

from __future__ import annotations

from collections.abc import Sequence

from gropius.rewards.base import RewardPart
from gropius.tasks.base import TaskSet
from gropius.tasks.preflight import Finding, finding
from gropius.types import Task


def unusable_gold(tasks: TaskSet, parts: Sequence[RewardPart]) -> list[Finding]:
    """Rows whose gold answer the verifier `math` cannot read, or whose tests the reward `code` cannot ask."""
    every = [*tasks.train, *tasks.held_out]
    names = {part.name.partition(".")[0] for part in parts if not part.own}
    found = []
    for name, fault_of, what in (("math", _of_answer, "gold answers"), ("code", _of_tests, "tests")):
        faults = {task.key: fault for task in every if name in names and (fault := fault_of(task))}
        if faults:
            first = next(iter(faults.values()))
            found.append(
                finding(f"unparsable {what}",
                        f"{len(faults)} of {len(every)} rows have {what} that the reward {name} cannot use: {first}",
                        "mend the rows, or leave them out: their verdicts would be void", faults)
            )  # fmt: skip
    return found


def _of_answer(task: Task) -> str:
    from gropius.rewards.answers.errors import AnswerError
    from gropius.rewards.math import read_gold

    if task.answer is None or not task.answer.strip():
        return "no answer"
    try:
        read_gold(task.answer)
    except AnswerError as problem:
        return problem.reason
    return ""


def _of_tests(task: Task) -> str:
    from gropius.rewards.code import read_tests

    try:
        read_tests(task)
    except ValueError as problem:
        return str(problem)
    return ""
