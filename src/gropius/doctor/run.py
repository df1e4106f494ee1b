"""A run folder of ours as a log. Steps that were read stay in memory, so that a live run is read once. No torch.

What stays is bounded: of a run with more than 200,000 responses a sample of the groups of every step is looked at, and
at most a million tokens of sixteen steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from gropius.doctor.log import PART, Column, Log, TokenRow, repetition
from gropius.doctor.sample import MOST_RESPONSES, MOST_TOKENS, chosen, fingerprint, list_lengths, within_tokens
from gropius.errors import RunFolderError
from gropius.records.reader import RunReader
from gropius.records.schema import GREEDY_MEMBER

EXCERPT = 80
TOKEN_STEPS = 16
_PLAIN = (
    "step", "group_id", "member", "task_key", "status", "reward", "reason", "raw", "advantage", "skipped", "update",
    "truncated", "policy_version", "response_text", "response_ids", "loss_mask", "parts",
)  # fmt: skip
_METRICS = frozenset((
    "step", "updates", "updates_skipped", "grad_norm", "entropy", "kl", "clip_ratio/region_mean", "held_out/mean",
    "held_out/mean_low", "held_out/mean_high",
))  # fmt: skip
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
        self._groups: dict[int, int] = {}
        self._most: int | None = None
        self._tokens: dict[int, list[TokenRow]] = {}

    def read(self) -> Log:
        """The log as it is now. Damaged files are left out and named in its notes."""
        steps = self.reader.steps()
        for step in steps:
            if step not in self._steps:
                table = self.reader.table(step, _PLAIN)
                if table is not None:
                    self._take(step, table)
        known = [self._steps[step] for step in steps if step in self._steps]
        return Log(
            source=str(self.reader.folder),
            metrics=self.reader.metrics_by_step(_METRICS),
            responses=_joined(known),
            tokens=self._token_rows([step for step in steps if step in self._steps]),
            settings=_settings(self.reader),
            hints=_HINTS,
            notes=(*self.reader.problems, *self._sampled()),
        )

    def _take(self, step: int, table: pa.Table) -> None:
        """Keep a step; when that makes too many responses, keep half as many groups of every step."""
        table = table.filter(pc.not_equal(table.column("member"), GREEDY_MEMBER))
        ids = table.column("group_id").to_pylist()
        self._groups[step] = len(set(ids))
        if self._most is not None:
            table = table.filter(pa.array(chosen(ids, self._most)))
        self._steps[step] = _columns(table)
        while sum(len(c["step"]) for c in self._steps.values()) > MOST_RESPONSES and self._most != 1:
            self._most = max(1, (self._most or max(self._groups.values())) // 2)
            self._steps = {s: _fewer(columns, self._most) for s, columns in self._steps.items()}

    def _sampled(self) -> tuple[str, ...]:
        if self._most is None:
            return ()
        kept = sum(min(self._most, count) for count in self._groups.values())
        return (f"a long run: at most {self._most} groups of a step are examined, chosen by lot "
                f"({kept:,} of {sum(self._groups.values()):,})",)  # fmt: skip

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


def _fewer(columns: Mapping[str, Column], groups: int) -> dict[str, Column]:
    here = chosen(columns["group_id"].tolist(), groups)
    return {name: column[here] for name, column in columns.items()}


def _columns(table: pa.Table) -> dict[str, Column]:
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
        "tokens": _written(table),
        "identity": np.array([fingerprint(ids) for ids in table.column("response_ids").to_pylist()], np.int64),
        "repetition": np.array([repetition(text[:4000]) for text in texts], np.float64),
        "excerpt": np.array([text[:EXCERPT] for text in texts], object),
    }
    rows = [dict(parts or []) for parts in table.column("parts").to_pylist()]
    for name in dict.fromkeys(name for row in rows for name in row):
        values = [row.get(name, {}).get("value") for row in rows]
        columns[PART + name] = np.array([np.nan if v is None else v for v in values], np.float64)
    return columns


def _written(table: pa.Table) -> NDArray[np.int64]:
    """[rows] tokens that the model wrote."""
    masks = table.column("loss_mask").to_pylist()
    return np.array([sum(mask) for mask in masks], np.int64)


def _numbers(table: pa.Table, name: str) -> NDArray[np.float64]:
    return np.array([np.nan if v is None else v for v in table.column(name).to_pylist()], np.float64)


def _words(table: pa.Table, name: str) -> Column:
    """[rows] text, "" for a null; equal texts are one object."""
    seen: dict[str, str] = {}
    return np.array([seen.setdefault(v or "", v or "") for v in table.column(name).to_pylist()], object)


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
    table = table.filter(pc.not_equal(table.column("member"), GREEDY_MEMBER))
    ids = table.column("group_id").to_pylist()
    kept = within_tokens(ids, list_lengths(table, "loss_mask"), MOST_TOKENS // TOKEN_STEPS)
    table = table.filter(pa.array(kept))
    lists = {name: table.column(name) for name in ("loss_mask", *_PER_TOKEN)}
    plain = table.select(["group_id", "member", "update"]).to_pylist()
    rows = []
    for i, row in enumerate(plain):
        mask = lists["loss_mask"][i].values.to_numpy(zero_copy_only=False).astype(np.bool_)
        own = {name: _list(lists[name][i], mask) for name in _PER_TOKEN}
        rows.append(TokenRow(step, row["group_id"], row["member"], row["update"], **own))
    return rows


def _list(value: pa.ListScalar, mask: NDArray[np.bool_]) -> Column | None:
    """[tokens of the model] one response's numbers, copied out of the table; None where there are none."""
    return np.array(value.values.to_numpy(zero_copy_only=False)[mask], np.float64) if value.is_valid else None


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
