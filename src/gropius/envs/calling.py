"""One episode in which a model may call functions. Messages only; no torch.

A reply with calls is answered by one message for each; a reply without is the final answer and ends the episode.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from gropius.envs.functions import Call, FunctionTool, told, without_thoughts
from gropius.types import EnvironmentStep, Message

MOST_RESULT = 2000


@dataclass(frozen=True)
class Calling:
    """What all episodes share. read: the calls of a reply. calls_per_turn, calls: at most, 0 is none.

    shape: how a call is written, put before the conversation in words; "" where the chat template shows the tools.
    role: of the messages that answer, "tool" or "user".
    """

    tools: Mapping[str, FunctionTool]
    read: Callable[[str], list[Call]]
    calls_per_turn: int
    calls: int
    shape: str = ""
    role: str = "tool"


@dataclass
class FunctionCalls:
    """One episode. A call that cannot be read or run is told to the model, and counts.

    Calls beyond the episode's number are told once; with the next the episode ends as "tool_limit".
    """

    calling: Calling
    opening: tuple[Message, ...]
    used: int = 0
    warned: bool = False
    _state: str = field(init=False, default="new")

    def start(self) -> Sequence[Message]:
        """The task's messages, the tools in words before them where that is asked for."""
        if self._state != "new":
            raise RuntimeError("this environment was started before; it is single-use, make a new one")
        self._state = "working"
        if not self.calling.shape:
            return self.opening
        words = told(list(self.calling.tools.values()), self.calling.shape)
        first, *rest = self.opening
        if first["role"] == "system":
            return ({"role": "system", "content": f"{first['content']}\n\n{words}"}, *rest)
        return ({"role": "system", "content": words}, *self.opening)

    def step(self, reply: str) -> EnvironmentStep:
        """Run the calls in a reply, or take it as the final answer."""
        if self._state != "working":
            raise RuntimeError(f"this environment is {self._state}; start it once and step it until it is over")
        calls = self.calling.read(without_thoughts(reply))
        if not calls:
            self._state = "over"
            return EnvironmentStep((), done=True, reason="stop")
        if self.used >= self.calling.calls:
            if self.warned:
                self._state = "over"
                return EnvironmentStep((), done=True, reason="tool_limit")
            self.warned = True
            return self._answer([(call, "no calls are left; give the final answer") for call in calls[:1]])
        if len(calls) > self.calling.calls_per_turn:
            self.used += 1
            text = f"at most {self.calling.calls_per_turn} calls in a reply: none was run"
            return self._answer([(call, f"error: {text}") for call in calls[:1]])
        answers = []
        for call in calls:
            left = self.used < self.calling.calls
            self.used += left
            answers.append((call, self._run(call) if left else "no calls are left; give the final answer"))
        return self._answer(answers)

    def _run(self, call: Call) -> str:
        if call.arguments is None:
            return f"error: the call cannot be read: {call.fault}"
        tool = self.calling.tools.get(call.name)
        if tool is None:
            return f"error: there is no function {call.name[:60]!r}; there are {', '.join(self.calling.tools)}"
        text = tool.run(call.arguments)
        return text if len(text) <= MOST_RESULT else f"{text[:MOST_RESULT]} … ({len(text)} characters)"

    def _answer(self, answers: Sequence[tuple[Call, str]]) -> EnvironmentStep:
        if self.calling.role == "tool":
            return EnvironmentStep(tuple(_result(call, text) for call, text in answers))
        texts = (text.replace("</tool_response>", "</ tool_response>") for _, text in answers)
        whole = "\n".join(f"<tool_response>\n{text}\n</tool_response>" for text in texts)
        return EnvironmentStep(({"role": "user", "content": whole},))


def _result(call: Call, text: str) -> Message:
    return {"role": "tool", "name": call.name, "content": text} if call.name else {"role": "tool", "content": text}
