"""The workbench: constructed teaching numbers, every one made by the package. Torch is imported only where it is used.

Each bench takes a JSON object and answers one; `BENCHES` at the foot lists them.
"""

from __future__ import annotations

import importlib
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from gropius.errors import UsageError
from gropius.objective.aggregate import AGGREGATES, Layout, token_weights
from gropius.objective.explain import explain, explain_rewards
from gropius.objective.formula import formula
from gropius.objective.presets import PRESETS, resolve
from gropius.objective.spec import Aggregate

Body = Mapping[str, Any]
MOST_SIBLINGS = 64
MOST_ANSWERS = 16
MOST_TOKENS = 4096
CURVE_POINTS = 241


def presets() -> list[dict[str, Any]]:
    """Every preset with its source, its formula and all its fields.

    Whoever asks is about to work, so the parts that need torch begin to load.
    """
    threading.Thread(target=_warm, daemon=True).start()
    return [
        {
            "name": preset.name,
            "title": preset.title,
            "citation": preset.citation,
            "print_difference": preset.print_difference,
            "objective": preset.objective.as_dict(),
            "formula": formula(preset.objective),
        }
        for preset in PRESETS.values()
    ]


def _warm() -> None:
    importlib.import_module("gropius.objective.loss")


def group_bench(body: Body) -> dict[str, Any]:
    """A group step by step. body: rewards [2 to 64], preset, overrides."""
    rewards = numbers(body, "rewards", 1, MOST_SIBLINGS)
    return explain_rewards(rewards, *_objective(body))


def weights_bench(body: Body) -> dict[str, Any]:
    """The weight of a token under every aggregation. body: lengths, losses (a number or a list an answer), prompts
    (which answer belongs to which prompt; default all to one), constant (C).

    loss = Σ weight · loss of the token; share: of an answer in the sum of all weights.
    """
    lengths = [int(n) for n in numbers(body, "lengths", 1, MOST_ANSWERS)]
    if any(not 1 <= n <= MOST_TOKENS for n in lengths):
        raise UsageError(f"lengths: write whole numbers from 1 to {MOST_TOKENS}")
    losses = _token_losses(body.get("losses", 1.0), lengths)
    prompts = body.get("prompts", [0] * len(lengths))
    if not isinstance(prompts, list) or len(prompts) != len(lengths) or not all(type(p) is int for p in prompts):
        raise UsageError("prompts: write one whole number an answer, which prompt it belongs to")
    constant = body.get("constant", max(lengths))
    if type(constant) is not int or constant < 1:
        raise UsageError("constant: write a whole number of tokens, at least 1")
    masks = [np.ones(n, np.bool_) for n in lengths]
    layout = Layout(masks, masks, np.ones(len(lengths), np.bool_), np.array(prompts, np.int64))
    out = {}
    for kind in AGGREGATES:
        weights = token_weights(Aggregate(kind, constant if kind == "constant_length" else 0), layout)  # type: ignore[arg-type]
        parts = [math.fsum(w * x) for w, x in zip(weights, losses, strict=True)]
        total = math.fsum(math.fsum(w) for w in weights)
        out[kind] = {
            "loss": math.fsum(parts),
            "answers": [
                {"weight": float(w[0]), "sum": part, "share": math.fsum(w) / total, "per_token": (w * x)[:64].tolist()}
                for w, x, part in zip(weights, losses, parts, strict=True)
            ],
        }
    return {"lengths": lengths, "constant": constant, "kinds": out}


def ratio_bench(body: Body) -> dict[str, Any]:
    """Surrogate and gradient against the ratio. body: preset, overrides, anchor (the token's probability under the
    anchor), low, high (ends of the ratio's axis).

    One token is one response here. value: the policy term; gradient: its derivative by log π; flat: no gradient.
    """
    import torch

    from gropius.objective.loss import Tokens, loss

    spec = resolve(*_named(body), {**dict(_overrides(body)), "kl.estimator": "none", "kl.coefficient": 0.0,
                                   "ratio.correction": "none", "selection.off_policy_mask": 0.0,
                                   "terms.entropy": 0.0, "selection.covariance": "none"})  # fmt: skip
    anchor = number(body, "anchor", 0.2, 1e-6, 1.0)
    low, high = number(body, "low", 0.0, 0.0, 10.0), number(body, "high", 2.0, 0.1, 20.0)
    if low >= high:
        raise UsageError("low must lie below high")
    axis = spec.surrogate
    corners = [x + e for x in (1 - axis.low, 1.0, 1 + axis.high, axis.cap or 1.0) for e in (-1e-9, 0.0, 1e-9)]
    ratio = np.unique(np.concatenate([np.linspace(max(low, 1e-3), high, CURVE_POINTS), corners]))
    ratio = ratio[(ratio >= max(low, 1e-3)) & (ratio <= high)]
    count = len(ratio)
    policy = torch.from_numpy(np.log(ratio * anchor)).requires_grad_(True)
    curves = {}
    for sign in (1.0, -1.0):
        tokens = Tokens(
            sequence=torch.arange(count),
            mask=torch.ones(count, dtype=torch.bool),
            advantage=torch.full((count,), sign, dtype=torch.float64),
            weight=torch.ones(count, dtype=torch.float64),
            sequences=count,
            anchor=torch.full((count,), math.log(anchor), dtype=torch.float64),
            sampler=torch.full((count,), math.log(anchor), dtype=torch.float64),
        )
        out = loss(spec, policy, tokens)
        (gradient,) = torch.autograd.grad(out.loss, policy)
        curves["positive" if sign > 0 else "negative"] = {
            "value": out.surrogate.tolist(),
            "gradient": (-gradient).tolist(),
            "flat": out.flat.tolist(),
        }
    return {"ratio": ratio.tolist(), "curves": curves, "formula": formula(spec), "objective": spec.as_dict()}


