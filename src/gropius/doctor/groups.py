"""Diagnostics of groups: where siblings compare nothing, where the signal comes from, what the budget buys."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from gropius.doctor.finding import Finding, Severity
from gropius.doctor.log import Log, Members
from gropius.doctor.windows import Held, drawn_again, ends, held_above, width

DEAD = 0.7
NEARLY_ALL = 0.9
IDENTICAL = 0.5
FEW_SHARE = 0.3
FEWEST_TASKS = 8
COLD = 0.3
BY_CHANCE = 0.05


@dataclass(frozen=True)
class Kinds:
    """Every group of two or more valid siblings with its state: informative, all_failed, all_solved or all_equal."""

    groups: list[Members]
    states: list[str]

    def by_step(self, state: str) -> dict[int, list[float]]:
        """1 where a group has the state, by step."""
        found: dict[int, list[float]] = defaultdict(list)
        for group, own in zip(self.groups, self.states, strict=True):
            found[group.step].append(float(own == state))
        return found

    def last(self, log: Log, state: str) -> list[Members]:
        """Groups of that state in the last window, the newest first."""
        begin = log.steps[-width(len(log.steps)) :][0]
        pairs = zip(self.groups, self.states, strict=True)
        return [group for group, own in pairs if own == state and group.step >= begin][::-1]


def kinds(log: Log) -> Kinds:
    """The state of each group by the task metric (the reward where there is no metric).

    A value is failed at or below 0, solved at 1 or at the largest value of the log.
    """
    metric = log.metric_of_task
    finite = metric[np.isfinite(metric)]
    best = min(1.0, float(finite.max())) if len(finite) and finite.max() > 0 else 1.0
    groups, states = [], []
    for group in log.groups:
        values = metric[group.places]
        values = values[np.isfinite(values)]
        if len(values) < 2:
            continue
        groups.append(group)
        if values.max() > values.min():
            states.append("informative")
        else:
            states.append("all_failed" if values[0] <= 0 else "all_solved" if values[0] >= best else "all_equal")
    return Kinds(groups, states)


def all_failed(log: Log) -> Finding | None:
    """More than 70 % of the recent groups are dead because every sibling failed."""
    found = kinds(log)
    held = held_above(found.by_step("all_failed"), DEAD, "share of groups in which every sibling fails")
    if held is None:
        return None
    metric = log.metric_of_task
    never = not bool((metric[np.isfinite(metric)] > 0).any())
    if never:
        cause = "no response of the whole run succeeded: the task is out of reach, or the verifier or answer is broken"
        key, change = (
            "sft.steps",
            (
                "look at the rows below: if an answer is right, mend the reward; else warm-start (sft.steps) or take "
                "easier tasks (data.options)"
            ),
        )
    else:
        cause = "the tasks are too hard for this policy, so most responses buy no comparison"
        key, change = (
            "objective.selection.dead",
            (
                'draw other prompts for them (objective.selection.dead = "refill"), sample more siblings ("grow", '
                "rollout.group_size), or take easier tasks"
            ),
        )
    return _dead("all_failed_groups", held, (cause, key, change), found.last(log, "all_failed"), "fails")


def all_solved(log: Log) -> Finding | None:
    """More than 70 % of the recent groups are dead because every sibling succeeded; a note where that was learned."""
    found = kinds(log)
    by_step = found.by_step("all_solved")
    held = held_above(by_step, DEAD, "share of groups in which every sibling succeeds")
    if held is None:
        return None
    first = [value for step in log.steps[: width(len(log.steps))] for value in by_step[step]]
    learned = float(np.mean(first)) < DEAD - 0.2
    if learned:
        causes = ("the tasks are mastered; further steps on them teach nothing", "data.options", "take harder tasks")
        finding = _dead("all_solved_groups", held, causes, found.last(log, "all_solved"), "succeeds")
        return replace(finding, severity="note")
    causes = (
        "it has been so from the start: the tasks are too easy, leaked into the prompt, or the reward is exploitable",
        "data.options",
        "read a few of the rows below; take harder tasks, or a stricter reward",
    )
    return _dead("all_solved_groups", held, causes, found.last(log, "all_solved"), "succeeds")


def _dead(name: str, held: Held, causes: tuple[str, str, str], groups: Sequence[Members], verb: str) -> Finding:
    severity: Severity = "critical" if held.share.low > NEARLY_ALL else "warning"
    cause, key, change = causes
    message = f"in {held.share.value:.0%} of the recent groups every sibling {verb}, so they carry no signal"
    return Finding(name, severity, held.onset, message, cause, key, change, held.share, tuple(g.row() for g in groups))


def identical_siblings(log: Log) -> Finding | None:
    """In most recent groups that are not solved, all siblings are one and the same response."""
    identity, metric = log.responses["identity"], log.metric_of_task
    best = float(np.nanmax(metric)) if np.isfinite(metric).any() else 1.0
    by_step: dict[int, list[float]] = {step: [] for step in log.steps}
    same: list[Members] = []
    for group in log.groups:
        values = metric[group.places]
        if len(group.places) < 3 or not np.isfinite(values).any() or np.nanmin(values) >= best > 0:
            continue
        equal = len(np.unique(identity[group.places])) == 1
        by_step[group.step].append(float(equal))
        if equal:
            same.append(group)
    held = held_above(by_step, IDENTICAL, "share of unsolved groups whose siblings are all one response")
    if held is None:
        return None
    cause, key, change = _why_identical(log, {group.group_id for group in same})
    severity: Severity = "critical" if held.share.low > NEARLY_ALL else "warning"
    message = f"in {held.share.value:.0%} of the recent unsolved groups the siblings are copies of one response"
    rows = log.rows([int(group.places[0]) for group in same[::-1][:8]])
    return Finding("identical_siblings", severity, held.onset, message, cause, key, change, held.share, rows)


def _why_identical(log: Log, groups: set[str]) -> tuple[str, str, str]:
    """(cause, key, change). Chance is ruled out by p^(G−1), p the probability of the repeated response."""
    temperature = log.settings.get("rollout.temperature")
    rows = [row for row in log.tokens if row.group_id in groups and row.sampler is not None]
    members = Counter(row.group_id for row in rows)
    logs = [float(row.sampler.sum()) * (members[row.group_id] - 1) for row in rows if row.sampler is not None]
    entropy = log.series("entropy").values[-width(len(log.steps)) :]
    if temperature is not None and temperature < COLD:
        cause = f"responses are drawn at temperature {temperature:g}, which repeats the likeliest one"
        return cause, "rollout.temperature", "draw at temperature 1"
    by_chance = float(np.exp(np.mean(logs))) if logs else None
    if (by_chance is not None and by_chance < BY_CHANCE) or (not logs and len(entropy) and entropy.mean() > 0.3):
        odds = f" (by chance this has probability {by_chance:.1g} a group)" if by_chance is not None else ""
        return (
            f"the policy is not certain of these responses{odds}: the sampler gives siblings the same random numbers, "
            "or serves one cached response",
            "seed",
            "give every sibling its own random stream; switch a response cache off",
        )
    return (
        "the policy is certain of one answer a prompt, right or wrong",
        "train.learning_rate",
        "go back to an earlier checkpoint with a lower train.learning_rate, add KL, or take other tasks",
    )


def few_prompts(log: Log) -> Finding | None:
    """A few of the prompts that carry any signal carry nearly all of it: (Σs)²/Σs² over their number is below 0.3."""
    advantage, task, steps = (log.responses[name] for name in ("advantage", "task", "step"))
    begin = log.steps[-width(len(log.steps)) :]
    blocks = []
    names = {name: i for i, name in enumerate(dict.fromkeys(task.tolist()))}
    codes = np.array([names[name] for name in task.tolist()], np.float64)
    for step in begin:
        here = (steps == step) & np.isfinite(advantage) & (advantage != 0)
        size = np.abs(advantage[here])  # a share of its step, so that one loud step is not taken for a loud prompt
        blocks.append(np.stack([codes[here], size / size.sum() if len(size) else size], axis=1))
    shares, owners = _shares(np.concatenate(blocks))
    if len(shares) < FEWEST_TASKS or len(begin) < 5:
        return None
    measured = drawn_again(blocks, _effective, "effective share of the prompts that carry signal")
    if measured.value >= FEW_SHARE:
        return None
    heaviest = list(names)[int(owners[np.argmax(shares)])]
    places = [p for p in np.flatnonzero(task == heaviest) if steps[p] >= begin[0] and advantage[p] != 0]
    return Finding(
        "few_prompts_carry_signal",
        "warning",
        int(min(steps[task == heaviest])),
        f"{shares.max():.0%} of the recent |advantage| is that of task {heaviest}, one of {len(shares)} that have any",
        "rewards of different prompts have different scales and the advantage is not scaled by group, or that prompt "
        "is drawn far more often than others",
        "objective.advantage.scale",
        'bring rewards to one scale, or write objective.advantage.scale = "group_std"',
        measured,
        log.rows([int(p) for p in places[-8:]]),
    )


def _shares(rows: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Share of Σ|advantage| by task, and the tasks' codes. rows [_N, 2]: code, |advantage|."""
    owners, place = np.unique(rows[:, 0], return_inverse=True)
    totals = np.bincount(place, rows[:, 1], len(owners))
    total = float(totals.sum())
    shares = totals / total if total else totals
    return np.asarray(shares, np.float64), owners


