"""Held-out evaluation: the same tasks, the same random streams, before and after; shares with 95 % intervals."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from gropius.errors import DataError
from gropius.records.intervals import Share, maj_at_k, mean_at_k, pass_at_k
from gropius.rewards.number import NumberTooLong, last_number_in, whole_text_number
from gropius.rollout.collect import CollectPlan, Player, collect, raw_metric
from gropius.types import Episode, Group, Sampling, Task

# The `step` of the random streams of every evaluation: before and after draw with the same numbers, and no training
# step ever has them.
EVALUATION_STREAM = 2**31 - 1


@dataclass(frozen=True)
class HeldOut:
    """What an evaluation found. k: responses per task; passed: pass@k, majority: maj@k; void ones are left out."""

    mean: Share
    passed: Share
    majority: Share
    k: int
    mean_length_tokens: float
    time_s: float

    def metrics(self) -> dict[str, float]:
        """The `held_out/…` metrics of the run record."""
        found: dict[str, float] = {"held_out/tasks": self.mean.tasks, "held_out/samples": self.k}
        for name, share in (("mean", self.mean), ("pass", self.passed), ("maj", self.majority)):
            found[f"held_out/{name}"] = share.value
            found[f"held_out/{name}_low"] = share.low
            found[f"held_out/{name}_high"] = share.high
        return found | {"held_out/mean_length": self.mean_length_tokens, "held_out/time_s": self.time_s}


@dataclass(frozen=True)
class Limits:
    """What bounds the rollouts of an evaluation, beside its sampling."""

    seed: int
    max_turns: int
    max_episode_tokens: int


async def evaluate(
    tasks: Sequence[Task], player: Player, sampling: Sampling, k: int, limits: Limits
) -> tuple[HeldOut, list[Group]]:
    """Draw k responses to every task and measure mean@k, pass@k and maj@k of the raw metric.

    Errors: DataError when there is no held-out task.
    """
    if not tasks:
        raise DataError("there is no held-out task to evaluate on; set data.held_out, or eval.before and after = false")
    start = time.perf_counter()
    plan = CollectPlan(
        sampling=sampling,
        group_size=k,
        seed=limits.seed,
        step=EVALUATION_STREAM,
        max_turns=limits.max_turns,
        max_episode_tokens=limits.max_episode_tokens,
        greedy_baseline=False,
    )
    groups = await collect(tasks, plan, player)
    return summarise(groups, k, time.perf_counter() - start), groups


def summarise(groups: Sequence[Group], k: int, time_s: float = 0.0) -> HeldOut:
    """Shares over the responses that could be scored. Errors: DataError when none could."""
    scored = [[(e, raw) for e in group.episodes if (raw := raw_metric(e)) is not None] for group in groups]
    scores = [[raw for _, raw in row] for row in scored]
    if not any(scores):
        raise DataError("no held-out response could be scored: every verdict is void")
    answers = [[conclusion(episode) for episode, _ in row] for row in scored]
    lengths = [int(e.loss_mask.sum()) for group in groups for e in group.episodes]
    fewest = min(len(row) for row in scores if row)
    return HeldOut(
        mean=mean_at_k(scores),
        passed=pass_at_k(scores, min(k, fewest)),
        majority=maj_at_k(answers, scores),
        k=k,
        mean_length_tokens=sum(lengths) / len(lengths),
        time_s=time_s,
    )


def conclusion(episode: Episode) -> str:
    """What a reply concludes, for a majority vote: its last number where the gold answer is one, else its text."""
    reply = episode.last_reply.strip()
    try:
        if episode.task.answer is not None and whole_text_number(episode.task.answer) is not None:
            number = last_number_in(reply)
            return reply if number is None else str(number)
    except NumberTooLong:
        return reply
    return reply
