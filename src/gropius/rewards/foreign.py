"""Reward functions written for other libraries, taken unchanged: which signature it is, and the call it expects.

    ours       f(episode) -> Outcome | number | None
    group      f(siblings) -> list of numbers, Outcomes or None                   all siblings of one group; ours too
    TRL        f(prompts, completions, **columns) -> list of numbers or None      keyword lists, one entry an episode
    verl       f(data_source, solution_str, ground_truth, extra_info) -> number | {"score": number}
    OpenRLHF   f(queries, prompts, labels) -> tensor, list or {"rewards": tensor}

The signature is read off the parameters' names, never tried out. Dataset columns come from the task's metadata, as
copies. No torch.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from gropius.errors import RecipeError, RewardError
from gropius.rewards.base import BatchedReward, Signature
from gropius.types import Episode, Message

_P = inspect.Parameter
GROUP_NAMES = ("siblings", "episodes", "group")
_NAMED = (_P.POSITIONAL_OR_KEYWORD, _P.KEYWORD_ONLY)


def detect(name: str, function: Callable[..., Any]) -> Signature:
    """Which library's signature a function has, by the names of its parameters.

    Raises RecipeError showing the signature found and those that are taken.
    """
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        raise RecipeError(
            f"reward {name}: its signature cannot be read; wrap it in a function of one episode"
        ) from None
    names = {n for n, p in parameters.items() if p.kind in _NAMED}
    if {"solution_str", "ground_truth"} <= names:
        return "verl"
    if "queries" in names:
        return "OpenRLHF"
    if "completions" in names:
        return "TRL"
    positional = (_P.POSITIONAL_ONLY, _P.POSITIONAL_OR_KEYWORD)
    required = [p for p in parameters.values() if p.default is _P.empty and p.kind in (*positional, _P.KEYWORD_ONLY)]
    if len(required) == 1 and required[0].kind in positional:
        return "group" if required[0].name in GROUP_NAMES else "episode"
    raise RecipeError(
        f"reward {name}: cannot tell how to call {name}{inspect.signature(function)}. Write one of: f(episode), "
        "f(siblings) (a whole group), "
        "f(prompts, completions, **columns) (TRL), f(data_source, solution_str, ground_truth, extra_info) (verl), "
        "f(queries, prompts, labels) (OpenRLHF)"
    )


def adapt(name: str, function: Callable[..., Any]) -> tuple[Signature, Callable[[Episode], Any] | BatchedReward]:
    """The detected signature, and the function in a form that a `RewardPart` takes."""
    signature = detect(name, function)
    if signature == "TRL":
        return signature, BatchedReward(lambda episodes: _call_trl(name, function, episodes))
    if signature == "OpenRLHF":
        return signature, BatchedReward(lambda episodes: _call_openrlhf(name, function, episodes))
    if signature == "group":
        return signature, BatchedReward(function, siblings=True)
    if signature == "verl":
        return signature, lambda episode: _call_verl(name, function, episode)
    return signature, function


def columns_of(episodes: Sequence[Episode]) -> dict[str, list[Any]]:
    """The dataset columns of the episodes, one list a column, None where a row lacks it; copies.

    The gold answer is the column `answer` where the rows have none of that name; rows without gold have no such column.
    """
    names = list(dict.fromkeys(name for episode in episodes for name in episode.task.metadata))
    columns = {name: [copy.deepcopy(e.task.metadata.get(name)) for e in episodes] for name in names}
    if any(episode.task.answer is not None for episode in episodes):
        columns.setdefault("answer", [e.task.answer for e in episodes])
    return columns


def prompt_text(episode: Episode) -> str:
    """The prompt as one text: itself, or the contents of its messages joined by line ends (no template)."""
    prompt = episode.task.prompt
    return prompt if isinstance(prompt, str) else "\n".join(message["content"] for message in prompt)


def completion_messages(episode: Episode) -> list[Message]:
    """What followed the prompt, as messages: the model's turns as "assistant", the environment's as "user"."""
    start = len(episode.task.messages())
    if len(episode.messages) > start and list(episode.messages[:start]) == list(episode.task.messages()):
        return [copy.deepcopy(message) for message in episode.messages[start:]]
    roles = {"model": "assistant", "environment": "user"}
    return [{"role": roles[turn.role], "content": turn.text} for turn in episode.turns]


def _call_trl(name: str, function: Callable[..., Any], episodes: Sequence[Episode]) -> Any:
    columns = columns_of(episodes)
    for reserved in ("prompts", "completions", "completion_ids", "prompt", "completion"):
        columns.pop(reserved, None)
    given = {
        **columns,
        "prompts": [
            e.task.prompt if isinstance(e.task.prompt, str) else [copy.deepcopy(m) for m in e.task.prompt]
            for e in episodes
        ],
        "completions": [e.completion if isinstance(e.task.prompt, str) else completion_messages(e) for e in episodes],
        "completion_ids": [e.response_ids.tolist() for e in episodes],
    }
    return function(**_accepted(name, function, given))


def _call_verl(name: str, function: Callable[..., Any], episode: Episode) -> Any:
    metadata = copy.deepcopy(dict(episode.task.metadata))
    given = {
        "data_source": metadata.get("data_source", ""),
        "solution_str": episode.completion,
        "ground_truth": episode.task.answer,
        "extra_info": metadata.get("extra_info"),
    }
    returned = function(**_accepted(name, function, given))
    if isinstance(returned, Mapping):
        if "score" not in returned:
            raise RewardError(f'reward {name}: returned a dict without "score"; found: {", ".join(map(str, returned))}')
        return returned["score"]
    return returned


def _call_openrlhf(name: str, function: Callable[..., Any], episodes: Sequence[Episode]) -> Any:
    prompts = [prompt_text(e) for e in episodes]
    given = {
        "queries": [prompt + e.completion for prompt, e in zip(prompts, episodes, strict=True)],
        "prompts": prompts,
        "labels": [e.task.answer for e in episodes],
    }
    returned = function(**_accepted(name, function, given))
    if isinstance(returned, Mapping):
        if "rewards" not in returned:
            raise RewardError(
                f'reward {name}: returned a dict without "rewards"; found: {", ".join(map(str, returned))}'
            )
        returned = returned["rewards"]
    if isinstance(returned, (list, tuple)):
        return returned
    try:
        values = np.asarray(returned)  # a CPU tensor gives its values; one on a GPU refuses
    except (TypeError, ValueError, RuntimeError) as fault:
        raise RewardError(f"reward {name}: returned a {type(returned).__name__} that cannot be read: {fault}") from None
    if values.ndim != 1:
        raise RewardError(f"reward {name}: returned values of shape {values.shape}; return one number a query")
    return values.tolist()


def _accepted(name: str, function: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The keyword arguments the function has parameters for; all of them when it takes `**kwargs`."""
    parameters = inspect.signature(function).parameters
    missing = [n for n, p in parameters.items() if p.kind in _NAMED and p.default is _P.empty and n not in given]
    if missing:
        raise RewardError(
            f"reward {name}: wants {', '.join(missing)}, but the rows have no such column; found: {', '.join(given)}"
        )
    if any(p.kind is _P.VAR_KEYWORD for p in parameters.values()):
        return dict(given)
    return {n: given[n] for n, p in parameters.items() if p.kind in _NAMED and n in given}