def batch_bench(body: Body) -> dict[str, Any]:
    """A whole batch of answers. body: answers [{advantage or reward, ratios, anchor, reference}], preset, overrides.

    ratios: one a token; anchor, reference: probabilities, one number or one a token; reference absent = the policy
    itself, so that its KL is 0.
    """
    answers = body.get("answers")
    if not isinstance(answers, list) or not 1 <= len(answers) <= MOST_ANSWERS:
        raise UsageError(f"answers: write a list of 1 to {MOST_ANSWERS} answers")
    responses = [_answer(i, answer) for i, answer in enumerate(answers)]
    return explain({"groups": [{"id": "group", "responses": responses}]}, *_objective(body))


def _answer(i: int, answer: Any) -> dict[str, Any]:
    if not isinstance(answer, Mapping):
        raise UsageError(f"answer {i}: write an object with ratios and an advantage or a reward")
    ratios = numbers(answer, "ratios", 1, 64)
    anchors = _spread(i, answer, "anchor", len(ratios), [0.2] * len(ratios))
    policies = [ratio * anchor for ratio, anchor in zip(ratios, anchors, strict=True)]
    references = _spread(i, answer, "reference", len(ratios), policies)
    if min(*ratios, *anchors, *references) <= 0:
        raise UsageError(f"answer {i}: ratios and probabilities are above 0")
    out: dict[str, Any] = {
        "policy": [math.log(p) for p in policies],
        "anchor": [math.log(p) for p in anchors],
        "sampler": [math.log(p) for p in anchors],
        "reference": [math.log(p) for p in references],
        "reward": answer.get("reward", 0.0),
    }
    if answer.get("advantage") is not None:
        out["advantage"] = answer["advantage"]
    return out


def kl_bench(body: Body) -> dict[str, Any]:
    """Estimators on a small categorical policy. body: policy, reference (weights of 2 to 8 tokens, made to sum to 1).

    For each estimator, exact sums over the tokens drawn from the policy: its values, mean and standard deviation, and
    the expected gradient in the logits when it is differentiated as it stands. Beside them both true gradients.
    """
    import torch

    from gropius.objective.kl import ESTIMATORS, kl_term
    from gropius.objective.spec import Kl

    policy, reference = _distribution(body, "policy"), _distribution(body, "reference")
    if len(policy) != len(reference):
        raise UsageError("policy and reference need the same number of tokens")
    logits = torch.from_numpy(np.log(policy)).requires_grad_(True)
    log_ref = torch.from_numpy(np.log(reference))
    probability = torch.from_numpy(policy)

    def gradient(value: torch.Tensor) -> list[float]:
        (found,) = torch.autograd.grad(value, logits)
        return [float(x) for x in found]

    log_policy = torch.log_softmax(logits, 0)
    reverse = (log_policy.exp() * (log_policy - log_ref)).sum()
    true = {"reverse": float(reverse.detach()), "reverse_gradient": gradient(reverse)}
    forward = (log_ref.exp() * (log_ref - torch.log_softmax(logits, 0))).sum()
    true |= {"forward": float(forward.detach()), "forward_gradient": gradient(forward)}
    estimators = {}
    for name in ESTIMATORS:
        log_policy = torch.log_softmax(logits, 0)
        term = kl_term(Kl(name, coefficient=1.0), log_policy, log_ref, log_policy.detach())  # type: ignore[arg-type]
        mean = float((probability * term).sum().detach())
        spread = float((probability * (term - mean) ** 2).sum().detach()) ** 0.5
        estimators[name] = {
            "values": term.tolist(),
            "mean": mean,
            "std": spread,
            "gradient": gradient((probability * term).sum()),
        }
    return {"policy": policy.tolist(), "reference": reference.tolist(), "true": true, "estimators": estimators}


