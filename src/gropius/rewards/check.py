"""Try a reward on scripted policies and say what is wrong with it, before any training. No torch."""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gropius.errors import RewardError
from gropius.rewards.base import RewardPart, Scorer
from gropius.rewards.gold import unusable_gold
from gropius.rewards.trials import TRIALS, Case, Trial, cases_of, gold_turns, perform
from gropius.tasks.base import TaskSet
from gropius.tasks.preflight import Finding, finding, preflight
from gropius.types import Episode, Task, Verdict

REPEATS = 10
SLOW_S = 1.0
SLOWER = 3.0
DOMINATES = 0.9
PAYS = 0.5
LABEL = "check"


@dataclass(frozen=True)
class Plan:
    """tasks: rows tried with every policy. gold: rows whose gold answer is tried; 0 for all. seed: which rows.

    characters_per_token: for rewards of length, as nobody samples.
    """

    tasks: int = 16
    gold: int = 64
    seed: int = 0
    characters_per_token: int = 4


@dataclass
class Score:
    """What one policy got: verdicts of its rows. full: as good as right; paid: mean reward of the valid ones."""

    trial: Trial
    rows: list[tuple[Task, Verdict]] = field(default_factory=list)
    time_s: float = 0.0

    @property
    def values(self) -> list[float]:
        """Rewards of the verdicts that are not void."""
        return [v.outcome.value for _, v in self.rows if v.outcome.value is not None]

    @property
    def paid(self) -> float | None:
        """Mean reward; None without a valid verdict."""
        return statistics.fmean(self.values) if self.values else None

    def full(self) -> list[tuple[Task, Verdict]]:
        """Rows that count as right: the task metric where there is one, else any reward that is not rejected."""
        return [(task, verdict) for task, verdict in self.rows if is_full(verdict)]

    def void(self) -> list[tuple[Task, Verdict]]:
        """Rows that could not be judged."""
        return [(task, verdict) for task, verdict in self.rows if verdict.outcome.status == "void"]


@dataclass
class Report:
    """Scores by policy, findings, and how many rows were tried."""

    scores: dict[str, Score]
    findings: list[Finding]
    tasks: int
    gold: int

    @property
    def failed(self) -> bool:
        """True when something more than a note was found."""
        return any(found.severity == "finding" for found in self.findings)

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        scores = {
            name: {
                "does": score.trial.does,
                "rows": len(score.rows),
                "full": len(score.full()),
                "void": len(score.void()),
                "reward": score.paid,
            }
            for name, score in self.scores.items()
        }
        return {
            "tasks": self.tasks,
            "gold": self.gold,
            "policies": scores,
            "findings": [found.as_dict() for found in self.findings],
            "failed": self.failed,
        }


def is_full(verdict: Verdict) -> bool:
    """True for a verdict that says "right"."""
    if verdict.raw is not None:
        return verdict.raw >= 1.0
    return verdict.outcome.status == "scored" and (verdict.outcome.value or 0.0) > 0.0


async def check(tasks: TaskSet, scorer: Scorer, parts: Sequence[RewardPart], plan: Plan) -> Report:
    """Preflight of the data, then every policy of `trials.TRIALS` through the scorer, then what they tell.

    A broken contract (RewardError) is a finding itself, with the policies it happened to.
    """
    draw = random.Random(f"{plan.seed}:check")
    every = [*tasks.train, *tasks.held_out]
    chosen = every if len(every) <= plan.tasks else draw.sample(every, plan.tasks)
    gold = every if not plan.gold or len(every) <= plan.gold else draw.sample(every, plan.gold)
    keys = {task.key for task in gold}
    gold = [*gold, *(task for task in chosen if task.key not in keys)]
    programs = any(part.name == "code" for part in parts)
    findings = [*preflight(tasks, programs), *unusable_gold(tasks, parts)]
    with tempfile.TemporaryDirectory(prefix="gropius-check-") as folder:
        stage = _Stage(tasks, scorer, plan, Path(folder) / "canary", programs)
        await stage.play_all(chosen, gold)
        if stage.broken:
            advice = "mend the function: training would halt at this answer"
            findings.append(finding("broken contract", next(iter(stage.broken.values())), advice, stage.broken))
        else:
            findings += await _steadiness(stage)
        if stage.canary.exists():
            findings.append(
                finding("evaluates answers", "an answer that is a program was run by the reward: it made a file",
                        "never eval or sympify an answer; use the rewards math, countdown or code")
            )  # fmt: skip
    findings += _of_policies(stage.scores, tasks) + _of_parts(stage.scores, parts)
    return Report(stage.scores, findings, len(chosen), len(gold))


