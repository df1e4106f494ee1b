"""Groups of a step or of a whole run: queues, filters, sorting, search; and one group with its siblings. No torch."""

from __future__ import annotations

import difflib
import json
import math
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gropius.errors import GropiusError, UsageError, did_you_mean
from gropius.objective.formula import advantage as advantage_words
from gropius.objective.selection import Assignment, Response, assign
from gropius.objective.spec import Objective
from gropius.records.schema import GREEDY_MEMBER, ResponseRecord
from gropius.viewer.index import RunIndex, step_groups
from gropius.viewer.store import RunStore, strict

Findings = Sequence[dict[str, Any]]

HACKS = ("reward_hacking", "dominant_reward_part")
SEARCH_TIME_S = 1.0
PAGE_LIMIT = 500
DIFF_UNITS = 3000
SORTS = {
    "order": [("step", "ascending"), ("order", "ascending")],
    "newest": [("step", "descending"), ("order", "ascending")],
    "mean": [("mean", "ascending")],
    "mean_desc": [("mean", "descending")],
    "spread": [("std", "descending")],
    "longest": [("longest", "descending")],
    "advantage": [("largest_advantage", "descending")],
    "duplicates": [("duplicates", "descending")],
}
ROW_FIELDS = (
    "step", "group_id", "task_key", "state", "size", "mean", "std", "rewards", "advantages", "tokens", "longest",
    "duplicates", "truncated", "void", "rejected", "skipped", "outlier",
)  # fmt: skip


@dataclass(frozen=True)
class Query:
    """What to list. step: None for the whole run. offset, limit: which rows. text: looked for in responses.

    search_from: where a search through the whole run goes on (a step), None at its beginning.
    """

    step: int | None = None
    queue: str = "all"
    task: str = ""
    text: str = ""
    sort: str = "order"
    offset: int = 0
    limit: int = 100
    search_from: int | None = None


def _queue_states(*states: str) -> Any:
    return lambda table, findings: pc.is_in(table.column("state"), pa.array(states))


def _queue_count(name: str) -> Any:
    return lambda table, findings: pc.greater(table.column(name), 0)


def _named(only: tuple[str, ...] | None) -> Any:
    def choose(table: pa.Table, findings: Findings) -> pa.Array:
        ids = named_groups(findings, only)
        return pc.is_in(table.column("group_id"), pa.array(sorted(ids), pa.string()))

    return choose


QUEUES: dict[str, Any] = {
    "all": None,
    "informative": _queue_states("informative"),
    "all_failed": _queue_states("all_failed"),
    "all_solved": _queue_states("all_solved"),
    "all_equal": _queue_states("all_equal", "singleton", "too_few_valid"),
    "duplicates": _queue_count("duplicates"),
    "outliers": lambda table, findings: table.column("outlier"),
    "void": _queue_count("void"),
    "rejected": _queue_count("rejected"),
    "truncated": _queue_count("truncated"),
    "findings": _named(None),
    "suspected": lambda table, findings: pc.or_(
        _named(HACKS)(table, findings), pc.greater(table.column("paid_wrong"), 0)
    ),
}


def list_groups(store: RunStore, index: RunIndex, query: Query) -> dict[str, Any]:
    """Rows of groups for a query, with the size of every queue under the same step and task.

    Errors: UsageError for an unknown queue or sort.
    """
    if query.queue not in QUEUES:
        raise UsageError(f"queue {query.queue!r} is unknown; {did_you_mean(query.queue, QUEUES)}")
    if query.sort not in SORTS:
        raise UsageError(f"sort {query.sort!r} is unknown; {did_you_mean(query.sort, SORTS)}")
    table = _scope(store, index, query)
    if query.task:
        table = table.filter(pc.equal(table.column("task_key"), query.task))
    findings = store.findings()
    counts = {name: _size(table, choose, findings) for name, choose in QUEUES.items()}
    choose = QUEUES[query.queue]
    chosen = table if choose is None else table.filter(choose(table, findings))
    searched: dict[str, Any] | None = None
    if query.text:
        chosen, searched = search(store, chosen, query)
    if query.sort != "order":
        chosen = chosen.take(pc.sort_indices(chosen, sort_keys=SORTS[query.sort]))
    limit = max(1, min(query.limit, PAGE_LIMIT))
    page = chosen.slice(max(query.offset, 0), limit).select(ROW_FIELDS)
    done, present = index.progress()
    return {
        "rows": strict(page.to_pylist()),
        "total": chosen.num_rows,
        "counts": counts,
        "searched": searched,
        "indexed": {"steps": done, "of": present},
        "problems": store.problems,
    }


def _scope(store: RunStore, index: RunIndex, query: Query) -> pa.Table:
    if query.step is None:
        index.refresh()
        return index.groups()
    table = step_groups(store, query.step)
    return index.groups().slice(0, 0) if table is None else table


