"""Diagnostics of the sampler: its log-probabilities against the trainer's, how old its policy is, weights. No torch.

A gap between sampler and trainer is attributed by testing each cause on the tokens at hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gropius.doctor.finding import Finding, Interval, Row
from gropius.doctor.log import Log, TokenRow
from gropius.doctor.windows import FEWEST_STEPS, drawn_again, mean_of, width

APART = 0.02
FAR_APART = 0.1
THIN = 0.1
FIT = 0.6
HOTTEST = 0.75  # the slope is 1 − 1/T; near 1 the sampler knows nothing of what the trainer computes
LATE = 0.25
WEIGHTLESS = 0.5
MOST_WEIGHTLESS = 0.2
FEWEST_WEIGHTS = 24
FEWEST_RESPONSES = 8


@dataclass(frozen=True, eq=False)
class Gaps:
    """sampler − trainer of every token at hand, with what each token's cause is tested on. Arrays of one length.

    first: the token opens its response. surprise: trainer log-probability plus entropy (0 where that is unknown).
    drawn_above: the sampler reports what it drew from, not the whole distribution.
    """

    gap: NDArray[np.float64]
    step: NDArray[np.int64]
    first: NDArray[np.bool_]
    surprise: NDArray[np.float64]
    rows: list[TokenRow]


def gaps(rows: Sequence[TokenRow]) -> Gaps:
    """The gaps of all rows whose trainer's log-probabilities were recorded before the weights moved."""
    used = [r for r in rows if r.sampler is not None and r.trainer is not None and len(r.sampler)]
    parts: list[NDArray[np.float64]] = []
    steps, firsts, surprises = [], [], []
    for row in used:
        trainer = np.asarray(row.trainer, np.float64)
        parts.append(np.asarray(row.sampler, np.float64) - trainer)
        steps.append(np.full(len(trainer), row.step))
        firsts.append(np.arange(len(trainer)) == 0)
        surprises.append(trainer + row.entropy if row.entropy is not None else np.zeros(len(trainer)))
    empty = np.zeros(0)
    return Gaps(
        np.concatenate([*parts, empty]),
        np.concatenate([*steps, empty]).astype(np.int64),
        np.concatenate([*firsts, empty]).astype(np.bool_),
        np.concatenate([*surprises, empty]),
        used,
    )


def sampler_mismatch(log: Log) -> Finding | None:
    """Sampler and trainer give the same tokens log-probabilities that differ by more than 0.02 nats on average."""
    found = gaps(log.tokens)
    means = [_mean_gap(row) for row in found.rows]
    if len(means) < FEWEST_RESPONSES:
        return None
    recent = [m for m, r in zip(means, found.rows, strict=True) if r.step >= _recent(log)]
    measured = mean_of(recent or means, "|sampler − trainer|, nats a token")
    if measured.low <= APART or (_declared(log) and _agreed_at_first(found, log)):
        return None
    cause, key, change = attribute(found, log)
    worst = sorted(range(len(means)), key=lambda i: -means[i])[:8]
    apart = [row.step for mean, row in zip(means, found.rows, strict=True) if mean > APART]
    return Finding(
        "sampler_trainer_mismatch",
        "critical" if measured.low > FAR_APART else "warning",
        min(apart),
        f"sampler and trainer differ by {measured.value:.3g} nats a token on the same tokens",
        cause,
        key,
        change,
        measured,
        tuple(Row(found.rows[i].step, found.rows[i].group_id, found.rows[i].member) for i in worst),
    )


def _mean_gap(row: TokenRow) -> float:
    return float(np.abs(np.asarray(row.sampler, np.float64) - np.asarray(row.trainer, np.float64)).mean())


def attribute(found: Gaps, log: Log) -> tuple[str, str, str]:
    """(cause, key, change): each cause tested on the tokens, the certain ones first."""
    size = np.abs(found.gap)
    if _agreed_at_first(found, log):
        return (
            "stale weights: the numbers agree at the first step, before any update, and come apart afterwards",
            "rollout",
            "hand the new weights to the sampler after every update, and drop its caches then",
        )
    temperature = float(log.settings.get("rollout.temperature", 1.0))
    slope, fit = _line(-found.surprise, found.gap)
    if fit > FIT and -3 < slope < HOTTEST and found.surprise.any():
        return (
            "temperature: the gap follows the token's surprise as if the sampler divided the logits by "
            f"{temperature / (1 - slope):.2g}, not by the {temperature:g} of the recipe",
            "rollout.temperature",
            "send rollout.temperature to the sampler, and let nothing override it (a model's generation config does)",
        )
    if float((found.gap > -1e-3).mean()) > 0.99 and float(found.gap.mean()) > APART:
        return (
            "truncated sampling: the sampler's numbers are never below the trainer's, as they are after top-k, top-p "
            "or min-p has taken tokens away",
            "rollout.top_p",
            "let the sampler report the whole distribution, or switch the truncation off",
        )
    late = size[~found.first]
    if found.first.any() and float(size[found.first].mean()) < LATE * float(late.mean() if len(late) else 0.0):
        return (
            "template or re-tokenised text: first tokens agree and later ones do not, so the ids differ",
            "model.source",
            "train on the ids that were drawn, never on decoded and encoded text",
        )
    if float(size.mean()) < THIN and abs(float(found.gap.mean())) < 0.25 * float(size.mean()):
        return (
            "dtype: the gap is small, of both signs and spread thinly, as rounding is",
            "model.dtype",
            "compute in float32, or declare a correction (objective.ratio.correction)",
        )
    return (
        "template or model: the gap is there from the first token of the first step on, so the sampler sees another "
        "prompt or holds other weights",
        "data.system_prompt",
        "let sampler and trainer build the prompt with one template, from the same weights",
    )