@dataclass
class _Stage:
    """Where policies perform."""

    tasks: TaskSet
    scorer: Scorer
    plan: Plan
    canary: Path
    programs: bool
    scores: dict[str, Score] = field(default_factory=dict)
    kept: list[Episode] = field(default_factory=list)
    broken: dict[str, str] = field(default_factory=dict)

    async def play_all(self, chosen: Sequence[Task], gold: Sequence[Task]) -> None:
        """Gold on its rows first, then every policy on the chosen ones."""
        await self._play("gold", [(task, gold_turns(self.tasks, task)) for task in gold])
        cases = cases_of(self.tasks, chosen, str(self.canary), self.programs)
        for name, trial in TRIALS.items():
            if name != "gold":
                await self._play(name, _replies(trial, cases))

    async def _play(self, name: str, pairs: Sequence[tuple[Task, list[str]]]) -> None:
        width = self.plan.characters_per_token
        episodes = [perform(self.tasks, task, replies, f"{LABEL}-{name}", width) for task, replies in pairs]
        if not episodes:
            return
        self.scores[name] = score = Score(TRIALS[name])
        began = time.perf_counter()
        try:
            verdicts = await self.scorer.score(episodes)
        except RewardError as fault:
            self.broken[name] = str(fault)
            return
        score.time_s = time.perf_counter() - began
        score.rows = [(episode.task, verdict) for episode, verdict in zip(episodes, verdicts, strict=True)]
        self.kept += episodes[:2]


def _replies(trial: Trial, cases: Sequence[Case]) -> list[tuple[Task, list[str]]]:
    return [(case.task, [reply]) for case in cases if (reply := trial.reply(case)) is not None]


async def _steadiness(stage: _Stage) -> list[Finding]:
    """The same episodes ten times, alone and among shuffled batch-mates."""
    episodes = stage.kept[:12]
    first = await stage.scorer.score(episodes)
    draw = random.Random(stage.plan.seed)
    unsteady: dict[str, str] = {}
    for repeat in range(REPEATS):
        order = list(range(len(episodes)))
        if repeat % 2:
            draw.shuffle(order)
        if repeat == REPEATS - 1:
            again = [(await stage.scorer.score([episode]))[0] for episode in episodes]
        else:
            verdicts = await stage.scorer.score([episodes[place] for place in order])
            again = [verdicts[order.index(place)] for place in range(len(episodes))]
        for episode, one, other in zip(episodes, first, again, strict=True):
            if one.outcome != other.outcome:
                unsteady.setdefault(episode.group_id.removeprefix(f"{LABEL}-"), f"{one.outcome} then {other.outcome}")
    if not unsteady:
        return []
    example = next(iter(unsteady.values()))
    return [
        finding("not deterministic", f"{len(unsteady)} of {len(episodes)} answers got several verdicts: {example}",
                "take out randomness, time and state; a reward may not depend on batch-mates", unsteady)
    ]  # fmt: skip


def _of_policies(scores: dict[str, Score], tasks: TaskSet) -> list[Finding]:
    found: list[Finding] = []
    gold = scores.get("gold")
    if gold is not None:
        found += _of_gold(gold, tasks)
    for name, score in scores.items():
        if name == "gold":
            continue
        if won := score.full():
            found.append(
                finding(f"{name} scores full", f"a policy that {score.trial.does} is right in {len(won)} of "
                        f"{len(score.rows)} tasks", "it would be learnt; make the reward tell it from a right answer",
                        [task.key for task, _ in won], note=_by_chance(name, len(won), len(score.rows), tasks))
            )  # fmt: skip
        unusable = {task.key for task, _ in gold.void()} if gold else set()
        if voids := [(task, verdict) for task, verdict in score.void() if task.key not in unusable]:
            found.append(
                finding(f"{name} cannot be judged", f"a policy that {score.trial.does} makes the reward fail in "
                        f"{len(voids)} of {len(score.rows)} tasks: {voids[0][1].outcome.reason}",
                        "reject what a model writes, void only what is your own fault", [t.key for t, _ in voids])
            )  # fmt: skip
        found += _of_pay(name, score, gold)
        found += _of_time(name, score, gold)
    return found