def _size(table: pa.Table, choose: Any, findings: Findings) -> int:
    if choose is None:
        return int(table.num_rows)
    return int(pc.sum(choose(table, findings)).as_py() or 0)


def named_groups(findings: Findings, only: tuple[str, ...] | None = None) -> set[str]:
    """Ids of groups that findings name as evidence; only: of findings of these names.

    >>> named_groups([{"name": "x", "evidence": [{"group_id": "000001-0000"}, {"step": 3}]}])
    {'000001-0000'}
    """
    out = set()
    for finding in findings:
        rows = finding.get("evidence") if only is None or finding.get("name") in only else None
        for row in rows if isinstance(rows, list) else []:
            if isinstance(row, dict) and isinstance(row.get("group_id"), str):
                out.add(row["group_id"])
    return out


def search(store: RunStore, table: pa.Table, query: Query) -> tuple[pa.Table, dict[str, Any]]:
    """The groups with a response that holds the text, letter case ignored.

    Step by step within a time limit; `next` says where to go on, None when all steps were searched.
    """
    steps = sorted(set(table.column("step").to_pylist()))
    if query.search_from is not None:
        steps = [step for step in steps if step >= query.search_from]
    until, hits, done, following = time.monotonic() + SEARCH_TIME_S, [], 0, None
    for step in steps:
        if done and time.monotonic() > until:
            following = step
            break
        texts = store.reader.table(step, ["group_id", "response_text"])
        done += 1
        if texts is not None:
            found = pc.match_substring(texts.column("response_text"), query.text, ignore_case=True)
            hits.append(texts.column("group_id").filter(found).unique())
    ids = pa.chunked_array([pa.concat_arrays(hits)]) if hits else pa.chunked_array([pa.array([], pa.string())])
    chosen = table.filter(pc.is_in(table.column("group_id"), ids.combine_chunks()))
    return chosen, {"steps": done, "of": len(steps), "next": following}


def same_task(index: RunIndex, task_key: str) -> dict[str, Any]:
    """Every group of the task, by step, of what is indexed so far; indexed: whether that is all."""
    index.refresh()
    table = index.groups()
    rows = table.filter(pc.equal(table.column("task_key"), task_key)).select(ROW_FIELDS).to_pylist()
    done, present = index.progress()
    return {"rows": strict(rows), "indexed": done >= present}


def group_detail(store: RunStore, step: int, group_id: str) -> dict[str, Any] | None:
    """One group, its siblings side by side and the arithmetic of their advantages; None when it is not there."""
    records = store.records(step, group_id)
    if not records:
        return None
    siblings = [record for record in records if record.member != GREEDY_MEMBER]
    greedy = next((record for record in records if record.member == GREEDY_MEMBER), None)
    neighbours = step_groups(store, step)
    ids = neighbours.column("group_id").to_pylist() if neighbours is not None else [group_id]
    at = ids.index(group_id) if group_id in ids else 0
    return {
        "step": step,
        "group_id": group_id,
        "task_key": records[0].task_key,
        "state": siblings[0].state if siblings else "",
        "prompt": records[0].prompt_text,
        "messages": _prompt_messages(records[0]),
        "prompt_tokens": len(records[0].prompt_ids),
        "responses": [sibling(record) for record in siblings],
        "greedy": sibling(greedy) if greedy else None,
        "replay": replay(store.objective(), siblings, greedy, _part_weights(store.resolved())),
        "position": {
            "index": at,
            "count": len(ids),
            "previous": ids[at - 1] if at > 0 else None,
            "next": ids[at + 1] if at + 1 < len(ids) else None,
        },
        "findings": [f for f in store.findings() if group_id in named_groups([f])],
    }


def _prompt_messages(record: ResponseRecord) -> list[dict[str, Any]]:
    """The task's own messages: those before the model first spoke."""
    out = []
    for message in parse_messages(record.messages):
        if message.get("role") == "assistant":
            break
        out.append(message)
    return out


def parse_messages(text: str) -> list[dict[str, Any]]:
    """The stored conversation; empty when it cannot be read."""
    try:
        messages = json.loads(text)
    except ValueError:
        return []
    return [message for message in messages if isinstance(message, dict)] if isinstance(messages, list) else []


