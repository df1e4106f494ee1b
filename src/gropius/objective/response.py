"""What the objective sees of a response, and what it answers. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from gropius.objective.advantage import Credit
from gropius.objective.aggregate import Layout
from gropius.types import Status

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]
GroupState = Literal["informative", "all_failed", "all_solved", "all_equal", "singleton", "too_few_valid"]


@dataclass(frozen=True, eq=False)
class Response:
    """One response as the objective sees it. Every per-token array has length T (environment tokens included).

    group: explicit id. reward: a number, named parts, or None when void; without what `steps` holds. mask: True at the
    model's own tokens. raw: the unshaped task metric that selection looks at; None means reward and steps. advantage:
    overrides the computed one, a number or one per token. anchor, reference: log-probabilities, for a KL in the reward.
    entropy: of the anchor, for `entropy_top`. kept: False where the sampler correction masked the token, for
    `count_corrected = false`. member: its number among its siblings. steps: (token, score) of rewards with a position.
    values: of a critic, before each token. energy: 1 − 2π + Σ π², for `optimal_token`. policy: log-probabilities of the
    policy at this update, where `objective.needs_fresh`. origin: the member that drew each token, where siblings branch
    from one another. demonstration: a teacher wrote it. turns: the model's turn of each token; None: a turn is a run of
    own tokens.
    """

    group: str
    reward: float | Mapping[str, float] | None
    mask: Mask
    status: Status = "scored"
    truncated: bool = False
    raw: float | None = None
    advantage: float | Array | None = None
    anchor: Array | None = None
    reference: Array | None = None
    entropy: Array | None = None
    kept: Mask | None = None
    greedy_reward: float | None = None
    member: int = 0
    steps: Sequence[tuple[int, float]] = ()
    values: Array | None = None
    energy: Array | None = None
    policy: Array | None = None
    origin: NDArray[np.int64] | None = None
    demonstration: bool = False
    turns: NDArray[np.int64] | None = None


@dataclass(frozen=True, eq=False)
class Assigned:
    """What one response brings to the loss. advantage, weight, keep [T]; value: the response's advantage before any
    per-token part; skipped: adds nothing to the gradient and need not be run. Absent where the objective has none:
    penalised [T]: tokens with a penalty on |log r|; imitation [T]: weight of −log π; offset [T]: the value that
    surrogate `classify` has beside its slope; returns [T]: what a critic should have said. trains [T]: False at tokens
    that another branch trains. demonstration: a teacher wrote it."""

    advantage: Array
    weight: Array
    keep: Mask
    value: float
    skipped: bool
    reward: float | None
    penalised: Mask | None = None
    imitation: Array | None = None
    offset: Array | None = None
    returns: Array | None = None
    trains: Mask | None = None
    demonstration: bool = False


@dataclass(frozen=True, eq=False)
class GroupSummary:
    """One group: its id, its statistics over valid shaped rewards, its state, and whether selection dropped it."""

    id: str
    mean: float | None
    std: float | None
    state: GroupState
    dropped: bool


@dataclass(frozen=True, eq=False)
class Assignment:
    """Responses in the order given, groups in order of first appearance, and the denominators."""

    responses: list[Assigned]
    groups: list[GroupSummary]
    layout: Layout
    credit: Credit
