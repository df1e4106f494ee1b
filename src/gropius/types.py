"""The nouns that every room shares. No torch, no I/O.

One legend for shapes: `_B` groups in a batch, `_G` members of a group, `_N` sequences, `_T` tokens, `_L` packed length,
`_V` vocabulary. Four policies, four names: `sampler` drew the tokens, `policy` is being trained, `anchor` is the
proximal policy of the ratio, `reference` is the KL target.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NotRequired, Protocol, TypedDict

import numpy as np
from numpy.typing import NDArray

FinishReason = Literal["stop", "length", "tool_limit", "environment_end", "cancelled", "error"]
Status = Literal["scored", "rejected", "void"]


class Message(TypedDict):
    """One message of a conversation, in the shape that chat templates take."""

    role: str
    content: str
    tool_calls: NotRequired[list[dict[str, Any]]]
    tool_call_id: NotRequired[str]
    name: NotRequired[str]


@dataclass(frozen=True)
class Task:
    """One immutable item: a prompt (text or messages), the gold answer, metadata, and a key that never changes.

    `key` identifies the row (never its text): two rows with the same prompt are two tasks.
    """

    key: str
    prompt: str | tuple[Message, ...]
    answer: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def messages(self) -> tuple[Message, ...]:
        """The prompt as messages; a text prompt is one user message."""
        if isinstance(self.prompt, str):
            return ({"role": "user", "content": self.prompt},)
        return self.prompt


@dataclass(frozen=True)
class Place:
    """A score that falls at a place of an episode. turn: the model's turn, from 0; negative counts from the last.

    characters: how much of the turn's text the step covers, so that it ends with the token that completes it; None: all
    of the turn. note: why, for a person.
    """

    score: float
    turn: int = -1
    characters: int | None = None
    note: str = ""


@dataclass(frozen=True)
class Step:
    """A reward with a position, as training takes it. score: the part's weight in it. token: the last token of the step
    among everything after the prompt, once the ids are looked at; None before.
    """

    score: float
    part: str
    place: Place
    token: int | None = None


@dataclass(frozen=True)
class Outcome:
    """What became of one score. Three kinds and never two.

    `scored(x)`: checked, finite. `rejected(reason)`: the policy's fault; counts at the floor reward, reason kept.
    `void(reason)`: our fault (the verifier crashed, the gold is unusable); leaves loss and baseline.
    places: where a score fell, whose sum is the value; empty for one number at the end.
    """

    status: Status
    value: float | None = None
    reason: str = ""
    places: tuple[Place, ...] = ()

    def __post_init__(self) -> None:
        if self.status == "void":
            if self.value is not None:
                raise ValueError("a void outcome carries no value")
        elif self.value is None or not math.isfinite(self.value):
            raise ValueError(f"a {self.status} outcome needs a finite value, got {self.value!r}")


def scored(value: float, reason: str = "") -> Outcome:
    """An outcome that was checked. `value` must be finite.

    >>> scored(1).value
    1.0
    """
    return Outcome("scored", float(value), reason)


def placed(places: Sequence[Place], reason: str = "") -> Outcome:
    """An outcome whose score falls at places: its value is their sum, 0 without any. What a process reward returns.

    >>> placed([Place(0.5, turn=0), Place(0.25, turn=1)]).value
    0.75
    """
    return Outcome("scored", math.fsum(place.score for place in places), reason, tuple(places))


def rejected(reason: str, floor: float = 0.0) -> Outcome:
    """An outcome that is the policy's fault (wrong, unparsable, too slow): it counts at the floor reward.

    >>> rejected("no number in the answer").value
    0.0
    """
    return Outcome("rejected", float(floor), reason)


def void(reason: str) -> Outcome:
    """An outcome that is our fault: retried, then excluded from the loss and from the group baseline.

    >>> void("the verifier crashed").value is None
    True
    """
    return Outcome("void", None, reason)


@dataclass(frozen=True)
class Verdict:
    """The outcome of one episode and the outcomes of its parts, by name, before weighting.

    `outcome.value` is the weighted sum of the parts that apply; it is what `sum_then_normalise` uses.
    `raw` is the unshaped task metric (accuracy, where there is one): what selection and held-out evaluation look at.
    steps: the scores that have a place, weighted; final: the weighted sum of the parts that have none, None while void.
    """

    outcome: Outcome
    parts: Mapping[str, Outcome] = field(default_factory=dict)
    raw: float | None = None
    steps: tuple[Step, ...] = ()
    final: float | None = None


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. What is asked is what happens: a model's own generation config never overrides it.

    temperature: divides the logits; 0 is greedy. top_k: 0 is off. top_p: 1 is off. min_p: 0 is off.
    max_tokens: new tokens at most, the stop token included. stop_token_ids: any of these ends the response and is kept.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()

    @property
    def truncates(self) -> bool:
        """True when some tokens of the vocabulary cannot be drawn."""
        return self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0


@dataclass(eq=False)
class Bound:
    """Tokens that each response of a collection may draw at most; may be lowered while they are being drawn."""

    limit: int = 1 << 62


@dataclass(frozen=True)
class Request:
    """One response to draw: the ids so far, how to sample, and the random stream that belongs to this response.

    stream: (seed, step, group, member); draw number t of the stream decides generated token t, wherever and with
    whatever neighbours the row is decoded. offset: draws of the stream already used by earlier turns.
    bound: ends the response as "cancelled" once it has drawn `bound.limit` - `spent` tokens, or some more (an engine
    may look late, or never). goes_on: the ids drawn here are likely to be the beginning of another request's prompt.
    """

    prompt_ids: tuple[int, ...]
    sampling: Sampling
    stream: tuple[int, ...]
    offset: int = 0
    bound: Bound | None = None
    spent: int = 0
    goes_on: bool = False

    @property
    def left(self) -> int:
        """Tokens that the bound leaves now."""
        return 1 << 62 if self.bound is None else max(0, self.bound.limit - self.spent)


@dataclass(frozen=True, eq=False)
class Completion:
    """What an engine returns for one request.

    token_ids [T]: as drawn, the stop token included. logprobs [T]: of the drawn token under softmax(logits /
    temperature), the whole vocabulary (what the trainer computes). drawn_logprobs [T]: under the distribution it was
    drawn from (after top-k, top-p, min-p); equal to `logprobs` when nothing is cut off.
    """

    token_ids: NDArray[np.int64]
    logprobs: NDArray[np.float32]
    drawn_logprobs: NDArray[np.float32]
    finish_reason: FinishReason
    policy_version: int = 0
    weight_digest: str = ""
    prompt_time_s: float = 0.0
    decode_time_s: float = 0.0


@dataclass(frozen=True)
class EnvironmentStep:
    """What an environment answers to one reply: messages for the model (none when it is over) and the score at the end.

    parts: reward parts by name, given on the last step. raw: the unshaped success metric (0 or 1 where there is one).
    reason: why the episode ends, where it does.
    """

    messages: tuple[Message, ...] = ()
    done: bool = False
    parts: Mapping[str, float] = field(default_factory=dict)
    raw: float | None = None
    reason: FinishReason = "environment_end"


class Environment(Protocol):
    """A single-use partner of one episode. Siblings of a group start from the same hidden state."""

    def start(self) -> Sequence[Message]:
        """The first messages."""
        ...

    def step(self, reply: str) -> EnvironmentStep:
        """Answer the model's reply."""
        ...


