"""How much data each diagnostic needs before its silence means anything. No torch, no I/O.

A diagnostic that found nothing on less is not passed: it waits, and says for what.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from gropius.doctor.finding import Amount
from gropius.doctor.log import Log
from gropius.doctor.windows import FEWEST_GROUPS, FEWEST_STEPS, ends, width

Need = Callable[[Log], Amount]
BOTH_WINDOWS = 8  # groups in the first and in the last window, for a comparison of the two


def steps(least: int = FEWEST_STEPS) -> Need:
    """Steps of the log."""
    return lambda log: Amount("steps", least, len(log.steps))


def responses(least: int) -> Need:
    """Responses of the log."""
    return lambda log: Amount("responses", least, len(log.responses["step"]))


def groups(least: int = FEWEST_GROUPS) -> Need:
    """Groups of the log."""
    return lambda log: Amount("groups", least, len(log.groups))


def scored_groups(least: int = FEWEST_GROUPS) -> Need:
    """Groups of two or more siblings with a known task metric."""

    def of(log: Log) -> Amount:
        known = np.isfinite(log.metric_of_task)
        return Amount("scored groups", least, sum(int(known[g.places].sum()) > 1 for g in log.groups))

    return of


def unsolved_groups(least: int = FEWEST_GROUPS) -> Need:
    """Groups of three or more siblings that are not all right."""

    def of(log: Log) -> Amount:
        metric = log.metric_of_task
        best = float(np.nanmax(metric)) if np.isfinite(metric).any() else 1.0
        values = (metric[g.places] for g in log.groups if len(g.places) >= 3)
        count = sum(bool(np.isfinite(v).any()) and not np.nanmin(v) >= best > 0 for v in values)
        return Amount("groups of three or more that are not all right", least, count)

    return of


def groups_at_both_ends(least: int = BOTH_WINDOWS) -> Need:
    """Groups in the smaller of the first and the last window; none while the windows overlap."""

    def of(log: Log) -> Amount:
        windows = ends(log.steps)
        sides = [sum(g.step in set(window) for g in log.groups) for window in windows or ((), ())]
        return Amount("groups at the beginning and as many at the end", least, min(sides))

    return of


def differing_groups(least: int = FEWEST_GROUPS) -> Need:
    """Recent groups whose siblings' rewards differ."""

    def of(log: Log) -> Amount:
        reward = log.responses.get("reward")
        begin = log.steps[-width(len(log.steps)) :][0] if log.steps else 0
        rows = [reward[g.places] for g in log.groups if g.step >= begin] if reward is not None else []
        count = sum(len(known := r[np.isfinite(r)]) > 1 and float(np.ptp(known)) > 0 for r in rows)
        return Amount("recent groups whose rewards differ", least, count)

    return of


def tasks_with_signal(least: int) -> Need:
    """Tasks that have an advantage in the last window."""

    def of(log: Log) -> Amount:
        begin = log.steps[-width(len(log.steps)) :][0] if log.steps else 0
        advantage = log.responses["advantage"]
        here = (log.responses["step"] >= begin) & np.isfinite(advantage) & (advantage != 0)
        return Amount("recent prompts with a signal", least, len(set(log.responses["task"][here].tolist())))

    return of


def points(metric: str, least: int) -> Need:
    """Steps at which a metric was logged."""
    return lambda log: Amount(f"steps with {metric}", least, len(log.series(metric)))


def moving_gradients(least: int) -> Need:
    """Steps with a gradient above zero."""
    return lambda log: Amount("steps with a gradient", least, int((log.series("grad_norm").values > 0).sum()))


def compared_responses(least: int) -> Need:
    """Responses whose tokens have a log-probability of the sampler and of the trainer."""

    def of(log: Log) -> Amount:
        count = sum(r.sampler is not None and r.trainer is not None and len(r.sampler) > 0 for r in log.tokens)
        return Amount("responses with log-probabilities of sampler and trainer", least, count)

    return of


def moved_responses(least: int) -> Need:
    """Responses of one batch at a later update, with policy and anchor: the fullest batch counts."""

    def of(log: Log) -> Amount:
        found: dict[int, int] = {}
        for row in log.tokens:
            if row.update > 0 and row.policy is not None and row.anchor is not None and len(row.policy):
                found[row.step] = found.get(row.step, 0) + 1
        return Amount("responses of one batch at a later update", least, max(found.values(), default=0))

    return of


def reference_tokens(least: int) -> Need:
    """Recent tokens with a log-probability of policy and reference."""

    def of(log: Log) -> Amount:
        begin = log.steps[-width(len(log.steps)) :][0] if log.steps else 0
        rows = [r for r in log.tokens if r.step >= begin and r.policy is not None and r.reference is not None]
        return Amount("recent tokens with a reference", least, sum(len(r.policy) for r in rows if r.policy is not None))

    return of


def evaluations(least: int = 2) -> Need:
    """Held-out means with an interval."""
    return lambda log: Amount("held-out evaluations", least, len(log.series("held_out/mean_low")))
