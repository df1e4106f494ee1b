"""Whole-number arithmetic: endless for a tiny character model, a small times table for an instruct model. No torch."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import product

from gropius.errors import DataError
from gropius.tasks.base import TaskSet, answer_of, fingerprint, require_choice, require_range, rows_pair
from gropius.types import Task


def arithmetic(
    *,
    seed: int = 0,
    operators: str = "+",
    digits: int = 2,
    terms: int = 2,
    rows: Sequence[int] = (4000, 200),
    style: str = "bare",
) -> TaskSet:
    """Sums, differences and products of whole numbers, `*` before `+` and `-`.

    operators: a subset of "+-*". digits: operands are 0 .. 10^digits - 1 (1 to 6). terms: operands in one task
    (2 to 8). rows: tasks to train on and held-out tasks, all different, drawn without replacement from the
    10^(digits·terms) · |operators|^(terms-1) that exist. style: "bare" is `37+58=` with the answer `95`, for a
    character model; "question" is a sentence for an instruct model. `37+58` and `58+37` are two tasks.
    Raises DataError for an option out of range and when more rows are asked than exist.
    """
    require_range("arithmetic: digits", digits, 1, 6)
    require_range("arithmetic: terms", terms, 2, 8)
    require_choice("arithmetic: style", style, ("bare", "question"))
    if not operators or set(operators) - set("+-*") or len(set(operators)) != len(operators):
        raise DataError(f'arithmetic: operators = "{operators}"; write some of + - *, each once')
    wanted, kept_out = rows_pair("arithmetic", rows)
    space = 10 ** (digits * terms) * len(operators) ** (terms - 1)
    if wanted + kept_out > space:
        raise DataError(
            f"arithmetic: rows = {wanted} + {kept_out}, but only {space} different tasks exist with digits = {digits}, "
            f'terms = {terms}, operators = "{operators}"; ask for fewer or raise digits'
        )
    drawn = random.Random(f"{seed}:arithmetic").sample(range(space), wanted + kept_out)
    tasks = [_arithmetic_task(index, operators, digits, terms, style) for index in drawn]
    train, held_out = tuple(tasks[kept_out:]), tuple(tasks[:kept_out])
    return TaskSet(
        name="arithmetic",
        train=train,
        held_out=held_out,
        solution=answer_of,
        environment=None,
        rewards=("exact",) if style == "bare" else ("math",),
        system_prompt=None,
        notes=(f"arithmetic: {wanted} train and {kept_out} held-out of {space} different tasks",),
        fingerprint=fingerprint(train, held_out),
    )


def evaluate(numbers: Sequence[int], operators: Sequence[str]) -> int:
    """The value of n₀ o₀ n₁ o₁ n₂ …, with `*` before `+` and `-`.

    >>> evaluate([2, 3, 4], ["+", "*"])
    14
    """
    total, sign, factor = 0, 1, numbers[0]
    for number, operator in zip(numbers[1:], operators, strict=True):
        if operator == "*":
            factor *= number
        else:
            total, sign, factor = total + sign * factor, 1 if operator == "+" else -1, number
    return total + sign * factor


def _arithmetic_task(index: int, operators: str, digits: int, terms: int, style: str) -> Task:
    numbers, signs = [], []
    for _ in range(terms):
        index, number = divmod(index, 10**digits)
        numbers.append(number)
    for _ in range(terms - 1):
        index, place = divmod(index, len(operators))
        signs.append(operators[place])
    pieces = [str(numbers[0])]
    for sign, number in zip(signs, numbers[1:], strict=True):
        pieces += [sign, str(number)]
    prompt = "".join(pieces) + "=" if style == "bare" else f"What is {' '.join(pieces)}? Reply with the number only."
    return Task(f"arithmetic:{''.join(pieces)}", prompt, str(evaluate(numbers, signs)))


def times_table(*, seed: int = 0, low: int = 2, high: int = 12, held_out: int = 30) -> TaskSet:
    """Every ordered pair A, B in low..high: `What is A times B? Reply with the number only.`

    held_out: ordered pairs kept out of training, drawn by the seed. With the defaults 121 pairs, 30 of them held out.
    Raises DataError when the range is empty or nothing is left to train on.
    """
    require_range("times_table: low", low, 0, 999)
    require_range("times_table: high", high, low, 999)
    pairs = list(product(range(low, high + 1), repeat=2))
    require_range("times_table: held_out", held_out, 0, len(pairs) - 1)
    unseen = set(random.Random(f"{seed}:times_table").sample(pairs, held_out))
    tasks = {pair: _times_task(*pair) for pair in pairs}
    train = tuple(task for pair, task in tasks.items() if pair not in unseen)
    kept_out = tuple(task for pair, task in tasks.items() if pair in unseen)
    return TaskSet(
        name="times_table",
        train=train,
        held_out=kept_out,
        solution=answer_of,
        environment=None,
        rewards=("math",),
        system_prompt=None,
        notes=(f"times_table: {len(train)} ordered pairs to train on, {len(kept_out)} unseen pairs held out",),
        fingerprint=fingerprint(train, kept_out),
    )


def _times_task(a: int, b: int) -> Task:
    return Task(f"times_table:{a}x{b}", f"What is {a} times {b}? Reply with the number only.", str(a * b))
