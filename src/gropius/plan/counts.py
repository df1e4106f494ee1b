"""How often each prompt was solved: the measurement that a plan starts from. No torch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from gropius.errors import DataError

Ints = NDArray[np.int64]


class GroupOutcomes(Protocol):
    """What a plan needs to know of one recorded group: when it was drawn, of which task, and who solved it.

    raw: the unshaped task metric of every valid sibling; solved is raw >= 1 (`solved_at`).
    """

    @property
    def step(self) -> int: ...

    @property
    def task_key(self) -> str: ...

    @property
    def raw(self) -> Sequence[float]: ...


@dataclass(frozen=True, eq=False)
class PassCounts:
    """c_i of n_i responses to prompt i were right. solved, sampled, step [prompts]; step is 0 when unknown.

    source: where the counts come from, for messages. response_tokens: mean length of a response, 0 when unknown.
    """

    solved: Ints
    sampled: Ints
    step: Ints
    source: str = ""
    response_tokens: float = 0.0

    def __post_init__(self) -> None:
        if len(self.solved) == 0:
            raise DataError(
                f"{self.source or 'counts'}: no prompt; a plan needs at least one count of solved responses"
            )
        bad = np.flatnonzero((self.solved < 0) | (self.solved > self.sampled) | (self.sampled < 1))
        if len(bad):
            i = int(bad[0])
            raise DataError(
                f"{self.source or 'counts'}, prompt {i}: {self.solved[i]} solved of {self.sampled[i]} sampled; "
                "write 0 <= solved <= sampled and sampled >= 1"
            )

    @property
    def rate(self) -> float:
        """Mean over prompts of c_i / n_i."""
        return float(np.mean(self.solved / self.sampled))

    def of(self, chosen: NDArray[np.bool_]) -> PassCounts:
        """The counts of some of the prompts."""
        return PassCounts(
            self.solved[chosen], self.sampled[chosen], self.step[chosen], self.source, self.response_tokens
        )


def counts(solved: Sequence[int], sampled: Sequence[int] | int, source: str = "") -> PassCounts:
    """Counts from plain lists; `sampled` may be one number for all.

    >>> counts([0, 3, 8], 8).rate
    0.4583333333333333
    """
    c = np.asarray(solved, np.int64)
    n = np.full(len(c), sampled, np.int64) if isinstance(sampled, int) else np.asarray(sampled, np.int64)
    if len(c) != len(n):
        raise DataError(f"{source or 'counts'}: {len(c)} solved counts for {len(n)} sampled counts")
    return PassCounts(c, n, np.zeros(len(c), np.int64), source)


def from_groups(groups: Iterable[GroupOutcomes], source: str = "run", solved_at: float = 1.0) -> PassCounts:
    """One count for each recorded group. A group without a valid sibling is left out.

    solved_at: the raw metric from which a response counts as solved. Errors: DataError when no group is left.
    """
    rows = [(sum(1 for r in g.raw if r >= solved_at), len(g.raw), g.step) for g in groups if len(g.raw)]
    table = np.asarray(rows, np.int64).reshape(-1, 3)
    return PassCounts(table[:, 0], table[:, 1], table[:, 2], source)


def read_counts(path: Path) -> PassCounts:
    """Counts from a JSON file, in one of three shapes.

    {"solved": [0, 3, 8], "sampled": 8} (or a list), [[0, 8], [3, 8]] (pairs), or
    [{"solved": 3, "sampled": 8, "step": 10}, ...]. Errors: DataError naming file and row.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise DataError(f"{path}: cannot be read as JSON: {error}") from error
    where = str(path)
    if isinstance(data, Mapping):
        solved, sampled = data.get("solved"), data.get("sampled")
        if not isinstance(solved, list) or not isinstance(sampled, int | list):
            raise DataError(f'{where}: write {{"solved": [0, 3, 8], "sampled": 8}}')
        many = [sampled] * len(solved) if isinstance(sampled, int) else sampled
        steps = data.get("step", [0] * len(solved))
        if not isinstance(steps, list) or not len(solved) == len(many) == len(steps):
            raise DataError(f"{where}: solved, sampled and step must have one entry a prompt")
        rows = [list(row) for row in zip(solved, many, steps, strict=True)]
        tokens = data.get("response_tokens", 0.0)
    elif isinstance(data, list):
        rows, tokens = [_row(where, i, item) for i, item in enumerate(data)], 0.0
    else:
        raise DataError(f"{where}: a file of counts is a list of rows or a table of lists")
    for i, row in enumerate(rows):
        if not all(isinstance(x, int) and not isinstance(x, bool) for x in row):
            raise DataError(f"{where}, row {i}: {row} are not whole numbers")
    if not isinstance(tokens, int | float) or isinstance(tokens, bool) or not 0 <= tokens < float("inf"):
        raise DataError(f"{where}: response_tokens is {tokens!r}; write the mean number of tokens of a response")
    table = np.asarray(rows, np.int64).reshape(-1, 3)
    return PassCounts(table[:, 0], table[:, 1], table[:, 2], where, float(tokens))


def _row(where: str, i: int, item: Any) -> list[Any]:
    if isinstance(item, Mapping) and {"solved", "sampled"} <= set(item):
        return [item["solved"], item["sampled"], item.get("step", 0)]
    if isinstance(item, list) and len(item) in (2, 3):
        return [*item, 0][:3] if len(item) == 2 else item
    raise DataError(f'{where}, row {i}: write [solved, sampled] or {{"solved": 3, "sampled": 8}}')
