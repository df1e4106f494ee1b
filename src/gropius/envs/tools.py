"""A question that may be worked on with tools over several turns. Messages only; no torch.

A reply with one `<NAME>…</NAME>` calls the tool NAME and is answered by `<result>…</result>`; a reply without a call is
the final answer and ends the episode. What a model thinks (up to `</think>`) calls nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from gropius.types import EnvironmentStep, Message, Outcome

Tool = Callable[[str], str]
MOST_RESULT = 2000


@dataclass(frozen=True)
class Workbench:
    """What the siblings of a group share: the opening text, the tools, the judge of a final answer, calls allowed.

    A tool takes the text between its tags and returns text for the model, its own faults included.
    """

    opening: str
    tools: Mapping[str, Tool]
    judge: Callable[[str], Outcome]
    calls: int


@dataclass
class ToolUse:
    """One episode with tools. A call too many, several calls in one reply or an unclosed one is told, and counts.

    The last step has raw 1 for a right final answer, else 0, the same as part `correct`, and `calls` used as a part of
    its own only in the record. A judge that is void is an error of the task: RuntimeError.
    """

    bench: Workbench
    used: int = 0
    _state: str = field(init=False, default="new")

    def start(self) -> Sequence[Message]:
        """The question. A second start is a RuntimeError: an environment is single-use."""
        if self._state != "new":
            raise RuntimeError("this environment was started before; it is single-use, make a new one")
        self._state = "working"
        return ({"role": "user", "content": self.bench.opening},)

    def step(self, reply: str) -> EnvironmentStep:
        """Run the call in a reply, or take the reply as the final answer."""
        if self._state != "working":
            raise RuntimeError(f"this environment is {self._state}; start it once and step it until it is over")
        calls, fault = calls_in(reply, tuple(self.bench.tools))
        if not calls and not fault:
            return self._finish(reply)
        self.used += 1
        if self.used > self.bench.calls + 1:  # told once that no calls are left
            return replace(self._finish(""), reason="tool_limit")
        if self.used > self.bench.calls:
            text = "no calls are left; give the final answer"
        elif fault:
            text = fault
        else:
            name, content = calls[0]
            text = self.bench.tools[name](content)
        return EnvironmentStep(({"role": "user", "content": result_text(text)},))

    def _finish(self, reply: str) -> EnvironmentStep:
        self._state = "over"
        outcome = self.bench.judge(reply)
        if outcome.status == "void":
            raise RuntimeError(f"the answer cannot be judged: {outcome.reason}")
        right = float(outcome.status == "scored" and outcome.value == 1.0)
        word: Message = {
            "role": "user",
            "content": "correct" if right else f"wrong: {outcome.reason or 'not the answer'}",
        }
        return EnvironmentStep((word,), done=True, parts={"correct": right}, raw=right)


def result_text(text: str) -> str:
    """What a tool said, cut to 2000 characters, so that it cannot be mistaken for another tag.

    >>> result_text("42</result>")
    '<result>42</ result></result>'
    """
    shown = text if len(text) <= MOST_RESULT else f"{text[:MOST_RESULT]} … ({len(text)} characters)"
    return f"<result>{shown.replace('</result>', '</ result>')}</result>"


def calls_in(reply: str, names: Sequence[str]) -> tuple[list[tuple[str, str]], str]:
    """(calls, fault): the tool calls of a reply as (name, text), and what is wrong with them, "" when nothing is.

    >>> calls_in("<think><calc>1</calc></think>so <calc>2+2</calc>", ["calc"])
    ([('calc', '2+2')], '')
    >>> calls_in("<calc>1+", ["calc"])[1]
    '<calc> is not closed'
    """
    visible = reply.rpartition("</think>")[2]
    if "<think>" in visible:
        return [], ""  # still thinking when the turn ended: no call
    either = "|".join(map(re.escape, names))
    calls = [(m.group(1), m.group(2).strip()) for m in re.finditer(rf"<({either})>(.*?)</\1>", visible, re.S)]
    if len(calls) > 1:
        return calls, "one call a reply: none was run"
    opened = re.search(rf"<({either})>", visible)
    return (calls, "") if calls or opened is None else ([], f"<{opened.group(1)}> is not closed")
