"""Laws of the seeded task sets: reproducible, disjoint, right by construction."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gropius.envs.guess_number import GuessNumber
from gropius.errors import DataError
from gropius.tasks import TASKS
from gropius.tasks.arithmetic import arithmetic, evaluate, times_table
from gropius.tasks.base import TaskSet, fingerprint
from gropius.tasks.countdown import countdown
from gropius.tasks.guess_number import STRATEGIES, game_of, guess_number
from gropius.types import Task

SMALL = {
    "arithmetic": {"rows": (50, 10)},
    "times_table": {},
    "countdown": {"rows": (40, 10)},
    "guess_number": {"rows": (40, 15)},
}


@pytest.mark.parametrize("name", sorted(SMALL))
def test_same_seed_same_set_and_other_seed_another(name: str) -> None:
    build, options = TASKS[name], SMALL[name]
    assert build(seed=3, **options).fingerprint == build(seed=3, **options).fingerprint
    assert build(seed=3, **options).fingerprint != build(seed=4, **options).fingerprint


@pytest.mark.parametrize("name", ["arithmetic", "times_table", "countdown"])
def test_no_held_out_prompt_is_trained_on(name: str) -> None:
    tasks = TASKS[name](seed=1, **SMALL[name])
    assert not {t.prompt for t in tasks.train} & {t.prompt for t in tasks.held_out}
    assert len({t.prompt for t in tasks.train}) == len(tasks.train)


@pytest.mark.parametrize("name", sorted(SMALL))
def test_every_task_has_a_demonstration_that_ends_with_the_model(name: str) -> None:
    tasks = TASKS[name](seed=1, **SMALL[name])
    for task in tasks.train:
        said = tasks.demonstration(task)
        assert said[-1]["role"] == "assistant"
        assert [m["role"] for m in said] == ["assistant", "user"] * (len(said) // 2) + ["assistant"]


def test_arithmetic_bare_is_the_sum_and_its_answer() -> None:
    tasks = arithmetic(seed=0, rows=(100, 20))
    for task in tasks.train:
        left, right = str(task.prompt).removesuffix("=").split("+")
        assert int(left) + int(right) == int(task.answer or "")
        assert max(int(left), int(right)) < 100
    assert tasks.rewards == ("exact",)
    assert (len(tasks.train), len(tasks.held_out)) == (100, 20)


def test_arithmetic_question_is_a_sentence() -> None:
    task = arithmetic(rows=(5, 0), operators="-", style="question").train[0]
    assert str(task.prompt).startswith("What is ")
    assert str(task.prompt).endswith("? Reply with the number only.")


def test_arithmetic_can_use_every_task_that_exists_and_no_more() -> None:
    tasks = arithmetic(digits=1, rows=(90, 10))
    assert len({t.key for t in (*tasks.train, *tasks.held_out)}) == 100
    with pytest.raises(DataError, match="only 100 different tasks"):
        arithmetic(digits=1, rows=(91, 10))


@settings(deadline=None)
@given(st.lists(st.integers(0, 99), min_size=2, max_size=6), st.randoms(use_true_random=False))
def test_products_come_before_sums(numbers: list[int], draw: random.Random) -> None:
    signs = [draw.choice("+-*") for _ in numbers[1:]]
    groups, sums = [numbers[0]], []
    for sign, number in zip(signs, numbers[1:], strict=True):
        if sign == "*":
            groups[-1] *= number
        else:
            sums.append(sign)
            groups.append(number)
    expected = groups[0] + sum(g if s == "+" else -g for s, g in zip(sums, groups[1:], strict=True))
    assert evaluate(numbers, signs) == expected


def test_times_table_is_121_ordered_pairs_with_30_unseen() -> None:
    tasks = times_table(seed=5)
    prompts = [t.prompt for t in (*tasks.train, *tasks.held_out)]
    expected = {f"What is {a} times {b}? Reply with the number only." for a in range(2, 13) for b in range(2, 13)}
    assert set(prompts) == expected
    assert (len(tasks.train), len(tasks.held_out)) == (91, 30)
    assert all(int(t.answer or 0) == int(t.key[12:].split("x")[0]) * int(t.key.split("x")[1]) for t in tasks.train)


@pytest.mark.parametrize(
    ("build", "options", "words"),
    [
        (arithmetic, {"operators": "+/"}, "operators"),
        (arithmetic, {"operators": ""}, "operators"),
        (arithmetic, {"digits": 0}, "digits"),
        (arithmetic, {"style": "poem"}, "choose from"),
        (arithmetic, {"rows": 7}, r"\[train, held_out\]"),
        (arithmetic, {"rows": (0, 7)}, r"\[train, held_out\]"),
        (times_table, {"low": 9, "high": 3}, "high"),
        (times_table, {"held_out": 121}, "held_out"),
        (countdown, {"count": 1}, "count"),
        (countdown, {"count": 2, "highest": 1, "rows": (50, 5)}, "only . different tasks"),
        (guess_number, {"between": (5, 5)}, "low < high"),
        (guess_number, {"budget": 0}, "budget"),
        (guess_number, {"strategy": "psychic"}, "choose from"),
    ],
)
def test_senseless_options_are_refused_with_their_name(build: object, options: dict[str, object], words: str) -> None:
    with pytest.raises(DataError, match=words):
        build(**options)  # type: ignore[operator]


@pytest.mark.parametrize("style", ["compact", "wordy"])
def test_guess_number_prompt_is_what_the_environment_opens_with(style: str) -> None:
    tasks = guess_number(rows=(6, 3), between=(3, 40), budget=5, style=style)
    assert tasks.environment is not None
    for task in tasks.train:
        assert tuple(tasks.environment(task).start()) == task.messages()
        for number in ("3", "40", "5"):
            assert number in str(task.prompt)
        assert 3 <= int(task.answer or 0) <= 40


def test_guess_number_prompt_does_not_tell_the_number() -> None:
    assert len({t.prompt for t in guess_number(rows=(30, 0)).train}) == 1


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_demonstrations_replay_against_the_environment(strategy: str) -> None:
    tasks = guess_number(rows=(60, 0), strategy=strategy)
    wins = 0
    for task in tasks.train:
        game = GuessNumber(game_of(task))
        game.start()
        said = list(tasks.demonstration(task))
        for reply, answer in zip(said[::2], [*said[1::2], None], strict=True):
            step = game.step(reply["content"])
            assert step.done == (answer is None)
            assert answer is None or step.messages[0] == answer
        wins += int(step.raw or 0)
        assert tasks.demonstration(task) == tuple(said)
    assert (wins == 60) == (strategy == "bisect")


def test_the_random_strategy_never_says_what_is_ruled_out() -> None:
    tasks = guess_number(rows=(200, 0), budget=8)
    for task in tasks.train:
        guesses = [int(m["content"]) for m in tasks.demonstration(task) if m["role"] == "assistant"]
        hidden = int(task.answer or 0)
        below, above = [g for g in guesses if g < hidden], [g for g in guesses if g > hidden]
        assert below == sorted(set(below))
        assert above == sorted(set(above), reverse=True)
        assert guesses[-1] == hidden or len(guesses) == 8


def test_keys_of_both_halves_must_differ() -> None:
    twin = Task("a", "1+1=", "2")
    with pytest.raises(DataError, match='key "a"'):
        TaskSet("x", (twin,), (twin,), None, None, (), None, (), fingerprint([twin], [twin]))
    with pytest.raises(DataError, match="no tasks"):
        TaskSet("x", (), (twin,), None, None, (), None, (), "")


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 6))
def test_countdown_targets_are_whole_and_in_range(seed: int, count: int) -> None:
    for task in countdown(seed=seed, count=count, rows=(5, 1), target_highest=50, style="bare").train:
        assert 1 <= task.metadata["target"] <= 50
        assert len(task.metadata["numbers"]) == count
        assert task.prompt == f"{' '.join(map(str, task.metadata['numbers']))} = {task.metadata['target']}:"
