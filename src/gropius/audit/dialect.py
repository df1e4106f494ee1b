"""What a dialect is: a framework's options with their defaults, and tables of what they mean. No torch.

A rule says what a setting makes of the objective and where that is written upstream; a caveat says what a person would
not expect. Both are rows, so that a dialect is one file with tables and nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from gropius.errors import UsageError, did_you_mean

Axis = Literal["advantage", "ratio", "surrogate", "kl", "aggregate", "selection"]
Kind = Literal["inexpressible", "unread", "contradiction", "no_effect", "trap", "condition"]


@dataclass(frozen=True)
class Option:
    """One option that touches the objective or the batch.

    choices: what upstream accepts, where it is a list. kind: of its value; "" = that of the default, a number for None.
    numbers: how many a list must have, 0 = any. least: the smallest number that makes sense.
    """

    default: Any
    choices: tuple[Any, ...] = ()
    kind: Literal["", "number", "text", "list"] = ""
    numbers: int = 0
    least: float = -math.inf

    @property
    def expects(self) -> str:
        """number, text, list or choice."""
        if self.choices:
            return "choice"
        if self.kind:
            return self.kind
        if isinstance(self.default, str):
            return "text"
        return "list" if isinstance(self.default, list) else "number"


class Values:
    """The settings of one configuration: what was written, over the framework's defaults.

    unread: name → text of a value that is not a literal (a variable, an expression); the default stands in and the
    audit says so. looked_at: options that were asked for so far.
    """

    def __init__(
        self, options: Mapping[str, Option], given: Mapping[str, Any], unread: Mapping[str, str], processes: int = 1
    ):
        self.given = {name: _typed(name, options[name], value) for name, value in given.items() if name in options}
        self.unread = {name: text for name, text in unread.items() if name in options}
        self.strangers = sorted({*given, *unread} - set(options))
        self.looked_at: set[str] = set()
        self.processes = processes
        self._options = options

    def __getitem__(self, name: str) -> Any:
        self.looked_at.add(name)
        return self.given[name] if name in self.given else self._options[name].default

    def wrote(self, *names: str) -> bool:
        """True when any of the options was written, whatever its value."""
        return any(name in self.given or name in self.unread for name in names)


def _typed(name: str, option: Option, value: Any) -> Any:
    """A number written as text becomes one ("1e-6" is text in YAML); a value outside the choices is refused."""
    if isinstance(value, str) and option.expects != "text":
        value = literal(value)
    if option.expects == "choice":
        if isinstance(value, list | dict) or value not in option.choices:
            suggestion = did_you_mean(str(value), map(str, option.choices))
            raise UsageError(f"{name} = {value!r} is not a choice of this framework; {suggestion}")
        return value
    if value is None:
        return option.default
    if option.expects == "number":
        if not _is_number(value) or value < option.least:
            least = f" of at least {option.least:g}" if option.least > -math.inf else ""
            raise UsageError(f"{name} = {value!r} is not a number{least}")
    elif option.expects == "list":
        if not isinstance(value, list | tuple) or not all(_is_number(x) for x in value):
            raise UsageError(f"{name} = {value!r} is not a list of numbers")
        if option.numbers and len(value) != option.numbers:
            raise UsageError(f"{name} = {value!r} must be {option.numbers} numbers")
        return list(value)
    elif not isinstance(value, str | int | float) or isinstance(value, bool):
        raise UsageError(f"{name} = {value!r} is not a text")
    return value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def literal(text: str) -> Any:
    """A number, true/false/null, or the text itself, as YAML and command lines mean it.

    >>> literal("1e-6"), literal("True"), literal("null"), literal("token-mean")
    (1e-06, True, None, 'token-mean')
    """
    word = text.strip()
    named = {"true": True, "false": False, "null": None, "none": None, "~": None}
    if word.lower() in named:
        return named[word.lower()]
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            continue
    return word.strip("'\"")


Words = str | Callable[[Values], str]
Test = Callable[[Values], bool]


def always(values: Values) -> bool:
    """A rule that always holds."""
    return True


@dataclass(frozen=True)
class Rule:
    """When it holds, `sets` goes into the objective (`axis.key` → value) and `says` into the report, with its place."""

    axis: Axis
    where: str
    when: Test
    sets: Mapping[str, Any] | Callable[[Values], Mapping[str, Any]]
    says: Words


@dataclass(frozen=True)
class Caveat:
    """What a person would not expect.

    inexpressible: part of what upstream runs that no Gropius objective has (blocking: without it there is no equivalent
    at all). unread: a value that is no literal, on which the objective or the run depends. contradiction: upstream
    refuses it, or one option works against another. no_effect: an option that was written and changes nothing. trap:
    allowed and surprising. condition: holds only under what it says.
    """

    kind: Kind
    where: str
    when: Test
    says: Words
    keys: tuple[str, ...] = ()
    blocking: bool = False


def unused(where: str, keys: Iterable[str], needs: str, when: Test) -> tuple[Caveat, ...]:
    """A caveat for each key that is written while `when` holds: it has no effect because it needs something else."""

    def row(key: str) -> Caveat:
        return Caveat(
            "no_effect", where, lambda v: v.wrote(key) and when(v), f"{key} has no effect: it needs {needs}", (key,)
        )

    return tuple(row(key) for key in keys)


@dataclass(frozen=True)
class Units:
    """What the batch sizes count, in one language. Everything a step, summed over ranks, unless named otherwise.

    prompts, group_size: of one rollout batch. responses: their product. update_responses: of one optimiser step.
    micro_responses: of one forward pass on one rank, 0 when it is cut by tokens. ranks. updates: optimiser steps in a
    pass over a rollout batch. epochs: passes.
    """

    prompts: float
    group_size: int
    update_responses: float
    micro_responses: int
    ranks: int
    updates: float
    epochs: int
    words: tuple[str, ...] = ()

    @property
    def responses(self) -> float:
        """Of one rollout batch."""
        return self.prompts * self.group_size

    @property
    def micro_batches(self) -> float:
        """Forward passes of one rank in one optimiser step; 0 when cut by tokens."""
        return self.update_responses / (self.micro_responses * self.ranks) if self.micro_responses else 0.0


@dataclass(frozen=True)
class Parsed:
    """What was read from a file: literals, and the text of what was no literal."""

    given: Mapping[str, Any]
    unread: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Dialect:
    """One framework. version: what was read. files: short names used by the places. parse: text, file suffix → Parsed.

    units: what batch sizes count. run: recipe keys (`rollout.max_tokens`) that follow from the settings.
    """

    name: str
    title: str
    version: str
    files: Mapping[str, str]
    options: Mapping[str, Option]
    rules: tuple[Rule, ...]
    caveats: tuple[Caveat, ...]
    parse: Callable[[str, str], Parsed]
    units: Callable[[Values], Units]
    run: Callable[[Values], dict[str, Any]]
