"""The best of k: what a response is worth to the subsets of its siblings that hold it. NumPy float64, no torch.

All statistics are over the k-subsets of the group's n rewards, in closed form. With fewer than k rewards, k is n.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def _odds(n: int, k: int) -> Array:
    """[n] the chance that the j-th smallest of n values is the largest of a k-subset: C(j, k − 1)/C(n, k)."""
    total = math.comb(n, k)
    return np.array([math.comb(j, k - 1) / total for j in range(n)], np.float64)


def best_of_k(values: Array, k: int) -> Array:
    """[n] E[max of a k-subset that holds i]; their mean is E[max of a k-subset]. Equal values stay what they are.

    Right and wrong answers, c right of n: 1 for a right one, 1 − C(n − c − 1, k − 1)/C(n − 1, k − 1) for a wrong one.
    Sources: 2508.10751 (analytic advantage); PKPO 2505.15201 eqs. 5 and 11.

    >>> best_of_k(np.array([1.0, 0.0, 0.0]), 2).tolist()
    [1.0, 0.5, 0.5]
    """
    n, k = len(values), min(k, len(values))
    if k <= 1 or values.max() == values.min():
        return values.copy()
    odds = _odds(n - 1, k - 1)
    others = [np.delete(values, i) for i in range(n)]
    return np.array([math.fsum(odds * np.maximum(np.sort(o), v)) for v, o in zip(values, others, strict=True)])


def best_without(values: Array, k: int) -> Array:
    """[n] E[max of a (k − 1)-subset of the others]; 0 for k = 1. It does not depend on response i: no bias.

    Source: PKPO 2505.15201, the leave-one-out-minus-one baseline.

    >>> best_without(np.array([1.0, 0.0, 0.0]), 2).tolist()
    [0.0, 0.5, 0.5]
    """
    n, k = len(values), min(k, len(values))
    if k <= 1:
        return np.zeros(n)
    odds = _odds(n - 1, k - 1)
    return np.array([math.fsum(odds * np.sort(np.delete(values, i))) for i in range(n)])


def subset_std(values: Array, k: int) -> float:
    """Population std of the maximum of a random k-subset; √(R̄(1 − R̄)) for right and wrong, R̄ = pass@k. 0 when equal.

    Source: 2508.10751.

    >>> round(subset_std(np.array([1.0, 1.0, 0, 0, 0, 0, 0, 0]), 4), 6)
    0.410326
    """
    k = min(k, len(values))
    if values.max() == values.min():
        return 0.0
    odds, ordered = _odds(len(values), k), np.sort(values)
    centre = math.fsum(odds * ordered)
    return math.sqrt(math.fsum(odds * (ordered - centre) ** 2))


def runner_up(values: Array) -> Array:
    """[n] the baseline that leaves the best alone with its lead over the second: v_i elsewhere. A tie leads by 0.

    Source: 2503.19595.

    >>> runner_up(np.array([0.2, 0.9, 0.5])).tolist()
    [0.2, 0.5, 0.5]
    """
    baseline = values.copy()
    if len(values) > 1:
        baseline[int(np.argmax(values))] = np.sort(values)[-2]
    return baseline


TRANSFORMS: dict[str, Callable[[Array, int], Array]] = {
    "none": lambda values, k: values,
    "best_of_k": best_of_k,
    "pkpo": lambda values, k: min(k, len(values)) * best_of_k(values, k),
}
FACTORS: dict[str, Callable[[int, int], int]] = {
    "none": lambda n, k: 1,
    "best_of_k": lambda n, k: 1,
    "pkpo": lambda n, k: min(k, n),
}