def _of_time(name: str, score: Score, gold: Score | None) -> list[Finding]:
    """More than a second an answer: a finding where the answer is what takes it, a note where gold takes as long."""
    if not score.rows or (each := score.time_s / len(score.rows)) <= SLOW_S:
        return []
    usual = gold.time_s / len(gold.rows) if gold is not None and gold.rows else 0.0
    return [
        finding(f"{name} is slow",
                f"{each:.1f} s an answer from a policy that {score.trial.does}, {usual:.1f} s from gold",
                "bound the size of an answer before working on it: a verdict belongs under a second",
                note=each <= SLOWER * usual)
    ]  # fmt: skip


def _of_gold(gold: Score, tasks: TaskSet) -> list[Finding]:
    found = []
    void = gold.void()
    wrong = [(t, v) for t, v in gold.rows if not is_full(v) and v.outcome.status != "void"]
    if void:
        found.append(
            finding("gold cannot be judged", f"{len(void)} of {len(gold.rows)} gold answers are void: "
                    f"{void[0][1].outcome.reason}", "mend the answer, or leave the row out", [t.key for t, _ in void])
        )  # fmt: skip
    if wrong and (tasks.environment is None or len(wrong) == len(gold.rows)):
        reason = wrong[0][1].outcome.reason
        found.append(
            finding("gold is not full", f"{len(wrong)} of {len(gold.rows)} gold answers do not score full"
                    + (f": {reason}" if reason else ""), "mend the row or the reward: the right answer is not paid",
                    [t.key for t, _ in wrong])
        )  # fmt: skip
    elif wrong:
        found.append(
            finding("demonstrations fail", f"{len(wrong)} of {len(gold.rows)} demonstrations do not end in success",
                    "expected where they play at random; they are no gold", [t.key for t, _ in wrong], note=True)
        )  # fmt: skip
    return found


def _by_chance(name: str, won: int, rows: int, tasks: TaskSet) -> bool:
    """In a game naming the answer is a move, and a fixed reply may win now and then; anywhere else neither may."""
    return tasks.environment is not None and not tasks.judges_text and (TRIALS[name].knows or won <= rows / 2)


def _of_pay(name: str, score: Score, gold: Score | None) -> list[Finding]:
    if gold is None or gold.paid is None or score.paid is None or gold.paid <= 0 or score.full():
        return []
    if score.paid < PAYS * gold.paid:
        return []
    return [
        finding(f"{name} is paid", f"a policy that {score.trial.does} gets {score.paid:.3g}, gold gets {gold.paid:.3g}",
                "lower the weight of what it is paid for, or pay it only beside a right answer")
    ]  # fmt: skip


def _of_parts(scores: dict[str, Score], parts: Sequence[RewardPart]) -> list[Finding]:
    """Parts that never differ, and one that decides alone, over everything that was tried."""
    values = {part.name: _values(scores, part.name) for part in parts}
    found = []
    for part in parts:
        seen = values[part.name]
        if not seen:
            found.append(
                finding(f"{part.name} never applies", f"{part.label()} gave no value to any answer",
                        "remove it, or mend what it looks for")
            )  # fmt: skip
        elif len(seen) > 1 and max(seen) == min(seen):
            found.append(
                finding(f"{part.name} is constant", f"{part.label()} is {seen[0]:g} for every answer tried",
                        "it adds nothing to any advantage: remove it, or mend it")
            )  # fmt: skip
    spread = {p.name: p.weight**2 * statistics.pvariance(values[p.name]) for p in parts if len(values[p.name]) > 1}
    total = sum(spread.values())
    for name, variance in spread.items():
        if len(spread) > 1 and total and variance / total > DOMINATES and len([v for v in spread.values() if v]) > 1:
            found.append(
                finding(f"{name} dominates", f"reward {name} makes {variance / total:.0%} of the variance of the sum",
                        "the other parts hardly count: change the weights, or normalise before summing", note=True)
            )  # fmt: skip
    return found


def _values(scores: dict[str, Score], part: str) -> list[float]:
    outcomes = [verdict.parts.get(part) for score in scores.values() for _, verdict in score.rows]
    return [outcome.value for outcome in outcomes if outcome is not None and outcome.value is not None]
