"""Branching: several siblings from one trunk, at a chosen turn or token; and siblings that a teacher wrote.

A trunk is an episode as any other. A branch takes its beginning over, id by id, replays what the environment said, and
goes on with draws of its own. `origin` says of every token which sibling drew it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from gropius.errors import DataError
from gropius.models.chat import ChatFormat
from gropius.rollout.course import Course, Said
from gropius.tasks.base import TaskSet
from gropius.types import EnvironmentStep, Episode, Message, Task, Turn


@dataclass(frozen=True)
class Branching:
    """size: siblings of one trunk, itself among them; it divides the group. at: "turn", before one of the trunk's later
    turns, or "token", before one of its later tokens. choice: "random", or "surprising": where the trunk drew what was
    least likely.
    """

    size: int
    at: Literal["turn", "token"] = "turn"
    choice: Literal["random", "surprising"] = "random"

    @classmethod
    def of(cls, size: int, at: Literal["turn", "token"], choice: Literal["random", "surprising"]) -> Branching | None:
        """As the recipe has it; None for a size of 1."""
        return cls(size, at, choice) if size > 1 else None


def choose(trunk: Course, rule: Branching, stream: tuple[int, ...]) -> tuple[Said, ...]:
    """What a branch has said when it leaves its trunk: whole turns, and the beginning of one when it leaves at a token.

    stream: (seed, step, group, member) of the branch: it alone decides a random choice. Nothing where the trunk has no
    later turn or token, or failed: the branch is then a sibling of its own.
    """
    places = [
        (k, t)
        for k, turn in enumerate(trunk.said)
        for t in range(len(turn) if rule.at == "token" else 1)
        if (k, t) != (0, 0)
    ]
    if not places or trunk.reason in ("error", "cancelled"):
        return ()
    if rule.choice == "random":
        k, t = random.Random(f"branch:{stream}").choice(places)
    else:
        k, t = min(places, key=lambda place: (_logprob(trunk.said[place[0]], place[1]), place))
    begun = trunk.said[k].first(t)
    return (*trunk.said[:k], *((begun,) if t else ()))


def _logprob(turn: Said, token: int) -> float:
    return float(turn.logprobs[token]) if token < len(turn) else 0.0


def origin_of(trunk: Episode | None, episode: Episode, inherited: int) -> NDArray[np.int64] | None:
    """[T] who drew each token of an episode whose first `inherited` model tokens are the trunk's; None: all its own.

    Errors: DataError when what stands between them differs: the environment answered the same replies differently.
    """
    if trunk is None or not inherited:
        return None
    own = np.flatnonzero(episode.loss_mask)
    size = int(own[inherited - 1]) + 1
    if not np.array_equal(episode.response_ids[:size], trunk.response_ids[:size]):
        raise DataError(
            f"{episode.task.key}: its environment answers the same replies differently, so no sibling can branch from "
            "another; its state must come from the task alone"
        )
    origin = np.full(len(episode.loss_mask), episode.member, np.int64)
    origin[:size] = trunk.member if trunk.origin is None else trunk.origin[:size]
    return origin


def demonstrated(task: Task, tasks: TaskSet, chat: ChatFormat, place: tuple[str, int]) -> Episode:
    """The task's own solution as a sibling: a teacher's turns, and between them what the environment answers.

    place: group id and member. Its log-probabilities under a sampler do not exist and stand at 0. An environment
    answers the teacher as it answers the model. Errors: DataError when the task set has no solutions.
    """
    stop = int(chat.tokenizer.eos_token_id)
    environment = None if tasks.environment is None else tasks.environment(task)
    opening: Sequence[Message] = task.messages() if environment is None else environment.start()
    history: list[Message] = list(opening)
    turns: list[Turn] = []
    last: EnvironmentStep | None = None
    for message in tasks.demonstration(task):
        if message["role"] != "assistant":
            continue
        if last is not None:
            ids = np.asarray(chat.environment_ids(history, last.messages, stop), np.int64)
            turns.append(Turn("environment", ids, "".join(said["content"] for said in last.messages)))
            history.extend(last.messages)
        own = [*chat.tokenizer(message["content"], add_special_tokens=False).input_ids, stop]
        nothing = np.zeros(len(own), np.float32)
        turns.append(Turn("model", np.asarray(own, np.int64), message["content"], nothing, nothing, "stop"))
        history.append(message)
        last = environment.step(message["content"]) if environment is not None else None
        if last is not None and last.done:
            break
    return Episode(
        task=task,
        group_id=place[0],
        member=place[1],
        prompt_ids=np.asarray(chat.prompt_ids(opening), np.int64),
        turns=tuple(turns),
        messages=(*history, *(last.messages if last is not None else ())),
        finish_reason="stop" if environment is None else "environment_end",
        outcome_step=last,
        demonstration=True,
    )