def _effective(rows: NDArray[np.float64]) -> float:
    shares, _ = _shares(rows)
    square = float((shares**2).sum())
    return 1 / square / len(shares) if square else 1.0


def budget_waste(log: Log) -> Finding | None:
    """More than 70 % of the recently sampled tokens sit in groups that compare nothing, whatever the reason."""
    found = kinds(log)
    lengths = log.responses["tokens"].astype(np.float64)
    by_step: dict[int, list[float]] = defaultdict(list)
    mean = float(lengths.mean()) or 1.0
    for group, state in zip(found.groups, found.states, strict=True):
        share = float(lengths[group.places].mean()) / mean
        by_step[group.step].append(min(1.0, share) if state != "informative" else 0.0)
    held = held_above(by_step, DEAD - 0.05, "share of sampled tokens in groups without signal")
    if held is None:
        return None
    rows = tuple(g.row() for state in ("all_failed", "all_solved", "all_equal") for g in found.last(log, state)[:3])
    return Finding(
        "budget_waste",
        "warning",
        held.onset,
        f"{held.share.value:.0%} of the recently sampled tokens are in groups that compare nothing",
        "most prompts are either always failed or always solved: the tasks' difficulty does not match the policy",
        "objective.selection.dead",
        'replace dead groups (objective.selection.dead = "refill"), filter tasks by pass rate, or see `gropius plan`',
        held.share,
        rows,
    )


def growth_of_groups(log: Log, value: Callable[[Members], float | None]) -> tuple[list[float], list[float]] | None:
    """A value of each group in the first and in the last window; None while they overlap or have fewer than 8."""
    windows = ends(log.steps)
    if windows is None:
        return None
    first, last = (set(window) for window in windows)
    before: list[float] = []
    after: list[float] = []
    for group in log.groups:
        if group.step in first or group.step in last:
            found = value(group)
            if found is not None:
                (before if group.step in first else after).append(found)
    return (before, after) if min(len(before), len(after)) >= 8 else None
