"""One response down to the token: recorded numbers, and the arithmetic behind them made by the package's own loss."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pyarrow.compute as pc
from numpy.typing import NDArray

from gropius.objective.marks import entropy_threshold
from gropius.objective.spec import Objective
from gropius.records.replay import in_force
from gropius.records.schema import GREEDY_MEMBER, NEVER_TRAINED, ResponseRecord
from gropius.viewer.groups import parse_messages, sibling
from gropius.viewer.pieces import find_tokenizer, pieces
from gropius.viewer.store import RunStore, strict

WINDOW = 4096
ARRAYS = (
    "sampler", "drawn", "anchor", "policy", "reference", "entropy", "weight", "contribution", "values", "returns",
)  # fmt: skip


def response_head(store: RunStore, step: int, group_id: str, member: int) -> dict[str, Any] | None:
    """Everything about a response but its tokens; None when it is not there."""
    records = store.records(step, group_id)
    found = next((record for record in records if record.member == member), None)
    if found is None:
        return None
    siblings = [record.member for record in records if record.member != GREEDY_MEMBER]
    objective = store.objective()
    return {
        **sibling(found),
        "step": step,
        "group_id": group_id,
        "task_key": found.task_key,
        "prompt": found.prompt_text,
        "messages": parse_messages(found.messages),
        "siblings": siblings,
        "segments": segments(found),
        "window": WINDOW,
        "recorded": [name for name in ARRAYS if getattr(found, name) is not None],
        "scales": scales(found),
        "kl_in_loss": bool(objective and objective.kl_in_loss),
        "coefficient": objective.kl.coefficient if objective and objective.kl_in_loss else 0.0,
        "entropy_bonus": _bonus(store, step, objective),
        "balance": balance(store, step),
    }


def _bonus(store: RunStore, step: int, objective: Objective | None) -> float:
    """The entropy coefficient as it was in the step; 0 where the loss has no such term."""
    if objective is None or not objective.entropy_in_loss:
        return 0.0
    return float(in_force(objective, store.metrics().get(step, {}).get("entropy_bonus")).terms.entropy)


def segments(record: ResponseRecord) -> list[dict[str, Any]]:
    """Stretches of tokens by who wrote them: the model (trained) or the environment (masked)."""
    mask = record.loss_mask
    if len(mask) == 0:
        return []
    edges = [0, *(np.flatnonzero(mask[1:] != mask[:-1]) + 1).tolist(), len(mask)]
    return [
        {"start": start, "end": end, "role": "model" if mask[start] else "environment"}
        for start, end in itertools.pairwise(edges)
    ]


def scales(record: ResponseRecord) -> dict[str, float]:
    """The largest size of each shade's number, so that colours mean the same in every window of tokens."""
    columns = derived(record, slice(0, len(record.response_ids)))
    return {name: float(np.nanmax(np.abs(values), initial=0.0)) for name, values in columns.items()}


def derived(record: ResponseRecord, window: slice) -> dict[str, NDArray[np.float64]]:
    """Numbers that follow from two recorded ones: advantage · weight, trainer − sampler, policy − reference."""
    mask = record.loss_mask[window]

    def column(name: str) -> NDArray[np.float64] | None:
        values = getattr(record, name)
        return None if values is None else np.where(mask, np.asarray(values, np.float64)[window], np.nan)

    def apart(first: str, second: str) -> NDArray[np.float64] | None:
        a, b = column(first), column(second)
        return None if a is None or b is None else a - b

    advantage = column("token_advantages")
    if advantage is None:
        advantage = np.where(mask, np.nan if record.advantage is None else record.advantage, np.nan)
    weight = column("weight")
    out = {
        "advantage": advantage,
        "credit": None if weight is None else advantage * weight,
        "sampler_gap": apart("anchor", "sampler"),
        "log_ratio": apart("policy", "anchor"),
        "reference_gap": apart("policy", "reference"),
        "entropy": column("entropy"),
        "contribution": column("contribution"),
        "value": column("values"),
        "step": step_scores(record)[window] if record.steps else None,
    }
    return {name: values for name, values in out.items() if values is not None}


def step_scores(record: ResponseRecord) -> NDArray[np.float64]:
    """[T] the weighted scores that fall at each token."""
    scores = np.zeros(len(record.response_ids))
    for step in record.steps:
        if step.token is not None:
            scores[step.token] += step.score
    return scores


def token_window(store: RunStore, step: int, group_id: str, member: int, start: int) -> dict[str, Any] | None:
    """Up to `WINDOW` tokens from `start`: ids, texts, the recorded arrays and what follows from them."""
    records = store.records(step, group_id, member)
    if not records:
        return None
    record = records[0]
    window = slice(max(start, 0), max(start, 0) + WINDOW)
    ids = record.response_ids
    texts = pieces(find_tokenizer(store), ids[: window.stop].tolist())
    columns = {
        name: np.asarray(getattr(record, name), np.float64)[window].tolist()
        for name in ARRAYS
        if getattr(record, name) is not None
    }
    return dict(
        strict(
            {
                "start": window.start,
                "total": len(ids),
                "ids": ids[window].tolist(),
                "texts": None if texts is None else texts[window],
                "mask": record.loss_mask[window].tolist(),
                "columns": columns | {name: v.tolist() for name, v in derived(record, window).items()},
            }
        )
    )


