"""Laws of the guessing game: the answers are true, every reply costs a guess, an instance serves once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gropius.envs.guess_number import Game, GuessNumber, read_guess


def started(hidden: int = 7, low: int = 1, high: int = 15, budget: int = 4, style: str = "compact") -> GuessNumber:
    game = GuessNumber(Game(hidden, low, high, budget, style))
    game.start()
    return game


@given(st.integers(1, 15), st.integers(-50, 50))
def test_answers_are_true(hidden: int, guess: int) -> None:
    word = Game(hidden, 1, 15, 4).answer(str(guess))
    assert word == ("correct" if guess == hidden else "higher" if guess < hidden else "lower")


def test_a_right_guess_ends_the_game_with_success() -> None:
    game = started()
    assert game.step("3").messages[0]["content"] == "higher"
    step = game.step("I say 7")
    assert (step.done, step.raw, dict(step.parts)) == (True, 1.0, {"success": 1.0, "narrowing": 0.0})
    assert step.messages[0]["content"] == "correct"


@pytest.mark.parametrize("style", ["compact", "wordy"])
def test_a_reply_without_a_number_is_invalid_and_uses_a_guess(style: str) -> None:
    game = started(budget=2, style=style)
    assert game.step("no idea").messages[0]["content"].startswith("invalid")
    step = game.step("7.0")
    assert (step.done, step.raw) == (True, 0.0)
    assert step.parts["narrowing"] == 0.0


def test_the_budget_is_exact() -> None:
    game = started(budget=3)
    assert [game.step(text).done for text in ("1", "2", "3")] == [False, False, True]


def test_a_list_of_guesses_is_one_guess() -> None:
    assert read_guess("5, 6, 7, 8") == 8
    assert read_guess("9" * 40) is None
    assert read_guess("−4") == -4
    assert started().step("1 2 3 4 5 6 7 8").messages[0]["content"] == "lower"


def test_an_instance_serves_once() -> None:
    game = started(budget=1)
    with pytest.raises(RuntimeError, match="single-use"):
        game.start()
    game.step("1")
    with pytest.raises(RuntimeError, match="over"):
        game.step("1")
    with pytest.raises(RuntimeError, match="new"):
        GuessNumber(Game(7, 1, 15, 4)).step("1")


@given(st.integers(1, 15), st.lists(st.integers(-5, 25), min_size=4, max_size=4))
def test_a_failure_never_pays_more_than_half_a_success(hidden: int, guesses: list[int]) -> None:
    game = started(hidden)
    for guess in guesses:
        step = game.step(str(guess))
        if step.done:
            break
    total = sum(step.parts.values())
    assert total == 1.0 if step.raw else 0.0 <= total <= 0.5


def test_siblings_meet_the_same_game() -> None:
    game = Game(7, 1, 15, 4)
    first, second = GuessNumber(game), GuessNumber(game)
    first.start()
    first.step("3")
    assert second.start() == ({"role": "user", "content": "1-15 in 4:"},)
    assert second.used == 0
