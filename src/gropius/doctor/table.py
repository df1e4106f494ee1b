"""The table of diagnostics and what runs it. A diagnostic is a pure function of a log; a row here makes it part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from gropius.doctor import enough, groups, lengths, policy, rewards, sampling
from gropius.doctor.enough import Need
from gropius.doctor.finding import SEVERITIES, Examination, Finding, Skipped, Waiting
from gropius.doctor.log import Log
from gropius.doctor.windows import FEWEST_STEPS, width


@dataclass(frozen=True)
class Diagnostic:
    """One row of the table.

    examine: Log → a finding, or None. needs: fields without which it is skipped. asks: what it looks for, in words.
    explains: findings that are its consequences when it holds no later than they do. least: how much data it takes for
    None to mean that there is nothing.
    """

    examine: Callable[[Log], Finding | None]
    needs: tuple[str, ...]
    asks: str
    explains: tuple[str, ...] = ()
    least: tuple[Need, ...] = ()


def examine(log: Log, only: Sequence[str] = ()) -> Examination:
    """Every diagnostic (or those named) on one log. A log with no step gives nothing but skips."""
    chosen = {name: row for name, row in DIAGNOSTICS.items() if not only or name in only}
    findings: list[Finding] = []
    passed: list[str] = []
    waiting: list[Waiting] = []
    skipped: list[Skipped] = []
    for name, row in chosen.items():
        missing = log.lacks(row.needs)
        if missing:
            skipped.append(Skipped(name, missing, log.hint(missing)))
            continue
        found = row.examine(log)
        short = [a for a in (need(log) for need in row.least) if a.there < a.least] if found is None else []
        if found is not None:
            findings.append(found)
        elif short:
            waiting.append(Waiting(name, tuple(short)))
        else:
            passed.append(name)
    findings = _explained(findings, width(len(log.steps)))
    order = {severity: rank for rank, severity in enumerate(SEVERITIES)}
    findings.sort(key=lambda f: (bool(f.explained_by), -order[f.severity], f.step))
    return Examination(
        log.source, len(log.steps), tuple(findings), tuple(passed), tuple(waiting), tuple(skipped), log.notes
    )


def _explained(findings: list[Finding], slack: int) -> list[Finding]:
    """Name for each finding the root it follows from: one that explains it and does not begin much later.

    Of two that explain each other the earlier one is the root, the upper one where they begin together.
    """

    def explains(root: Finding, other: Finding) -> bool:
        return other.name in DIAGNOSTICS[root.name].explains and root.severity != "note"

    places = {name: place for place, name in enumerate(DIAGNOSTICS)}
    out = []
    for finding in findings:
        roots = []
        for other in findings:
            if not explains(other, finding) or other.step > finding.step + slack:
                continue
            first = (other.step, places[other.name]) < (finding.step, places[finding.name])
            if first or not explains(finding, other):
                roots.append(other.name)
        out.append(replace(finding, explained_by=roots[0]) if roots else finding)
    return out


_RESPONSES = ("responses.group_id", "responses.reward")
_SOME = (enough.steps(), enough.groups())
_SCORED = (enough.steps(), enough.scored_groups())
_TWO_ENDS = (enough.steps(2 * FEWEST_STEPS), enough.groups_at_both_ends())
_STEP_OF_DEATH = ("budget_waste", "zero_gradient", "few_prompts_carry_signal")

# In causal order: a row explains rows below it; drift and the collapses explain each other, the earlier the later.
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
        least=_SOME,
    ),
    "void_verdicts": Diagnostic(
        rewards.void_verdicts,
        ("responses.group_id", "responses.status"),
        "does the verifier fail?",
        _STEP_OF_DEATH,
        least=_SOME,
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
        least=(enough.steps(),),
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
        least=(enough.compared_responses(sampling.FEWEST_RESPONSES),),
    ),
    "few_prompts_carry_signal": Diagnostic(
        groups.few_prompts,
        ("responses.task", "responses.advantage"),
        "do a few prompts carry all the signal?",
        ("gradient_spikes", "dominant_reward_part"),
        least=(enough.steps(), enough.tasks_with_signal(groups.FEWEST_TASKS)),
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
        least=(enough.moving_gradients(2 * FEWEST_STEPS),),
    ),
    "dead_reward_part": Diagnostic(
        rewards.dead_part,
        ("responses.parts",),
        "is a reward part always the same?",
        least=(enough.steps(), enough.responses(rewards.FEWEST_OF_A_PART)),
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
        least=_TWO_ENDS,
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
        least=_TWO_ENDS,
    ),
    "dominant_reward_part": Diagnostic(
        rewards.dominant_part,
        ("responses.parts",),
        "does one part drown the others?",
        ("entropy_collapse", "kl_drift", "policy_collapse"),
        least=(enough.steps(), enough.differing_groups()),
    ),
    "kl_estimator": Diagnostic(
        policy.kl_estimator,
        ("tokens.policy", "tokens.reference"),
        "is the logged KL that of the model the run began with, and of more than a few tokens?",
        ("kl_drift",),
        least=(enough.reference_tokens(policy.HEAVY_TOKENS),),
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
        least=(enough.points("clip_ratio/region_mean", FEWEST_STEPS),),
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
        least=(enough.moved_responses(sampling.FEWEST_WEIGHTS),),
    ),
    "entropy_collapse": Diagnostic(
        policy.entropy_collapse,
        ("metrics.entropy", "responses.reward"),
        "has the policy become certain too early?",
        ("identical_siblings", "kl_drift", "policy_collapse", "truncation", "all_failed_groups", *_STEP_OF_DEATH),
        least=_TWO_ENDS,
    ),
    "kl_drift": Diagnostic(
        policy.kl_drift,
        ("metrics.kl",),
        "has the policy left its reference?",
        ("entropy_collapse", "policy_collapse", "all_failed_groups", *_STEP_OF_DEATH),
        least=(enough.points("kl", 2 * FEWEST_STEPS),),
    ),
    "policy_collapse": Diagnostic(
        policy.policy_collapse,
        _RESPONSES,
        "has the task metric fallen?",
        ("entropy_collapse", "identical_siblings", "truncation", "all_failed_groups", *_STEP_OF_DEATH),
        least=_TWO_ENDS,
    ),
    "clip_never_reached": Diagnostic(
        policy.clip_never,
        ("settings.train.updates", "metrics.clip_ratio/region_mean", "tokens.later_updates"),
        "does the policy move at all within a batch?",
        least=(enough.points("clip_ratio/region_mean", 2 * FEWEST_STEPS),),
    ),
    "reward_without_held_out": Diagnostic(
        rewards.reward_without_held_out,
        (*_RESPONSES, "metrics.held_out/mean"),
        "does the held-out metric follow the reward?",
        ("all_solved_groups", *_STEP_OF_DEATH),
        least=(*_TWO_ENDS, enough.evaluations()),
    ),
    "identical_siblings": Diagnostic(
        groups.identical_siblings,
        (*_RESPONSES, "responses.identity"),
        "are siblings copies of each other?",
        ("all_failed_groups", *_STEP_OF_DEATH),
        least=(enough.steps(), enough.unsolved_groups()),
    ),
    "truncation": Diagnostic(
        lengths.truncation,
        ("responses.group_id", "responses.truncated"),
        "are responses cut off?",
        ("all_failed_groups", *_STEP_OF_DEATH),
        least=_SOME,
    ),
    "all_failed_groups": Diagnostic(
        groups.all_failed,
        _RESPONSES,
        "does every sibling fail in most groups?",
        _STEP_OF_DEATH,
        least=_SCORED,
    ),
    "all_solved_groups": Diagnostic(
        groups.all_solved,
        _RESPONSES,
        "does every sibling succeed in most groups?",
        _STEP_OF_DEATH,
        least=_SCORED,
    ),
    "zero_gradient": Diagnostic(
        policy.zero_gradient,
        (*_RESPONSES, "metrics.updates"),
        "are there stretches without a gradient although siblings differ?",
        least=(enough.steps(),),
    ),
    "budget_waste": Diagnostic(
        groups.budget_waste,
        (*_RESPONSES, "responses.tokens"),
        "what share of the sampled tokens buys no comparison?",
        least=_SCORED,
    ),
}
