"""Branches: siblings that begin with the same drawn tokens. Shared tokens take the mean credit and are trained once.

`origin` says for every token which sibling drew it: a token is the same one, not an equal one, where origin and
position agree. NumPy only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gropius.objective.response import Response

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]
Place = tuple[int, int]  # (response, token)


@dataclass(frozen=True, eq=False)
class Branches:
    """Which tokens are shared. shared: for every token drawn once and held by several live responses, its places.

    The first place of each is where it is trained; trains [T_i]: False at the others.
    """

    shared: tuple[tuple[Place, ...], ...]
    trains: Sequence[Mask]

    def merged(self, per_token: Sequence[Array], responses: Sequence[Response]) -> list[Array]:
        """[L_i] advantages of own tokens with the mean over the branches at every shared token."""
        if not self.shared:
            return list(per_token)
        full = [np.zeros(len(r.mask)) for r in responses]
        for row, r, own in zip(full, responses, per_token, strict=True):
            row[r.mask] = own
        for places in self.shared:
            credit = sum(full[i][t] for i, t in places) / len(places)
            for i, t in places:
                full[i][t] = credit
        return [row[r.mask] for row, r in zip(full, responses, strict=True)]

    def drawn(self, per_token: Sequence[Array], responses: Sequence[Response]) -> list[Array]:
        """Of arrays at own tokens, what stands at the tokens that are trained here."""
        return [row[t[r.mask]] for row, t, r in zip(per_token, self.trains, responses, strict=True)]

    def spread(self, drawn: Sequence[Array], responses: Sequence[Response]) -> list[Array]:
        """The inverse of `drawn`: shared tokens take the value that stands where they are trained."""
        full = [np.zeros(len(r.mask)) for r in responses]
        for row, r, trains, values in zip(full, responses, self.trains, drawn, strict=True):
            row[r.mask & trains] = values
        for (first, at), *others in self.shared:
            for i, t in others:
                full[i][t] = full[first][at]
        return [row[r.mask] for row, r in zip(full, responses, strict=True)]

    def times(self, weights: Sequence[Array]) -> list[Array]:
        """[T_i] weights, those of a shared token times the number of its branches (`aggregate.shared = "each"`)."""
        out = [w.copy() for w in weights]
        for places in self.shared:
            i, t = places[0]
            out[i][t] *= len(places)
        return out


def branches_of(responses: Sequence[Response], group: NDArray[np.int64], live: Mask) -> Branches:
    """Find the shared tokens of every group; responses without `origin` drew all their tokens themselves."""
    trains = [np.ones(len(r.mask), np.bool_) for r in responses]
    found: dict[tuple[int, int, int], list[Place]] = {}
    for g in {int(group[i]) for i, r in enumerate(responses) if r.origin is not None}:
        for i in np.flatnonzero((group == g) & live).tolist():
            r = responses[i]
            origin = np.full(len(r.mask), r.member) if r.origin is None else r.origin
            for t in np.flatnonzero(r.mask).tolist():
                found.setdefault((g, int(origin[t]), t), []).append((i, t))
    shared = tuple(tuple(places) for places in found.values() if len(places) > 1)
    for places in shared:
        for i, t in places[1:]:
            trains[i][t] = False
    return Branches(shared, trains)
