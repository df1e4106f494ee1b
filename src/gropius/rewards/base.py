"""What a reward is, and the scorer that runs rewards in this process. No torch.

A `Scorer` is the seam: `mixed.MixedScorer` puts a person's own functions into a pool of killable processes without
anything else changing.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np

from gropius.errors import RewardError
from gropius.rewards.places import require_places
from gropius.types import Episode, Outcome, Step, Verdict, rejected, scored, void

Reward = Callable[[Episode], Outcome]
Metric = Callable[[Episode, Outcome], "float | None"]
Signature = Literal["built-in", "episode", "group", "TRL", "verl", "OpenRLHF"]
Outcomes = dict[str, Outcome]
Memory = dict[str, Any]  # JSON-ready counters of a scorer, as `State` of a run keeps them

FAULTS_IN_A_ROW = 64
BATCHED: tuple[Signature, ...] = ("TRL", "OpenRLHF")  # written for many completions at once: given a whole group
NOTHING_APPLIES = "no reward applies to this episode"
_LOG = logging.getLogger("gropius.rewards")


@dataclass(frozen=True)
class BatchedReward:
    """A reward that is called once for many episodes and returns one value each: a number, None (not applicable).

    siblings: group-wise; each call gets all siblings of one group, in the order of their members, and nobody else.
    """

    call: Callable[[Sequence[Episode]], Any]
    siblings: bool = False


@dataclass(frozen=True)
class RewardPart:
    """One term of the reward: weight · function.

    function: Episode → Outcome, number or None (not applicable to this episode), or a `BatchedReward`.
    metric: how to read the unshaped task metric (accuracy) off this part; None when the part only shapes.
    signature: how the function was understood. source: where it came from, for messages. low, high: the declared range
    of a scored value; outside it the function broke its contract. floor: the value of a rejection, None for the
    scorer's. threaded: it blocks, so it runs in a thread. own: a person's function, run in a pool where there is one.
    """

    name: str
    weight: float
    function: Callable[[Episode], Any] | BatchedReward
    metric: Metric | None = None
    signature: Signature = "built-in"
    source: str = ""
    low: float = -math.inf
    high: float = math.inf
    floor: float | None = None
    threaded: bool = False

    @property
    def own(self) -> bool:
        """True for a person's function."""
        return self.signature != "built-in"

    @property
    def siblings(self) -> bool:
        """True when it must see a whole group."""
        return self.signature == "group" or (isinstance(self.function, BatchedReward) and self.function.siblings)

    def label(self) -> str:
        """The part as a message names it: `reward NAME (SOURCE)`."""
        return f"reward {self.name}" + (f" ({self.source})" if self.source and self.source != self.name else "")


class Scorer(Protocol):
    """Judges episodes. unit: "episode" when each is judged alone, "group" when siblings must come together."""

    @property
    def unit(self) -> Literal["episode", "group"]:
        """What must not be split over two calls."""
        ...

    async def score(self, episodes: Sequence[Episode]) -> list[Verdict]:
        """One verdict an episode, in order."""
        ...


def outcome_as_metric(episode: Episode, outcome: Outcome) -> float | None:
    """The metric of a part that is the metric: its value, 0 when rejected, None when void."""
    return {"scored": outcome.value, "rejected": 0.0, "void": None}[outcome.status]


