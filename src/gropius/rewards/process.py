"""Process rewards: scores that fall where a step or a turn ends. Each sees the episode and returns places. No torch."""

from __future__ import annotations

import math
import re
from fractions import Fraction
from typing import Any

from gropius.envs.guess_number import read_guess
from gropius.errors import RecipeError
from gropius.rewards.base import Reward
from gropius.types import Episode, Outcome, Place, placed, void

_NUMBER = r"[-−]?\d+(?:,\d{3})*(?:\.\d+)?"
_EQUATION = re.compile(rf"({_NUMBER})\s*([-+−*×·/÷])\s*({_NUMBER})\s*=\s*({_NUMBER})")
_MOST_DIGITS = 18
MEASURES = ("distance", "interval")


def arithmetic_steps(*, right: float = 1.0, wrong: float = -1.0, limit: int = 16) -> Reward:
    """`right` or `wrong` at the end of every `a op b = c` in the replies, checked as exact rationals.

    op is + − × · * / ÷; thousands may have commas; GSM8K's <<48/2=24>> is such a step. The result of a division may be
    rounded to the decimals it is written with. A step written twice counts once; at most `limit` steps count, the
    first ones. No step: 0 without places. What was checked stands in the notes.
    """
    if limit < 1:
        raise RecipeError(f"reward arithmetic_steps: limit = {limit}; write a number of steps, at least 1")

    def _score(episode: Episode) -> Outcome:
        places: list[Place] = []
        seen: set[str] = set()
        for number, text in enumerate(turn.text for turn in episode.turns if turn.role == "model"):
            for found in _EQUATION.finditer(text):
                step = re.sub(r"\s", "", found.group())
                if step in seen or len(places) >= limit or max(map(len, found.groups())) > _MOST_DIGITS:
                    continue
                seen.add(step)
                holds = _holds(*found.groups())
                note = f"{step[:60]} {'holds' if holds else 'does not hold'}"
                places.append(Place(right if holds else wrong, number, found.end(), note))
        return placed(places, f"{sum(p.score == right for p in places)} of {len(places)} steps hold")

    return _score


def _holds(a: str, operation: str, b: str, c: str) -> bool:
    left, second, result = (_exact(text) for text in (a, b, c))
    if operation in "/÷":
        if second == 0:
            return False
        decimals = len(c.partition(".")[2])
        return abs(left / second - result) <= (Fraction(1, 2 * 10**decimals) if decimals else 0)
    value = {"+": left + second, "*": left * second, "×": left * second, "·": left * second}.get(
        operation, left - second
    )
    return value == result


def _exact(text: str) -> Fraction:
    return Fraction(text.replace(",", "").replace("−", "-"))


def guess_progress(*, measure: str = "distance") -> Reward:
    """How much nearer each guess of `guess_number` brings the game to its hidden number, at the end of its turn.

    distance: (d before − d after)/(n − 1), d = |guess − hidden| of the last valid guess, n − 1 before any; n numbers in
    the range. interval: (ln of the numbers still possible before − after)/ln n; a right guess leaves one. An invalid
    guess scores 0. The scores of an episode add up to at most 1. A task that is no such game is void.
    """
    if measure not in MEASURES:
        raise RecipeError(f'reward guess_progress: measure = "{measure}"; write "distance" or "interval"')

    def _score(episode: Episode) -> Outcome:
        game = _game(episode.task.metadata)
        if game is None:
            return void("the task is no game of guess_number: its metadata lacks hidden, low and high")
        hidden, low, high = game
        guesses = [read_guess(turn.text) for turn in episode.turns if turn.role == "model"]
        potentials = _distances(guesses, hidden, high - low) if measure == "distance" else _logs(guesses, game)
        places = [
            Place(before - after, turn, note=f"guess {guesses[turn]}: {before:.3f} -> {after:.3f}")
            for turn, (before, after) in enumerate(zip([1.0, *potentials], potentials, strict=False))
        ]
        return placed(places, f"{1.0 - potentials[-1]:.3f} of the way" if potentials else "no guess")

    return _score


def _game(metadata: Any) -> tuple[int, int, int] | None:
    values = [metadata.get(name) for name in ("hidden", "low", "high")]
    if any(not isinstance(v, int) or isinstance(v, bool) for v in values) or not values[1] <= values[0] <= values[2]:
        return None
    return (values[0], values[1], values[2]) if values[1] < values[2] else None


def _distances(guesses: list[int | None], hidden: int, width: int) -> list[float]:
    out, last = [], 1.0
    for guess in guesses:
        last = last if guess is None else min(abs(guess - hidden) / width, 1.0)
        out.append(last)
    return out


def _logs(guesses: list[int | None], game: tuple[int, int, int]) -> list[float]:
    hidden, low, high = game
    size, out = math.log(high - low + 1), []
    for guess in guesses:
        if guess is not None:
            low, high = (
                (guess, guess)
                if guess == hidden
                else ((max(low, guess + 1), high) if guess < hidden else (low, min(high, guess - 1)))
            )
        out.append(math.log(high - low + 1) / size)
    return out
