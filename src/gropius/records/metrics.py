"""The metrics of one step: what each name means, and those that follow from the records. No torch.

Names are TRL's where the meaning is the same. What the field does not log is ours: dead groups split into all-failed
and all-solved, duplicate siblings, effective groups, tokens sampled and trained, skipped compute.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from gropius.records.schema import GREEDY_MEMBER, ResponseRecord

Number = float | int | None


@dataclass(frozen=True)
class Metric:
    """One metric. unit: of the value. made_by: the records alone, training, or evaluation.

    timing: a reading of the clock or the machine, the only kind that may differ between two equal runs.
    """

    unit: str
    meaning: str
    made_by: Literal["records", "train", "eval"] = "records"
    timing: bool = False


def step_metrics(records: Sequence[ResponseRecord], num_tokens_before: int = 0) -> dict[str, Number]:
    """Every metric of METRICS made by the records of one step, those of refilled groups included.

    Void responses leave rewards and groups, not tokens. A mean over nothing is None. The greedy responses of a baseline
    count as tokens sampled only. num_tokens_before: `num_tokens` of the step before.
    """
    siblings = [record for record in records if record.member != GREEDY_MEMBER]
    return {
        **_rewards(siblings),
        **_parts(siblings),
        **_second_opinions(siblings),
        "shown_tests_only": _shown_only(siblings),
        **_groups(siblings),
        **_lengths(siblings),
        **_tokens(records, num_tokens_before),
    }


def by_group(records: Iterable[ResponseRecord]) -> dict[str, list[ResponseRecord]]:
    """Records by explicit group id, in order of first appearance."""
    groups: dict[str, list[ResponseRecord]] = {}
    for record in records:
        groups.setdefault(record.group_id, []).append(record)
    return groups


def _rewards(records: Sequence[ResponseRecord]) -> dict[str, Number]:
    rewards = [record.reward for record in records if record.reward is not None]
    raw = [record.raw for record in records if record.raw is not None]
    groups = [[r.reward for r in group if r.reward is not None] for group in by_group(records).values()]
    comparable = [group for group in groups if len(group) > 1]
    return {
        "reward": _mean(rewards),
        "reward_std": _mean([0.0 if max(g) == min(g) else statistics.stdev(g) for g in comparable]),
        "frac_reward_zero_std": _mean([float(max(g) == min(g)) for g in comparable]),
        "raw": _mean(raw),
        "void_rate": _mean([float(record.status == "void") for record in records]),
        "rejected_rate": _mean([float(record.status == "rejected") for record in records]),
    }


def _parts(records: Sequence[ResponseRecord]) -> dict[str, Number]:
    values: dict[str, list[float]] = {}
    for record in records:
        for name, part in record.parts.items():
            applies = values.setdefault(name, [])
            if part.value is not None:
                applies.append(part.value)
    metrics: dict[str, Number] = {}
    for name, scores in values.items():
        metrics[f"rewards/{name}/mean"] = _mean(scores)
        metrics[f"rewards/{name}/std"] = statistics.stdev(scores) if len(scores) > 1 else None
    return metrics


def _second_opinions(records: Sequence[ResponseRecord]) -> dict[str, Number]:
    """The verifier `math` beside `math_verify`, where both were asked."""
    pairs = [(record.parts["math"], record.parts["math_verify"]) for record in records if record.parts.keys() >= _PAIR]
    pairs = [(ours, other) for ours, other in pairs if ours.status != "void"]
    judged = [(ours, other) for ours, other in pairs if other.status == "scored" or other.reason == "wrong"]
    return {
        "second_opinion/disagreement": _mean([float(ours.status != other.status) for ours, other in judged]),
        "second_opinion/missing": 1.0 - len(judged) / len(pairs) if pairs else None,
    }


def _shown_only(records: Sequence[ResponseRecord]) -> Number:
    judged = [record.parts["code"] for record in records if "code" in record.parts]
    judged = [part for part in judged if part.status != "void"]
    return _mean([float(part.reason.endswith(SHOWN_ONLY)) for part in judged])


def _groups(records: Sequence[ResponseRecord]) -> dict[str, Number]:
    groups = by_group(records)
    states = [group[0].state for group in groups.values()]
    shares = {f"groups/{state}": _mean([float(s == state) for s in states]) for state in GROUP_STATES}
    return {
        "groups/count": len(groups),
        **shares,
        "effective_groups": sum(any(not record.skipped for record in group) for group in groups.values()),
        "duplicates": _mean([float(record.duplicate) for record in records]),
    }


def _lengths(records: Sequence[ResponseRecord]) -> dict[str, Number]:
    lengths = [record.tokens for record in records]
    ended = [record.tokens for record in records if not record.truncated]
    return {
        "completions/mean_length": _mean(lengths),
        "completions/min_length": min(lengths, default=None),
        "completions/max_length": max(lengths, default=None),
        "completions/mean_terminated_length": _mean(ended),
        "completions/min_terminated_length": min(ended, default=None),
        "completions/max_terminated_length": max(ended, default=None),
        "completions/clipped_ratio": _mean([float(record.truncated) for record in records]),
    }


def _tokens(records: Sequence[ResponseRecord], before: int) -> dict[str, Number]:
    sampled = sum(record.drawn_tokens for record in records)
    trained = sum(record.own_tokens for record in records if not record.skipped)
    rows = [len(record.prompt_ids) + len(record.response_ids) for record in records]
    skipped_rows = sum(row for row, record in zip(rows, records, strict=True) if record.skipped)
    return {
        "tokens_sampled": sampled,
        "tokens_trained": trained,
        "tokens_shared": sum(record.tokens - record.own_tokens for record in records),
        "tokens_skipped": sum(record.drawn_tokens for record in records if record.skipped),
        "skipped_compute": skipped_rows / sum(rows) if sum(rows) else None,
        "num_tokens": before + sum(rows),
    }


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def describe(name: str) -> Metric | None:
    """The meaning of a metric's name, reward parts included; None for a name nobody declared.

    >>> describe("rewards/exact/mean").unit
    'reward'
    """
    if name.startswith("rewards/"):
        return METRICS["rewards/PART/" + name.rpartition("/")[2]] if name.endswith(("/mean", "/std")) else None
    return METRICS.get(name)


SHOWN_ONLY = "; the tests shown in the prompt pass"  # ends the reason of a program that fails hidden tests alone
_PAIR = {"math", "math_verify"}
GROUP_STATES = ("informative", "all_failed", "all_solved", "all_equal", "singleton", "too_few_valid")

METRICS: dict[str, Metric] = {
    "reward": Metric("reward", "mean reward of the responses that are not void"),
    "reward_std": Metric("reward", "mean over groups of the sample standard deviation (ddof 1) of their rewards"),
    "frac_reward_zero_std": Metric("share of groups", "groups whose valid siblings all have the same reward"),
    "rewards/PART/mean": Metric("reward", "mean of one reward part, before its weight, where it applies"),
    "rewards/PART/std": Metric("reward", "sample standard deviation (ddof 1) of one reward part over the batch"),
    "raw": Metric("metric", "mean of the unshaped task metric (accuracy, where there is one)"),
    "void_rate": Metric("share of responses", "responses that could not be scored, through our fault"),
    "rejected_rate": Metric("share of responses", "responses rejected at the floor reward"),
    "second_opinion/disagreement": Metric(
        "share of responses", "math and math_verify differ, among those that both judged; null without a second opinion"
    ),
    "second_opinion/missing": Metric("share of responses", "math_verify came to no judgement (time, memory, gold)"),
    "shown_tests_only": Metric(
        "share of responses",
        "programs that pass every test shown in the prompt and fail a hidden one: the gap of visible and hidden tests",
    ),
    "groups/count": Metric("groups", "groups sampled, those that were replaced included"),
    "groups/informative": Metric("share of groups", "groups whose raw metric differs between siblings"),
    "groups/all_failed": Metric("share of groups", "dead: every valid sibling failed"),
    "groups/all_solved": Metric("share of groups", "dead: every valid sibling solved the task"),
    "groups/all_equal": Metric("share of groups", "dead: every valid sibling has the same metric, neither 0 nor 1"),
    "groups/singleton": Metric("share of groups", "groups of one response by design"),
    "groups/too_few_valid": Metric("share of groups", "dropped: fewer than two valid siblings"),
    "effective_groups": Metric("groups", "groups with at least one response that was trained"),
    "duplicates": Metric("share of responses", "responses equal to an earlier sibling, token for token"),
    "completions/mean_length": Metric("tokens", "mean tokens that the model wrote in a response"),
    "completions/min_length": Metric("tokens", "the shortest response"),
    "completions/max_length": Metric("tokens", "the longest response"),
    "completions/mean_terminated_length": Metric("tokens", "mean over responses that were not truncated"),
    "completions/min_terminated_length": Metric("tokens", "the shortest response that was not truncated"),
    "completions/max_terminated_length": Metric("tokens", "the longest response that was not truncated"),
    "completions/clipped_ratio": Metric("share of responses", "responses ended by a length limit"),
    "tokens_sampled": Metric(
        "tokens", "tokens that the model wrote: of complete groups and, up to the cut, of aborted ones"
    ),
    "tokens_trained": Metric("tokens", "those in responses that were run forward and backward"),
    "tokens_shared": Metric("tokens", "those that branches took over from a sibling: not sampled again"),
    "tokens_skipped": Metric("tokens", "those in responses that could not move the policy and were not run"),
    "responses": Metric("responses", "of complete groups, greedy ones included", "train"),
    "responses_per_informative": Metric(
        "responses", "responses of complete groups for each group that carries signal; absent without one", "train"
    ),
    "tokens_dropped": Metric("tokens", "of complete groups that were thrown away", "train"),
    "refill_rounds": Metric("rounds", "further rounds of fresh tasks", "train"),
    "groups_begun": Metric("groups", "groups of fresh tasks that were begun, over-sampled ones included", "train"),
    "responses_resumed": Metric("responses", "begun in an earlier step and gone on with in this one", "train"),
    "tokens_resumed": Metric("tokens", "those that earlier steps had drawn of resumed responses", "train"),
    "responses_aborted": Metric("responses", "of groups that were cut when the batch was full", "train"),
    "tokens_aborted": Metric("tokens", "of aborted responses up to the cut; they are in no record", "train"),
    "responses_waiting": Metric("responses", "cut, and to be gone on with in the next step", "train"),
    "tokens_waiting": Metric("tokens", "drawn so far of waiting responses", "train"),
    "skipped_compute": Metric("share of ids", "prompt and response ids that training did not have to run"),
    "num_tokens": Metric("tokens", "prompt and response ids of all steps so far"),
    "loss": Metric("loss", "the objective's loss, mean over the first pass; null: nothing to train on", "train"),
    "grad_norm": Metric("norm", "gradient norm before clipping, mean over the step's updates", "train"),
    "learning_rate": Metric("1", "learning rate of the step's last update", "train"),
    "kl": Metric("nats", "mean of the KL estimator over loss tokens, policy against reference", "train"),
    "entropy": Metric("nats", "mean entropy of the policy at loss tokens", "train"),
    "clip_ratio/low_mean": Metric("share of tokens", "loss tokens clipped below (negative advantage)", "train"),
    "clip_ratio/high_mean": Metric("share of tokens", "loss tokens clipped above (positive advantage)", "train"),
    "clip_ratio/region_mean": Metric("share of tokens", "loss tokens clipped on either side", "train"),
    "sampling/sampling_logp_difference/mean": Metric("nats", "mean |trainer − sampler| at the first pass", "train"),
    "sampling/sampling_logp_difference/max": Metric("nats", "largest |trainer − sampler| at the first pass", "train"),
    "updates": Metric("updates", "optimiser steps of this step", "train"),
    "updates_skipped": Metric("updates", "optimiser steps left out because a number was not finite", "train"),
    "critic/loss": Metric("loss", "the critic's value loss at its last pass, before that pass moved it", "train"),
    "critic/explained_variance": Metric("1", "1 − Var(return − value) / Var(return) over trained tokens", "train"),
    "critic/clip_fraction": Metric("share of tokens", "tokens in the clipped branch of the value loss", "train"),
    "critic/grad_norm": Metric("norm", "the critic's gradient norm before clipping", "train"),
    "critic/learning_rate": Metric("1", "learning rate of the critic's last step", "train"),
    "entropy_bonus": Metric("1", "entropy coefficient in force, where a target moves it", "train"),
    "memory/optimiser_bytes": Metric("bytes", "moments of every optimiser, a critic's included", "train"),
    "memory/weight_bytes": Metric("bytes", "weights of policy, critic and reference, shared ones once", "train"),
    "memory/gradient_bytes": Metric("bytes", "gradients of what is trained", "train"),
    "memory/peak_bytes": Metric("bytes", "the most memory so far, of the GPU or the process", "train", timing=True),
    "cpu_time_s": Metric("s", "processor time of the step, all threads of the process", "train", timing=True),
    "compute/run": Metric("ids", "prompt and response ids run forward and backward, all updates of the step", "train"),
    "compute/padded": Metric("ids", "what rows padded to the longest prompt and response would have run", "train"),
    "compute/shared": Metric("ids", "of prompts and beginnings that several rows share, run once for all", "train"),
    "compute/dead": Metric("ids", "of rows that could not move the policy and were not run", "train"),
    "compute/padding": Metric("ids", "that would have been padding; below 0 where rows had to be padded", "train"),
    "compute/saved": Metric("share of ids", "1 − run / padded", "train"),
    "staleness/mean": Metric("versions", "between the weights that drew a trained token and the step's own", "train"),
    "staleness/max": Metric("versions", "the oldest trained token's", "train"),
    "idle/trainer_s": Metric("s", "the trainer waited for responses (train.max_staleness)", "train", timing=True),
    "idle/engine_s": Metric("s", "nothing was being drawn (train.max_staleness)", "train", timing=True),
    "weights/version": Metric("updates", "of the weights that engines elsewhere, or ranks, were handed", "train"),
    "weights/bytes": Metric("bytes", "of tensors to all engines, or that came to rank 0 from others", "train"),
    "weights/time_s": Metric("s", "until all held them, the probe not included", "train", timing=True),
    "step_time": Metric("s", "wall time of the step", "train", timing=True),
    "sampling_time_s": Metric("s", "wall time of drawing responses", "train", timing=True),
    "scoring_time_s": Metric("s", "wall time of scoring them", "train", timing=True),
    "training_time_s": Metric("s", "wall time of the updates", "train", timing=True),
    "tokens_per_s": Metric("tokens/s", "tokens sampled per second of the step", "train", timing=True),
    "held_out/tasks": Metric("tasks", "held-out tasks measured", "eval"),
    "held_out/samples": Metric("responses", "responses per task, k", "eval"),
    "held_out/mean": Metric("metric", "mean@k: mean of the raw metric over tasks and responses", "eval"),
    "held_out/mean_low": Metric("metric", "lower end of its 95 % interval", "eval"),
    "held_out/mean_high": Metric("metric", "upper end of its 95 % interval", "eval"),
    "held_out/pass": Metric("share of tasks", "pass@k: at least one of k responses solves the task", "eval"),
    "held_out/pass_low": Metric("share of tasks", "lower end of its 95 % interval", "eval"),
    "held_out/pass_high": Metric("share of tasks", "upper end of its 95 % interval", "eval"),
    "held_out/maj": Metric("share of tasks", "maj@k: the commonest answer of k solves the task", "eval"),
    "held_out/maj_low": Metric("share of tasks", "lower end of its 95 % interval", "eval"),
    "held_out/maj_high": Metric("share of tasks", "upper end of its 95 % interval", "eval"),
    "held_out/mean_length": Metric("tokens", "mean tokens of a held-out response", "eval"),
    "held_out/time_s": Metric("s", "wall time of the evaluation", "eval", timing=True),
}
