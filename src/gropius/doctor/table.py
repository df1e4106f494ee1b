"""The table of diagnostics and what runs it. A diagnostic is a pure function of a log; a row here makes it part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from gropius.doctor import groups, lengths, policy, rewards, sampling
from gropius.doctor.finding import SEVERITIES, Examination, Finding, Skipped
from gropius.doctor.log import Log
from gropius.doctor.windows import width


@dataclass(frozen=True)
class Diagnostic:
    """One row of the table.

    examine: Log → a finding, or None. needs: fields without which it is skipped. asks: what it looks for, in words.
    explains: findings that are its consequences when it holds no later than they do.
    """

    examine: Callable[[Log], Finding | None]
    needs: tuple[str, ...]
    asks: str
    explains: tuple[str, ...] = ()


def examine(log: Log, only: Sequence[str] = ()) -> Examination:
    """Every diagnostic (or those named) on one log. A log with no step gives nothing but skips."""
    chosen = {name: row for name, row in DIAGNOSTICS.items() if not only or name in only}
    findings: list[Finding] = []
    passed: list[str] = []
    skipped: list[Skipped] = []
    for name, row in chosen.items():
        missing = log.lacks(row.needs)
        if missing:
            skipped.append(Skipped(name, missing, log.hint(missing)))
            continue
        found = row.examine(log)
        if found is None:
            passed.append(name)
        else:
            findings.append(found)
    findings = _explained(findings, width(len(log.steps)))
    order = {severity: rank for rank, severity in enumerate(SEVERITIES)}
    findings.sort(key=lambda f: (bool(f.explained_by), -order[f.severity], f.step))
    return Examination(log.source, len(log.steps), tuple(findings), tuple(passed), tuple(skipped), log.notes)


def _explained(findings: list[Finding], slack: int) -> list[Finding]:
    """Name for each finding the root it follows from: one that explains it and does not begin much later."""
    out = []
    for finding in findings:
        roots = [
            other.name
            for other in findings
            if finding.name in DIAGNOSTICS[other.name].explains
            and other.step <= finding.step + slack
            and other.severity != "note"
        ]
        out.append(replace(finding, explained_by=roots[0]) if roots else finding)
    return out


_RESPONSES = ("responses.group_id", "responses.reward")
_STEP_OF_DEATH = ("budget_waste", "zero_gradient", "few_prompts_carry_signal")

# In causal order: a row explains only rows below it.
DIAGNOSTICS: dict[str, Diagnostic] = {
    "stop_not_learned": Diagnostic(
        lengths.stop_not_learned,
        ("responses.group_id", "responses.truncated"),
        "does no response ever end by itself?",
        (
            "identical_siblings",
            "length_growth_of_wrong_answers",
            "truncation",
            "policy_collapse",
            "all_failed_groups",
            "entropy_collapse",
            "dead_reward_part",
            *_STEP_OF_DEATH,
        ),
    ),
    "void_verdicts": Diagnostic(
        rewards.void_verdicts,
        ("responses.group_id", "responses.status"),
        "does the verifier fail?",
        _STEP_OF_DEATH,
    ),
    "stale_sampler": Diagnostic(
        sampling.staleness,
        ("responses.version", "metrics.updates"),
        "how old is the policy that draws?",
        (
            "sampler_trainer_mismatch",
            "clip_fraction_high",
            "weight_concentration",
            "gradient_spikes",
            "policy_collapse",
        ),
    ),
    "sampler_trainer_mismatch": Diagnostic(
        sampling.sampler_mismatch,
        ("tokens.sampler",),
        "do sampler and trainer give a token one log-probability, and if not, why?",
        (
            "clip_fraction_high",
            "weight_concentration",
            "kl_estimator",
            "kl_drift",
            "entropy_collapse",
            "gradient_spikes",
            "policy_collapse",
            "truncation",
            "all_failed_groups",
            *_STEP_OF_DEATH,
        ),
    ),
    "few_prompts_carry_signal": Diagnostic(
        groups.few_prompts,
        ("responses.task", "responses.advantage"),
        "do a few prompts carry all the signal?",
        ("gradient_spikes", "dominant_reward_part"),
    ),
    "gradient_spikes": Diagnostic(
        policy.gradient_spikes,
        ("metrics.grad_norm",),
        "are single gradients far above the others?",
        (
            "entropy_collapse",
            "kl_drift",
            "clip_fraction_high",
            "identical_siblings",
            "policy_collapse",
            "truncation",
            "all_failed_groups",
            *_STEP_OF_DEATH,
        ),
    ),
    "dead_reward_part": Diagnostic(
        rewards.dead_part,
        ("responses.parts",),
        "is a reward part always the same?",
    ),
    "length_growth_of_wrong_answers": Diagnostic(
        lengths.length_growth,
        (*_RESPONSES, "responses.tokens"),
        "do wrong answers grow longer?",
        (
            "reward_hacking",
            "truncation",
            "kl_drift",
            "policy_collapse",
            "all_failed_groups",
            "entropy_collapse",
            *_STEP_OF_DEATH,
        ),
    ),
    "reward_hacking": Diagnostic(
        rewards.reward_hacking,
        (*_RESPONSES, "responses.raw"),
        "does the reward rise where the strict metric rejects?",
        (
            "dominant_reward_part",
            "entropy_collapse",
            "identical_siblings",
            "kl_drift",
            "policy_collapse",
            "all_failed_groups",
            "truncation",
            *_STEP_OF_DEATH,
        ),
    ),
    "dominant_reward_part": Diagnostic(
        rewards.dominant_part,
        ("responses.parts",),
        "does one part drown the others?",
        ("entropy_collapse", "kl_drift", "policy_collapse"),
    ),
    "kl_estimator": Diagnostic(
        policy.kl_estimator,
        ("tokens.policy", "tokens.reference"),
        "is the logged KL that of the model the run began with, and of more than a few tokens?",
        ("kl_drift",),
    ),
    "clip_fraction_high": Diagnostic(
        policy.clip_fraction_high,
        ("metrics.clip_ratio/region_mean",),
        "are many tokens clipped?",
        (
            "weight_concentration",
            "kl_drift",
            "entropy_collapse",
            "identical_siblings",
            "policy_collapse",
            "truncation",
            "all_failed_groups",
            *_STEP_OF_DEATH,
        ),
    ),
    "weight_concentration": Diagnostic(
        sampling.weight_concentration,
        ("tokens.later_updates", "settings.objective.ratio.level"),
        "do the importance weights leave enough responses?",
        (
            "kl_drift",
            "entropy_collapse",
            "identical_siblings",
            "policy_collapse",
            "truncation",
            "all_failed_groups",
            *_STEP_OF_DEATH,
        ),
    ),
    "entropy_collapse": Diagnostic(
        policy.entropy_collapse,
        ("metrics.entropy", "responses.reward"),
        "has the policy become certain too early?",
        ("identical_siblings", "kl_drift", "policy_collapse", "truncation", "all_failed_groups", *_STEP_OF_DEATH),
    ),
    "kl_drift": Diagnostic(
        policy.kl_drift,
        ("metrics.kl",),
        "has the policy left its reference?",
        ("policy_collapse", "all_failed_groups", *_STEP_OF_DEATH),
    ),
    "policy_collapse": Diagnostic(
        policy.policy_collapse,
        _RESPONSES,
        "has the task metric fallen?",
        ("identical_siblings", "truncation", "all_failed_groups", *_STEP_OF_DEATH),
    ),
    "clip_never_reached": Diagnostic(
        policy.clip_never,
        ("settings.train.updates", "metrics.clip_ratio/region_mean", "tokens.later_updates"),
        "does the policy move at all within a batch?",
    ),
    "reward_without_held_out": Diagnostic(
        rewards.reward_without_held_out,
        (*_RESPONSES, "metrics.held_out/mean"),
        "does the held-out metric follow the reward?",
        ("all_solved_groups", *_STEP_OF_DEATH),
    ),
    "identical_siblings": Diagnostic(
        groups.identical_siblings,
        (*_RESPONSES, "responses.identity"),
        "are siblings copies of each other?",
        ("all_failed_groups", *_STEP_OF_DEATH),
    ),
    "truncation": Diagnostic(
        lengths.truncation,
        ("responses.group_id", "responses.truncated"),
        "are responses cut off?",
        ("all_failed_groups", *_STEP_OF_DEATH),
    ),
    "all_failed_groups": Diagnostic(
        groups.all_failed, _RESPONSES, "does every sibling fail in most groups?", _STEP_OF_DEATH
    ),
    "all_solved_groups": Diagnostic(
        groups.all_solved, _RESPONSES, "does every sibling succeed in most groups?", _STEP_OF_DEATH
    ),
    "zero_gradient": Diagnostic(
        policy.zero_gradient,
        (*_RESPONSES, "metrics.updates"),
        "are there stretches without a gradient although siblings differ?",
    ),
    "budget_waste": Diagnostic(
        groups.budget_waste,
        (*_RESPONSES, "responses.tokens"),
        "what share of the sampled tokens buys no comparison?",
    ),
}
