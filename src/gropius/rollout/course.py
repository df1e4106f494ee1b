"""One episode under way: what was said so far, what the environment answered, and what ends it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from gropius.errors import DataError
from gropius.models.chat import ChatFormat
from gropius.types import Completion, EnvironmentStep, FinishReason, Message, Sampling, Task, Turn


@dataclass(frozen=True, eq=False)
class Said:
    """One model turn as drawn, perhaps by several policies. versions [T]. finish_reason: None while unfinished."""

    token_ids: NDArray[np.int64]
    logprobs: NDArray[np.float32]
    drawn_logprobs: NDArray[np.float32]
    versions: NDArray[np.int64]
    finish_reason: FinishReason | None = None

    def __len__(self) -> int:
        return len(self.token_ids)

    def first(self, count: int) -> Said:
        """The first tokens, unfinished."""
        return Said(self.token_ids[:count], self.logprobs[:count], self.drawn_logprobs[:count], self.versions[:count])

    def then(self, completion: Completion) -> Said:
        """This and what was drawn next."""
        versions = np.full(len(completion.token_ids), completion.policy_version, np.int64)
        new = (completion.token_ids, completion.logprobs, completion.drawn_logprobs, versions)
        mine = (self.token_ids, self.logprobs, self.drawn_logprobs, self.versions)
        reason = None if completion.finish_reason == "cancelled" else completion.finish_reason
        if not len(self):
            return Said(*new, reason)
        whole = [np.concatenate([old, fresh]) for old, fresh in zip(mine, new, strict=True)]
        return Said(whole[0], whole[1], whole[2], whole[3], reason)


NOTHING_SAID = Said(np.zeros(0, np.int64), np.zeros(0, np.float32), np.zeros(0, np.float32), np.zeros(0, np.int64))


@dataclass(frozen=True)
class Limits:
    """sampling: of one turn. max_turns: model turns. max_episode_tokens: all after the prompt; 0 is no bound.
    context_length: of the model; None is no bound.
    """

    sampling: Sampling
    max_turns: int
    max_episode_tokens: int
    context_length: int | None


@dataclass(eq=False)
class Course:
    """An episode under way. inherited: tokens that earlier collections drew. said: the model's turns."""

    prompt_ids: tuple[int, ...]
    messages: list[Message]
    limits: Limits
    inherited: int = 0
    said: list[Said] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    ids: tuple[int, ...] = ()
    drawn: int = 0
    reason: FinishReason = "stop"
    error: str = ""
    last_step: EnvironmentStep | None = None
    last: Completion | None = None
    sampling_time_s: float = 0.0

    def __post_init__(self) -> None:
        self.ids = self.prompt_ids

    @property
    def spent(self) -> int:
        """Tokens that were drawn in this collection."""
        return self.drawn - self.inherited

    @property
    def cut(self) -> bool:
        """True when it was ended from outside."""
        return self.reason == "cancelled"

    @property
    def room(self) -> int:
        """Tokens that the episode's own budget leaves for one turn."""
        most, whole = self.limits.sampling.max_tokens, self.limits.max_episode_tokens
        return min(most, whole - (len(self.ids) - len(self.prompt_ids))) if whole else most

    def note(self, completion: Completion) -> None:
        """Who drew last, and how long it took."""
        self.last = completion
        self.sampling_time_s += completion.prompt_time_s + completion.decode_time_s

    def add(self, said: Said, text: str) -> None:
        """The model's turn; an unfinished one ends the episode as "cancelled"."""
        if len(said) or said.finish_reason is not None:
            self.said.append(said)
        self.drawn += len(said)
        if said.finish_reason is None:
            self.reason = "cancelled"
            return
        several = len(said) > 0 and (said.versions != said.versions[-1]).any()
        older = self.last is None or (len(said) > 0 and said.versions[-1] != self.last.policy_version)
        self.turns.append(
            Turn(
                "model",
                said.token_ids,
                text,
                said.logprobs,
                said.drawn_logprobs,
                said.finish_reason,
                said.versions if several or older else None,
            )
        )
        self.ids += tuple(said.token_ids.tolist())
        self.messages.append({"role": "assistant", "content": text})
        self.reason = said.finish_reason

    def take(self, step: EnvironmentStep, chat: ChatFormat) -> bool:
        """The environment's answer. True when the episode is over; what is not followed by a turn is not in the ids."""
        self.last_step = step
        history = list(self.messages)
        self.messages.extend(step.messages)
        if self.reason != "stop":
            return True
        if step.done:
            self.reason = step.reason
        elif len(self.said) >= self.limits.max_turns:
            self.reason = "tool_limit"
        else:
            new_ids = chat.environment_ids(history, step.messages, int(self.said[-1].token_ids[-1]))
            context, whole = self.limits.context_length, self.limits.max_episode_tokens
            full = context is not None and len(self.ids) + len(new_ids) >= context
            if full or (whole and len(new_ids) >= whole - (len(self.ids) - len(self.prompt_ids))):
                self.reason = "length"
            else:
                text = "".join(message["content"] for message in step.messages)
                self.turns.append(Turn("environment", np.array(new_ids, np.int64), text))
                self.ids += new_ids
                return False
        return True

    def said_by(self, spent: int) -> tuple[Said, ...]:
        """What had been said when this collection had drawn `spent` tokens of the episode, or all that was said."""
        left, kept = self.inherited + spent, []
        for said in self.said:
            if len(said) > left:
                kept += [said.first(left)] if left else []
                break
            kept.append(said)
            left -= len(said)
        return tuple(kept)


class Prompt:
    """The prompt of a group, encoded once. Siblings that start differently are refused: they could not be compared."""

    def __init__(self, chat: ChatFormat) -> None:
        self._chat = chat
        self._messages: tuple[Message, ...] | None = None
        self._ids: tuple[int, ...] = ()

    def ids(self, messages: Sequence[Message], task: Task) -> tuple[int, ...]:
        """The ids of the first messages; raises DataError where they differ from a sibling's."""
        if self._messages is None:
            self._messages, self._ids = tuple(messages), self._chat.prompt_ids(messages)
        elif tuple(messages) != self._messages:
            raise DataError(
                f"{task.key}: the environment starts siblings of one group differently; its hidden state must come "
                "from the task alone"
            )
        return self._ids
