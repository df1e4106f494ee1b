"""Why an answer was not accepted: a small fixed set of reasons, so that a run can count them."""

from __future__ import annotations

EMPTY = "no answer: the reply is empty"
ONLY_THINKING = "no answer outside the thinking"
NO_FINAL = "no final answer"
SEVERAL = "several answers"
NEGATED = "the answer is negated"
HEDGED = "the answer is hedged"
UNPARSABLE = "the answer cannot be read"
TOO_LARGE = "the answer is too large to evaluate"
UNSIMPLIFIED = "the answer is not simplified"
FORM = "right value in the wrong form"
UNIT = "wrong unit"
WRONG = "wrong value"

REASONS = (
    EMPTY,
    ONLY_THINKING,
    NO_FINAL,
    SEVERAL,
    NEGATED,
    HEDGED,
    UNPARSABLE,
    TOO_LARGE,
    UNSIMPLIFIED,
    FORM,
    UNIT,
    WRONG,
)


class AnswerError(Exception):
    """An answer that cannot be used; `reason` is one of REASONS. Never leaves the rewards room."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