@dataclass
class InProcessScorer:
    """Runs every part in this process, one after the other; fit for functions that are trusted not to hang.

    verdict = Σ weight · value over the parts that apply, a rejected part counting `floor`
    (or its own value where that is not 0).
    Void: any part of non-zero weight that is void, no part that applies, or an episode that failed or was cancelled.
    Rejected: every part that applies and weighs something is. Scored otherwise. Reasons of the parts are kept. raw: the
    metric of the first part that has one. faults: how often each part failed, since the run began.
    A function that raises, or returns a number that is not finite, makes that one episode void; when it fails for a
    whole call and has never yet worked, or 64 times in a row, the run halts (RewardError). A wrong length or type
    halts at once. A batched function that raises is asked again for each episode alone, to find the culprit.
    """

    parts: Sequence[RewardPart]
    floor: float = 0.0
    unit: Literal["episode", "group"] = "episode"
    faults: dict[str, int] = field(default_factory=dict, init=False, repr=False)
    _worked: set[str] = field(default_factory=set, init=False, repr=False)
    _faults_in_a_row: dict[str, int] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        names = [part.name for part in self.parts]
        if not names or len(set(names)) != len(names):
            raise RewardError(f"a scorer needs parts with different names, got: {', '.join(names) or 'none'}")
        if not math.isfinite(self.floor) or not all(math.isfinite(part.weight) for part in self.parts):
            raise RewardError("the floor and every weight must be finite")

    async def score(self, episodes: Sequence[Episode]) -> list[Verdict]:
        """One verdict an episode, in order. Raises RewardError naming the function that broke its contract."""
        return await judge(self.parts, episodes, self.outcomes)

    async def outcomes(self, episodes: Sequence[Episode]) -> list[Outcomes]:
        """For every episode the outcomes of the parts that apply to it, by name; all episodes must be sound."""
        columns = {part.name: await self._column(part, episodes) for part in self.parts}
        return [
            {name: outcome for name, column in columns.items() if (outcome := column[place]) is not None}
            for place in range(len(episodes))
        ]

    def describe(self) -> tuple[str, ...]:
        """One line a part: weight, how its function was understood, which is the task metric."""
        return described(self.parts)

    def close(self) -> None:
        """Nothing to close."""

    def memory(self) -> Memory:
        """What has to survive a pause: which parts ever worked, their faults, and how many came in a row."""
        return {
            "worked": sorted(self._worked),
            "faults": dict(self.faults),
            "in_a_row": {name: count for name, count in self._faults_in_a_row.items() if count},
        }

    def remember(self, memory: Memory) -> None:
        """Take up what `memory` gave before a pause."""
        self._worked = set(memory.get("worked", ()))
        self.faults = dict(memory.get("faults", {}))
        self._faults_in_a_row = dict(memory.get("in_a_row", {}))

    async def _column(self, part: RewardPart, episodes: Sequence[Episode]) -> list[Outcome | None]:
        if not episodes:
            return []
        function = part.function
        if not isinstance(function, BatchedReward) and len(episodes) == 1:
            values = [await _value(function, episodes[0], part.threaded)]  # no task for one: this is the inner loop
        elif not isinstance(function, BatchedReward):
            values = await asyncio.gather(*(_value(function, episode, part.threaded) for episode in episodes))
        elif function.siblings:
            values = await _sibling_values(part, function, episodes)
        else:
            values = await _batch_values(part, function, episodes)
        faults: list[str | None] = []
        outcomes: list[Outcome | None] = []
        for episode, returned in zip(episodes, values, strict=True):
            outcome, fault = self._checked(part, episode, returned)
            outcomes.append(outcome)
            faults.append(fault)
        self._count(part, faults)
        return outcomes

    def _checked(self, part: RewardPart, episode: Episode, returned: Any) -> tuple[Outcome | None, str | None]:
        """(outcome, fault): the fault is text when the function failed on this episode."""
        if isinstance(returned, _Raised):
            return void(f"{part.label()} raised {returned.text}"), f"raised {returned.text}"
        if returned is None:
            return None, None
        if isinstance(returned, Outcome):
            if returned.status == "rejected" and not returned.value:
                return rejected(returned.reason, self.floor if part.floor is None else part.floor), None
            if returned.status == "scored":
                _require_in_range(part, episode, float(returned.value or 0.0))
            require_places(part, episode, returned)
            return returned, None
        if isinstance(returned, (bool, np.bool_)) or not isinstance(returned, (int, float, np.integer, np.floating)):
            raise RewardError(
                f"{part.label()} returned a {type(returned).__name__} ({_short(returned)}) for {_whose(episode)}; "
                "return a finite number, None (not applicable) or an Outcome"
            )
        try:
            value = float(returned)
        except OverflowError:
            value = math.inf
        if not math.isfinite(value):
            fault = f"returned {_short(returned)}, which is not finite"
            return void(f"{part.label()} {fault}"), f"{fault}, for {_whose(episode)}"
        _require_in_range(part, episode, value)
        return scored(value), None

    def _count(self, part: RewardPart, faults: Sequence[str | None]) -> None:
        first = next((fault for fault in faults if fault is not None), None)
        for fault in faults:
            self._faults_in_a_row[part.name] = 0 if fault is None else self._faults_in_a_row.get(part.name, 0) + 1
        if None in faults:
            self._worked.add(part.name)
        failed = sum(fault is not None for fault in faults)
        if failed:
            self.faults[part.name] = self.faults.get(part.name, 0) + failed
        in_a_row = self._faults_in_a_row[part.name]
        if failed == len(faults) and (part.name not in self._worked or in_a_row >= FAULTS_IN_A_ROW):
            raise RewardError(
                f"{part.label()} failed for all {max(failed, in_a_row)} episodes it was asked about: {first}"
            )
        if failed:
            _LOG.warning("%s failed for %d of %d episodes (void): %s", part.label(), failed, len(faults), first)


