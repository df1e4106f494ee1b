"""Guess the number: one hidden number, a budget of guesses, and the answers "higher", "lower", "correct". No torch."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from gropius.types import EnvironmentStep, Message

_NUMBER = re.compile(r"(?<![\d.])[-−]?\d+(?:\.\d+)?")
_MOST_DIGITS = 12
SHARE_OF_NARROWING = 0.5


@dataclass(frozen=True)
class Game:
    """What all siblings of a group share. hidden lies in low..high, both included; budget: guesses allowed."""

    hidden: int
    low: int
    high: int
    budget: int
    style: str = "compact"

    def opening(self) -> str:
        """The first message: the range and the budget. "compact" suits a character model, "wordy" an instruct model.

        >>> Game(7, 1, 15, 4).opening()
        '1-15 in 4:'
        """
        if self.style == "compact":
            return f"{self.low}-{self.high} in {self.budget}:"
        return (
            f"I have chosen a whole number from {self.low} to {self.high}. You have {self.budget} guesses. "
            'After each guess I say "higher" (my number is higher), "lower" or "correct". '
            "Reply with one number only. Your first guess?"
        )

    def answer(self, reply: str) -> str:
        """What is said to a reply: "higher", "lower", "correct", or "invalid" when it holds no whole number.

        The last number of the reply is the guess, so a list of guesses is one guess. Numbers outside the range are
        answered like any other; one of more than 12 digits, or with decimals, is invalid.

        >>> [Game(7, 1, 15, 4).answer(text) for text in ("3", "I say 12.", "7", "no idea")]
        ['higher', 'lower', 'correct', 'invalid']
        """
        guess = read_guess(reply)
        if guess is None:
            return "invalid"
        return "correct" if guess == self.hidden else "higher" if guess < self.hidden else "lower"


def read_guess(reply: str) -> int | None:
    """The last number of a reply when it is a whole one of at most 12 digits; None otherwise.

    >>> read_guess("between 3 and 9: 6"), read_guess("6.5"), read_guess("")
    (6, None, None)
    """
    found = None
    for found in _NUMBER.finditer(reply):  # noqa: B007 (the last match is what is wanted)
        pass
    if found is None or "." in found.group() or len(found.group()) > _MOST_DIGITS:
        return None
    return int(found.group().replace("−", "-"))


@dataclass
class GuessNumber:
    """One game, to be played once. `start` gives the prompt; every `step` uses one guess, an invalid one too.

    The last step has `done`, the closing word as its message (for a person and the record; the model need not see it),
    raw 1 for success and 0 otherwise, and the parts `success` (the same) and `narrowing`: after a failure
    0.5 · ln(n / n_left) / ln(n), n numbers in the range and n_left still possible; 0 after a success, so that the sum
    of the parts lies in 0..1 and a failure never pays more than half a success. A step after the end is a RuntimeError.
    """

    game: Game
    used: int = 0
    _low: int = field(init=False)
    _high: int = field(init=False)
    _state: str = field(init=False, default="new")

    def __post_init__(self) -> None:
        self._low, self._high = self.game.low, self.game.high

    def start(self) -> Sequence[Message]:
        """The opening message. A second start is a RuntimeError: an environment is single-use."""
        if self._state != "new":
            raise RuntimeError("this game was started before; an environment is single-use, make a new one")
        self._state = "playing"
        return ({"role": "user", "content": self.game.opening()},)

    def step(self, reply: str) -> EnvironmentStep:
        """Answer one reply and count it against the budget."""
        if self._state != "playing":
            raise RuntimeError(f"this game is {self._state}; start an environment once and step it until it is over")
        self.used += 1
        word = self.game.answer(reply)
        guess = read_guess(reply)
        if word == "higher" and guess is not None:
            self._low = max(self._low, guess + 1)
        elif word == "lower" and guess is not None:
            self._high = min(self._high, guess - 1)
        over = word == "correct" or self.used >= self.game.budget
        message: Message = {"role": "user", "content": self._wording(word)}
        if not over:
            return EnvironmentStep((message,))
        self._state = "over"
        success = float(word == "correct")
        parts = {"success": success, "narrowing": 0.0 if success else self._narrowing()}
        return EnvironmentStep((message,), done=True, parts=parts, raw=success)

    def _wording(self, word: str) -> str:
        if word == "invalid" and self.game.style == "wordy":
            return f"invalid: reply with one whole number from {self.game.low} to {self.game.high}"
        return word

    def _narrowing(self) -> float:
        size, left = self.game.high - self.game.low + 1, self._high - self._low + 1
        return SHARE_OF_NARROWING * math.log(size / left) / math.log(size) if size > 1 else 0.0
