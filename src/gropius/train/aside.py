"""A batch that gave a number that is not finite, written aside with the rows that caused it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gropius.records.writer import LOGS, write_json
from gropius.train.sequences import TrainSequence
from gropius.train.step import UpdateReport


def write(
    folder: Path,
    step: int,
    rows: Sequence[TrainSequence],
    report: UpdateReport,
    decode: Callable[[Sequence[int]], str],
) -> Path:
    """Write `logs/refused-step-N-K.json`: why, the guilty rows in full, the others by name. Its path.

    Errors: RunHalted when the disk refuses.
    """
    number = len(list((folder / LOGS).glob(f"refused-step-{step:06d}-*.json")))
    path = folder / LOGS / f"refused-step-{step:06d}-{number}.json"
    guilty = set(report.culprits)
    document = {
        "step": step,
        "refused": report.refused,
        "learning_rate": report.learning_rate,
        "rows": [_row(rows[i], report, i, decode) for i in sorted(guilty)],
        "others": [{"group_id": row.group_id, "member": row.member} for i, row in enumerate(rows) if i not in guilty],
    }
    write_json(path, document)
    return path


def _row(
    row: TrainSequence, report: UpdateReport, index: int, decode: Callable[[Sequence[int]], str]
) -> dict[str, Any]:
    return {
        "group_id": row.group_id,
        "member": row.member,
        "prompt": decode(row.prompt_ids.tolist()),
        "response": decode(row.response_ids.tolist()),
        "prompt_ids": row.prompt_ids.tolist(),
        "response_ids": row.response_ids.tolist(),
        "mask": row.mask.tolist(),
        "advantage": _numbers(row.advantage),
        "weight": _numbers(row.weight),
        "sampler_logprobs": _numbers(row.sampler_logprobs),
        "policy_logprobs": _numbers(report.logprobs[index]),
    }


def _numbers(values: Any) -> list[float | str] | None:
    """JSON has no NaN and no infinity: they are written as text."""
    if values is None:
        return None
    return [float(value) if math.isfinite(value) else str(value) for value in np.asarray(values).ravel().tolist()]
