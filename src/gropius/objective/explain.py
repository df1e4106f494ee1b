"""One batch → every intermediate number, in float64, by the same code that trains.

`explain_rewards` replays one group step by step and needs no torch; `explain` evaluates a batch of responses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gropius.errors import ObjectiveError, did_you_mean
from gropius.objective.formula import formula
from gropius.objective.presets import resolve
from gropius.objective.selection import Assignment, Response, assign
from gropius.objective.spec import Objective

RESPONSE_KEYS = (
    "reward", "length", "policy", "anchor", "sampler", "reference", "entropy", "mask", "truncated", "status", "raw",
    "advantage",
)  # fmt: skip
ARRAYS = ("policy", "anchor", "sampler", "reference", "entropy")
STATUSES = ("scored", "rejected", "void")


def as_objective(objective: str | Objective, overrides: Mapping[str, Any] | None) -> Objective:
    """A preset's name or an Objective, with overrides, checked."""
    if isinstance(objective, str):
        return resolve(objective, overrides)
    if overrides:
        raise ObjectiveError("overrides go with a preset's name; an Objective is already complete")
    return objective


def explain(
    batch: Mapping[str, Any], objective: str | Objective = "grpo", overrides: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Evaluate the objective on a batch; every number behind the loss.

    batch: {"groups": [{"id", "greedy_reward"?, "responses": [{...}]}], "weights"?: {part: weight}}; a response has
    reward (number, parts, or null when void), length, and optionally policy, anchor, sampler, reference, entropy
    (one number a token), mask, truncated, status, raw, advantage. Without `policy`: advantages and weights only.
    `anchor` absent: on-policy. Returns the structure printed by `gropius explain --json`: contributions add up to
    `loss`, `gradient` is d loss / d policy log-probability. All arithmetic float64.
    Errors: ObjectiveError naming group, response and token for malformed or non-finite input.
    """
    spec = as_objective(objective, overrides)
    rows = parse(batch)
    notes = _notes(spec, rows)
    spec_used = _without_kl_in_reward(spec) if any("KL" in note for note in notes) else spec
    _count_kept(spec_used, rows)
    assignment = assign(spec_used, [row.response for row in rows], _part_weights(batch))
    numbers = _evaluate(spec_used, rows, assignment) if rows and all(row.has("policy") for row in rows) else None
    if numbers is None and any(row.has("policy") for row in rows):
        missing = next(row for row in rows if not row.has("policy"))
        raise ObjectiveError(f"{missing.where}: policy log-probabilities are missing, while other responses have them")
    return _report(spec, rows, assignment, numbers, notes)


class Row:
    """One parsed response: the objective's view of it, its arrays, and its place for messages."""

    def __init__(self, where: str, response: Response, arrays: dict[str, np.ndarray]):
        self.where, self.response, self.arrays = where, response, arrays

    def has(self, name: str) -> bool:
        """True when the array was given."""
        return name in self.arrays


def parse(batch: Mapping[str, Any]) -> list[Row]:
    """Read BATCH.json's structure, refusing anything unclear by its place."""
    if not isinstance(batch, Mapping) or not isinstance(batch.get("groups"), list):
        raise ObjectiveError('a batch is {"groups": [{"id": ..., "responses": [...]}]}')
    extra = set(batch) - {"groups", "weights"}
    if extra:
        raise ObjectiveError(f"batch: unknown key {min(extra)!r}; it has groups and, for several rewards, weights")
    rows, seen = [], set()
    for position, group in enumerate(batch["groups"]):
        if not isinstance(group, Mapping) or not isinstance(group.get("responses"), list):
            raise ObjectiveError(f'group {position}: write {{"id": ..., "responses": [...]}}')
        name = str(group.get("id", position))
        if name in seen:
            raise ObjectiveError(f"group {name}: the id appears twice; siblings of one prompt go in one group")
        seen.add(name)
        if not group["responses"]:
            raise ObjectiveError(f"group {name}: empty; a group needs at least one response")
        for i, item in enumerate(group["responses"]):
            rows.append(_row(f"group {name}, response {i}", name, item, group.get("greedy_reward")))
    return rows


def _row(where: str, group: str, item: Any, greedy: float | None) -> Row:
    if not isinstance(item, Mapping):
        raise ObjectiveError(f"{where}: a response is an object with at least a reward and a length")
    for key in item:
        if key not in RESPONSE_KEYS:
            raise ObjectiveError(f"{where}: unknown key {key!r}; {did_you_mean(str(key), RESPONSE_KEYS)}")
    status = item.get("status", "scored")
    if status not in STATUSES:
        raise ObjectiveError(f"{where}: status {status!r} is unknown; {did_you_mean(str(status), STATUSES)}")
    length = _length(where, item)
    mask = np.ones(length, np.bool_)
    if item.get("mask") is not None:
        mask = np.array([bool(m) for m in item["mask"]], np.bool_)
    arrays = {name: _numbers(where, name, item[name], mask) for name in ARRAYS if item.get(name) is not None}
    reward = item.get("reward")
    if reward is None and status != "void":
        raise ObjectiveError(f'{where}: reward is null; write a number, or "status": "void"')
    anchor = arrays.get("anchor", arrays.get("policy"))
    advantage = item.get("advantage")
    if isinstance(advantage, Sequence):
        advantage = _numbers(where, "advantage", advantage, mask)
    elif advantage is not None and not np.isfinite(advantage):
        raise ObjectiveError(f"{where}: advantage is {advantage}; write a finite number")
    response = Response(
        group, None if status == "void" else _reward(where, reward), mask, status, bool(item.get("truncated", False)),
        item.get("raw"), advantage, anchor, arrays.get("reference"), arrays.get("entropy"), None, greedy,
    )  # fmt: skip
    return Row(where, response, arrays)


def _reward(where: str, reward: Any) -> float | dict[str, float]:
    parts = reward if isinstance(reward, Mapping) else {"": reward}
    for name, value in parts.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ObjectiveError(f"{where}: reward {name or 'value'} is {value!r}; write a number")
    return {k: float(v) for k, v in parts.items()} if isinstance(reward, Mapping) else float(reward)


def _length(where: str, item: Mapping[str, Any]) -> int:
    sizes = {name: len(item[name]) for name in (*ARRAYS, "mask") if isinstance(item.get(name), Sequence)}
    if item.get("length") is not None:
        if isinstance(item["length"], bool) or not isinstance(item["length"], int) or item["length"] < 0:
            raise ObjectiveError(f"{where}: length {item['length']!r} is not a number of tokens")
        sizes["length"] = item["length"]
    if not sizes:
        raise ObjectiveError(f"{where}: neither length nor any per-token array; write the number of tokens as length")
    if len(set(sizes.values())) > 1:
        raise ObjectiveError(f"{where}: lengths differ: " + ", ".join(f"{k} {v}" for k, v in sizes.items()))
    return next(iter(sizes.values()))


def _numbers(where: str, name: str, values: Any, mask: np.ndarray) -> np.ndarray:
    if isinstance(values, str) or not isinstance(values, Sequence):
        raise ObjectiveError(f"{where}: {name} must be a list of numbers, one a token")
    if len(values) != len(mask):
        raise ObjectiveError(f"{where}: {name} has {len(values)} numbers for {len(mask)} tokens")
    out = np.zeros(len(mask))
    for t, value in enumerate(values):
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if mask[t] and not (number and np.isfinite(value)):
            raise ObjectiveError(f"{where}, token {t}: {name} is {value!r}; write a finite number")
        out[t] = value if number else np.nan
    return out


def _part_weights(batch: Mapping[str, Any]) -> dict[str, float]:
    return {str(k): float(v) for k, v in (batch.get("weights") or {}).items()}


def _notes(spec: Objective, rows: Sequence[Row]) -> list[str]:
    """Say what is left out when there are no log-probabilities at all."""
    in_reward = spec.kl.estimator != "none" and spec.kl.place == "reward"
    if in_reward and not any(row.has("policy") or row.has("anchor") or row.has("reference") for row in rows):
        return ["the KL in the reward is left out: no log-probabilities were given"]
    if spec.ratio.anchor == "sampler" and not any(row.has("sampler") for row in rows) and any(map(_has_anchor, rows)):
        return ["no sampler log-probabilities were given: the sampler is taken to be the anchor"]
    return []


def _has_anchor(row: Row) -> bool:
    return row.has("anchor")


def _without_kl_in_reward(spec: Objective) -> Objective:
    from dataclasses import replace

    return replace(spec, kl=replace(spec.kl, estimator="none", coefficient=0.0))


def _count_kept(spec: Objective, rows: Sequence[Row]) -> None:
    """Mark tokens that the correction masks, where they must leave the denominator."""
    if spec.ratio.correction == "none" or spec.aggregate.count_corrected:
        return
    from dataclasses import replace

    import torch

    from gropius.objective.ratio import Segments, correction

    for row in rows:
        anchor, sampler = row.response.anchor, row.arrays.get("sampler")
        if anchor is None or sampler is None:
            raise ObjectiveError(f"{row.where}: ratio.correction needs the sampler log-probabilities")
        mask = torch.from_numpy(row.response.mask)
        segments = Segments(torch.zeros(len(mask), dtype=torch.int64), mask, 1)
        weight = correction(
            spec.ratio, segments.select(torch.from_numpy(anchor)), segments.select(torch.from_numpy(sampler)), segments
        )
        row.response = replace(row.response, kept=(weight != 0).numpy())


def _evaluate(spec: Objective, rows: Sequence[Row], assignment: Assignment) -> dict[str, np.ndarray]:
    """Per-token numbers of the whole batch, flat, in float64, with the gradient by autograd."""
    import torch

    from gropius.objective.loss import Tokens, loss

    def flat(pick: Any) -> torch.Tensor:
        return torch.from_numpy(np.concatenate([np.asarray(pick(i), np.float64) for i in range(len(rows))]))

    def optional(name: str) -> torch.Tensor | None:
        given = [row.has(name) for row in rows]
        if any(given) and not all(given):
            raise ObjectiveError(f"{rows[given.index(False)].where}: {name} is missing, while other responses have it")
        return flat(lambda i: rows[i].arrays[name]) if all(given) else None

    sampler = optional("sampler")
    if sampler is None and spec.ratio.anchor == "sampler":
        sampler = optional("anchor")
    lengths = torch.tensor([len(row.response.mask) for row in rows])
    tokens = Tokens(
        sequence=torch.repeat_interleave(torch.arange(len(rows)), lengths),
        mask=flat(lambda i: rows[i].response.mask).bool(),
        advantage=flat(lambda i: assignment.responses[i].advantage),
        weight=flat(lambda i: assignment.responses[i].weight),
        sequences=len(rows),
        anchor=optional("anchor"),
        sampler=sampler,
        reference=optional("reference"),
        keep=flat(lambda i: assignment.responses[i].keep).bool(),
    )
    policy = flat(lambda i: rows[i].arrays["policy"]).requires_grad_(True)
    out = loss(spec, policy, tokens)
    (gradient,) = torch.autograd.grad(out.loss, policy, allow_unused=True)
    numbers = {"gradient": torch.zeros_like(policy) if gradient is None else gradient}
    for name in ("contribution", "ratio", "surrogate", "kl", "correction", "flat"):
        numbers[name] = getattr(out, name)
    numbers["loss"] = out.loss.detach().reshape(1)
    return {name: value.detach().numpy() for name, value in numbers.items()}


def _report(
    spec: Objective,
    rows: Sequence[Row],
    assignment: Assignment,
    numbers: dict[str, np.ndarray] | None,
    notes: list[str],
) -> dict[str, Any]:
    groups = {g.id: {"id": g.id, "mean": g.mean, "std": g.std, "state": g.state, "dropped": g.dropped,
                     "responses": []} for g in assignment.groups}  # fmt: skip
    start = 0
    for row, given in zip(rows, assignment.responses, strict=True):
        size = len(row.response.mask)
        tokens = [_token(t, start + t, row, given, numbers) for t in range(size)]
        start += size
        own = given.advantage[row.response.mask]
        constant = len(own) == 0 or own.max() == own.min()
        groups[row.response.group]["responses"].append({
            "reward": given.reward,
            "advantage": given.value if constant else own.tolist(),
            "skipped": given.skipped,
            "tokens": tokens,
        })  # fmt: skip
    return {
        "objective": spec.as_dict(),
        "formula": formula(spec),
        "loss": None if numbers is None else float(numbers["loss"][0]),
        "denominator": {"responses": assignment.layout.responses, "tokens": assignment.layout.tokens,
                        "prompts": assignment.layout.prompts},
        "groups": list(groups.values()),
        "metrics": {} if numbers is None else _metrics(rows, numbers),
        "notes": notes,
    }  # fmt: skip


def _token(t: int, at: int, row: Row, given: Any, numbers: dict[str, np.ndarray] | None) -> dict[str, Any]:
    token: dict[str, Any] = {"weight": float(given.weight[t])}
    if not row.response.mask[t]:
        token["masked"] = True
    if numbers is not None:
        token["ratio"] = float(numbers["ratio"][at])
        token["clipped"] = bool(numbers["flat"][at])
        for name in ("surrogate", "kl", "contribution", "gradient"):
            token[name] = float(numbers[name][at])
        if float(numbers["correction"][at]) != 1.0 and row.response.mask[t]:
            token["correction"] = float(numbers["correction"][at])
    return token


def _metrics(rows: Sequence[Row], numbers: dict[str, np.ndarray]) -> dict[str, float]:
    """Token shares over all loss tokens: clip_fraction is the flat branch, not the ratio outside its interval."""
    mask = np.concatenate([row.response.mask for row in rows])
    count = max(int(mask.sum()), 1)
    return {
        "clip_fraction": float(numbers["flat"][mask].sum() / count),
        "ratio_mean": float(numbers["ratio"][mask].sum() / count),
        "ratio_max": float(numbers["ratio"][mask].max()) if mask.any() else 1.0,
        "kl_mean": float(numbers["kl"][mask].sum() / count),
    }


def explain_rewards(
    rewards: Sequence[float], objective: str | Objective = "grpo", overrides: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Replay one group: rewards → baseline → centred → scaled, with the definition of each step. Needs no torch.

    Equal lengths are assumed (for the length-weighted baseline). A KL in the reward is left out and said.
    Errors: ObjectiveError for an empty group or a reward that is not finite.

    >>> [step["values"] for step in explain_rewards([1, 1, 0, 0])["steps"]][-1]
    [1.0, 1.0, -1.0, -1.0]
    """
    if len(rewards) == 0:
        raise ObjectiveError("an empty group has no advantage; give at least one reward, e.g. --rewards 1,1,0,0")
    spec = as_objective(objective, overrides)
    batch = {"groups": [{"id": "group", "responses": [{"reward": r, "length": 1} for r in rewards]}]}
    rows = parse(batch)
    notes = _notes(spec, rows)
    assignment = assign(_without_kl_in_reward(spec) if notes else spec, [row.response for row in rows])
    credit, group = assignment.credit, assignment.groups[0]
    given = [r.value for r in assignment.responses]
    steps = [
        {"name": "rewards", "definition": "the group's scores", "values": [float(r) for r in rewards]},
        {"name": "baseline", "definition": _BASELINE_WORDS[spec.advantage.baseline],
         "values": credit.baseline.tolist()},
        {"name": "centred", "definition": "reward − baseline", "values": credit.centred.tolist()},
        {"name": "scale", "definition": _scale_words(spec), "values": credit.scale.tolist()},
        {"name": "advantage", "definition": _advantage_words(spec, group.state), "values": given},
    ]  # fmt: skip
    return {
        "objective": spec.as_dict(),
        "formula": formula(spec),
        "state": group.state,
        "dropped": group.dropped,
        "mean": group.mean,
        "std": group.std,
        "steps": steps,
        "advantages": given,
        "notes": notes,
    }


_BASELINE_WORDS = {
    "none": "nothing is subtracted",
    "batch_mean": "mean of the whole batch (here: of this group)",
    "group_mean": "mean of the group, the response itself included",
    "leave_one_out": "mean of the other responses",
    "length_weighted": "length-weighted mean of the group",
    "greedy": "reward of the greedy response",
    "critic": "value of a critic",
}


def _scale_words(spec: Objective) -> str:
    axis = spec.advantage
    if axis.scale == "none":
        return "none: the centred reward is the advantage"
    if axis.scale == "group_mean":
        return f"mean of the group + {axis.epsilon:g}"
    which = "population std (ddof 0)" if axis.ddof == 0 else "sample std (ddof 1)"
    over = "group" if axis.scale == "group_std" else f"batch, of its {axis.scale_of}"
    return f"{which} of the {over} + epsilon {axis.epsilon:g}"


def _advantage_words(spec: Objective, state: str) -> str:
    if state in ("all_failed", "all_solved", "all_equal"):
        return f"{state}: equal rewards carry no signal under a group baseline, and an epsilon cannot restore one"
    if state == "singleton":
        return "one response alone has no sibling to compare with"
    extra = "" if spec.advantage.whiten == "none" else f", whitened over the batch's {spec.advantage.whiten}"
    return "centred / scale" + extra
