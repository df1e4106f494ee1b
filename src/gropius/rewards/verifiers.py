"""What a task of the library `verifiers` says of a reply: its own reward methods, in a pool worker. No torch."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from functools import lru_cache
from typing import Any

from gropius.errors import DataError, RecipeError
from gropius.tasks.verifiers import library, open_taskset
from gropius.types import Episode, Message, Outcome, scored, void


def verifiers() -> Callable[[Episode], Awaitable[Outcome]]:
    """Σ weight · score over the task's rewards, for a trace of the prompt and the reply.

    Void when a reward gave nothing, or for a task of another kind. What a reward method raises voids its episode.
    Raises RecipeError when the library is missing or of an unknown version.
    """
    try:
        v1 = library()
    except DataError as refusal:
        raise RecipeError(f"reward {refusal}") from None

    async def _score(episode: Episode) -> Outcome:
        metadata = episode.task.metadata
        if not {"taskset", "config", "index"} <= metadata.keys():
            return void(f"task {episode.task.key} is no task of verifiers")
        origin = {"taskset": metadata["taskset"], "config": dict(metadata["config"])}
        task = _tasks(json.dumps(origin, sort_keys=True)).at(int(metadata["index"]))
        trace = _trace(v1, task, episode)
        await task.score(trace)
        missing = [name for name, reward in trace.rewards.items() if reward is None]
        if missing or not trace.rewards:
            return void(f"no score from {', '.join(missing) or 'any reward'}")
        return scored(sum(reward.score * reward.weight for reward in trace.rewards.values()))

    return _score


class _Tasks:
    """The tasks of one taskset, read as far as they were asked for."""

    def __init__(self, origin: str) -> None:
        self._rest, self._read = open_taskset(json.loads(origin)), list[Any]()

    def at(self, index: int) -> Any:
        """Task number `index`. Raises LookupError when the taskset has become shorter."""
        while len(self._read) <= index:
            try:
                self._read.append(next(self._rest))
            except StopIteration:
                raise LookupError(f"the taskset has {len(self._read)} tasks, and no task {index}") from None
        return self._read[index]


@lru_cache(maxsize=8)
def _tasks(origin: str) -> _Tasks:
    return _Tasks(origin)


def _trace(v1: Any, task: Any, episode: Episode) -> Any:
    kinds = {"system": v1.SystemMessage, "user": v1.UserMessage, "assistant": v1.AssistantMessage}
    messages: list[Message] = [*episode.task.messages(), {"role": "assistant", "content": episode.last_reply}]
    nodes = [
        v1.MessageNode(
            parent=place - 1 if place else None,
            message=kinds[message["role"]](content=message["content"]),
            sampled=place == len(messages) - 1,
        )
        for place, message in enumerate(messages)
    ]
    agent = v1.AgentInfo(config=v1.AgentConfig())
    return v1.Trace(task=v1.TraceTask(type=type(task).__name__, data=task.data), agent=agent, nodes=nodes)
