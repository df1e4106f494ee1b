"""Turn-taking: tasks become episodes, episodes become groups. One coroutine an episode.

An episode's ids are what the sampler saw and drew, concatenated and never encoded again; what the environment said is
marked and stays out of the loss. A unit is scored as soon as it is complete, while others still decode.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from gropius.errors import DataError
from gropius.models.chat import ChatFormat
from gropius.objective.selection import group_state
from gropius.rewards.base import Scorer
from gropius.rollout.engine import Engine
from gropius.tasks.base import TaskSet
from gropius.types import (
    Completion,
    Environment,
    EnvironmentStep,
    Episode,
    FinishReason,
    Group,
    Message,
    Request,
    Sampling,
    Task,
    Turn,
)

# What a person's environment may raise and thereby void its episode. Not caught: memory, recursion, interrupts.
ENVIRONMENT_FAULTS = (
    ArithmeticError, AssertionError, AttributeError, LookupError, NameError, OSError, RuntimeError, TypeError,
    ValueError,
)  # fmt: skip


@dataclass(frozen=True)
class CollectPlan:
    """How to collect. sampling: of every turn; `max_tokens` bounds one turn. group_size: siblings of a task.

    seed, step: with group index and member they name the random stream of a response. max_turns: model turns of an
    episode at most. max_episode_tokens: everything after the prompt, the environment's text included; 0 is no bound.
    greedy_baseline: one more episode a group at temperature 0. first_index: index of the first group within the step.
    grow_limit: siblings at most of a group that all failed; it grows by `group_size` at a time; 0 is off.
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
    """

    engine: Engine
    chat: ChatFormat
    tasks: TaskSet
    scorer: Scorer
    context_length: int | None = None


async def collect(tasks: Sequence[Task], plan: CollectPlan, player: Player) -> list[Group]:
    """One group of `group_size` scored episodes for every task, in the order of the tasks.

    The first failure (a dead engine, a broken reward, a template that cannot go on) cancels everything that still runs
    and is raised as it is; no request stays behind. An environment that raises voids its own episode only.
    """
    try:
        async with asyncio.TaskGroup() as together:
            jobs = [
                together.create_task(_group(_Seat(task, plan.first_index + index, plan, player)))
                for index, task in enumerate(tasks)
            ]
    except BaseExceptionGroup as failures:
        first = _first(failures)
        raise first from first.__cause__
    return [job.result() for job in jobs]


@dataclass(frozen=True)
class _Seat:
    """One task of this collection, and what its episodes have in common."""

    task: Task
    index: int
    plan: CollectPlan
    player: Player

    @property
    def group_id(self) -> str:
        return f"{self.plan.step:06d}-{self.index:04d}"


async def _group(seat: _Seat) -> Group:
    plan = seat.plan
    prompt = _Prompt(seat.player.chat)
    episodes = await _siblings(seat, prompt, range(plan.group_size))
    while plan.grow_limit and len(episodes) < plan.grow_limit and _all_failed(episodes):
        grown = min(len(episodes) + plan.group_size, plan.grow_limit)
        episodes += await _siblings(seat, prompt, range(len(episodes), grown))
    baseline = None
    if plan.greedy_baseline:
        greedy = replace(seat, plan=replace(plan, sampling=replace(plan.sampling, temperature=0.0)))
        baseline = (await _siblings(greedy, prompt, range(len(episodes), len(episodes) + 1)))[0]
    return Group(seat.group_id, seat.task, tuple(episodes), baseline)


async def _siblings(seat: _Seat, prompt: _Prompt, members: range) -> list[Episode]:
    alone = seat.player.scorer.unit == "episode"
    async with asyncio.TaskGroup() as together:
        jobs = [together.create_task(_member(seat, prompt, member, alone)) for member in members]
    episodes = [job.result() for job in jobs]
    return episodes if alone else await _score(seat.player.scorer, episodes)


async def _member(seat: _Seat, prompt: _Prompt, member: int, alone: bool) -> Episode:
    episode = await _play(seat, prompt, member)
    return (await _score(seat.player.scorer, [episode]))[0] if alone else episode


async def _score(scorer: Scorer, episodes: list[Episode]) -> list[Episode]:
    began = time.perf_counter()
    verdicts = await scorer.score(episodes)
    seconds = (time.perf_counter() - began) / len(episodes)
    return [
        replace(episode, verdict=verdict, scoring_time_s=seconds)
        for episode, verdict in zip(episodes, verdicts, strict=True)
    ]


async def _play(seat: _Seat, prompt: _Prompt, member: int) -> Episode:
    """One episode, from the prompt to its end; not scored."""
    plan, player = seat.plan, seat.player
    environment, messages = _open(seat)
    course = _Course(prompt.ids(messages, seat.task), list(messages))
    stream = (plan.seed, plan.step, seat.index, member)
    while True:
        sampling = replace(plan.sampling, max_tokens=min(plan.sampling.max_tokens, course.room(plan)))
        request = Request(course.ids, sampling, stream, course.drawn)
        completion = await player.engine.complete(request)
        course.add_reply(completion, player.chat.decode(completion.token_ids.tolist()))
        if environment is None:
            course.reason = completion.finish_reason
            break
        try:
            step = environment.step(course.messages[-1]["content"])
        except ENVIRONMENT_FAULTS as fault:  # the boundary: a person's environment
            course.reason, course.error = "error", f"the environment raised {type(fault).__name__}: {fault}"
            break
        if course.take(step, completion, plan, player):
            break
    return course.episode(seat, member)


def _open(seat: _Seat) -> tuple[Environment | None, tuple[Message, ...]]:
    """A fresh environment, where the tasks have one, and the first messages."""
    make = seat.player.tasks.environment
    if make is None:
        return None, seat.task.messages()
    try:
        environment = make(seat.task)
        return environment, tuple(environment.start())
    except ENVIRONMENT_FAULTS as fault:  # the boundary: a person's environment
        raise DataError(f"{seat.task.key}: its environment cannot start: {type(fault).__name__}: {fault}") from fault


@dataclass
class _Course:
    """An episode under way."""

    prompt_ids: tuple[int, ...]
    messages: list[Message]
    turns: list[Turn] = field(default_factory=list)
    ids: tuple[int, ...] = ()
    drawn: int = 0
    spoken: int = 0
    reason: FinishReason = "stop"
    error: str = ""
    last_step: EnvironmentStep | None = None
    last: Completion | None = None
    sampling_time_s: float = 0.0

    def __post_init__(self) -> None:
        self.ids = self.prompt_ids

    def room(self, plan: CollectPlan) -> int:
        """Tokens that the episode's own budget leaves."""
        if not plan.max_episode_tokens:
            return plan.sampling.max_tokens
        return plan.max_episode_tokens - (len(self.ids) - len(self.prompt_ids))

    def add_reply(self, completion: Completion, text: str) -> None:
        """The model's turn."""
        self.turns.append(
            Turn(
                "model",
                completion.token_ids,
                text,
                completion.logprobs,
                completion.drawn_logprobs,
                completion.finish_reason,
            )
        )
        self.ids += tuple(completion.token_ids.tolist())
        self.drawn += len(completion.token_ids)
        self.spoken += 1
        self.messages.append({"role": "assistant", "content": text})
        self.last = completion
        self.sampling_time_s += completion.prompt_time_s + completion.decode_time_s

    def take(self, step: EnvironmentStep, completion: Completion, plan: CollectPlan, player: Player) -> bool:
        """The environment's answer. True when the episode is over; what is not followed by a turn is not in the ids."""
        self.last_step = step
        history = list(self.messages)
        self.messages.extend(step.messages)
        if completion.finish_reason != "stop":
            self.reason = completion.finish_reason
        elif step.done:
            self.reason = "environment_end"
        elif self.spoken >= plan.max_turns:
            self.reason = "tool_limit"
        else:
            last_id = int(completion.token_ids[-1])
            new_ids = player.chat.environment_ids(history, step.messages, last_id)
            full = player.context_length is not None and len(self.ids) + len(new_ids) >= player.context_length
            if full or (plan.max_episode_tokens and len(new_ids) >= self.room(plan)):
                self.reason = "length"
            else:
                text = "".join(message["content"] for message in step.messages)
                self.turns.append(Turn("environment", np.array(new_ids, np.int64), text))
                self.ids += new_ids
                return False
        return True

    def episode(self, seat: _Seat, member: int) -> Episode:
        """What came of it, not scored."""
        return Episode(
            task=seat.task,
            group_id=seat.group_id,
            member=member,
            prompt_ids=np.array(self.prompt_ids, np.int64),
            turns=tuple(self.turns),
            messages=tuple(self.messages),
            finish_reason=self.reason,
            policy_version=self.last.policy_version if self.last else 0,
            weight_digest=self.last.weight_digest if self.last else "",
            sampling_time_s=self.sampling_time_s,
            error=self.error,
            outcome_step=self.last_step,
        )


class _Prompt:
    """The prompt of a group, encoded once. Siblings that start differently are refused: they could not be compared."""

    def __init__(self, chat: ChatFormat) -> None:
        self._chat = chat
        self._messages: tuple[Message, ...] | None = None
        self._ids: tuple[int, ...] = ()

    def ids(self, messages: tuple[Message, ...], task: Task) -> tuple[int, ...]:
        """The ids of the first messages; raises DataError where they differ from a sibling's."""
        if self._messages is None:
            self._messages, self._ids = messages, self._chat.prompt_ids(messages)
        elif messages != self._messages:
            raise DataError(
                f"{task.key}: the environment starts siblings of one group differently; its hidden state must come "
                "from the task alone"
            )
        return self._ids


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
