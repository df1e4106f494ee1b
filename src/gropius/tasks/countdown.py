"""Countdown: make a target from given numbers with + - * / and parentheses, each number used exactly once. No torch."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from gropius.errors import DataError
from gropius.tasks.base import TaskSet, answer_of, fingerprint, require_choice, require_range, rows_pair
from gropius.types import Task

_STRENGTH = {"+": 1, "-": 1, "*": 2, "/": 2}
_ATTEMPTS_PER_ROW = 200


@dataclass(frozen=True)
class _Term:
    """An expression, its exact value, and how tightly its outermost operator binds (3: a number or parentheses)."""

    text: str
    value: Fraction
    strength: int


def countdown(
    *,
    seed: int = 0,
    count: int = 4,
    highest: int = 20,
    target_highest: int = 100,
    rows: Sequence[int] = (2000, 200),
    style: str = "question",
) -> TaskSet:
    """Numbers and a target that can be made from them; a solution exists by construction.

    count: numbers in one task (2 to 6), drawn from 1..highest with repetition. target_highest: targets are whole
    numbers 1..target_highest. rows: tasks to train on and held out; no two share both their sorted numbers and their
    target. style: "question" is a sentence for an instruct model; "bare" is `3 7 8 2 = 24:` for a character model.
    Metadata: `numbers` (list), `target`. The answer is the solution found while building; any other right expression
    scores the same. Raises DataError for an option out of range or when so many different tasks cannot be found.
    """
    require_range("countdown: count", count, 2, 6)
    require_range("countdown: highest", highest, 1, 9999)
    require_range("countdown: target_highest", target_highest, 1, 999_999)
    require_choice("countdown: style", style, ("question", "bare"))
    wanted, kept_out = rows_pair("countdown", rows)
    draw = random.Random(f"{seed}:countdown")
    found: dict[str, Task] = {}
    for _ in range(_ATTEMPTS_PER_ROW * (wanted + kept_out)):
        if len(found) == wanted + kept_out:
            break
        numbers = [draw.randint(1, highest) for _ in range(count)]
        term = _combine(numbers, draw)
        if term is not None and term.value.denominator == 1 and 1 <= term.value <= target_highest:
            task = _countdown_task(numbers, int(term.value), term.text, style)
            found.setdefault(task.key, task)
    if len(found) < wanted + kept_out:
        raise DataError(
            f"countdown: rows = {wanted} + {kept_out}, but only {len(found)} different tasks were found with "
            f"count = {count}, highest = {highest}, target_highest = {target_highest}; ask for fewer or raise these"
        )
    tasks = tuple(found.values())
    train, held_out = tasks[kept_out:], tasks[:kept_out]
    return TaskSet(
        name="countdown",
        train=train,
        held_out=held_out,
        solution=answer_of,
        environment=None,
        rewards=("countdown",),
        system_prompt=None,
        notes=(f"countdown: {wanted} train and {kept_out} held-out tasks of {count} numbers, each with a solution",),
        fingerprint=fingerprint(train, held_out),
    )


def _combine(numbers: Sequence[int], draw: random.Random) -> _Term | None:
    """A random expression over all the numbers; None when it divides by zero."""
    terms = [_Term(str(n), Fraction(n), 3) for n in numbers]
    while len(terms) > 1:
        left = terms.pop(draw.randrange(len(terms)))
        right = terms.pop(draw.randrange(len(terms)))
        operator = draw.choice("+-*/")
        if operator == "/" and right.value == 0:
            return None
        terms.append(_join(left, operator, right))
    return terms[0]


def _join(left: _Term, operator: str, right: _Term) -> _Term:
    strength = _STRENGTH[operator]
    left_text = f"({left.text})" if left.strength < strength else left.text
    closed = right.strength > strength or (right.strength == strength and operator in "+*")
    right_text = right.text if closed else f"({right.text})"
    a, b = left.value, right.value
    value = a + b if operator == "+" else a - b if operator == "-" else a * b if operator == "*" else a / b
    return _Term(left_text + operator + right_text, value, strength)


def _countdown_task(numbers: Sequence[int], target: int, solution: str, style: str) -> Task:
    key = f"countdown:{','.join(str(n) for n in sorted(numbers))}={target}"
    if style == "bare":
        prompt = f"{' '.join(str(n) for n in numbers)} = {target}:"
    else:
        prompt = (
            f"Make {target} from the numbers {', '.join(str(n) for n in numbers)}. Use every number exactly once, with "
            "+ - * / and parentheses. Reply with the expression only."
        )
    return Task(key, prompt, solution, {"numbers": list(numbers), "target": target})