async def judge(
    parts: Sequence[RewardPart],
    episodes: Sequence[Episode],
    outcomes: Callable[[Sequence[Episode]], Awaitable[Sequence[Outcomes]]],
) -> list[Verdict]:
    """Verdicts by weighing what `outcomes` says of the sound episodes; an episode that failed or was cancelled is void.

    outcomes: for every episode given, the outcomes of the parts that apply, by name.
    """
    broken = {place for place, e in enumerate(episodes) if e.finish_reason in ("error", "cancelled")}
    sound = [e for place, e in enumerate(episodes) if place not in broken]
    found = iter(await outcomes(sound) if sound else ())
    verdicts = []
    for place, episode in enumerate(episodes):
        if place in broken:
            verdicts.append(Verdict(void(f"the episode ended by {episode.finish_reason}: {episode.error}")))
        else:
            verdicts.append(weigh(parts, episode, next(found)))
    if sound and not any(verdict.parts for verdict in verdicts):
        _LOG.warning("every reward returned None (not applicable) for all %d episodes: all are void", len(sound))
    return verdicts


def weigh(parts: Sequence[RewardPart], episode: Episode, outcomes: Mapping[str, Outcome]) -> Verdict:
    """The verdict over the outcomes of the parts that apply; see `InProcessScorer`. Raises RewardError on overflow."""
    raw = None
    metric = next((part for part in parts if part.metric and part.name in outcomes), None)
    if metric is not None and metric.metric is not None:
        raw = metric.metric(episode, outcomes[metric.name])
    weights = {part.name: part.weight for part in parts}
    reasons = [f"{name}: {outcome.reason}" for name, outcome in outcomes.items() if outcome.reason]
    broken = [name for name, outcome in outcomes.items() if outcome.status == "void" and weights[name] != 0]
    if broken or not outcomes:
        return Verdict(void("; ".join(reasons) or NOTHING_APPLIES), outcomes, None)
    counted = [(weights[name], outcome) for name, outcome in outcomes.items() if outcome.status != "void"]
    total = sum(weight * float(outcome.value or 0.0) for weight, outcome in counted)
    final = sum(weight * float(outcome.value or 0.0) for weight, outcome in counted if not outcome.places)
    if not math.isfinite(total):
        raise RewardError(f"the weighted sum of the rewards is {total} for {_whose(episode)}; use smaller weights")
    status: Literal["scored", "rejected"] = "scored"
    deciding = [outcome for weight, outcome in counted if weight != 0] or [outcome for _, outcome in counted]
    if deciding and all(outcome.status == "rejected" for outcome in deciding):
        status = "rejected"
    steps = tuple(
        Step(weights[name] * place.score, name, place)
        for name, outcome in outcomes.items()
        for place in (outcome.places if outcome.status != "void" else ())
    )
    return Verdict(Outcome(status, total, "; ".join(reasons)), outcomes, raw, steps, final)