def _agreed_at_first(found: Gaps, log: Log) -> bool:
    early = np.abs(found.gap)[found.step == min(log.steps)]
    return len(early) > 0 and float(early.mean()) < 1e-3


def _declared(log: Log) -> int:
    """How many steps old the recipe lets samples be."""
    return int(log.settings.get("train.max_staleness", 0))


def _line(x: NDArray[np.float64], y: NDArray[np.float64]) -> tuple[float, float]:
    """Slope of y on x, and the share of y's variance that the line explains."""
    if len(x) < 20 or float(x.std()) < 1e-9 or float(y.std()) < 1e-9:
        return 0.0, 0.0
    correlation = float(np.corrcoef(x, y)[0, 1])
    return correlation * float(y.std() / x.std()), correlation**2


def staleness(log: Log) -> Finding | None:
    """Responses were drawn by a policy a step or more further behind the one that trains on them than is declared."""
    version, steps = log.responses["version"].astype(np.float64), log.responses["step"]
    made, lags, total = {}, [], 0.0
    for step in log.steps:
        made[step] = total
        total += float(log.metrics.get(step, {}).get("updates") or 0.0)
    per_step = total / max(1, len(log.steps))
    if len(log.steps) < FEWEST_STEPS or per_step == 0:
        return None
    begin = _recent(log)
    for step in log.steps:
        if step >= begin:
            lags.append(float((made[step] - version[steps == step]).mean()) / per_step)
    measured = mean_of(lags, "steps that the sampler's policy is behind")
    most = _declared(log)
    behind = [s for s in log.steps if float((made[s] - version[steps == s]).mean()) >= per_step * (1 + most)]
    if measured.value < most + 0.5 or not behind:
        return None
    places = np.flatnonzero(steps == behind[-1])[:8]
    return Finding(
        "stale_sampler",
        "warning",
        behind[0],
        f"recent responses come from a policy {measured.value:.1f} steps older than the one trained",
        "the sampler is not handed the new weights after every step, or its queue is long",
        "rollout",
        "hand over the weights every step, shorten the queue, or take a ratio anchored at the sampler "
        '(objective.ratio.anchor = "sampler")',
        measured,
        log.rows(places.tolist()),
    )


def weight_concentration(log: Log) -> Finding | None:
    """The importance weights leave less than half of the responses: ESS = (Σw)²/(n Σw²) of one batch, w = Π ratio."""
    level = log.settings.get("objective.ratio.level")
    blocks: dict[int, list[float]] = {}
    rows = [r for r in log.tokens if r.update > 0 and r.policy is not None and r.anchor is not None and len(r.policy)]
    for row in rows:
        change = np.asarray(row.policy, np.float64) - np.asarray(row.anchor, np.float64)
        mean = float(change.sum() if level == "sequence_product" else change.mean())
        blocks.setdefault(row.step, []).append(float(np.exp(min(mean, 50.0))))
    blocks = {step: weights for step, weights in blocks.items() if len(weights) >= FEWEST_WEIGHTS}
    share = {step: _effective(np.array(weights)) for step, weights in blocks.items()}
    recent = list(blocks.values())[-FEWEST_STEPS:]
    if level == "none" or not recent:
        return None
    pool = [np.array([weight / float(np.mean(weights))]) for weights in recent for weight in weights]
    measured = drawn_again(pool, _effective, "effective share of the responses under their importance weights")
    if measured.value >= WEIGHTLESS or not any(value < WEIGHTLESS for value in share.values()):
        return None
    low = [step for step, value in share.items() if value < WEIGHTLESS]
    return Finding(
        "weight_concentration",
        "critical" if measured.value < MOST_WEIGHTLESS else "warning",
        low[0],
        f"the importance weights of a batch count for {measured.value:.0%} of its responses",
        "the policy has moved so far within the batch that a few responses outweigh the rest",
        "train.learning_rate",
        "use a batch fewer times (train.updates, train.epochs), lower train.learning_rate, or bound the ratio "
        "(objective.surrogate)",
        Interval(measured.of, measured.value, max(0.0, measured.low), min(1.0, measured.high)),
        tuple(Row(r.step, r.group_id, r.member) for r in rows if r.step == low[-1])[:8],
    )


def _effective(weights: NDArray[np.float64]) -> float:
    """(Σw)²/(n Σw²), in (0, 1]."""
    return float(np.sum(weights) ** 2 / (len(weights) * np.sum(np.square(weights))))


def _recent(log: Log) -> int:
    return log.steps[-width(len(log.steps)) :][0]
