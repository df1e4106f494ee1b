"""Scores that fall at places of an episode: checked as a function returns them, then brought to tokens. No torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from gropius.errors import RewardError
from gropius.types import Episode, Outcome, Step, Verdict

if TYPE_CHECKING:
    from gropius.rewards.base import RewardPart

TOLERANCE = 1e-9
Decode = Callable[[Sequence[int]], str]


def require_places(part: RewardPart, episode: Episode, outcome: Outcome) -> None:
    """Errors: RewardError for a score that is not finite, a place outside the episode, or scores that miss the value.

    A place in an episode without a turn of the model, or a rejection with places, is an error too.
    """
    if not outcome.places:
        return
    where = f"{part.label()} for group {episode.group_id} member {episode.member} (task {episode.task.key})"
    texts = [turn.text for turn in episode.turns if turn.role == "model"]
    if outcome.status != "scored":
        raise RewardError(f"{where}: a {outcome.status} outcome has no places; return placed(...) or a plain outcome")
    for place in outcome.places:
        if not math.isfinite(place.score):
            raise RewardError(f"{where}: a score of {place.score} has a place; return finite scores")
        if not -len(texts) <= place.turn < len(texts):
            raise RewardError(f"{where}: a score falls in turn {place.turn} and the model has {len(texts)}")
        if place.characters is not None and not 0 < place.characters <= len(texts[place.turn]):
            raise RewardError(
                f"{where}: a step ends after {place.characters} characters of turn {place.turn}, which has "
                f"{len(texts[place.turn])}"
            )
    total = math.fsum(place.score for place in outcome.places)
    if abs(total - float(outcome.value or 0.0)) > TOLERANCE * max(1.0, abs(total)):
        raise RewardError(
            f"{where}: the placed scores add up to {total:g} and the value is {outcome.value}; use placed(...)"
        )


def on_tokens(episode: Episode, verdict: Verdict, decode: Decode) -> Verdict:
    """The verdict with the token of every step: the first whose prefix decodes to all of the step's text.

    decode: token ids → text, as the turn's text was made.
    """
    if not verdict.steps:
        return verdict
    return replace(verdict, steps=tuple(replace(s, token=_token(episode, s, decode)) for s in verdict.steps))


def _token(episode: Episode, step: Step, decode: Decode) -> int:
    starts, start = [], 0
    for turn in episode.turns:
        if turn.role == "model":
            starts.append((start, turn))
        start += len(turn.token_ids)
    first, turn = starts[step.place.turn]
    ids = turn.token_ids.tolist()
    if step.place.characters is None or not ids:
        return first + max(len(ids) - 1, 0)
    low, high = 0, len(ids) - 1
    while low < high:  # the text of a prefix never gets shorter with another token
        middle = (low + high) // 2
        if len(decode(ids[: middle + 1])) >= step.place.characters:
            high = middle
        else:
            low = middle + 1
    return first + low
