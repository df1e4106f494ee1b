"""Siblings as a classification: right ones should have gained probability, wrong ones lost it. No torch.

    s_i = mean_t(log π − log π_anchor)
    L_g = log(1 + Σ_{right} e^{−s_i/τ}) + log(1 + Σ_{wrong} e^{s_i/τ})        loss = mean over groups of L_g

The loss looks at a whole group at once. It is brought to a weighted sum of token terms at the policy as it is:
value_t + A_t (log π_t − sg log π_t), whose value and gradient are those of the loss. Source: REAL 2602.05630.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from gropius.errors import ObjectiveError
from gropius.objective.aggregate import Layout
from gropius.objective.response import Response

Array = NDArray[np.float64]


def classify(
    responses: Sequence[Response], right: Sequence[bool], layout: Layout, weights: Sequence[Array], tau: float
) -> tuple[list[Array], list[Array]]:
    """([T_i] A, [T_i] value) such that Σ_t weight_t · −(value_t + A_t (log π_t − sg log π_t)) is the loss.

    right: per response. weights: of the aggregate. Needs `policy`, and `anchor` where it is not the policy itself.
    Groups of one kind only have a loss and a gradient too. Errors: ObjectiveError for a response without `policy`.
    """
    live = [i for i, trained in enumerate(layout.trained) if trained.any()]
    scores = {i: _score(responses[i], layout.trained[i]) for i in live}
    groups: dict[int, list[int]] = {}
    for i in live:
        groups.setdefault(int(layout.group[i]), []).append(i)
    advantages = [np.zeros(len(w)) for w in weights]
    values = [np.zeros(len(w)) for w in weights]
    for members in groups.values():
        loss, slopes = _group_loss({i: scores[i] for i in members}, right, tau)
        tokens = sum(int(layout.trained[i].sum()) for i in members)
        for i in members:
            own = layout.trained[i]
            share = weights[i][own] * len(groups)
            advantages[i][own] = -slopes[i] / (int(own.sum()) * share)
            values[i][own] = -loss / (tokens * share)
    return advantages, values


def _score(response: Response, own: NDArray[np.bool_]) -> float:
    if response.policy is None:
        raise ObjectiveError(
            f'group {response.group}: surrogate.kind = "classify" needs the policy\'s log-probabilities before the loss'
        )
    anchor = response.policy if response.anchor is None else response.anchor
    return math.fsum(response.policy[own] - anchor[own]) / int(own.sum())


def _group_loss(scores: dict[int, float], right: Sequence[bool], tau: float) -> tuple[float, dict[int, float]]:
    """L_g and ∂L_g/∂s_i."""
    loss, slopes = 0.0, {}
    for sign, members in ((-1.0, [i for i in scores if right[i]]), (1.0, [i for i in scores if not right[i]])):
        exponents = [0.0, *(sign * scores[i] / tau for i in members)]
        top = max(exponents)
        total = math.fsum(math.exp(e - top) for e in exponents)
        loss += top + math.log(total)
        slopes.update({i: sign * math.exp(sign * scores[i] / tau - top) / total / tau for i in members})
    return loss, slopes
