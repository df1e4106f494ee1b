"""BATCH.json → responses and their arrays, refusing anything unclear by its place. No torch.

A batch is untrusted input: every value is checked here, and every message names group, response and token.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gropius.errors import ObjectiveError, did_you_mean
from gropius.objective.selection import Array, Mask, Response
from gropius.types import Status

BATCH_KEYS = ("groups", "weights")
GROUP_KEYS = ("id", "responses", "greedy_reward")
RESPONSE_KEYS = (
    "reward", "length", "policy", "anchor", "sampler", "reference", "entropy", "mask", "truncated", "status", "raw",
    "advantage", "steps", "values", "energy", "policy_entropy", "origin", "demonstration", "member",
    "turns",
)  # fmt: skip
ARRAYS = ("policy", "anchor", "sampler", "reference", "entropy", "values", "energy", "policy_entropy")
LOGPROBS = ("policy", "anchor", "sampler", "reference")
LONGEST_TOKENS = 10_000_000
ROUNDING = 1e-3  # what a log-probability may exceed 0 by
STATUSES: tuple[Status, ...] = ("scored", "rejected", "void")


@dataclass(frozen=True, eq=False)
class Row:
    """One parsed response: its place for messages, the objective's view of it, and its arrays [T] by name."""

    where: str
    response: Response
    arrays: Mapping[str, Array]

    def has(self, name: str) -> bool:
        """True when the array was given."""
        return name in self.arrays

    @property
    def void(self) -> bool:
        """True when the response leaves loss and baseline, so that its arrays do not matter."""
        return self.response.status == "void"


def parse(batch: Mapping[str, Any]) -> list[Row]:
    """Read BATCH.json's structure (design.md 4.2): groups of responses, in the order given.

    Errors: ObjectiveError for an unknown key (with a suggestion), a missing or malformed value, arrays of different
    lengths, a number that is not finite at a loss token, an id that appears twice, an empty group.
    """
    if not isinstance(batch, Mapping) or not isinstance(batch.get("groups"), list):
        raise ObjectiveError('a batch is {"groups": [{"id": ..., "responses": [...]}]}')
    _known("batch", batch, BATCH_KEYS)
    if not batch["groups"]:
        raise ObjectiveError("batch: no groups; write at least one")
    rows: list[Row] = []
    seen: set[str] = set()
    for position, group in enumerate(batch["groups"]):
        if not isinstance(group, Mapping) or not isinstance(group.get("responses"), list):
            raise ObjectiveError(f'group {position}: write {{"id": ..., "responses": [...]}}')
        name = str(group.get("id", position))
        _known(f"group {name}", group, GROUP_KEYS)
        if name in seen:
            raise ObjectiveError(f"group {name}: the id appears twice; siblings of one prompt go in one group")
        seen.add(name)
        if not group["responses"]:
            raise ObjectiveError(f"group {name}: empty; a group needs at least one response")
        greedy = _optional_number(f"group {name}", "greedy_reward", group.get("greedy_reward"))
        rows += [
            _row(f"group {name}, response {i}", name, i, item, greedy) for i, item in enumerate(group["responses"])
        ]
    return rows


def part_weights(batch: Mapping[str, Any], rows: Sequence[Row]) -> dict[str, float]:
    """The weight of every named reward part; parts that are not named weigh 1.

    Errors: ObjectiveError for a weight that is not a finite number, or that names no part of any reward.
    """
    given = batch.get("weights")
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise ObjectiveError('batch: weights is {"part": weight}')
    rewards = [row.response.reward for row in rows]
    parts = {name for reward in rewards if isinstance(reward, Mapping) for name in reward}
    for name in given:
        if name not in parts:
            hint = did_you_mean(str(name), parts) if parts else "the rewards are plain numbers; remove weights"
            raise ObjectiveError(f"batch: weights names {name!r}, which no reward has; {hint}")
    return {str(name): _number("batch", f"the weight of {name!r}", value) for name, value in given.items()}


def _known(where: str, item: Mapping[str, Any], keys: Sequence[str]) -> None:
    for key in item:
        if key not in keys:
            raise ObjectiveError(f"{where}: unknown key {key!r}; {did_you_mean(str(key), keys)}")


def _finite(value: Any) -> bool:
    """True for a number that a float can hold; false for NaN, infinity and true/false."""
    if isinstance(value, np.integer | np.floating):
        value = value.item()
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _list(value: Any) -> list[Any] | None:
    """The value as a list where it is one (or a tuple, or a NumPy array), else None."""
    if isinstance(value, np.ndarray):
        return value.tolist() if value.ndim == 1 else None
    return list(value) if isinstance(value, list | tuple) else None


def _number(where: str, name: str, value: Any) -> float:
    if not _finite(value):
        raise ObjectiveError(f"{where}: {name} is {value!r}; write a finite number")
    return float(value)


def _optional_number(where: str, name: str, value: Any) -> float | None:
    return None if value is None else _number(where, name, value)


