"""Turn-taking: tasks become episodes, episodes become groups. One coroutine an episode.

An episode's ids are what the sampler saw and drew, concatenated and never encoded again; what the environment said is
marked and stays out of the loss. A unit is scored as soon as it is complete, while others still decode.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from gropius.errors import DataError
from gropius.models.chat import ChatFormat
from gropius.objective.selection import group_state
from gropius.rewards.base import Scorer
from gropius.rewards.places import on_tokens
from gropius.rollout.branch import Branching, choose, demonstrated, origin_of
from gropius.rollout.course import NOTHING_SAID, Course, Limits, Prompt, Said
from gropius.rollout.engine import Engine
from gropius.rollout.partners import Partners, Wait, no_wait
from gropius.tasks.base import TaskSet
from gropius.types import Bound, Episode, Group, Request, Sampling, Task


@dataclass(frozen=True)
class CollectPlan:
    """How to collect. sampling: of every turn; `max_tokens` bounds one turn. group_size: siblings of a task.

    seed, step: with group index and member they name the random stream of a response. max_turns: model turns of an
    episode at most. max_episode_tokens: everything after the prompt, the environment's text included; 0 is no bound.
    greedy_baseline: one more episode a group at temperature 0. first_index: index of the first group within the step.
    grow_limit: siblings at most of a group that all failed; it grows by `group_size` at a time; 0 is off.
    branching: siblings that share a trunk; None: all on their own. demonstrations: last siblings of a group that are
    the task's own solution.
    """

    sampling: Sampling
    group_size: int
    seed: int
    step: int
    max_turns: int = 1
    max_episode_tokens: int = 0
    greedy_baseline: bool = False
    first_index: int = 0
    grow_limit: int = 0
    branching: Branching | None = None
    demonstrations: int = 0

    def __post_init__(self) -> None:
        if self.group_size < 1 or self.max_turns < 1 or self.sampling.max_tokens < 1:
            raise DataError(
                f"group_size = {self.group_size}, max_turns = {self.max_turns}, max_tokens = "
                f"{self.sampling.max_tokens}: each must be at least 1"
            )


@dataclass
class Player:
    """Who plays: the engine, the format of its model's conversations, the tasks' environments, and the judge.

    context_length: tokens the model can take; an episode that would pass it ends as "length". None: no such bound.
    wait: told of an environment that is waited for, while it is.
    """

    engine: Engine
    chat: ChatFormat
    tasks: TaskSet
    scorer: Scorer
    context_length: int | None = None
    wait: Wait = no_wait


@dataclass(frozen=True, eq=False)
class Begun:
    """A group that an earlier step began. step, index: what its streams and its id are made of. said: by member."""

    task: Task
    step: int
    index: int
    said: tuple[tuple[Said, ...], ...]

    @property
    def tokens(self) -> int:
        """Tokens drawn so far."""
        return sum(len(turn) for member in self.said for turn in member)


@dataclass(frozen=True, eq=False)
class Seat:
    """One task of a collection, and what its episodes have in common. said: what an earlier step drew, by member."""

    task: Task
    step: int
    index: int
    plan: CollectPlan
    player: Player
    partners: Partners
    bound: Bound | None = None
    said: tuple[tuple[Said, ...], ...] = ()

    @property
    def group_id(self) -> str:
        """Unique in a run."""
        return f"{self.step:06d}-{self.index:04d}"


@dataclass(frozen=True, eq=False)
class Played:
    """What came of a seat. group: None where an episode was cut."""

    seat: Seat
    courses: tuple[Course, ...]
    group: Group | None

    @property
    def spent(self) -> int:
        """Tokens that the longest sibling drew in this collection: when the group was complete, in decode steps."""
        return max(course.spent for course in self.courses)

    def begun(self, spent: int) -> Begun:
        """The group as it was when every episode had drawn `spent` tokens in this collection, or had ended."""
        said = tuple(course.said_by(spent) for course in self.courses)
        return Begun(self.seat.task, self.seat.step, self.seat.index, said)


async def collect(tasks: Sequence[Task], plan: CollectPlan, player: Player) -> list[Group]:
    """One group of `group_size` scored episodes for every task, in the order of the tasks.

    The first failure (a dead engine, a broken reward, a template that cannot go on) cancels everything that still runs
    and is raised as it is; no request stays behind. An environment that raises voids its own episode only.
    """
    groups = [played.group for played in await play(seats(tasks, plan, player), lambda played: None)]
    return [group for group in groups if group is not None]


def seats(
    tasks: Sequence[Task], plan: CollectPlan, player: Player, bound: Bound | None = None, begun: Sequence[Begun] = ()
) -> list[Seat]:
    """The seats of a collection: groups that an earlier step began, then fresh tasks."""
    common = (plan, player, Partners(player.tasks, player.wait), bound)
    old = [Seat(group.task, group.step, group.index, *common, group.said) for group in begun]
    return [*old, *(Seat(task, plan.step, plan.first_index + i, *common) for i, task in enumerate(tasks))]


async def play(at: Sequence[Seat], ended: Callable[[Played], None]) -> list[Played]:
    """Play every seat, in the order of the seats. ended: told of each one as soon as it is over and scored."""

    async def _seat(seat: Seat) -> Played:
        played = await _group(seat)
        ended(played)
        return played

    try:
        async with asyncio.TaskGroup() as together:
            jobs = [together.create_task(_seat(seat)) for seat in at]
    except BaseExceptionGroup as failures:
        first = _first(failures)
        raise first from first.__cause__
    return [job.result() for job in jobs]


@dataclass
class _Members:
    """Siblings so far; the episode of a cut one is not scored."""

    courses: list[Course] = field(default_factory=list)
    episodes: list[Episode] = field(default_factory=list)


async def _group(seat: Seat) -> Played:
    plan = seat.plan
    prompt, members = Prompt(seat.player.chat), _Members()
    await _siblings(seat, prompt, range(len(seat.said) or plan.group_size), members)
    if any(course.cut for course in members.courses):
        return Played(seat, tuple(members.courses), None)
    while plan.grow_limit and len(members.episodes) < plan.grow_limit and _all_failed(members.episodes):
        have = len(members.episodes)
        await _siblings(seat, prompt, range(have, min(have + plan.group_size, plan.grow_limit)), members)
    baseline = None
    if plan.greedy_baseline:
        greedy, alone = replace(plan, sampling=replace(plan.sampling, temperature=0.0)), _Members()
        have = len(members.episodes)
        await _siblings(replace(seat, plan=greedy, bound=None), prompt, range(have, have + 1), alone)
        baseline = alone.episodes[0]
    group = Group(seat.group_id, seat.task, tuple(members.episodes), baseline)
    return Played(seat, tuple(members.courses), group)


async def _siblings(seat: Seat, prompt: Prompt, which: range, members: _Members) -> None:
    alone = seat.player.scorer.unit == "episode"
    size = seat.plan.branching.size if seat.plan.branching is not None else 1
    async with asyncio.TaskGroup() as together:
        trees = [
            together.create_task(_tree(seat, prompt, which[k : k + size], alone)) for k in range(0, len(which), size)
        ]
    new = [pair for tree in trees for pair in tree.result()]
    members.courses += [course for course, _ in new]
    episodes = [episode for _, episode in new]
    if not alone and not any(course.cut for course, _ in new):
        episodes = await _score(seat.player, episodes)
    members.episodes += episodes


async def _tree(seat: Seat, prompt: Prompt, which: range, alone: bool) -> list[tuple[Course, Episode]]:
    """A trunk and, once it is there, its branches; without branching a trunk alone."""
    trunk = await _member(seat, prompt, which[0], alone)
    if len(which) == 1:
        return [trunk]
    async with asyncio.TaskGroup() as together:
        jobs = [together.create_task(_member(seat, prompt, member, alone, trunk)) for member in which[1:]]
    return [trunk, *(job.result() for job in jobs)]


async def _member(
    seat: Seat, prompt: Prompt, member: int, alone: bool, trunk: tuple[Course, Episode] | None = None
) -> tuple[Course, Episode]:
    plan, player = seat.plan, seat.player
    said = seat.said[member] if seat.said else ()
    if trunk is not None and plan.branching is not None:
        said = choose(trunk[0], plan.branching, (plan.seed, seat.step, seat.index, member))
    if plan.group_size - plan.demonstrations <= member < plan.group_size:
        episode = demonstrated(seat.task, player.tasks, player.chat, (seat.group_id, member))
        course = Course(tuple(episode.prompt_ids.tolist()), list(episode.messages), _limits(seat))
    else:
        course = await _play(seat, prompt, member, said)
        episode = _episode(seat, course, member)
        inherited = course.inherited if trunk is not None else 0
        episode = replace(episode, origin=origin_of(trunk[1] if trunk is not None else None, episode, inherited))
    if alone and not course.cut:
        episode = (await _score(player, [episode]))[0]
    return course, episode


async def _score(player: Player, episodes: list[Episode]) -> list[Episode]:
    began = time.perf_counter()
    verdicts = await player.scorer.score(episodes)
    seconds = (time.perf_counter() - began) / len(episodes)
    return [
        replace(episode, verdict=on_tokens(episode, verdict, player.chat.decode), scoring_time_s=seconds)
        for episode, verdict in zip(episodes, verdicts, strict=True)
    ]


def _limits(seat: Seat) -> Limits:
    plan = seat.plan
    return Limits(plan.sampling, plan.max_turns, plan.max_episode_tokens, seat.player.context_length)


async def _play(seat: Seat, prompt: Prompt, member: int, before: Sequence[Said]) -> Course:
    """One episode, from the prompt to its end or to where it is cut; what was said before is said again first."""
    environment, messages = await seat.partners.open(seat.task)
    said = list(before)
    course = Course(prompt.ids(messages, seat.task), list(messages), _limits(seat), sum(map(len, said)))
    while True:
        turn = said.pop(0) if said else NOTHING_SAID
        if turn.finish_reason is None:
            turn = await _draw(seat, course, member, turn)
        text = seat.player.chat.decode(turn.token_ids.tolist())
        course.add(turn, text)
        if environment is None or course.cut:
            return course
        step = await seat.partners.step(environment, text, seat.task)
        if isinstance(step, str):
            course.reason, course.error = "error", step
            return course
        if course.take(step, seat.player.chat):
            return course


async def _draw(seat: Seat, course: Course, member: int, begun: Said) -> Said:
    """One model turn, or the rest of one."""
    drawn = course.drawn + len(begun)
    request = Request(
        prompt_ids=course.ids + tuple(begun.token_ids.tolist()),
        sampling=replace(seat.plan.sampling, max_tokens=course.room - len(begun)),
        stream=(seat.plan.seed, seat.step, seat.index, member),
        offset=drawn,
        bound=seat.bound,
        spent=drawn - course.inherited,
        goes_on=seat.player.tasks.environment is not None and len(course.said) + 1 < seat.plan.max_turns,
    )
    if not request.left:
        return begun
    completion = await seat.player.engine.complete(request)
    course.note(completion)
    return begun.then(completion)


def _episode(seat: Seat, course: Course, member: int) -> Episode:
    """What came of it, not scored."""
    last, drawn = course.last, [turn.versions[-1] for turn in course.said if len(turn)]
    return Episode(
        task=seat.task,
        group_id=seat.group_id,
        member=member,
        prompt_ids=np.array(course.prompt_ids, np.int64),
        turns=tuple(course.turns),
        messages=tuple(course.messages),
        finish_reason=course.reason,
        policy_version=last.policy_version if last else int(max(drawn, default=0)),
        weight_digest=last.weight_digest if last else "",
        sampling_time_s=course.sampling_time_s,
        error=course.error,
        outcome_step=course.last_step,
    )


def raw_metric(episode: Episode) -> float | None:
    """The unshaped metric of an episode, else its reward; None when void or not scored."""
    verdict = episode.verdict
    if verdict is None or verdict.outcome.status == "void":
        return None
    return verdict.raw if verdict.raw is not None else verdict.outcome.value


def _all_failed(episodes: Sequence[Episode]) -> bool:
    raw = [value for episode in episodes if (value := raw_metric(episode)) is not None]
    return group_state(raw, len(episodes)) == "all_failed"


def _first(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    first = failures.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first