def arithmetic(store: RunStore, step: int, group_id: str, member: int, start: int = 0) -> dict[str, Any]:
    """Ratio, flat branch, surrogate, KL, contribution and gradient of a window of tokens, by `objective.loss`.

    Uses the recorded weights and advantages, so it is what training did, not a guess from this group alone. `missing`
    says what the record lacks; `gap` is the largest difference from the recorded contributions, and `sum`, `gap` and
    `most` (the largest size of each number) are of the whole response, whatever the window.
    """
    records = store.records(step, group_id, member)
    objective = store.objective()
    if not records or objective is None:
        return {"missing": "objective" if records else "response"}
    record = records[0]
    needed = ["policy", "anchor", "weight"] + (["reference"] if objective.kl_in_loss else [])
    needed += ["policy_entropy"] if objective.entropy_in_loss else []
    needed += ["entropy"] if objective.selection.entropy_top < 1 else []
    if objective.needs_fresh:
        return {"missing": "what the whole optimiser batch decides"}
    lacking = [name for name in needed if getattr(record, name) is None]
    if lacking or record.advantage is None:
        return {"missing": ", ".join(lacking or ["advantage"])}
    objective = in_force(objective, store.metrics().get(step, {}).get("entropy_bonus"))
    made = evaluate(objective, record, _kept(store, objective, record))
    lists = {name: values for name, values in made.items() if isinstance(values, list)}
    most = {name: max((abs(value) for value in values), default=0.0) for name, values in lists.items()}
    first = max(start, 0)
    window = {name: values[first : first + WINDOW] for name, values in lists.items()}
    return dict(strict({**made, **window, "start": first, "most": most}))


def _kept(store: RunStore, objective: Objective, record: ResponseRecord) -> NDArray[np.bool_] | None:
    """[T] True where the policy term stays under `selection.entropy_top`; None where it stays everywhere.

    The threshold is made again from what was recorded: the entropies of all tokens with a weight in the same optimiser
    step, or in this response alone.
    """
    axis = objective.selection
    if axis.entropy_top >= 1:
        return None
    own = np.asarray(record.entropy, np.float64)
    pools = [own[np.asarray(record.weight) != 0]]
    table = store.table(record.step, ["update", "entropy", "weight"]) if axis.entropy_over == "batch" else None
    if table is not None:
        rows = table.filter(pc.field("update") == record.update).drop_null()
        every, weight = (rows[name].combine_chunks().flatten().to_numpy() for name in ("entropy", "weight"))
        pools = [every.astype(np.float64)[weight != 0]]
    return np.asarray(own >= entropy_threshold(pools, axis.entropy_top))


def evaluate(objective: Objective, record: ResponseRecord, kept: NDArray[np.bool_] | None = None) -> dict[str, Any]:
    """The loss of one recorded response by the package. Imports torch here, when it is first asked for.

    kept: [T] False where the policy term is left out.
    """
    import torch

    from gropius.objective.loss import Tokens, loss

    size = len(record.response_ids)
    mask = torch.from_numpy(np.array(record.loss_mask, np.bool_))

    def tensor(values: Any) -> torch.Tensor:
        return torch.from_numpy(np.array(values, np.float64))

    def optional(values: Any) -> torch.Tensor | None:
        return None if values is None else tensor(values)

    advantage = record.token_advantages if record.token_advantages is not None else np.full(size, record.advantage)
    tokens = Tokens(
        sequence=torch.zeros(size, dtype=torch.int64),
        mask=mask,
        advantage=tensor(advantage) * mask,
        weight=tensor(record.weight),
        sequences=1,
        keep=None if kept is None else torch.from_numpy(kept),
        anchor=tensor(record.anchor),
        sampler=optional(record.sampler),
        reference=optional(record.reference),
        imitation=optional(record.imitation),
        demonstration=torch.ones(size, dtype=torch.bool) if record.demonstration else None,
        entropy=optional(record.policy_entropy),
    )
    policy = tensor(record.policy).requires_grad_(True)
    out = loss(objective, policy, tokens)
    gradient = torch.zeros_like(policy)
    if out.loss.requires_grad:
        (found,) = torch.autograd.grad(out.loss, policy, allow_unused=True)
        gradient = gradient if found is None else found
    contribution = out.contribution.detach().numpy()
    gap = None
    if record.contribution is not None and size:
        gap = float(np.abs(contribution - np.asarray(record.contribution, np.float64)).max())
    return {
        "ratio": out.ratio.detach().tolist(),
        "clipped": out.flat.tolist(),
        "surrogate": out.surrogate.detach().tolist(),
        **({"kept": kept.tolist()} if kept is not None else {}),
        "kl": out.kl.detach().tolist(),
        **({"entropy": (tokens.entropy * mask).tolist()} if tokens.entropy is not None else {}),
        **({"imitation": tokens.imitation.tolist()} if tokens.imitation is not None else {}),
        "correction": out.correction.detach().tolist(),
        "contribution": contribution.tolist(),
        "gradient": gradient.tolist(),
        "sum": math.fsum(contribution.tolist()),
        "gap": gap,
    }


def balance(store: RunStore, step: int) -> dict[str, Any] | None:
    """Do the recorded contributions of a step add up to its logged loss? None when either is not recorded.

    The logged loss is the mean over the optimiser steps of the first pass. sum, logged, gap; gap is their difference.
    """
    metrics = store.metrics().get(step, {})
    logged = metrics.get("loss")
    table = store.table(step, ["contribution", "update"])
    if table is None or not isinstance(logged, int | float):
        return None
    column = table.column("contribution")
    if column.null_count == len(column):
        return None
    count = max(1, len({update for update in table.column("update").to_pylist() if update != NEVER_TRAINED}))
    total = math.fsum(np.sum(chunk.flatten().to_numpy()) for chunk in column.chunks) / count
    return dict(strict({"sum": total, "logged": float(logged), "gap": total - float(logged), "updates": count}))