def _row(where: str, group: str, place: int, item: Any, greedy: float | None) -> Row:
    if not isinstance(item, Mapping):
        raise ObjectiveError(f"{where}: a response is an object with at least a reward and a length")
    _known(where, item, RESPONSE_KEYS)
    status = item.get("status", "scored")
    if status not in STATUSES:
        raise ObjectiveError(f"{where}: status {status!r} is unknown; {did_you_mean(str(status), STATUSES)}")
    mask = _mask(where, item, _length(where, item))
    trained = mask & (status != "void")
    arrays = {name: _array(where, name, item[name], trained) for name in ARRAYS if item.get(name) is not None}
    response = Response(
        group=group,
        reward=_reward(where, status, item.get("reward")),
        mask=mask,
        status=status,
        truncated=_flag(where, item, "truncated"),
        raw=_optional_number(where, "raw", item.get("raw")),
        advantage=_advantage(where, item.get("advantage"), trained),
        anchor=arrays.get("anchor", arrays.get("policy")),
        reference=arrays.get("reference"),
        entropy=arrays.get("entropy"),
        greedy_reward=greedy,
        member=_whole(where, "member", item.get("member", place)),
        steps=_steps(where, item.get("steps"), len(mask)),
        values=arrays.get("values"),
        energy=arrays.get("energy"),
        policy=arrays.get("policy"),
        origin=_numbers(where, "origin", item.get("origin"), len(mask)),
        turns=_numbers(where, "turns", item.get("turns"), len(mask)),
        demonstration=_flag(where, item, "demonstration"),
    )
    return Row(where, response, arrays)


def _flag(where: str, item: Mapping[str, Any], name: str) -> bool:
    value = item.get(name, False)
    if not isinstance(value, bool):
        raise ObjectiveError(f"{where}: {name} is {value!r}; write true or false")
    return value


def _whole(where: str, name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ObjectiveError(f"{where}: {name} is {value!r:.40}; write a whole number")
    return value


def _steps(where: str, given: Any, length: int) -> tuple[tuple[int, float], ...]:
    """Rewards with a position: [[token, score], ...]; a token counts from 0 over everything after the prompt."""
    if given is None:
        return ()
    if not isinstance(given, list | tuple) or any(
        not isinstance(step, list | tuple) or len(step) != 2 for step in given
    ):
        raise ObjectiveError(f"{where}: steps is a list of [token, score]")
    found = []
    for token, score in given:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < length:
            raise ObjectiveError(f"{where}: a step ends at token {token!r:.40}; write one of 0..{length - 1}")
        found.append((token, _number(where, f"the score of the step at token {token}", score)))
    return tuple(found)


def _numbers(where: str, name: str, given: Any, length: int) -> NDArray[np.int64] | None:
    """[T] whole numbers: the member that drew each token, or its turn."""
    if given is None:
        return None
    values = _list(given)
    if values is None or len(values) != length:
        raise ObjectiveError(f"{where}: {name} is a list of {length} whole numbers, one a token")
    return np.array([_whole(where, f"{name} of token {t}", v) for t, v in enumerate(values)], np.int64)


def _reward(where: str, status: Status, reward: Any) -> float | dict[str, float] | None:
    if status == "void":
        return None
    if reward is None:
        raise ObjectiveError(f'{where}: reward is null; write a number, or "status": "void"')
    if isinstance(reward, Mapping):
        if not reward:
            raise ObjectiveError(f"{where}: reward has no parts; write at least one, or a number")
        return {str(name): _number(where, f"reward {name!r}", value) for name, value in reward.items()}
    return _number(where, "reward", reward)


def _length(where: str, item: Mapping[str, Any]) -> int:
    lists = {name: _list(item.get(name)) for name in (*ARRAYS, "mask")}
    sizes = {name: len(values) for name, values in lists.items() if values is not None}
    if item.get("length") is not None:
        length = item["length"]
        if isinstance(length, bool) or not isinstance(length, int) or length < 0:
            raise ObjectiveError(f"{where}: length {length!r} is not a number of tokens")
        if length > LONGEST_TOKENS:
            raise ObjectiveError(f"{where}: length {length} is beyond {LONGEST_TOKENS} tokens; write the real length")
        sizes["length"] = length
    if not sizes:
        raise ObjectiveError(f"{where}: neither length nor any per-token array; write the number of tokens as length")
    if len(set(sizes.values())) > 1:
        raise ObjectiveError(f"{where}: lengths differ: " + ", ".join(f"{k} {v}" for k, v in sizes.items()))
    return next(iter(sizes.values()))


def _mask(where: str, item: Mapping[str, Any], length: int) -> Mask:
    if item.get("mask") is None:
        return np.ones(length, np.bool_)
    given = _list(item["mask"])
    if given is None:
        raise ObjectiveError(f"{where}: mask must be a list of 0 and 1, one a token")
    for t, value in enumerate(given):
        if not isinstance(value, bool | int | float) or value not in (0, 1):
            raise ObjectiveError(f"{where}, token {t}: mask is {value!r}; write 0 or 1")
    return np.array([bool(value) for value in given], np.bool_)


def _advantage(where: str, given: Any, trained: Mask) -> float | Array | None:
    if _list(given) is not None:
        return _array(where, "advantage", given, trained)
    return _optional_number(where, "advantage", given)


def _array(where: str, name: str, values: Any, trained: Mask) -> Array:
    """[T] the numbers, finite where a token is trained; anything may stand elsewhere and reads as NaN."""
    given = _list(values)
    if given is None:
        raise ObjectiveError(f"{where}: {name} must be a list of numbers, one a token")
    if len(given) != len(trained):
        raise ObjectiveError(f"{where}: {name} has {len(given)} numbers for {len(trained)} tokens")
    for t, value in enumerate(given):
        if trained[t] and not _finite(value):
            raise ObjectiveError(f"{where}, token {t}: {name} is {value!r:.40}; write a finite number")
        if trained[t] and name in LOGPROBS and value > ROUNDING:
            raise ObjectiveError(f"{where}, token {t}: {name} is {value!r}, a log-probability above 0; write log π")
    return np.array([value if _finite(value) else math.nan for value in given], np.float64)
