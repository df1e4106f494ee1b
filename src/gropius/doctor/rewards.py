"""Diagnostics of rewards: parts that cannot be heard, verdicts that fail, a score that moves without the task."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gropius.doctor.finding import Finding, Interval, Row, Severity
from gropius.doctor.groups import growth_of_groups
from gropius.doctor.log import PART, Log, known_mean
from gropius.doctor.windows import FEWEST_GROUPS, FEWEST_STEPS, ends, held_above, mean_of, rise, width
from gropius.records.intervals import Z95

VOID = 0.02
MANY_VOID = 0.2
DOMINANT = 0.95
VISIBLE = 0.05
REPEATED = 0.3
SAME_TEXT = 0.3
FEWEST_OF_A_PART = 100


def void_verdicts(log: Log) -> Finding | None:
    """More than 2 % of the recent responses could not be scored, through no fault of the policy."""
    status = log.responses["status"]
    by_step: dict[int, list[float]] = defaultdict(list)
    for group in log.groups:
        by_step[group.step].append(float(np.mean(status[group.places] == "void")))
    held = held_above(by_step, VOID, "share of void responses")
    if held is None:
        return None
    places = np.flatnonzero(status == "void")
    reasons = Counter(str(text) for text in log.responses["reason"][places]) if "reason" in log.responses else Counter()
    reason = reasons.most_common(1)[0][0] if reasons else ""
    severity: Severity = "critical" if held.share.low > MANY_VOID else "warning"
    return Finding(
        "void_verdicts",
        severity,
        int(log.responses["step"][places[0]]),
        f"{held.share.value:.0%} of the recent responses have no verdict and are left out of the loss",
        f"the reward fails on them{f', most often with: {reason}' if reason else ''}",
        "reward",
        "mend the reward, or the gold answers of these rows; a wrong answer is rejected, it is not an error",
        held.share,
        log.rows(places[-8:].tolist()),
    )


def dead_part(log: Log) -> Finding | None:
    """One of several reward parts never differed between responses, so it has taught nothing."""
    for name in log.parts:
        values = log.responses[PART + name]
        known = values[np.isfinite(values)]
        if len(log.parts) < 2 or len(known) < FEWEST_OF_A_PART or len(log.steps) < FEWEST_STEPS:
            continue
        if known.min() == known.max():
            places = np.flatnonzero(np.isfinite(values))
            high = 1 - 0.05 ** (1 / len(known))  # the rule of three: none of n differed
            return Finding(
                "dead_reward_part",
                "warning",
                log.steps[0],
                f'the part "{name}" was {known[0]:g} for every one of {len(known)} responses',
                "its pattern never matches (or always does), so it adds the same number to every sibling",
                "reward",
                f'try the part on the rows below (gropius check-reward), mend "{name}" or take it out',
                Interval("share of responses in which the part differs", 0.0, 0.0, high),
                log.rows(places[-8:].tolist()),
            )
    return None


def dominant_part(log: Log) -> Finding | None:
    """Of several parts that vary, one alone decides the comparison in more than 95 % of it."""
    weights = part_weights(log)
    names = [name for name in log.parts if weights.get(name, 1.0) != 0]
    found = _decided(log, {name: weights.get(name, 1.0) for name in names})
    if found is None:
        return None
    shares, places, silent = found
    if len(shares) < FEWEST_GROUPS:
        return None
    best = int(np.argmax(shares.mean(axis=0)))
    measured = mean_of(shares[:, best], f'share of the siblings\' differences that "{names[best]}" decides')
    others = [name for i, name in enumerate(names) if i != best and silent[i] > 0.25]
    if measured.low <= DOMINANT or not others:
        return None
    quiet = " and ".join(f'"{name}"' for name in others)
    return Finding(
        "dominant_reward_part",
        "warning",
        log.steps[0],
        f'"{names[best]}" decides {measured.value:.1%} of what siblings differ in; {quiet} varies and is not heard',
        "the parts have very different scales times weights",
        "reward",
        f'lower the weight of "{names[best]}", or write objective.advantage.combine = "normalise_then_sum"',
        Interval(measured.of, measured.value, measured.low, min(1.0, measured.high)),
        log.rows(places[-8:]),
    )


def part_weights(log: Log) -> dict[str, float]:
    """Weights of the reward parts: those that make the recorded rewards from the parts, by least squares.

    Where rewards are not such a sum (some parts do not apply, or the log has no rewards), the recipe's, else 1.
    """
    parts = np.stack([log.responses[PART + name] for name in log.parts], axis=1)
    reward = log.responses.get("reward")
    known = np.isfinite(parts).all(axis=1) & (np.isfinite(reward) if reward is not None else False)
    if reward is not None and known.sum() > 2 * parts.shape[1]:
        weights, *_ = np.linalg.lstsq(parts[known], reward[known], rcond=None)
        error = np.abs(parts[known] @ weights - reward[known]).max()
        if error < 1e-6 * (1 + np.abs(reward[known]).max()):
            return dict(zip(log.parts, weights.tolist(), strict=True))
    rows = log.settings.get("reward", ())
    return {str(row["name"]): float(row.get("weight", 1.0)) for row in rows if isinstance(row, Mapping)}


def _decided(log: Log, weights: Mapping[str, float]) -> tuple[NDArray[np.float64], list[int], list[float]] | None:
    """Per recent group with differing rewards: cov(weighted part, sum)/var(sum) of each part; how often each varies.

    Groups count equally, as they do once the advantage is scaled by group.
    """
    if len(weights) < 2:
        return None
    begin = log.steps[-width(len(log.steps)) :][0]
    shares, places = [], []
    varies = np.zeros(len(weights))
    seen = 0
    for group in log.groups:
        if group.step < begin:
            continue
        parts = np.stack([w * log.responses[PART + name][group.places] for name, w in weights.items()])
        parts = parts[:, np.isfinite(parts).all(axis=0)]
        if parts.shape[1] < 2:
            continue
        seen += 1
        varies += parts.max(axis=1) > parts.min(axis=1)
        centred = parts - parts.mean(axis=1, keepdims=True)
        total = centred.sum(axis=0)
        if float((total**2).sum()) > 1e-12:
            shares.append(centred @ total / float((total**2).sum()))
            places.append(int(group.places[0]))
    if not shares or len(log.steps) < FEWEST_STEPS:
        return None
    return np.array(shares), places, (varies / max(seen, 1)).tolist()


def reward_without_held_out(log: Log) -> Finding | None:
    """The training metric rose and the held-out metric did not follow by half of it."""
    held = _held_out_gain(log)
    metric = log.metric_of_task
    grown = growth_of_groups(log, lambda group: known_mean(metric[group.places]))
    if held is None or grown is None:
        return None
    gain, since = held
    trained = rise(*grown, "rise of the training metric")
    if trained.low < 2 * VISIBLE or gain.high >= 0.5 * trained.low:
        return None
    task = log.responses.get("task")
    seen = len(log.groups) / max(1, len(set(task.tolist()))) if task is not None else None
    times = f" ({seen:.0f} groups a task)" if seen is not None else ""
    return Finding(
        "reward_without_held_out",
        "critical" if gain.high < 0 else "warning",
        since,
        f"the training metric rose by {trained.value:.2f}, the held-out metric by {gain.value:+.2f} "
        f"[{gain.low:+.2f}, {gain.high:+.2f}]",
        f"the policy learns these rows by heart{times}, or training rows and held-out rows are of different kinds",
        "data.options",
        "train on more tasks, or fewer steps on these; see that the held-out rows ask the same thing",
        gain,
        (Row(since), Row(log.steps[-1])),
    )


def _held_out_gain(log: Log) -> tuple[Interval, int] | None:
    """Last minus first held-out mean, its interval from the two that were logged, and the step of the first."""
    mean, low, high = (log.series(f"held_out/mean{end}") for end in ("", "_low", "_high"))
    first = _first_evaluation(log)
    if first is None or not len(mean) or mean.steps[-1] <= first[0]:
        return None
    step, row = first
    errors = [(row["held_out/mean_high"] - row["held_out/mean_low"]) / (2 * Z95)]
    errors.append(float(high.values[-1] - low.values[-1]) / (2 * Z95))
    value, half = float(mean.values[-1]) - row["held_out/mean"], Z95 * math.hypot(*errors)
    return Interval("held-out gain", value, value - half, value + half), step


def _first_evaluation(log: Log) -> tuple[int, Mapping[str, Any]] | None:
    for step in sorted(log.metrics):
        row = log.metrics[step]
        if all(isinstance(row.get(f"held_out/mean{end}"), int | float) for end in ("", "_low", "_high")):
            return step, row
    return None


def reward_hacking(log: Log) -> Finding | None:
    """The reward rose on responses that the task metric rejects, and the metric did not rise with it."""
    reward, raw = log.responses["reward"], log.responses["raw"]
    finite = reward[np.isfinite(reward)]
    span = float(finite.max() - finite.min()) if len(finite) else 0.0
    total = growth_of_groups(log, lambda group: known_mean(reward[group.places]))
    strict = growth_of_groups(log, lambda group: known_mean(raw[group.places]))
    paid = growth_of_groups(log, lambda group: known_mean(reward[group.places][raw[group.places] <= 0]))
    if total is None or strict is None or paid is None or span == 0:
        return None
    risen, real = rise(*total, "rise of the reward"), rise(*strict, "rise of the metric")
    measured = rise(*paid, "rise of the reward on responses that the metric rejects")
    if measured.low < VISIBLE * span or risen.low < VISIBLE * span or real.high >= 0.5 * risen.value / span:
        return None
    windows = ends(log.steps)
    begin = windows[1][0] if windows else log.steps[-1]
    rejected = (raw <= 0) & np.isfinite(reward) & (log.responses["step"] >= begin)
    places = np.flatnonzero(rejected)
    best = places[np.argsort(-reward[places], kind="stable")][:8]
    return Finding(
        "reward_hacking",
        "critical",
        _since(log, reward, raw),
        f"the reward rose by {risen.value:.2f} while the task metric rose by {real.value:+.2f}; responses that the "
        f"metric rejects are paid {measured.value:+.2f} more than at the start",
        f"the shaped reward pays for something else than the task: {_pattern(log, best)}",
        "reward",
        "make the part that pays these rows depend on a right answer, or lower its weight",
        measured,
        log.rows(best.tolist()),
    )


def _pattern(log: Log, places: NDArray[np.int64]) -> str:
    """What the best-paid rejected responses have in common, of the known tricks."""
    columns, tricks = log.responses, []
    if "repetition" in columns and float(columns["repetition"][places].mean()) > REPEATED:
        tricks.append("repeated text")
    if "identity" in columns:
        counts = Counter(columns["identity"][columns["step"] >= columns["step"][places].min()].tolist())
        if counts.most_common(1)[0][1] / sum(counts.values()) > SAME_TEXT:
            tricks.append("one text for every prompt")
    if "tokens" in columns:
        own, all_of_them = columns["tokens"][places].mean(), columns["tokens"].mean()
        if own < 0.6 * all_of_them:
            tricks.append("short answers")
        elif own > 1.4 * all_of_them:
            tricks.append("long answers")
    return ", ".join(tricks) or "format without content"


def _since(log: Log, reward: NDArray[Any], raw: NDArray[Any]) -> int:
    """The first step from which rejected responses are paid more than half of the way to their last level."""
    levels = []
    for step, here in log.per_step():
        level = known_mean(reward[here & (raw <= 0)])
        if level is not None:
            levels.append((step, level))
    values = [level for _, level in levels]
    size = width(len(values))
    middle = (float(np.mean(values[:size])) + float(np.mean(values[-size:]))) / 2
    averaged = [float(np.mean(values[max(0, i - 2) : i + 1])) for i in range(len(values))]
    below = max((i for i, value in enumerate(averaged) if value <= middle), default=-1)
    return levels[min(below + 1, len(levels) - 1)][0]