@dataclass(frozen=True, eq=False)
class Turn:
    """A stretch of an episode's ids: the model's own tokens, or text that the environment put there (masked).

    versions [T]: of the policy that drew each token, where several did; None: all are the episode's `policy_version`.
    """

    role: Literal["model", "environment"]
    token_ids: NDArray[np.int64]
    text: str
    logprobs: NDArray[np.float32] | None = None
    drawn_logprobs: NDArray[np.float32] | None = None
    finish_reason: FinishReason | None = None
    versions: NDArray[np.int64] | None = None


@dataclass(frozen=True, eq=False)
class Episode:
    """One run of one task. Ids are what the sampler saw and drew, concatenated and never re-tokenised.

    group_id, member: explicit identity; `group_id` is unique in a run. prompt_ids [P]; turns: what followed.
    finish_reason: why the episode ended; "length" means truncated. verdict: None until scored.
    sampling_time_s, scoring_time_s: seconds. policy_version, weight_digest: of the policy that drew its last token.
    outcome_step: what the environment answered last, parts and raw metric included; None without an environment.
    origin [T]: the sibling that drew each token, where episodes branch from one another; None: all its own.
    demonstration: a teacher wrote the model's turns, no sampler drew them.
    """

    task: Task
    group_id: str
    member: int
    prompt_ids: NDArray[np.int64]
    turns: tuple[Turn, ...]
    messages: tuple[Message, ...]
    finish_reason: FinishReason
    policy_version: int = 0
    weight_digest: str = ""
    verdict: Verdict | None = None
    sampling_time_s: float = 0.0
    scoring_time_s: float = 0.0
    error: str = ""
    outcome_step: EnvironmentStep | None = None
    origin: NDArray[np.int64] | None = None
    demonstration: bool = False

    @property
    def drawn_tokens(self) -> int:
        """Tokens that were sampled for this episode: the model's own, without those of a sibling or a teacher."""
        if self.demonstration:
            return 0
        own = self.loss_mask if self.origin is None else self.loss_mask & (self.origin == self.member)
        return int(own.sum())

    @cached_property
    def response_ids(self) -> NDArray[np.int64]:
        """[T] every id after the prompt: the model's and the environment's."""
        parts = [turn.token_ids for turn in self.turns]
        return np.concatenate(parts).astype(np.int64) if parts else np.zeros(0, np.int64)

    @cached_property
    def loss_mask(self) -> NDArray[np.bool_]:
        """[T] True where the model wrote the token (its stop token included)."""
        parts = [np.full(len(turn.token_ids), turn.role == "model") for turn in self.turns]
        return np.concatenate(parts) if parts else np.zeros(0, np.bool_)

    @cached_property
    def sampler_logprobs(self) -> NDArray[np.float32]:
        """[T] log-probability under the sampler at its temperature, whole vocabulary; 0 at masked tokens."""
        return self._per_token("logprobs")

    @cached_property
    def drawn_logprobs(self) -> NDArray[np.float32]:
        """[T] log-probability under the (possibly truncated) distribution the token was drawn from; 0 where masked."""
        return self._per_token("drawn_logprobs")

    @property
    def token_versions(self) -> NDArray[np.int64] | None:
        """[T] version of the policy that drew each token, where several did (0 where masked); else None."""
        if all(turn.versions is None for turn in self.turns):
            return None
        versions = []
        for turn in self.turns:
            same = np.full(len(turn.token_ids), self.policy_version if turn.role == "model" else 0, np.int64)
            versions.append(same if turn.versions is None else turn.versions)
        return np.concatenate(versions)

    @property
    def completion(self) -> str:
        """The text of the model's turns, joined by nothing: what a reward reads of a single-turn task."""
        return "".join(turn.text for turn in self.turns if turn.role == "model")

    @property
    def last_reply(self) -> str:
        """The text of the model's last turn; empty when it never spoke."""
        return next((turn.text for turn in reversed(self.turns) if turn.role == "model"), "")

    @property
    def truncated(self) -> bool:
        """True when a length limit ended the episode."""
        return self.finish_reason == "length"

    def _per_token(self, name: str) -> NDArray[np.float32]:
        parts = []
        for turn in self.turns:
            values = getattr(turn, name)
            parts.append(np.zeros(len(turn.token_ids), np.float32) if values is None else values)
        return np.concatenate(parts).astype(np.float32) if parts else np.zeros(0, np.float32)


@dataclass(frozen=True, eq=False)
class Group:
    """The G episodes of one task instance: the unit of credit. A group never mixes tasks.

    baseline_episode: a greedy response to the same prompt, when the objective's baseline asks for one; never trained.
    """

    group_id: str
    task: Task
    episodes: tuple[Episode, ...]
    baseline_episode: Episode | None = None

    def __post_init__(self) -> None:
        if not self.episodes:
            raise ValueError(f"group {self.group_id} is empty; a group needs at least one episode")
        strangers = {e.task.key for e in self.episodes} - {self.task.key}
        if strangers:
            raise ValueError(f"group {self.group_id} mixes tasks: {self.task.key} and {', '.join(sorted(strangers))}")
