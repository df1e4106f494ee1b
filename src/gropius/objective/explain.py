"""One batch → every intermediate number, in float64, by the same code that trains.

`explain_rewards` replays one group step by step and needs no torch; `explain` evaluates a batch of responses.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gropius.errors import ObjectiveError
from gropius.objective.advantage import GROUP_RELATIVE, GROUP_SCALES, TOKEN_BASELINES
from gropius.objective.batch import ARRAYS, Row, parse, part_weights
from gropius.objective.formula import formula
from gropius.objective.presets import resolve
from gropius.objective.selection import DEAD, Assigned, Assignment, GroupSummary, Response, assign
from gropius.objective.spec import Objective
from gropius.objective.subsets import TRANSFORMS
from gropius.objective.validate import check

if TYPE_CHECKING:
    import torch

Numbers = dict[str, NDArray[Any]]
_TOKEN_ARRAY = {"critic": "values", "optimal_token": "energy"}


def as_objective(objective: str | Objective, overrides: Mapping[str, Any] | None) -> Objective:
    """A preset's name or an Objective, with overrides, checked."""
    if not isinstance(objective, str | Objective) or not isinstance(overrides, Mapping | None):
        raise ObjectiveError(
            f"objective = {objective!r:.80}, overrides = {overrides!r:.80}; write a preset's name (or an Objective), "
            'and overrides as {"surrogate.high": 0.28}'
        )
    if any(not isinstance(name, str) for name in overrides or ()):
        raise ObjectiveError('overrides are named by text: {"surrogate.high": 0.28}')
    if isinstance(objective, str):
        return resolve(objective or "(empty)", overrides)
    if overrides:
        raise ObjectiveError("overrides go with a preset's name; an Objective is already complete")
    check(objective)
    return objective


