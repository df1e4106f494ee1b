"""A regular expression that takes time linear in the text, whatever the text is. No torch.

Python's `re` backtracks: a reply written for it can stall a run for minutes. This matcher reads the part of the syntax
that needs no backtracking and walks the text once, building its automaton as it goes (Thompson 1968). Taken:
literals, `.` (any character, line ends too), `[...]`, `\\d \\w \\s \\D \\W \\S \\n \\t \\r`, escaped punctuation,
`|`, groups, `* + ? {m,n}` (lazy forms match the same texts), `^` at the start and `$` at the end, `(?s)` and `(?i)`
at the start. Refused: backreferences, look-around, `\\b`. A pattern matches the whole text or not at all.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

MOST_STATES = 400
MOST_REMEMBERED = 20_000
_CLASSES = "dwsDWSntr"


class PatternFault(ValueError):
    """A pattern that cannot be read, with the place and what to write instead."""


@dataclass(frozen=True)
class _Node:
    """char: `test` takes one character. cat, alt: of `parts`. repeat: `parts[0]` `low`..`high` times (-1: no end)."""

    kind: str
    test: re.Pattern[str] | None = None
    parts: tuple[_Node, ...] = ()
    low: int = 1
    high: int = 1


class _Reader:
    def __init__(self, pattern: str) -> None:
        head = re.match(r"\(\?([si]+)\)", pattern)
        self.flags = re.DOTALL | re.IGNORECASE if head and "i" in head[1] else re.DOTALL
        self.text = pattern[head.end() if head else 0 :].removeprefix("^")
        escapes = len(self.text) - 1 - len(self.text[:-1].rstrip("\\"))
        if self.text.endswith("$") and escapes % 2 == 0:
            self.text = self.text[:-1]
        self.place = 0

    def _fault(self, why: str) -> PatternFault:
        return PatternFault(f'{why} at "{self.text[self.place : self.place + 12]}"')

    def _alternatives(self) -> _Node:
        parts = [self._sequence()]
        while self.text[self.place : self.place + 1] == "|":
            self.place += 1
            parts.append(self._sequence())
        return parts[0] if len(parts) == 1 else _Node("alt", parts=tuple(parts))

    def _sequence(self) -> _Node:
        parts = []
        while self.place < len(self.text) and self.text[self.place] not in "|)":
            parts.append(self._repeated(self._atom()))
        return _Node("cat", parts=tuple(parts))

    def _repeated(self, node: _Node) -> _Node:
        found = re.compile(r"([*+?])|\{(\d*)(,?)(\d*)\}").match(self.text, self.place)
        if not found or found.group() in ("{}", "{,}"):
            return node
        self.place = found.end()
        if found[1]:
            low, high = {"*": (0, -1), "+": (1, -1), "?": (0, 1)}[found[1]]
        else:
            low = int(found[2] or 0)
            high = low if not found[3] else int(found[4]) if found[4] else -1
            if (high != -1 and high < low) or max(low, high) > MOST_STATES:
                raise self._fault(f"a repetition {found.group()} that cannot be")
        if self.text[self.place : self.place + 1] == "?":
            self.place += 1
        if self.text[self.place : self.place + 1] in ("*", "+", "?"):
            raise self._fault("a repetition of a repetition")
        return _Node("repeat", parts=(node,), low=low, high=high)

    def _atom(self) -> _Node:
        character = self.text[self.place]
        if character == "(":
            return self._group()
        if character in "*+?":
            raise self._fault("nothing to repeat")
        if character in "^$":
            raise self._fault(
                f"{character} inside a pattern; it may only stand at the {'start' if character == '^' else 'end'}"
            )
        end = self.place + 1
        if character == "\\":
            end += 1
            escaped = self.text[self.place + 1 : end]
            if not escaped or (escaped.isalnum() and escaped not in _CLASSES):
                raise self._fault("an escape that is not taken (no backreferences, no \\b)")
        elif character == "[":
            end = self._class_end()
        literal = self.text[self.place : end]
        source = re.escape(literal) if len(literal) == 1 and literal != "." else literal
        try:
            test = re.compile(source, self.flags)
        except re.error as why:
            raise self._fault(str(why)) from None
        self.place = end
        return _Node("char", test)

    def _group(self) -> _Node:
        opening = re.compile(r"\((?:\?:|\?P<\w+>|(?!\?))").match(self.text, self.place)
        if not opening:
            raise self._fault("a group that is not taken (no look-around, flags only at the start)")
        self.place = opening.end()
        inner = self._alternatives()
        if self.text[self.place : self.place + 1] != ")":
            raise self._fault("a group that is not closed")
        self.place += 1
        return inner

    def _class_end(self) -> int:
        found = re.compile(r"\[\^?\]?(?:[^\]\\]|\\.)*\]", re.DOTALL).match(self.text, self.place)
        if not found:
            raise self._fault("a [ that is not closed")
        return found.end()


@dataclass
class Pattern:
    """A compiled pattern. `fullmatch(text)` takes time linear in the text. Raises PatternFault when it cannot be read.

    >>> Pattern("<think>.+?</think>\\\\s*<answer>.+?</answer>").fullmatch("<think>so</think> <answer>4</answer>")
    True
    """

    source: str
    _tests: list[re.Pattern[str] | None] = field(default_factory=list, repr=False)
    _next: list[tuple[int, ...]] = field(default_factory=list, repr=False)
    _remembered: dict[tuple[frozenset[int], str], frozenset[int]] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        reader = _Reader(self.source)
        tree = reader._alternatives()
        if reader.place < len(reader.text):
            raise reader._fault("a ) without its (")
        self._end = self._state(None)
        self._start = self._closure([self._build(tree, self._end)])

    def fullmatch(self, text: str) -> bool:
        """True when the pattern describes the whole text."""
        current = self._start
        for character in text:
            known = self._remembered.get((current, character))
            if known is None:
                if len(self._remembered) >= MOST_REMEMBERED:
                    self._remembered.clear()
                known = self._remembered[current, character] = self._advance(current, character)
            if not known:
                return False
            current = known
        return self._end in current

    def _advance(self, states: frozenset[int], character: str) -> frozenset[int]:
        tests = ((state, self._tests[state]) for state in states)
        return self._closure([self._next[s][0] for s, test in tests if test is not None and test.match(character)])

    def _closure(self, states: list[int]) -> frozenset[int]:
        seen: set[int] = set()
        waiting = list(states)
        while waiting:
            state = waiting.pop()
            if state not in seen:
                seen.add(state)
                if self._tests[state] is None:
                    waiting.extend(self._next[state])
        return frozenset(state for state in seen if self._tests[state] is not None or state == self._end)

    def _state(self, test: re.Pattern[str] | None, *following: int) -> int:
        if len(self._tests) >= MOST_STATES:
            raise PatternFault(f"a pattern of more than {MOST_STATES} states; write smaller repetitions")
        self._tests.append(test)
        self._next.append(following)
        return len(self._tests) - 1

    def _build(self, node: _Node, then: int) -> int:
        """The state from which `node`, followed by `then`, is read."""
        if node.kind == "char":
            return self._state(node.test, then)
        if node.kind == "alt":
            return self._state(None, *(self._build(part, then) for part in node.parts))
        if node.kind == "cat":
            for part in reversed(node.parts):
                then = self._build(part, then)
            return then
        inner = node.parts[0]
        if node.high == -1:
            loop = self._state(None, then)
            self._next[loop] = (self._build(inner, loop), then)
            then = loop
        else:
            last = then
            for _ in range(node.high - node.low):
                then = self._state(None, self._build(inner, then), last)
        for _ in range(node.low):
            then = self._build(inner, then)
        return then
