"""Groups that carry signal: what becomes of dead groups while sampling, and what the sampling cost.

A group is dead when the raw metric of all its valid siblings is the same: it compares nothing. The rule says whether
dead groups stay (`keep`, `drop`: the objective's weights decide), are replaced by fresh tasks (`refill`), or, where
all failed, get more siblings (`grow`). With over-sampling more groups are begun than are needed (`rollout.enough`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from gropius.objective.selection import GroupState, group_state
from gropius.rollout.collect import Begun, CollectPlan, Player, raw_metric
from gropius.rollout.enough import begin, play_until_enough
from gropius.types import Group, Task

BINS = ("0", "0-25 %", "25-50 %", "50-75 %", "75-100 %", "100 %")


@dataclass(frozen=True)
class SelectionRule:
    """dead: as in the objective. refill_attempts: further rounds of fresh tasks at most. grow_limit: siblings at most
    of a group that is grown. oversample: groups begun for each one wanted, at least 1. cut: what becomes of those that
    are not over when enough are: thrown away, or kept to be gone on with.
    """

    dead: Literal["keep", "drop", "refill", "grow"] = "keep"
    refill_attempts: int = 4
    grow_limit: int = 0
    oversample: float = 1.0
    cut: Literal["abort", "resume"] = "abort"

    def counts(self, group: Group) -> bool:
        """Does a complete group count towards a full batch?"""
        signal = state_of(group) in ("informative", "singleton")
        return signal or (self.dead != "refill" and (self.dead != "drop" or self.oversample == 1.0))


@dataclass(frozen=True)
class Budget:
    """What sampling cost. groups, responses, tokens: of complete groups; tokens as drawn by the model, those of earlier
    steps included. tokens_dropped: of groups that were thrown away. duplicates: responses whose ids equal an earlier
    sibling's. states: groups by state, thrown away ones included. begun: groups begun in this step. resumed: responses
    that an earlier step had begun; resumed_tokens: what it had drawn of them. aborted: responses of groups that were
    cut, with aborted_tokens. waiting: responses of groups that are gone on with in the next step, with waiting_tokens.
    """

    attempts: int
    groups: int
    responses: int
    tokens: int
    tokens_dropped: int
    duplicates: int
    states: dict[GroupState, int]
    begun: int = 0
    resumed: int = 0
    resumed_tokens: int = 0
    aborted: int = 0
    aborted_tokens: int = 0
    waiting: int = 0
    waiting_tokens: int = 0

    def metrics(self) -> dict[str, float | int | None]:
        """The budget as metrics of the step."""
        per = self.responses_per_informative
        return {
            "responses": self.responses,
            "responses_per_informative": per if per < float("inf") else None,
            "tokens_dropped": self.tokens_dropped,
            "refill_rounds": self.attempts - 1,
            "groups_begun": self.begun,
            "responses_resumed": self.resumed,
            "tokens_resumed": self.resumed_tokens,
            "responses_aborted": self.aborted,
            "tokens_aborted": self.aborted_tokens,
            "responses_waiting": self.waiting,
            "tokens_waiting": self.waiting_tokens,
        }

    @property
    def responses_per_informative(self) -> float:
        """Responses drawn for each group that carries signal; inf when none does."""
        informative = self.states.get("informative", 0)
        return self.responses / informative if informative else float("inf")


@dataclass(frozen=True)
class Shortfall:
    """Why a batch could not be filled. pass_rates: groups by share of siblings that succeeded, by the names of BINS.
    over_sampling: groups to draw for each one that carries signal, 1 / mean(1 − pᴳ − (1 − p)ᴳ); inf where none would.
    """

    wanted: int
    found: int
    attempts: int
    pass_rates: dict[str, int]
    over_sampling: float

    def __str__(self) -> str:
        bars = ", ".join(f"{name}: {count}" for name, count in self.pass_rates.items() if count)
        need = (
            f"{self.over_sampling:.1f} groups drawn for each one" if self.over_sampling < 1e6 else "no number of groups"
        )
        return (
            f"{self.found} of {self.wanted} groups carry signal after {self.attempts} rounds; "
            f"pass rates {bars or 'none'}; over-sampling that would fill the batch: {need}. "
            "Choose tasks nearer to what the model can do, a larger "
            'rollout.group_size, or objective.selection.dead = "keep"'
        )


@dataclass(frozen=True, eq=False)
class Selected:
    """groups: for training. dropped: sampled and thrown away. shortfall: None when the batch is full.

    waiting: groups that were begun and are to be gone on with in the next step.
    """

    groups: tuple[Group, ...]
    dropped: tuple[Group, ...]
    budget: Budget
    shortfall: Shortfall | None
    waiting: tuple[Begun, ...] = ()


@dataclass
class _Haul:
    """What the rounds of one collection brought so far."""

    kept: list[Group] = field(default_factory=list)
    dropped: list[Group] = field(default_factory=list)
    cut: list[Begun] = field(default_factory=list)
    attempts: int = 0
    begun: int = 0


async def collect_selected(
    draw: Callable[[int], Sequence[Task]],
    prompts: int,
    plan: CollectPlan,
    player: Player,
    rule: SelectionRule,
    waiting: Sequence[Begun] = (),
) -> Selected:
    """Collect `prompts` groups under a rule. draw(n): the next n tasks; fresh ones at every call.

    refill: rounds of fresh tasks, at most 1 + refill_attempts, until `prompts` groups carry signal; a group is kept on
    its raw metric, never on the shaped reward. Groups are numbered on through the rounds, so no stream is drawn twice.
    waiting: groups that an earlier step began; they are gone on with first.
    """
    if rule.dead == "grow":
        plan = replace(plan, grow_limit=max(plan.grow_limit, rule.grow_limit))
    haul, begun = _Haul(), tuple(waiting)
    while len(haul.kept) < prompts and haul.attempts <= (rule.refill_attempts if rule.dead == "refill" else 0):
        wanted = prompts - len(haul.kept)
        fresh = begin(wanted, rule.oversample) - len(begun)
        tasks = draw(fresh) if fresh > 0 else ()
        if not tasks and not begun:
            break
        round_plan = replace(plan, first_index=plan.first_index + haul.begun)
        haul.attempts, haul.begun = haul.attempts + 1, haul.begun + len(tasks)
        complete, cut = await play_until_enough((tasks, round_plan, player, begun), wanted, rule.counts)
        for group in complete:
            (haul.kept if rule.counts(group) else haul.dropped).append(group)
        haul.cut += cut
        begun = ()
    if rule.dead == "drop":  # dead ones fill what is missing; the objective's weights leave them out
        missing = prompts - len(haul.kept)
        haul.kept, haul.dropped = [*haul.kept, *haul.dropped[:missing]], haul.dropped[missing:]
    return _selected(haul, prompts, rule, waiting)


def _selected(haul: _Haul, prompts: int, rule: SelectionRule, waiting: Sequence[Begun]) -> Selected:
    full = len(haul.kept) >= prompts or rule.dead != "refill"
    shortfall = None if full else _shortfall(prompts, haul.kept, haul.dropped, haul.attempts)
    kept_on = rule.cut == "resume"
    spent: dict[str, Any] = {
        "begun": haul.begun,
        "resumed": sum(len(group.said) for group in waiting),
        "resumed_tokens": sum(group.tokens for group in waiting),
        ("waiting" if kept_on else "aborted"): sum(len(group.said) for group in haul.cut),
        ("waiting_tokens" if kept_on else "aborted_tokens"): sum(group.tokens for group in haul.cut),
    }
    return Selected(
        tuple(haul.kept),
        tuple(haul.dropped),
        replace(budget(haul.kept, haul.dropped, haul.attempts), **spent),
        shortfall,
        tuple(haul.cut) if kept_on else (),
    )


def state_of(group: Group) -> GroupState:
    """The state of a group by the raw metric of its valid siblings."""
    return group_state(_raw(group), len(group.episodes))


def duplicates(group: Group) -> int:
    """Responses whose ids equal those of an earlier sibling: they cost a response and compare nothing."""
    return len(group.episodes) - len({tuple(episode.response_ids.tolist()) for episode in group.episodes})


def budget(kept: Sequence[Group], dropped: Sequence[Group], attempts: int) -> Budget:
    """Count what a collection cost; a greedy baseline episode counts as a response."""
    groups = [*kept, *dropped]
    return Budget(
        attempts=attempts,
        groups=len(groups),
        responses=sum(len(group.episodes) + (group.baseline_episode is not None) for group in groups),
        tokens=sum(map(_tokens, groups)),
        tokens_dropped=sum(map(_tokens, dropped)),
        duplicates=sum(map(duplicates, groups)),
        states=dict(Counter(map(state_of, groups))),
    )


def chance_of_signal(pass_rate: float, group_size: int) -> float:
    """1 − pᴳ − (1 − p)ᴳ: the chance that G siblings of a task with pass rate p do not all end alike.

    >>> chance_of_signal(0.5, 2), chance_of_signal(0.0, 8)
    (0.5, 0.0)
    """
    return 1.0 - pass_rate**group_size - (1.0 - pass_rate) ** group_size


def pass_rate_histogram(groups: Sequence[Group]) -> dict[str, int]:
    """Groups by the share of valid siblings whose raw metric is above 0, in the bins of BINS (lower edges included)."""
    counts = dict.fromkeys(BINS, 0)
    for group in groups:
        raw = _raw(group)
        if raw:
            rate = _pass_rate(raw)
            counts[BINS[0] if rate == 0 else BINS[-1] if rate == 1 else BINS[1 + int(rate * 4)]] += 1
    return counts


def _shortfall(wanted: int, kept: Sequence[Group], dropped: Sequence[Group], attempts: int) -> Shortfall:
    groups = [group for group in (*kept, *dropped) if _raw(group)]
    chances = [chance_of_signal(_pass_rate(_raw(group)), len(group.episodes)) for group in groups]
    share = sum(chances) / len(chances) if chances else 0.0
    return Shortfall(wanted, len(kept), attempts, pass_rate_histogram(groups), 1.0 / share if share else float("inf"))


def _raw(group: Group) -> list[float]:
    return [value for episode in group.episodes if (value := raw_metric(episode)) is not None]


def _pass_rate(raw: Sequence[float]) -> float:
    return sum(value > 0 for value in raw) / len(raw)


def _tokens(group: Group) -> int:
    extra = () if group.baseline_episode is None else (group.baseline_episode,)
    return sum(episode.drawn_tokens for episode in (*group.episodes, *extra))
