"""What the run folder holds of one response, as a record and as a Parquet row. No torch.

`ResponseRecord` and `ROLLOUT_SCHEMA` have the same fields; a per-token list has one value for every id after the prompt
(the environment's too, where it is 0), or is absent as a whole.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from gropius.types import Episode, Group, Outcome, Place, Status, Step

Array = NDArray[np.float64]

GREEDY_MEMBER = -1
NEVER_TRAINED = -1

_TOKENS = pa.list_(pa.int32())
_LOGPROBS = pa.list_(pa.float32())
_FLOATS = pa.list_(pa.float64())
_STEP = pa.struct([("token", pa.int32()), ("score", pa.float64()), ("part", pa.string()), ("note", pa.string())])
_PART = pa.struct([("value", pa.float64()), ("status", pa.string()), ("reason", pa.string())])

ROLLOUT_SCHEMA: pa.Schema = pa.schema(
    [
        pa.field("step", pa.int32(), nullable=False),
        pa.field("group_id", pa.string(), nullable=False),
        pa.field("member", pa.int32(), nullable=False),
        pa.field("task_key", pa.string(), nullable=False),
        pa.field("prompt_ids", _TOKENS, nullable=False),
        pa.field("response_ids", _TOKENS, nullable=False),
        pa.field("prompt_text", pa.string(), nullable=False),
        pa.field("response_text", pa.string(), nullable=False),
        pa.field("messages", pa.string(), nullable=False),
        pa.field("loss_mask", pa.list_(pa.bool_()), nullable=False),
        pa.field("parts", pa.map_(pa.string(), _PART), nullable=False),
        pa.field("status", pa.string()),
        pa.field("reward", pa.float64()),
        pa.field("reason", pa.string(), nullable=False),
        pa.field("raw", pa.float64()),
        pa.field("state", pa.string(), nullable=False),
        pa.field("advantage", pa.float64()),
        pa.field("token_advantages", _FLOATS),
        pa.field("skipped", pa.bool_(), nullable=False),
        pa.field("update", pa.int32(), nullable=False),
        pa.field("duplicate", pa.bool_(), nullable=False),
        pa.field("truncated", pa.bool_(), nullable=False),
        pa.field("finish_reason", pa.string(), nullable=False),
        pa.field("error", pa.string(), nullable=False),
        pa.field("policy_version", pa.int64(), nullable=False),
        pa.field("versions", pa.list_(pa.int64())),
        pa.field("weight_digest", pa.string(), nullable=False),
        pa.field("sampling_time_s", pa.float64(), nullable=False),
        pa.field("scoring_time_s", pa.float64(), nullable=False),
        pa.field("sampler", _LOGPROBS),
        pa.field("drawn", _LOGPROBS),
        pa.field("anchor", _LOGPROBS),
        pa.field("policy", _LOGPROBS),
        pa.field("reference", _LOGPROBS),
        pa.field("entropy", _LOGPROBS),
        pa.field("weight", _FLOATS),
        pa.field("contribution", _FLOATS),
        pa.field("steps", pa.list_(_STEP)),
        pa.field("final", pa.float64()),
        pa.field("origin", _TOKENS),
        pa.field("demonstration", pa.bool_()),
        pa.field("values", _FLOATS),
        pa.field("returns", _FLOATS),
        pa.field("energy", _FLOATS),
        pa.field("policy_entropy", _FLOATS),
        pa.field("imitation", _FLOATS),
    ]
)
ROW_GROUP_ROWS, ROW_GROUP_TOKENS = 64, 1 << 18
# Columns whose values repeat. A dictionary of log-probabilities costs time and room, as no two are the same.
REPEATED = ["group_id", "task_key", "status", "reason", "state", "finish_reason", "weight_digest", "prompt_text"]
LATER = (
    "versions", "steps", "final", "origin", "demonstration", "values", "returns", "energy", "policy_entropy",
    "imitation",
)  # fmt: skip
_SURROGATE = re.compile("[\ud800-\udfff]")
TOKEN_LISTS = (
    "token_advantages", "sampler", "drawn", "anchor", "policy", "reference", "entropy", "weight", "contribution",
    "origin", "values", "returns", "energy", "policy_entropy", "imitation",
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class Trained:
    """What selection and training add to one response. Every array has length T (environment tokens included).

    state: of the group. advantage: of the response; None when it has none (void, dropped). token_advantages: only where
    tokens of one response differ. skipped: never run forward. update: which optimiser step of the batch it was weighed
    in first, counted from 0, skipped or not; NEVER_TRAINED when it was thrown away before. anchor, policy, reference:
    log-probabilities, policy at that first update. entropy: nats. weight: of the token in the loss. contribution: what
    the token added to the loss. values, returns: what a critic said and should have said. energy: of the optimal token
    baseline. policy_entropy: nats, at the first update, where the loss has an entropy term. imitation: weight of
    −log π.
    """

    state: str
    advantage: float | None = None
    skipped: bool = True
    update: int = NEVER_TRAINED
    token_advantages: Array | None = None
    anchor: NDArray[Any] | None = None
    policy: NDArray[Any] | None = None
    reference: NDArray[Any] | None = None
    entropy: NDArray[Any] | None = None
    weight: Array | None = None
    contribution: Array | None = None
    values: NDArray[Any] | None = None
    returns: NDArray[Any] | None = None
    energy: NDArray[Any] | None = None
    policy_entropy: NDArray[Any] | None = None
    imitation: NDArray[Any] | None = None


@dataclass(frozen=True, eq=False)
class ResponseRecord:
    """One response of one step: one row of a rollout file. See `Trained` for what training adds.

    member: GREEDY_MEMBER for the greedy response of a baseline, which is never trained. messages: JSON. status, reward,
    reason: of the outcome; all absent while unscored. versions: of the policy that drew each token, where several steps
    did (0 at the environment's); else None. duplicate: an earlier sibling has the same ids. steps: weighted scores with
    a position; final: the reward without them. origin: the member that drew each token, where siblings branch.
    demonstration: a teacher wrote it.
    """

    step: int
    group_id: str
    member: int
    task_key: str
    prompt_ids: NDArray[np.int64]
    response_ids: NDArray[np.int64]
    prompt_text: str
    response_text: str
    messages: str
    loss_mask: NDArray[np.bool_]
    parts: Mapping[str, Outcome]
    status: Status | None
    reward: float | None
    reason: str
    raw: float | None
    state: str
    advantage: float | None
    token_advantages: NDArray[Any] | None
    skipped: bool
    update: int
    duplicate: bool
    truncated: bool
    finish_reason: str
    error: str
    policy_version: int
    weight_digest: str
    sampling_time_s: float
    scoring_time_s: float
    sampler: NDArray[Any] | None
    drawn: NDArray[Any] | None
    anchor: NDArray[Any] | None
    policy: NDArray[Any] | None
    reference: NDArray[Any] | None
    entropy: NDArray[Any] | None
    weight: NDArray[Any] | None
    contribution: NDArray[Any] | None
    versions: NDArray[np.int64] | None = None
    steps: tuple[Step, ...] = ()
    final: float | None = None
    origin: NDArray[Any] | None = None
    demonstration: bool = False
    values: NDArray[Any] | None = None
    returns: NDArray[Any] | None = None
    energy: NDArray[Any] | None = None
    policy_entropy: NDArray[Any] | None = None
    imitation: NDArray[Any] | None = None

    @property
    def tokens(self) -> int:
        """Tokens that the model wrote."""
        return int(self.loss_mask.sum())

    @property
    def own_tokens(self) -> int:
        """Tokens of the model that no other branch of the group drew."""
        return self.tokens if self.origin is None else int((self.loss_mask & (self.origin == self.member)).sum())

    @property
    def drawn_tokens(self) -> int:
        """Tokens that were sampled for this response: without those of another branch or of a teacher."""
        return 0 if self.demonstration else self.own_tokens


def clean_text(text: str) -> str:
    """Replace lone surrogates by U+FFFD: neither Parquet nor UTF-8 can hold them.

    >>> clean_text("a\\ud800b")
    'a\ufffdb'
    """
    return _SURROGATE.sub("\ufffd", text)


def records_of(
    step: int,
    groups: Iterable[Group],
    trained: Mapping[tuple[str, int], Trained],
    decode: Callable[[Sequence[int]], str],
) -> list[ResponseRecord]:
    """Records of every response of the groups, in order, a greedy baseline response last in its group.

    trained: by (group_id, member); a response that is not in it was never trained. decode: token ids → text.
    """
    records = []
    for group in groups:
        seen: set[bytes] = set()
        prompt_text = decode(group.episodes[0].prompt_ids.tolist())
        for episode in group.episodes:
            ids = episode.response_ids.tobytes()
            added = trained.get((group.group_id, episode.member), Trained(""))
            records.append(_record(step, episode, (episode.member, ids in seen, prompt_text), added))
            seen.add(ids)
        if group.baseline_episode is not None:
            member = (GREEDY_MEMBER, False, prompt_text)
            records.append(_record(step, group.baseline_episode, member, Trained("greedy")))
    return records


def _record(step: int, episode: Episode, where: tuple[int, bool, str], added: Trained) -> ResponseRecord:
    member, duplicate, prompt_text = where
    verdict = episode.verdict
    outcome = verdict.outcome if verdict else None
    return ResponseRecord(
        step=step,
        group_id=episode.group_id,
        member=member,
        task_key=episode.task.key,
        prompt_ids=episode.prompt_ids,
        response_ids=episode.response_ids,
        prompt_text=prompt_text,
        response_text="".join(turn.text for turn in episode.turns),
        messages=json.dumps(list(episode.messages), allow_nan=False, ensure_ascii=False),
        loss_mask=episode.loss_mask,
        parts=verdict.parts if verdict else {},
        status=outcome.status if outcome else None,
        reward=outcome.value if outcome else None,
        reason=outcome.reason if outcome else "",
        raw=verdict.raw if verdict else None,
        duplicate=duplicate,
        truncated=episode.truncated,
        finish_reason=episode.finish_reason,
        error=episode.error,
        policy_version=episode.policy_version,
        versions=episode.token_versions,
        weight_digest=episode.weight_digest,
        sampling_time_s=episode.sampling_time_s,
        scoring_time_s=episode.scoring_time_s,
        sampler=episode.sampler_logprobs,
        drawn=episode.drawn_logprobs,
        steps=verdict.steps if verdict else (),
        final=verdict.final if verdict and verdict.steps else None,
        origin=episode.origin,
        demonstration=episode.demonstration,
        **{field.name: getattr(added, field.name) for field in dataclasses.fields(Trained)},
    )


def row_group_size(records: Sequence[ResponseRecord]) -> int:
    """Rows of one row group, the least that a reader of one group unpacks: 256k tokens of the mean length, 64 rows or
    more. Short responses stay in one row group, whose columns are read at once.
    """
    mean = sum(len(record.response_ids) for record in records) / max(len(records), 1)
    return max(ROW_GROUP_ROWS, int(ROW_GROUP_TOKENS / max(mean, 1.0)))


def to_table(records: Sequence[ResponseRecord], *, token_lists: bool = True) -> pa.Table:
    """Lay records out as a table of ROLLOUT_SCHEMA; without `token_lists` every per-token list but the mask is absent.

    Errors: ValueError when a per-token list has not one value for every id after the prompt.
    """
    for record in records:
        _check_lengths(record)
    columns: dict[str, Any] = {}
    for name, kind in zip(ROLLOUT_SCHEMA.names, ROLLOUT_SCHEMA.types, strict=True):
        values = [getattr(record, name) for record in records]
        if name in TOKEN_LISTS and not token_lists:
            values = [None] * len(values)
        columns[name] = pa.array([_storable(value) for value in values], type=kind)
    return pa.table(columns, schema=ROLLOUT_SCHEMA)


def _check_lengths(record: ResponseRecord) -> None:
    expected = len(record.response_ids)
    for name in ("loss_mask", "versions", *TOKEN_LISTS):
        values = getattr(record, name)
        if values is not None and len(values) != expected:
            raise ValueError(
                f"step {record.step}, group {record.group_id}, member {record.member}: {name} has {len(values)} values "
                f"for {expected} ids after the prompt"
            )


def _storable(value: Any) -> Any:
    if isinstance(value, str):
        return clean_text(value)
    if isinstance(value, tuple):
        return [
            {"token": s.token, "score": s.score, "part": clean_text(s.part), "note": clean_text(s.place.note)}
            for s in value
        ] or None
    if isinstance(value, Mapping):
        return [
            (clean_text(name), {"value": part.value, "status": part.status, "reason": clean_text(part.reason)})
            for name, part in value.items()
        ]
    return value


def from_table(table: pa.Table) -> list[ResponseRecord]:
    """Read records back from a table of ROLLOUT_SCHEMA. Errors: KeyError naming a missing column.

    A column that came later (LATER) is absent in older files.
    """
    older = {name for name in LATER if name not in table.column_names}
    columns = {name: table.column(name) for name in ROLLOUT_SCHEMA.names if name not in older}
    arrays = {name for name, kind in zip(ROLLOUT_SCHEMA.names, ROLLOUT_SCHEMA.types, strict=True) if _is_list(kind)}
    records = []
    for row in range(table.num_rows):
        values: dict[str, Any] = {}
        for name, column in columns.items():
            cell = column[row]
            if name == "steps":
                values[name] = tuple(
                    Step(s["score"], s["part"], Place(s["score"], note=s["note"]), s["token"])
                    for s in cell.as_py() or []
                )
            elif name == "demonstration":
                values[name] = bool(cell.as_py())
            elif name in arrays:
                values[name] = _array(cell)
            elif name == "parts":
                values[name] = {key: Outcome(p["status"], p["value"], p["reason"]) for key, p in cell.as_py() or []}
            else:
                values[name] = cell.as_py()
        records.append(ResponseRecord(**values))
    return records


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind))


def _array(cell: pa.ListScalar) -> NDArray[Any] | None:
    if not cell.is_valid:
        return None
    values: NDArray[Any] = cell.values.to_numpy(zero_copy_only=False)
    return values.astype(np.int64) if values.dtype == np.int32 else values