def sibling(record: ResponseRecord) -> dict[str, Any]:
    """What a group's page shows of one response. Texts are the model's and must be shown as inert text."""
    parts = [
        {"name": name, "value": part.value, "status": part.status, "reason": part.reason}
        for name, part in record.parts.items()
    ]
    weight = record.weight if record.weight is not None else np.zeros(0)
    contribution = record.contribution if record.contribution is not None else np.zeros(0)
    return dict(
        strict(
            {
                "member": record.member,
                "status": record.status,
                "reward": record.reward,
                "reason": record.reason,
                "raw": record.raw,
                "parts": parts,
                "advantage": record.advantage,
                "tokens": record.tokens,
                "ids": len(record.response_ids),
                "finish_reason": record.finish_reason,
                "truncated": record.truncated,
                "duplicate": record.duplicate,
                "skipped": record.skipped,
                "update": record.update,
                "error": record.error,
                "text": record.response_text,
                "policy_version": record.policy_version,
                "weight_digest": record.weight_digest,
                "sampling_time_s": record.sampling_time_s,
                "scoring_time_s": record.scoring_time_s,
                "weight": math.fsum(weight),
                "contribution": math.fsum(contribution) if len(contribution) else None,
                "steps": [
                    {"token": s.token, "score": s.score, "part": s.part, "note": s.place.note} for s in record.steps
                ],
                "final": record.final,
                "demonstration": record.demonstration,
                "branched_tokens": record.tokens - record.own_tokens,
            }
        )
    )


def replay(
    objective: Objective | None,
    siblings: Sequence[ResponseRecord],
    greedy: ResponseRecord | None = None,
    part_weights: dict[str, float] | None = None,
) -> dict[str, Any] | None:
    """The advantages of a group made again by the package, and whether they are those recorded.

    None without an objective. `agrees` is False where the objective looks beyond the group (batch statistics,
    whitening), which the page then says. `reason` is set where the group alone is not enough to compute them.
    """
    if objective is None or not siblings:
        return None
    try:
        assignment = _assign(objective, siblings, greedy, part_weights or {})
    except GropiusError as error:
        return {"reason": str(error)}
    credit, group = assignment.credit, assignment.groups[0]
    given = [response.value for response in assignment.responses]
    pairs = [(r.advantage, value) for r, value in zip(siblings, given, strict=True) if r.advantage is not None]
    agrees = all(abs(recorded - value) <= 1e-6 * max(1.0, abs(value)) for recorded, value in pairs)
    return dict(
        strict(
            {
                "axis": objective.as_dict()["advantage"],
                "formula": advantage_words(objective.advantage, objective.kl),
                "mean": group.mean,
                "std": group.std,
                "state": group.state,
                "dropped": group.dropped,
                "baseline": credit.baseline.tolist(),
                "centred": credit.centred.tolist(),
                "scale": credit.scale.tolist(),
                "advantage": given,
                "agrees": agrees,
            }
        )
    )


def _assign(
    objective: Objective,
    siblings: Sequence[ResponseRecord],
    greedy: ResponseRecord | None,
    part_weights: dict[str, float],
) -> Assignment:
    apart = objective.advantage.combine == "normalise_then_sum"
    rows = []
    for record in siblings:
        parts = {name: part.value for name, part in record.parts.items() if part.value is not None}
        status = record.status or "void"
        reward = parts if apart and parts else record.reward
        rows.append(
            Response(
                "group",
                None if status == "void" else reward,
                record.loss_mask,
                status,
                record.truncated,
                record.raw,
                anchor=None if record.anchor is None else np.asarray(record.anchor, np.float64),
                reference=None if record.reference is None else np.asarray(record.reference, np.float64),
                entropy=None if record.entropy is None else np.asarray(record.entropy, np.float64),
                greedy_reward=greedy.reward if greedy else None,
            )
        )
    return assign(objective, rows, part_weights if apart else None)


def _part_weights(resolved: dict[str, Any]) -> dict[str, float]:
    """Weights of the reward parts, as the recipe names them."""
    out = {}
    rewards = resolved.get("reward")
    for part in rewards if isinstance(rewards, list) else []:
        if isinstance(part, dict) and isinstance(part.get("name"), str):
            out[part["name"]] = float(part.get("weight") or 1.0)
    return out


def difference(store: RunStore, step: int, group_id: str, members: tuple[int, int]) -> dict[str, Any] | None:
    """Two siblings as runs of equal and different text: [operation, text of the first, text of the second].

    Word by word; beyond 3,000 words in the part that differs, line by line. None when a sibling is not there.
    """
    found = {record.member: record for record in store.records(step, group_id)}
    if not all(member in found for member in members):
        return None
    first, second = (found[member].response_text for member in members)
    a, b = _units(first, r"\s+|\w+|[^\w\s]"), _units(second, r"\s+|\w+|[^\w\s]")
    if max(len(a), len(b)) > DIFF_UNITS:
        a, b = _units(first, r"[^\n]*\n|[^\n]+"), _units(second, r"[^\n]*\n|[^\n]+")
    a, b = a[: 4 * DIFF_UNITS], b[: 4 * DIFF_UNITS]
    matcher = difflib.SequenceMatcher(None, a, b, autojunk=False)
    runs = [[tag, "".join(a[i:j]), "".join(b[k:m])] for tag, i, j, k, m in matcher.get_opcodes()]
    return {"members": list(members), "runs": runs, "similarity": matcher.ratio()}


def _units(text: str, pattern: str) -> list[str]:
    return re.findall(pattern, text)