def budget_bench(body: Body) -> dict[str, Any]:
    """Group size against prompts. body: mixture [{weight, rate, concentration}], responses, grow_limit, scale.

    The mixture is constructed, not measured, so the plan's intervals have no width.
    """
    from gropius.plan import BetaMixture, Fit, plan_split
    from gropius.plan.split import Budget

    parts = body.get("mixture")
    if not isinstance(parts, list) or not 1 <= len(parts) <= 4 or not all(isinstance(p, Mapping) for p in parts):
        raise UsageError("mixture: write 1 to 4 components with weight, rate and concentration")
    weight = np.array([number(p, "weight", 1.0, 0.0, 1e6) for p in parts])
    rate = np.array([number(p, "rate", 0.5, 1e-4, 1 - 1e-4) for p in parts])
    concentration = np.array([number(p, "concentration", 4.0, 0.05, 1e4) for p in parts])
    if weight.sum() <= 0:
        raise UsageError("mixture: at least one weight must be above 0")
    mixture = BetaMixture(weight / weight.sum(), rate * concentration, (1 - rate) * concentration)
    same = BetaMixture(mixture.weight[None], mixture.a[None], mixture.b[None])
    responses = int(number(body, "responses", 512, 4, 1_000_000))
    budget = Budget(responses, grow_limit=int(number(body, "grow_limit", 64, 2, 1024)))
    plan = plan_split(
        Fit(mixture, same, {}, 1_000_000, float(mixture.mean)), budget, scale=str(body.get("scale", "group_std"))
    )
    return plan.as_dict()


def number(body: Body, key: str, default: float, low: float, high: float) -> float:
    """One number of a request. Errors: UsageError naming key and range."""
    value = body.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise UsageError(f"{key} = {value!r}: write a number from {low:g} to {high:g}")
    return float(value)


def numbers(body: Body, key: str, least: int, most: int) -> list[float]:
    """A list of finite numbers. Errors: UsageError naming the key, the place and the range."""
    values = body.get(key)
    if not isinstance(values, list) or not least <= len(values) <= most:
        raise UsageError(f"{key}: write a list of {least} to {most} numbers")
    for i, value in enumerate(values):
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise UsageError(f"{key}, entry {i}: {value!r} is not a finite number")
        if abs(value) > 1e12:
            raise UsageError(f"{key}, entry {i}: {value!r} is too large; write a number of at most 1e12 in size")
    return [float(value) for value in values]


def _token_losses(losses: Any, lengths: Sequence[int]) -> list[np.ndarray]:
    per_answer = losses if isinstance(losses, list) else [losses] * len(lengths)
    if len(per_answer) != len(lengths):
        raise UsageError(f"losses: {len(per_answer)} entries for {len(lengths)} answers")
    out = []
    for i, (loss, length) in enumerate(zip(per_answer, lengths, strict=True)):
        values = loss if isinstance(loss, list) else [loss] * length
        if len(values) != length:
            raise UsageError(f"losses, answer {i}: {len(values)} numbers for {length} tokens")
        out.append(np.array(numbers({"losses": values}, "losses", 1, MOST_TOKENS)))
    return out


def _spread(i: int, answer: Body, key: str, length: int, default: list[float]) -> list[float]:
    value = answer.get(key)
    if value is None:
        return default
    values = value if isinstance(value, list) else [value] * length
    if len(values) != length:
        raise UsageError(f"answer {i}: {key} has {len(values)} numbers for {length} tokens")
    return numbers({key: values}, key, 1, 64)


def _distribution(body: Body, key: str) -> np.ndarray:
    values = np.array(numbers(body, key, 2, 8))
    if values.min() <= 0:
        raise UsageError(f"{key}: every token needs a weight above 0")
    return np.asarray(values / values.sum())


def _overrides(body: Body) -> Mapping[str, Any]:
    overrides = body.get("overrides", {})
    if not isinstance(overrides, Mapping):
        raise UsageError('overrides: write an object such as {"advantage.ddof": 1}')
    return overrides


def _named(body: Body) -> tuple[str]:
    name = body.get("preset", "grpo")
    if not isinstance(name, str):
        raise UsageError("preset: write the name of a preset")
    return (name,)


def _objective(body: Body) -> tuple[str, Mapping[str, Any]]:
    return _named(body)[0], _overrides(body)


BENCHES: dict[str, Callable[[Body], dict[str, Any]]] = {
    "group": group_bench,
    "weights": weights_bench,
    "ratio": ratio_bench,
    "batch": batch_bench,
    "kl": kl_bench,
    "budget": budget_bench,
}
