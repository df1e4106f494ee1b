"""Games of guess-the-number: several turns, one hidden number for all siblings of a group. No torch."""

from __future__ import annotations

import random
from collections.abc import Sequence

from gropius.envs.guess_number import Game, GuessNumber
from gropius.errors import DataError
from gropius.tasks.base import TaskSet, fingerprint, require_choice, require_range, rows_pair
from gropius.types import Message, Task

STRATEGIES = ("bisect", "random", "blind")


def guess_number(
    *,
    seed: int = 0,
    between: Sequence[int] = (1, 15),
    budget: int = 4,
    rows: Sequence[int] = (512, 60),
    style: str = "compact",
    strategy: str = "random",
) -> TaskSet:
    """Find a hidden number within a budget of guesses; each is answered "higher", "lower" or "correct".

    between: [low, high], both included, -9999..9999. budget: guesses (1 to 64); bisection finds every one of
    2^budget - 1 numbers. rows: games to train on and held-out games; both halves go through all the numbers evenly,
    so a held-out game has a number that training had too (the prompt does not tell it: nothing can be learnt by
    heart). style: "compact" (`1-15 in 4:`) for a character model, "wordy" for an instruct model. strategy of the
    demonstrations: "bisect" (best), "random" (any number still possible: leaves something to learn), "blind" (any
    number of the range, hints ignored). A demonstration may fail; it ends when the game does. The answer is the
    hidden number. Raises DataError for an option out of range.
    """
    low, high = _range(between)
    require_range("guess_number: budget", budget, 1, 64)
    require_choice("guess_number: style", style, ("compact", "wordy"))
    require_choice("guess_number: strategy", strategy, STRATEGIES)
    wanted, kept_out = rows_pair("guess_number", rows)
    train = _games("train", wanted, Game(low, low, high, budget, style), seed)
    held_out = _games("held_out", kept_out, Game(low, low, high, budget, style), seed)
    return TaskSet(
        name="guess_number",
        train=train,
        held_out=held_out,
        solution=lambda task: play(game_of(task), strategy, random.Random(f"{seed}:{task.key}:{strategy}")),
        environment=lambda task: GuessNumber(game_of(task)),
        rewards=("environment",),
        system_prompt=None,
        notes=(f"guess_number: {low}..{high} in {budget} guesses; {wanted} train games, {kept_out} held-out games",),
        fingerprint=fingerprint(train, held_out),
        blocking=False,
    )


def game_of(task: Task) -> Game:
    """The game that a task of `guess_number` describes."""
    return Game(**task.metadata)


def play(game: Game, strategy: str, draw: random.Random) -> tuple[Message, ...]:
    """A demonstration: guesses (role "assistant") and answers (role "user") in turn, until the game is over.

    It begins and ends with a guess; the closing answer is left out, as nothing is said after it.
    """
    environment = GuessNumber(game)
    environment.start()
    low, high = game.low, game.high
    said: list[Message] = []
    while True:
        guess = _guess(strategy, low, high, game, draw)
        said.append({"role": "assistant", "content": str(guess)})
        step = environment.step(str(guess))
        if step.done:
            return tuple(said)
        said.extend(step.messages)
        if game.answer(str(guess)) == "higher":
            low = max(low, guess + 1)
        else:
            high = min(high, guess - 1)


def _guess(strategy: str, low: int, high: int, game: Game, draw: random.Random) -> int:
    if strategy == "bisect":
        return (low + high) // 2
    if strategy == "random":
        return draw.randint(low, high)
    return draw.randint(game.low, game.high)


def _games(half: str, count: int, game: Game, seed: int) -> tuple[Task, ...]:
    draw = random.Random(f"{seed}:guess_number:{half}")
    hidden: list[int] = []
    while len(hidden) < count:
        numbers = list(range(game.low, game.high + 1))
        draw.shuffle(numbers)
        hidden += numbers
    tasks = []
    for index, number in enumerate(hidden[:count]):
        metadata = {"hidden": number, "low": game.low, "high": game.high, "budget": game.budget, "style": game.style}
        tasks.append(Task(f"guess_number:{half}:{index:05d}", game.opening(), str(number), metadata))
    return tuple(tasks)


def _range(between: Sequence[int]) -> tuple[int, int]:
    whole = isinstance(between, (list, tuple)) and all(isinstance(n, int) and not isinstance(n, bool) for n in between)
    if not whole or len(between) != 2 or not -9999 <= between[0] < between[1] <= 9999:
        raise DataError(f"guess_number: between = {between!r}; write [low, high] with low < high, for example [1, 15]")
    return between[0], between[1]