def described(parts: Sequence[RewardPart]) -> tuple[str, ...]:
    """One line a part: weight, how its function was understood, its declared range, which is the task metric."""
    first = next((part.name for part in parts if part.metric), None)
    return tuple(
        f"{part.name}: weight {part.weight:g}, signature {part.signature}"
        + (f", from {part.source}" if part.source and part.source != part.name else "")
        + (f", in [{part.low:g}, {part.high:g}]" if math.isfinite(part.low) and math.isfinite(part.high) else "")
        + (", sees all siblings of a group" if part.siblings else "")
        + (", task metric" if part.name == first else "")
        for part in parts
    )


def unit_of(parts: Sequence[RewardPart]) -> Literal["episode", "group"]:
    """What must not be split over two calls of a scorer with these parts."""
    together = any(part.siblings or part.signature in BATCHED for part in parts)
    return "group" if together else "episode"


@dataclass(frozen=True)
class _Raised:
    """Stands for the value of a function that raised."""

    text: str


async def _value(function: Callable[[Episode], Any], episode: Episode, threaded: bool = False) -> Any:
    try:
        returned = await asyncio.to_thread(function, episode) if threaded else function(episode)
        return await returned if inspect.isawaitable(returned) else returned
    except RewardError:
        raise
    except (Exception, SystemExit) as fault:  # the boundary: a person's reward function
        return _Raised(f"{type(fault).__name__}: {fault}")


async def _batch_values(part: RewardPart, function: BatchedReward, episodes: Sequence[Episode]) -> list[Any]:
    returned = await _value(function.call, episodes)  # type: ignore[arg-type]
    if isinstance(returned, _Raised):
        if len(episodes) == 1:
            return [returned]
        return [value for episode in episodes for value in await _batch_values(part, function, [episode])]
    return _listed(part, episodes, returned)


def _listed(part: RewardPart, episodes: Sequence[Episode], returned: Any) -> list[Any]:
    """One value an episode, checked for kind and length."""
    if isinstance(returned, np.ndarray) and returned.ndim == 1:
        returned = returned.tolist()
    if not isinstance(returned, (list, tuple)):
        raise RewardError(
            f"{part.label()} returned a {type(returned).__name__} ({_short(returned)}), not a list, for "
            f"{len(episodes)} completions; return {len(episodes)} numbers (None where not applicable)"
        )
    if len(returned) != len(episodes):
        raise RewardError(
            f"{part.label()} returned {len(returned)} values for {len(episodes)} completions; return one each"
        )
    return list(returned)


async def _sibling_values(part: RewardPart, function: BatchedReward, episodes: Sequence[Episode]) -> list[Any]:
    """A group-wise function is called group by group; a group it raises for is void as a whole."""
    groups: dict[str, list[int]] = {}
    for place, episode in enumerate(episodes):
        groups.setdefault(episode.group_id, []).append(place)
    values: list[Any] = [None] * len(episodes)
    for places in groups.values():
        siblings = [episodes[place] for place in sorted(places, key=lambda place: episodes[place].member)]
        returned = await _value(function.call, siblings)  # type: ignore[arg-type]
        found = [returned] * len(siblings) if isinstance(returned, _Raised) else _listed(part, siblings, returned)
        for place, value in zip(sorted(places, key=lambda place: episodes[place].member), found, strict=True):
            values[place] = value
    return values


def _require_in_range(part: RewardPart, episode: Episode, value: float) -> None:
    if not part.low <= value <= part.high:
        raise RewardError(
            f"{part.label()} returned {value:g} for {_whose(episode)}, outside its declared range "
            f"[{part.low:g}, {part.high:g}]; mend the function, or declare another range"
        )


def _whose(episode: Episode) -> str:
    return f"group {episode.group_id} member {episode.member} (task {episode.task.key})"


def _short(value: Any) -> str:
    text = ascii(value)
    return text if len(text) <= 60 else text[:57] + "..."
