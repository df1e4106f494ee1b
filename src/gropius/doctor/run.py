"""A run folder of ours as a log. Steps that were read stay in memory, so that a live run is read once. No torch."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from gropius.doctor.log import PART, Column, Log, TokenRow, repetition
from gropius.errors import RunFolderError
from gropius.records.reader import RunReader
from gropius.records.schema import GREEDY_MEMBER

EXCERPT = 80
TOKEN_STEPS = 16
_PLAIN = (
    "step", "group_id", "member", "task_key", "status", "reward", "reason", "raw", "advantage", "skipped", "update",
    "truncated", "policy_version", "response_text", "response_ids", "loss_mask", "parts",
)  # fmt: skip
_PER_TOKEN = ("sampler", "anchor", "policy", "reference", "entropy")
_HINTS = {
    "responses": "the run kept no responses: record.rollouts = false",
    "responses.parts": "the reward has one part only",
    "responses.raw": "no reward part of this run is a task metric",
    "tokens": "the run kept no per-token lists: record.token_logprobs = false",
    "tokens.later_updates": "each batch is one optimiser step (train.updates = 1), so no policy is off its anchor",
    "tokens.reference": "the objective has no KL, so there is no reference",
    "metrics.held_out/mean": "nothing was measured on held-out tasks: eval.before, eval.every, eval.after",
    "metrics.kl": "the objective has no KL",
}


class RunLog:
    """Reads one run folder again and again; only steps that are new are read from the disk."""

    def __init__(self, reader: RunReader) -> None:
        self.reader = reader
        self._steps: dict[int, dict[str, Column]] = {}
        self._tokens: dict[int, list[TokenRow]] = {}

    def read(self) -> Log:
        """The log as it is now. Damaged files are left out and named in its notes."""
        steps = self.reader.steps()
        for step in steps:
            if step not in self._steps:
                table = self.reader.table(step, _PLAIN)
                if table is not None:
                    self._steps[step] = _columns(table)
        known = [self._steps[step] for step in steps if step in self._steps]
        return Log(
            source=str(self.reader.folder),
            metrics=self.reader.metrics_by_step(),
            responses=_joined(known),
            tokens=self._token_rows([step for step in steps if step in self._steps]),
            settings=_settings(self.reader),
            hints=_HINTS,
            notes=tuple(self.reader.problems),
        )

    def _token_rows(self, steps: Sequence[int]) -> list[TokenRow]:
        """Per-token lists of the first step and of up to 15 others, evenly chosen, always with the last."""
        if len(steps) > TOKEN_STEPS:
            places = sorted({round(i * (len(steps) - 1) / (TOKEN_STEPS - 1)) for i in range(TOKEN_STEPS)})
            steps = [steps[place] for place in places]
        for step in steps:
            if step not in self._tokens:
                table = self.reader.table(step, ("group_id", "member", "update", "loss_mask", *_PER_TOKEN))
                self._tokens[step] = _token_rows(table, step) if table is not None else []
        self._tokens = {step: self._tokens[step] for step in steps}
        return [row for step in steps for row in self._tokens[step]]


def _columns(table: pa.Table) -> dict[str, Column]:
    table = table.filter(pc.not_equal(table.column("member"), GREEDY_MEMBER))
    texts = [text or "" for text in table.column("response_text").to_pylist()]
    columns: dict[str, Column] = {
        "step": _numbers(table, "step").astype(np.int64),
        "member": _numbers(table, "member").astype(np.int64),
        "group_id": _words(table, "group_id"),
        "task": _words(table, "task_key"),
        "status": _words(table, "status"),
        "reason": _words(table, "reason"),
        "reward": _numbers(table, "reward"),
        "raw": _numbers(table, "raw"),
        "advantage": _numbers(table, "advantage"),
        "version": _numbers(table, "policy_version").astype(np.int64),
        "skipped": np.array(table.column("skipped").to_pylist(), np.bool_),
        "truncated": np.array(table.column("truncated").to_pylist(), np.bool_),
        "tokens": np.array([int(sum(mask)) for mask in table.column("loss_mask").to_pylist()], np.int64),
        "identity": np.array([fingerprint(ids) for ids in table.column("response_ids").to_pylist()], np.int64),
        "repetition": np.array([repetition(text[:4000]) for text in texts], np.float64),
        "excerpt": np.array([text[:EXCERPT] for text in texts], object),
    }
    rows = [dict(parts or []) for parts in table.column("parts").to_pylist()]
    for name in dict.fromkeys(name for row in rows for name in row):
        values = [row.get(name, {}).get("value") for row in rows]
        columns[PART + name] = np.array([np.nan if v is None else v for v in values], np.float64)
    return columns


def fingerprint(value: object) -> int:
    """A number that equal values share (63 bits of a digest of how they are written).

    >>> fingerprint([1, 2]) == fingerprint([1, 2]), fingerprint([1, 2]) == fingerprint([12])
    (True, False)
    """
    digest = hashlib.blake2b(repr(value).encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _numbers(table: pa.Table, name: str) -> NDArray[np.float64]:
    return np.array([np.nan if v is None else v for v in table.column(name).to_pylist()], np.float64)


def _words(table: pa.Table, name: str) -> Column:
    return np.array([v or "" for v in table.column(name).to_pylist()], object)


def _joined(steps: Sequence[Mapping[str, Column]]) -> dict[str, Column]:
    """Columns of all steps end to end; a part that some step lacks is NaN there."""
    names = dict.fromkeys(name for columns in steps for name in columns)
    joined = {}
    for name in names:
        pieces = [c[name] if name in c else np.full(len(c["step"]), np.nan) for c in steps]
        joined[name] = np.concatenate(pieces)
    if len([name for name in joined if name.startswith(PART)]) < 2:
        joined = {name: column for name, column in joined.items() if not name.startswith(PART)}
    return joined


def _token_rows(table: pa.Table, step: int) -> list[TokenRow]:
    rows = []
    for row in table.to_pylist():
        if row["member"] == GREEDY_MEMBER:
            continue
        mask = np.array(row["loss_mask"], np.bool_)
        lists = {name: None if row[name] is None else np.array(row[name], np.float64)[mask] for name in _PER_TOKEN}
        rows.append(TokenRow(step, row["group_id"], row["member"], row["update"], **lists))
    return rows


def _settings(reader: RunReader) -> dict[str, Any]:
    """The recipe's keys, dotted. None when the folder has no readable recipe."""
    try:
        document = reader.resolved()
    except RunFolderError:
        return {}
    flat: dict[str, Any] = {}
    pending: list[tuple[str, Any]] = [(key, value) for key, value in document.items()]
    while pending:
        name, value = pending.pop()
        if isinstance(value, Mapping):
            pending += [(f"{name}.{key}", inner) for key, inner in value.items()]
        else:
            flat[name] = value
    return flat
