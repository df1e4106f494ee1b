"""Aggregation is a weight: loss = Σ_t weight_t · term_t. NumPy float64, no torch.

Weights come from lengths and masks of the whole optimiser batch, so a split into micro-batches, padding, packing or
ranks cannot change them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gropius.errors import ObjectiveError
from gropius.objective.spec import Aggregate

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Layout:
    """What the denominators are made of; one entry a response, over the whole optimiser batch and all ranks.

    trained: [T_i] True at tokens that carry loss. counted: [T_i] True at tokens in the token count (a superset of
    `trained` where masked tokens are counted). in_count [n]: is the response one of the n. group [n]: its prompt.
    """

    trained: Sequence[Mask]
    counted: Sequence[Mask]
    in_count: Mask
    group: NDArray[np.int64]

    @property
    def lengths(self) -> Array:
        """[n] counted tokens of each counted response, 0 for the others."""
        return np.array([m.sum() if ok else 0 for m, ok in zip(self.counted, self.in_count, strict=True)], np.float64)

    @property
    def responses(self) -> int:
        """n: responses in the denominator."""
        return int(self.in_count.sum())

    @property
    def tokens(self) -> int:
        """N: tokens in the denominator."""
        return int(self.lengths.sum())

    @property
    def prompts(self) -> int:
        """P: prompts with at least one counted response."""
        return len(set(self.group[self.in_count].tolist()))


def _inverse(value: Array | float) -> Array:
    """1/value, and 0 where there is nothing to divide."""
    value = np.asarray(value, np.float64)
    return np.where(value > 0, 1.0 / np.where(value > 0, value, 1.0), 0.0)


def _prompt_tokens(layout: Layout) -> Array:
    """[n] N_q: counted tokens of the response's prompt."""
    totals: dict[int, float] = {}
    for group, length in zip(layout.group.tolist(), layout.lengths, strict=True):
        totals[group] = totals.get(group, 0.0) + float(length)
    return np.array([totals[g] for g in layout.group.tolist()], np.float64)


AGGREGATES: dict[str, Callable[[Aggregate, Layout], Array]] = {
    "response_mean": lambda axis, layout: _inverse(float(layout.responses)) * _inverse(layout.lengths),
    "token_mean": lambda axis, layout: np.full(len(layout.group), float(_inverse(float(layout.tokens)))),
    "prompt_mean": lambda axis, layout: _inverse(float(layout.prompts)) * _inverse(_prompt_tokens(layout)),
    "response_sum": lambda axis, layout: np.full(len(layout.group), float(_inverse(float(layout.responses)))),
    "constant_length": lambda axis, layout: np.full(
        len(layout.group), float(_inverse(float(layout.responses) * axis.length))
    ),
}


def token_weights(axis: Aggregate, layout: Layout) -> list[Array]:
    """[T_i] the weight of every token: 0 where nothing is trained, else the aggregation's weight.

    response_mean 1/(n L_i); token_mean 1/N; prompt_mean 1/(P N_q); response_sum 1/n; constant_length 1/(n C).
    A batch without a counted token gives all zeros, never a division by zero.
    Errors: ObjectiveError for constant_length without a length.

    >>> layout = Layout([np.ones(1, bool), np.ones(3, bool)], [np.ones(1, bool), np.ones(3, bool)],
    ...                 np.ones(2, bool), np.zeros(2, np.int64))
    >>> [w.tolist() for w in token_weights(Aggregate("token_mean"), layout)]
    [[0.25], [0.25, 0.25, 0.25]]
    """
    if axis.kind == "constant_length" and axis.length <= 0:
        raise ObjectiveError('aggregate.kind = "constant_length" needs aggregate.length; write e.g. length = 3000')
    weights = AGGREGATES[axis.kind](axis, layout)
    return [np.where(mask, weight, 0.0) for mask, weight in zip(layout.trained, weights, strict=True)]
