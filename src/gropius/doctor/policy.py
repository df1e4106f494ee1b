"""Diagnostics of the policy and its optimiser: entropy, clipping, KL, gradients. No torch."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from gropius.doctor.finding import Finding, Interval, Row
from gropius.doctor.groups import growth_of_groups, kinds
from gropius.doctor.log import Log, Series, known_mean
from gropius.doctor.windows import FEWEST_STEPS, ends, mean_of, rise, width

COLLAPSED = 0.2
BEGINNING = 2  # steps; a policy can come apart with its first update
FEWEST_BEFORE = 8  # groups
MASTERED = 0.9
FALLEN = 0.1
CLIPPED = 0.2
STILL = 1e-4
DRIFT = 0.5
OTHER_REFERENCE = 0.05
HEAVY = 0.8
HEAVY_TOKENS = 1000
SPIKE = 10.0
STRETCH = 5


def entropy_collapse(log: Log) -> Finding | None:
    """The policy has become certain (entropy below a fifth of the start) without having mastered the task."""
    entropy = _entropy(log)
    windows = ends(entropy.steps.tolist())
    if windows is None:
        return None
    start = float(entropy.values[:BEGINNING].mean())
    measured = mean_of(entropy.values[-len(windows[1]) :], "entropy of the policy, nats a token")
    metric = log.metric_of_task
    grown = growth_of_groups(log, lambda group: known_mean(metric[group.places]))
    if start <= 0 or measured.high >= COLLAPSED * start or grown is None:
        return None
    best = float(np.nanmax(metric)) if np.isfinite(metric).any() else 1.0
    level = float(np.mean(grown[1])) / best if best > 0 else 0.0
    if level > MASTERED or _still_rising(log):
        return None
    averaged = [float(entropy.values[i : i + 3].mean()) for i in range(len(entropy))]
    above = max((i for i, value in enumerate(averaged) if value >= 0.5 * start), default=-1)
    onset = int(entropy.steps[min(above + 1, len(entropy) - 1)])
    places = np.flatnonzero(log.responses["step"] == log.steps[-1])[:8]
    return Finding(
        "entropy_collapse",
        "critical",
        onset,
        f"entropy fell from {start:.2g} to {measured.value:.2g} nats a token while the task is at {level:.0%}",
        "updates are too large or too many for this batch: the policy has settled on one answer before it found "
        "a better one",
        "train.learning_rate",
        "go back to a checkpoint before the onset; lower train.learning_rate, raise objective.surrogate.high, or add "
        "KL to the reference (objective.kl.coefficient)",
        measured,
        log.rows(places.tolist()),
    )


def _entropy(log: Log) -> Series:
    """The logged entropy; where recent steps trained nothing and have none, −log p of the drawn tokens (its mean).

    Of the steps whose tokens were read, the first one always among them.
    """
    logged = log.series("entropy")
    drawn: dict[int, list[float]] = {}
    for row in log.tokens:
        if row.sampler is not None and len(row.sampler):
            drawn.setdefault(row.step, []).append(-float(row.sampler.mean()))
    if not drawn or (len(logged) and int(logged.steps[-1]) == log.steps[-1]):
        return logged
    steps = sorted(drawn)
    return Series(np.array(steps, np.int64), np.array([float(np.mean(drawn[step])) for step in steps]))


def _still_rising(log: Log) -> bool:
    """Has the task metric risen from the last window but one to the last?"""
    size, metric = width(len(log.steps)), log.metric_of_task
    middle, last = set(log.steps[-2 * size : -size]), set(log.steps[-size:])
    values = [(group.step, known_mean(metric[group.places])) for group in log.groups]
    before = [value for step, value in values if step in middle and value is not None]
    after = [value for step, value in values if step in last and value is not None]
    return rise(before, after, "").low > 0


def policy_collapse(log: Log) -> Finding | None:
    """The task metric fell below half of what it was before training, and the reward did not rise instead."""
    metric = log.metric_of_task
    grown = growth_of_groups(log, lambda group: known_mean(metric[group.places]))
    before = _untouched(log)
    if grown is None or len(before) < FEWEST_BEFORE:
        return None
    start, end = float(np.mean(before)), float(np.mean(grown[1]))
    measured = rise(before, grown[1], "change of the task metric")
    if start <= 0 or end >= 0.5 * start or measured.high >= -FALLEN:
        return None
    reward = log.responses["reward"]
    paid = growth_of_groups(log, lambda group: known_mean(reward[group.places]))
    if paid is not None and rise(*paid, "").low > 0:
        return None  # the updates do what the reward asks for; that it asks for the wrong thing is another finding
    levels = [(step, known_mean(metric[here]) or 0.0) for step, here in log.per_step()]
    averages = [float(np.mean([value for _, value in levels[i : i + 3]])) for i in range(len(levels))]
    low = [step for (step, own), mean in zip(levels, averages, strict=True) if max(own, mean) < 0.6 * start]
    places = np.flatnonzero(log.responses["step"] == log.steps[-1])[:8]
    return Finding(
        "policy_collapse",
        "critical",
        low[0] if low else log.steps[-1],
        f"the task metric fell from {start:.2f} to {end:.2f}",
        "updates have taken the policy apart: each is larger than the batch it was estimated on can carry",
        "train.learning_rate",
        "go back to a checkpoint before the onset with a lower train.learning_rate, larger batches (rollout.prompts), "
        "or KL to the reference (objective.kl.coefficient)",
        measured,
        log.rows(places.tolist()),
    )


def _untouched(log: Log) -> list[float]:
    """Task metric of the groups that the first policy drew: those of the first step, or of two where it has few."""
    metric = log.metric_of_task
    found: list[float] = []
    for step in log.steps[:BEGINNING]:
        values = [known_mean(metric[group.places]) for group in log.groups if group.step == step]
        found += [value for value in values if value is not None]
        if len(found) >= FEWEST_BEFORE:
            break
    return found


def clip_fraction_high(log: Log) -> Finding | None:
    """More than 20 % of the recent loss tokens are in the clipped region."""
    clipped = log.series("clip_ratio/region_mean")
    size = width(len(clipped))
    measured = mean_of(clipped.values[-size:], "share of clipped tokens")
    if len(clipped) < FEWEST_STEPS or measured.low <= CLIPPED:
        return None
    return Finding(
        "clip_fraction_high",
        "warning",
        _first_lasting(clipped, CLIPPED),
        f"{measured.value:.0%} of the recent loss tokens are clipped and give no gradient",
        "the policy moves far from its anchor within one batch, or the clip range is narrow",
        "train.learning_rate",
        "lower train.learning_rate, train a batch fewer times (train.epochs, updates), or widen objective.surrogate",
        _share(measured),
        tuple(Row(int(step)) for step in clipped.steps[-8:]),
    )


def clip_never(log: Log) -> Finding | None:
    """A batch is used several times, and yet the policy never moves off its anchor."""
    settings = log.settings
    used = int(settings["train.updates"]) * int(settings["train.epochs"])
    clipped = log.series("clip_ratio/region_mean")
    if used < 2 or settings.get("objective.surrogate.kind") != "clip" or len(clipped) < 2 * FEWEST_STEPS:
        return None
    moved = [
        float(np.abs(row.policy - row.anchor).mean())
        for row in log.tokens
        if row.update > 0 and row.policy is not None and row.anchor is not None and len(row.policy)
    ]
    if clipped.values.max() > 0 or not moved:
        return None
    measured = mean_of(moved, "|log-ratio| at later updates of a batch, nats")
    if measured.high > STILL:
        return None
    return Finding(
        "clip_never_reached",
        "warning",
        int(clipped.steps[0]),
        f"no token was ever clipped in {used} updates a batch, and the log-ratio is {measured.value:.1g} nats",
        "the learning rate is too small for the policy to move, so the further updates repeat the first",
        "train.learning_rate",
        "raise train.learning_rate, or use each batch once (train.epochs = 1, train.updates = 1)",
        measured,
        tuple(Row(int(step)) for step in clipped.steps[-8:]),
    )


def kl_drift(log: Log) -> Finding | None:
    """The policy is more than half a nat a token away from its reference, and has moved there."""
    kl = log.series("kl")
    windows = ends(kl.steps.tolist())
    if windows is None:
        return None
    measured = mean_of(kl.values[-len(windows[1]) :], "KL from the reference, nats a token")
    if measured.low <= DRIFT or float(kl.values[0]) > 0.5 * measured.value:
        return None
    return Finding(
        "kl_drift",
        "warning",
        _first_lasting(kl, DRIFT),
        f"the policy is {measured.value:.2g} nats a token from its reference; it began at {kl.values[0]:.2g}",
        "the coefficient is too small for this learning rate to hold the policy near the reference",
        "objective.kl.coefficient",
        "raise objective.kl.coefficient, lower train.learning_rate, or refresh the reference (train.reference_refresh)",
        measured,
        tuple(Row(int(step)) for step in kl.steps[-8:]),
    )


def kl_estimator(log: Log) -> Finding | None:
    """The KL that is logged is not what it seems: another reference, or an average that rests on very few tokens."""
    first = [
        (row, np.abs(row.policy - row.reference))
        for row in log.tokens
        if row.step == 1 and row.update == 0 and row.policy is not None and row.reference is not None
    ]
    if first:
        measured = mean_of([float(gap.mean()) for _, gap in first if len(gap)], "|policy − reference| at step 1, nats")
        if len(first) > 1 and measured.low > OTHER_REFERENCE:
            rows = tuple(Row(r.step, r.group_id, r.member) for r, _ in first)
            return Finding(
                "kl_estimator",
                "critical",
                1,
                f"before the first update the policy is already {measured.value:.2g} nats from its reference",
                "the reference is not the model that the run began with (another checkpoint, template or dtype)",
                "model.source",
                "load the reference from the same weights as the policy",
                measured,
                rows,
            )
    return _heavy_tail(log)


def _heavy_tail(log: Log) -> Finding | None:
    begin = log.steps[-width(len(log.steps)) :][0]
    rows = [r for r in log.tokens if r.step >= begin and r.policy is not None and r.reference is not None]
    values = [_k3(r.policy, r.reference) for r in rows if r.policy is not None and r.reference is not None]
    pool = np.sort(np.concatenate([*values, np.zeros(0)]))[::-1]
    if len(pool) < HEAVY_TOKENS or float(pool.mean()) <= 0.1:
        return None
    share = float(pool[: len(pool) // 100].sum() / pool.sum())
    if share <= HEAVY:
        return None
    worst = sorted(range(len(rows)), key=lambda i: -float(values[i].max(initial=0.0)))[:8]
    top = [float(v.max(initial=0.0)) for v in values]
    return Finding(
        "kl_estimator",
        "warning",
        rows[0].step,
        f"one token in a hundred makes {share:.0%} of the logged KL (largest {max(top):.3g} nats)",
        "k3 grows as the ratio itself: where the reference prefers what the policy gave up, a few tokens outweigh all",
        "objective.kl.clamp",
        'bound it (objective.kl.clamp), or take objective.kl.estimator = "k2"',
        Interval("share of the KL in 1 % of its tokens", share, HEAVY, 1.0),
        tuple(Row(rows[i].step, rows[i].group_id, rows[i].member) for i in worst),
    )


def _k3(policy: NDArray[np.floating], reference: NDArray[np.floating]) -> NDArray[np.float64]:
    ratio = np.asarray(reference, np.float64) - policy
    return np.asarray(np.expm1(ratio) - ratio, np.float64)


def gradient_spikes(log: Log) -> Finding | None:
    """A gradient norm ten times the median of the steps around it, or an update left out as not finite."""
    skipped = [(step, row) for step, row in sorted(log.metrics.items()) if row.get("updates_skipped")]
    norms = log.series("grad_norm")
    positive = norms.values > 0
    steps, values = norms.steps[positive], norms.values[positive]
    spikes = []
    if len(values) >= 2 * FEWEST_STEPS:
        logs = np.log(values)
        middle = float(np.median(logs))
        spread = 1.4826 * float(np.median(np.abs(logs - middle)))
        spikes = [i for i in range(len(values)) if logs[i] - middle > max(math.log(SPIKE), 5 * spread)]
    if not spikes and not skipped:
        return None
    at = sorted({*(int(steps[i]) for i in spikes), *(step for step, _ in skipped)})
    low, high = _rate(len(at), max(len(norms), 1))
    said = f"{len(at)} steps have a gradient far above the others"
    if spikes:
        largest = max(spikes, key=lambda i: values[i])
        said += f", the largest {values[largest]:.3g} at step {steps[largest]} (median {float(np.median(values)):.3g})"
    if skipped:
        said += f"; at {len(skipped)} of them a number was not finite and the update was left out"
    return Finding(
        "gradient_spikes",
        "critical" if skipped else "warning",
        at[0],
        said,
        "single rewards or ratios of another size than the rest reach the loss unbounded",
        "train.grad_clip",
        "set train.grad_clip near the median; bring the rewards of the rows below to the others' scale",
        Interval("share of steps with a spike", len(at) / max(len(norms), 1), low, high),
        tuple(Row(step) for step in at),
    )


def zero_gradient(log: Log) -> Finding | None:
    """Five steps or more in a row with no gradient although their groups differ in the task metric."""
    live: dict[int, bool] = {}
    found = kinds(log)
    for group, state in zip(found.groups, found.states, strict=True):
        live[group.step] = live.get(group.step, False) or state == "informative"
    still = []
    for step in log.steps:
        row = log.metrics.get(step, {})
        norm = row.get("grad_norm")
        still.append(live.get(step, False) and "updates" in row and (not row["updates"] or not norm))
    runs = _stretches(still)
    if not runs:
        return None
    begin, end = max(runs, key=lambda pair: pair[1] - pair[0])
    share = sum(still) / len(still)
    reward = log.responses.get("reward")
    equal = reward is not None and all(
        float(np.ptp(known)) == 0
        for group in found.groups
        if log.steps[begin] <= group.step < log.steps[begin] + end - begin
        and len(known := reward[group.places][np.isfinite(reward[group.places])])
    )
    if equal:
        cause, key = "the reward is the same for every sibling although the task metric differs", "reward"
        change = "give the reward weight to a part that tells right from wrong"
    else:
        cause, key = (
            "rewards differ and yet nothing reaches the weights: masks, weights or frozen parameters",
            "objective",
        )
        change = "take the step apart with `gropius explain` on the rows below; see which parameters are trained"
    low, high = _rate(sum(still), len(still))
    return Finding(
        "zero_gradient",
        "critical",
        log.steps[begin],
        f"{end - begin} steps in a row have no gradient although siblings differ in the task metric",
        cause,
        key,
        change,
        Interval("share of steps without a gradient", share, low, high),
        tuple(Row(log.steps[i]) for i in range(begin, min(end, begin + 8))),
    )


def _stretches(flags: list[bool]) -> list[tuple[int, int]]:
    """[begin, end) of every run of True that is long enough."""
    out, begin = [], None
    for i, flag in enumerate([*flags, False]):
        if flag and begin is None:
            begin = i
        if not flag and begin is not None:
            if i - begin >= STRETCH:
                out.append((begin, i))
            begin = None
    return out


def _first_lasting(series: Series, limit: float) -> int:
    """The first step from which the values, averaged over five, stay above the limit."""
    averaged = [float(series.values[max(0, i - 4) : i + 1].mean()) for i in range(len(series))]
    last_below = max((i for i, value in enumerate(averaged) if value <= limit), default=-1)
    return int(series.steps[min(last_below + 1, len(series) - 1)])


def _share(measured: Interval) -> Interval:
    return Interval(measured.of, measured.value, max(0.0, measured.low), min(1.0, measured.high))


def _rate(count: int, of: int) -> tuple[float, float]:
    from gropius.records.intervals import wilson

    return wilson(count / of, of)
