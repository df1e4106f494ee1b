"""Diagnostics of lengths: growth tied to wrong answers, truncation, a stop token that never comes. No torch."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from gropius.doctor.finding import Finding, Severity
from gropius.doctor.groups import growth_of_groups
from gropius.doctor.log import Log, Members
from gropius.doctor.windows import ends, held_above, mean_of, rise

GROWTH = 0.2
CUT = 0.15
HALF_CUT = 0.5
NEVER_ENDS = 0.97


def length_growth(log: Log) -> Finding | None:
    """Wrong responses grow by more than a fifth and are longer than their right siblings."""
    lengths, metric = log.responses["tokens"].astype(np.float64), log.metric_of_task

    def wrong(group: Members) -> float | None:
        """Mean length of the failed members."""
        chosen = lengths[group.places][metric[group.places] <= 0]
        return float(chosen.mean()) if len(chosen) else None

    grown = growth_of_groups(log, wrong)
    windows = ends(log.steps)
    if grown is None or windows is None:
        return None
    measured = rise(*grown, "tokens that a wrong response has grown by")
    start = float(np.mean(grown[0]))
    gaps = []
    for group in log.groups:
        if group.step >= windows[1][0]:
            own = metric[group.places]
            bad, good = lengths[group.places][own <= 0], lengths[group.places][own > 0]
            if len(bad) and len(good):
                gaps.append(float(bad.mean() - good.mean()))
    gap = mean_of(gaps, "tokens")
    tied = (len(gaps) >= 8 and gap.low > 0) or _pays(log)
    if measured.low < max(1.0, GROWTH * start) or not tied:
        return None
    failed = np.flatnonzero((metric <= 0) & (log.responses["step"] >= windows[1][0]))
    longest = failed[np.argsort(-lengths[failed], kind="stable")][:8]
    onset = next(
        (s for s, here in log.per_step() if _mean_length(log, here) > start + measured.value / 2), log.steps[0]
    )
    also = f"; they are {gap.value:.1f} tokens longer than their right siblings" if gaps else ""
    return Finding(
        "length_growth_of_wrong_answers",
        "warning",
        onset,
        f"wrong responses grew from {start:.1f} to {start + measured.value:.1f} tokens{also}",
        "length pays, or costs a wrong answer nothing: with the loss divided by a response's own length a long wrong "
        "answer is hardly punished",
        "objective.aggregate.kind",
        'divide by a constant (objective.aggregate.kind = "constant_length") or by all tokens ("token_mean"), and see '
        "that no reward part pays for length",
        measured,
        log.rows(longest.tolist()),
    )


def _pays(log: Log) -> bool:
    """Among wrong siblings, are the longer ones paid more? Correlation within groups above 0.2, over the whole run."""
    lengths, reward, metric = log.responses["tokens"].astype(np.float64), log.responses["reward"], log.metric_of_task
    pairs = []
    for group in log.groups:
        places = group.places[(metric[group.places] <= 0) & np.isfinite(reward[group.places])]
        if len(places) > 1:
            pairs.append(np.stack([lengths[places] - lengths[places].mean(), reward[places] - reward[places].mean()]))
    joined = np.concatenate(pairs, axis=1) if pairs else np.zeros((2, 0))
    spread = float(np.sqrt((joined[0] ** 2).sum() * (joined[1] ** 2).sum())) if joined.size else 0.0
    return spread > 0 and float(joined[0] @ joined[1]) / spread > 0.2


def _mean_length(log: Log, here: np.ndarray) -> float:
    failed = here & (log.metric_of_task <= 0)
    return float(log.responses["tokens"][failed].mean()) if failed.any() else 0.0


def truncation(log: Log) -> Finding | None:
    """More than 15 % of the recent responses were cut off by a length limit."""
    held = held_above(_cut_off(log), CUT, "share of truncated responses")
    if held is None or held.share.value > NEVER_ENDS:
        return None
    severity: Severity = "critical" if held.share.low > HALF_CUT else "warning"
    limit = log.settings.get("rollout.max_tokens")
    places = np.flatnonzero(log.responses["truncated"])
    return Finding(
        "truncation",
        severity,
        held.onset,
        f"{held.share.value:.0%} of the recent responses were cut off"
        + (f" at {limit} tokens" if limit is not None else ""),
        "the limit is below what answers need, so right beginnings are scored as wrong answers",
        "rollout.max_tokens",
        "raise rollout.max_tokens, or keep cut responses out of the loss (objective.selection.truncated)",
        held.share,
        log.rows(places[-8:].tolist()),
    )


def stop_not_learned(log: Log) -> Finding | None:
    """Nearly no response of the run ever ended by itself."""
    held = held_above(_cut_off(log), NEVER_ENDS - 0.1, "share of responses that never stop")
    if held is None or held.share.value <= NEVER_ENDS or not held.from_the_start:
        return None
    places = np.flatnonzero(log.responses["truncated"])
    return Finding(
        "stop_not_learned",
        "critical",
        log.steps[0],
        f"{held.share.value:.1%} of the recent responses, and nearly all before them, ran into the length limit",
        "the policy never emits its stop token: it is masked from the loss, is not in the sampler's list, or the "
        "template ends turns with another one",
        "model.source",
        "check the tokenizer's stop tokens (gropius check), train the stop token in the warm start (sft.steps), or "
        "write rollout.stop_strings",
        held.share,
        log.rows(places[-8:].tolist()),
    )


def _cut_off(log: Log) -> dict[int, list[float]]:
    cut = log.responses["truncated"]
    by_step: dict[int, list[float]] = defaultdict(list)
    for group in log.groups:
        by_step[group.step].append(float(np.mean(cut[group.places])))
    return by_step