def explain(
    batch: Mapping[str, Any], objective: str | Objective = "grpo", overrides: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Evaluate the objective on a batch; every number behind the loss.

    batch: {"groups": [{"id", "greedy_reward"?, "responses": [{...}]}], "weights"?: {part: weight}}; a response has
    reward (number, parts, or null when void), length, and optionally policy, anchor, sampler, reference, entropy,
    values, energy, policy_entropy (one number a token), mask, truncated, status, raw, advantage, steps ([token, score]
    of rewards with a position, not part of reward), origin and member (branches), demonstration. Without `policy`:
    advantages and weights only.
    `anchor` absent: on-policy. Returns the structure printed by `gropius explain --json`: contributions add up to
    `loss`, `gradient` is d loss / d policy log-probability. All arithmetic float64.
    Errors: ObjectiveError naming group, response and token for malformed or non-finite input.
    """
    spec = as_objective(objective, overrides)
    rows = parse(batch)
    used, notes = _as_evaluated(spec, rows)
    responses = [_kept(used, row) if _masks_tokens(used) else row.response for row in rows]
    assignment = assign(used, responses, part_weights(batch, rows))
    numbers = _evaluate(used, rows, assignment) if any(row.has("policy") and not row.void for row in rows) else None
    return {
        "objective": spec.as_dict(),
        "formula": formula(spec),
        "loss": None if numbers is None else float(numbers["loss"][0]),
        "denominator": {
            "responses": assignment.layout.responses,
            "tokens": assignment.layout.tokens,
            "prompts": assignment.layout.prompts,
        },
        "groups": _groups(rows, assignment, numbers),
        "metrics": {} if numbers is None else _metrics(numbers),
        "notes": notes,
    }


def _as_evaluated(spec: Objective, rows: Sequence[Row]) -> tuple[Objective, list[str]]:
    """What can be evaluated with the arrays given, and a note for each thing left out.

    With log-probabilities, everything the objective needs must be there; without any, the terms that need them are
    left out: advantages and weights remain.
    """
    live = [row for row in rows if not row.void]
    if any(row.has("policy") for row in live):
        _require(spec, live)
        if _sampler_as_anchor(spec, live):
            return spec, ["no sampler log-probabilities were given: the sampler is taken to be the anchor"]
        return spec, []
    notes = []
    used = spec
    if spec.kl.estimator != "none" and spec.kl.place == "reward" and not any(row.has("reference") for row in live):
        used = replace(used, kl=replace(used.kl, estimator="none"))
        notes.append("the KL in the reward is left out: no log-probabilities were given")
    if spec.selection.entropy_top < 1 and not any(row.has("entropy") for row in live):
        used = replace(used, selection=replace(used.selection, entropy_top=1.0))
        notes.append("the entropy mask is left out: no entropies were given")
    if spec.advantage.baseline in TOKEN_BASELINES and not any(
        row.has(_TOKEN_ARRAY[spec.advantage.baseline]) for row in live
    ):
        used = replace(used, advantage=replace(used.advantage, baseline="none"))
        notes.append(
            f"the {spec.advantage.baseline} baseline is left out: no {_TOKEN_ARRAY[spec.advantage.baseline]} given"
        )
    if spec.kl.reward_form == "token" and used.advantage.baseline != "critic":
        used = replace(used, kl=replace(used.kl, estimator="none"))
    if spec.needs_fresh:
        used = replace(
            used,
            selection=replace(used.selection, covariance="none"),
            surrogate=replace(used.surrogate, kind="none") if spec.surrogate.kind == "classify" else used.surrogate,
        )
        notes.append("what the policy's own log-probabilities decide is left out: none were given")
    if _masks_tokens(spec) and not all(row.has("sampler") and row.has("anchor") for row in live):
        used = replace(used, aggregate=replace(used.aggregate, count_corrected=True))
        notes.append("tokens that the correction would mask are counted: no log-probabilities were given")
    return used, notes


def _sampler_as_anchor(spec: Objective, live: Sequence[Row]) -> bool:
    anchored = spec.ratio.anchor == "sampler" and spec.ratio.level != "none"
    return anchored and not any(row.has("sampler") for row in live)


def _require(spec: Objective, live: Sequence[Row]) -> None:
    """Refuse a batch whose arrays are incomplete, naming the first response that lacks one and why it is needed."""
    needed = dict.fromkeys(ARRAYS, "")
    if spec.needs_reference:
        needed["reference"] = f'kl.estimator = "{spec.kl.estimator}"; add them, or write kl.estimator = "none"'
    if spec.ratio.correction != "none":
        needed["sampler"] = (
            f'ratio.correction = "{spec.ratio.correction}"; add them, or write ratio.correction = "none"'
        )
    if spec.selection.entropy_top < 1:
        needed["entropy"] = "selection.entropy_top; add them, or write selection.entropy_top = 1.0"
    if spec.terms.entropy > 0:
        needed["policy_entropy"] = "terms.entropy; add them, or write terms.entropy = 0"
    if (axis := spec.advantage).baseline in TOKEN_BASELINES and any(row.response.advantage is None for row in live):
        needed[_TOKEN_ARRAY[axis.baseline]] = f'advantage.baseline = "{axis.baseline}"; add them, or supply advantages'
    for name, reason in needed.items():
        missing = [row for row in live if not row.has(name)]
        if missing and len(missing) < len(live):
            raise ObjectiveError(f"{missing[0].where}: {name} is missing, while other responses have it")
        if missing and reason:
            raise ObjectiveError(f"{missing[0].where}: no {name} numbers, which the objective needs: {reason}")


def _masks_tokens(spec: Objective) -> bool:
    return spec.ratio.correction != "none" and not spec.aggregate.count_corrected


def _kept(spec: Objective, row: Row) -> Response:
    """The response with the tokens marked that the correction masks, so that they leave the denominator."""
    from gropius.objective.ratio import kept_by_correction

    if row.void or row.response.anchor is None:
        return row.response
    kept = kept_by_correction(spec.ratio, row.response.anchor, row.arrays["sampler"], row.response.mask)
    return replace(row.response, kept=kept)


def _evaluate(spec: Objective, rows: Sequence[Row], assignment: Assignment) -> Numbers:
    """Per-token numbers of the whole batch, flat, in float64, with the gradient by autograd."""
    import torch

    from gropius.objective.loss import Tokens, beside, loss

    def flat(pick: Callable[[int], NDArray[Any]]) -> torch.Tensor:
        return torch.from_numpy(np.concatenate([np.asarray(pick(i), np.float64) for i in range(len(rows))]))

    def array(name: str) -> torch.Tensor | None:
        if not any(row.has(name) and not row.void for row in rows):
            return None
        # a void response may lack what the others have; it is masked, so what stands there cannot matter
        return flat(lambda i: rows[i].arrays.get(name, np.zeros(len(rows[i].response.mask))))

    policy = array("policy")
    assert policy is not None
    sampler, anchor = array("sampler"), array("anchor")
    lengths = torch.tensor([len(row.response.mask) for row in rows])
    tokens = Tokens(
        sequence=torch.repeat_interleave(torch.arange(len(rows)), lengths),
        mask=flat(lambda i: rows[i].response.mask & (not rows[i].void)).bool(),
        advantage=flat(lambda i: assignment.responses[i].advantage),
        weight=flat(lambda i: assignment.responses[i].weight),
        sequences=len(rows),
        anchor=anchor,
        sampler=next((given for given in (sampler, anchor) if given is not None), policy),
        reference=array("reference"),
        keep=flat(lambda i: assignment.responses[i].keep).bool(),
        entropy=array("policy_entropy"),
        **beside(assignment.responses, flat),
    )
    policy.requires_grad_(True)
    out = loss(spec, policy, tokens)
    (gradient,) = torch.autograd.grad(out.loss, policy, allow_unused=True)
    _require_finite(rows, tokens.mask, (out.contribution, policy if gradient is None else gradient))
    numbers = {"gradient": torch.zeros_like(policy) if gradient is None else gradient}
    for name in ("contribution", "ratio", "surrogate", "kl", "correction", "flat"):
        numbers[name] = getattr(out, name)
    numbers["loss"] = out.loss.detach().reshape(1)
    numbers["mask"] = tokens.mask
    numbers["ratio"] = numbers["ratio"].clamp(max=sys.float_info.max)  # JSON has no infinity; its branch was flat
    return {name: value.detach().numpy() for name, value in numbers.items()}


def _require_finite(rows: Sequence[Row], mask: torch.Tensor, values: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Refuse a batch whose numbers overflow although each was finite, naming the first token where they do."""
    broken = ~values[0].isfinite() | ~values[1].isfinite()
    broken &= mask
    if not bool(broken.any()):
        return
    place = int(broken.nonzero()[0])
    for row in rows:
        if place < len(row.response.mask):
            raise ObjectiveError(
                f"{row.where}, token {place}: the loss is not finite here; policy and anchor or reference lie too far "
                "apart for their ratio to be a number"
            )
        place -= len(row.response.mask)


def _groups(rows: Sequence[Row], assignment: Assignment, numbers: Numbers | None) -> list[dict[str, Any]]:
    responses: dict[str, list[dict[str, Any]]] = {group.id: [] for group in assignment.groups}
    start = 0
    for row, given in zip(rows, assignment.responses, strict=True):
        size = len(row.response.mask)
        own = given.advantage[row.response.mask]
        constant = len(own) == 0 or own.max() == own.min()
        responses[row.response.group].append(
            {
                "reward": given.reward,
                "status": row.response.status,
                "advantage": given.value if constant else own.tolist(),
                "skipped": given.skipped,
                "tokens": [_token(t, start + t, row, given, numbers) for t in range(size)],
            }
        )
        start += size
    return [
        {
            "id": group.id,
            "mean": group.mean,
            "std": group.std,
            "state": group.state,
            "dropped": group.dropped,
            "responses": responses[group.id],
        }
        for group in assignment.groups
    ]


def _token(t: int, at: int, row: Row, given: Assigned, numbers: Numbers | None) -> dict[str, Any]:
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


def _metrics(numbers: Numbers) -> dict[str, float]:
    """Token shares over all loss tokens: clip_fraction is the flat branch, not the ratio outside its interval."""
    mask = numbers["mask"]
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
    batch = {"groups": [{"id": "rewards", "responses": [{"reward": r, "length": 1} for r in rewards]}]}
    rows = parse(batch)
    used, notes = _as_evaluated(spec, rows)
    responses = [row.response for row in rows]
    assignment = assign(used, responses)
    # a dropped group is replayed as if it were kept: the steps show why it carries nothing
    credit = assign(replace(used, selection=replace(used.selection, dead="keep")), responses).credit
    group = assignment.groups[0]
    given = [r.value for r in assignment.responses]
    steps = [
        ("rewards", "the group's scores", [float(r) for r in rewards]),
        *_transformed(spec, rewards),
        ("baseline", _BASELINE_WORDS[spec.advantage.baseline], credit.baseline.tolist()),
        ("centred", "reward − baseline", credit.centred.tolist()),
        ("scale", _scale_words(spec), credit.scale.tolist()),
        ("advantage", _advantage_words(spec, group), given),
    ]
    return {
        "objective": spec.as_dict(),
        "formula": formula(spec),
        "state": group.state,
        "dropped": group.dropped,
        "mean": group.mean,
        "std": group.std,
        "steps": [{"name": name, "definition": words, "values": values} for name, words, values in steps],
        "advantages": given,
        "notes": notes,
    }


def _transformed(spec: Objective, rewards: Sequence[float]) -> list[tuple[str, str, list[float]]]:
    axis = spec.advantage
    if axis.transform == "none":
        return []
    values = TRANSFORMS[axis.transform](np.array(rewards, np.float64), axis.k)
    times = f"{axis.k} times " if axis.transform == "pkpo" else ""
    return [("transformed", f"{times}the expected best of {axis.k} siblings, itself among them", values.tolist())]


_BASELINE_WORDS = {
    "none": "nothing is subtracted",
    "batch_mean": "mean of the whole batch (here: of this group)",
    "group_mean": "mean of the group, the response itself included",
    "leave_one_out": "mean of the other responses",
    "length_weighted": "length-weighted mean of the group",
    "greedy": "reward of the greedy response",
    "critic": "value of a critic",
    "optimal_token": "of each token: its siblings' rewards weighted by the energy up to it",
    "runner_up": "for the best response the second best; its own reward for the others",
    "subset": "expected best of k - 1 others",
}


def _scale_words(spec: Objective) -> str:
    axis = spec.advantage
    if axis.scale == "none":
        return "none: the centred reward is the advantage"
    if axis.scale == "subset_std":
        return f"std of the best of {axis.k} over all subsets + {axis.epsilon:g}"
    if axis.scale == "group_mean":
        return f"mean of the group + {axis.epsilon:g}"
    which = "population std (ddof 0)" if axis.ddof == 0 else "sample std (ddof 1)"
    over = "group" if axis.scale == "group_std" else f"batch, of its {axis.scale_of}"
    return f"{which} of the {over} + epsilon {axis.epsilon:g}"


def _advantage_words(spec: Objective, group: GroupSummary) -> str:
    axis = spec.advantage
    relative = axis.baseline in GROUP_RELATIVE or axis.scale in GROUP_SCALES
    if group.state in DEAD and relative and group.std == 0:
        words = f"{group.state}: equal rewards carry no signal within a group, and an epsilon cannot restore one"
    elif group.state == "singleton" and relative:
        words = "one response alone has no sibling to compare with"
    else:
        words = "the centred reward" if axis.scale == "none" else "centred / scale"
        if axis.rescale_live:
            words += ", times B/(B − M) over the batch"
        if axis.whiten != "none":
            words += f", whitened over the batch's {axis.whiten} (here: this group's)"
    return words + (f'; the group is dropped (selection.dead = "{spec.selection.dead}")' if group.dropped else "")
