"""Functions as tools: what the model is told of them, how its calls are read, and that nothing of them is evaluated."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gropius.envs.calling import Calling, FunctionCalls
from gropius.envs.functions import (
    FORMATS,
    Call,
    fault_of,
    hermes_calls,
    llama_calls,
    pattern_calls,
    tool_of,
    without_thoughts,
)
from gropius.errors import DataError
from gropius.tasks.base import TaskSet
from gropius.tasks.functions import ToolSettings, with_tools
from gropius.types import Task


def weather(city: str, days: int = 1, unit: Literal["C", "F"] = "C", tags: list[str] | None = None) -> dict[str, Any]:
    """The weather to come,
    by day.

    Args:
        city: where
        days (int): how many
    """
    if city == "nowhere":
        raise LookupError("no such place")
    return {"city": city, "days": days, "unit": unit, "tags": tags}


def add(a: float, b: float) -> str:
    """Add two numbers."""
    return f"{a + b:g}"


TOOLS = {tool.name: tool for tool in map(tool_of, (weather, add))}


def test_type_hints_and_docstring_become_the_schema() -> None:
    schema = TOOLS["weather"].schema["function"]
    assert schema["description"] == "The weather to come, by day."
    assert schema["parameters"] == {
        "type": "object",
        "required": ["city"],
        "properties": {
            "city": {"type": "string", "description": "where"},
            "days": {"type": "integer", "description": "how many"},
            "unit": {"enum": ["C", "F"]},
            "tags": {"anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "null"}]},
        },
    }
    json.dumps(TOOLS["add"].schema)


def no_text(a: int) -> int:
    return a


def no_type(a):
    """Text."""


def strange(a: complex) -> None:
    """Text."""


def open_ended(*a: int) -> None:
    """Text."""


def by_number(a: dict[int, str]) -> None:
    """Text."""


WRONG = [(no_text, "docstring"), (no_type, "a has no type"), (strange, "complex"), (open_ended, "by name")]


@pytest.mark.parametrize(("function", "says"), [*WRONG, (by_number, "dict")])
def test_a_function_that_cannot_be_described_is_refused(function: Any, says: str) -> None:
    with pytest.raises(DataError, match=says):
        tool_of(function)


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        ({"city": "Ulm"}, ""),
        ({"city": "Ulm", "days": 2, "unit": "F", "tags": ["a"]}, ""),
        ({"city": "Ulm", "tags": None}, ""),
        ({}, "city is missing"),
        ({"city": 3}, "city is 3, not a string"),
        ({"city": "Ulm", "days": True}, "days is true, not an integer"),
        ({"city": "Ulm", "days": 2.0}, "days is 2.0, not an integer"),
        ({"city": "Ulm", "unit": "K"}, 'unit is "K", not one of "C", "F"'),
        ({"city": "Ulm", "tags": ["a", 1]}, "tags[1] is 1, not a string"),
        ({"city": "Ulm", "colour": 1}, "no parameter 'colour'"),
        ([], "arguments is [], not an object"),
    ],
)
def test_arguments_are_checked_before_the_function_sees_them(arguments: Any, fault: str) -> None:
    found = fault_of(arguments, TOOLS["weather"].schema["function"]["parameters"])
    assert fault in found and bool(found) == bool(fault)
    assert TOOLS["weather"].run(arguments).startswith("error: ") == bool(fault)


def test_a_result_is_text_or_json_and_a_fault_of_the_function_is_told() -> None:
    assert TOOLS["add"].run({"a": 1, "b": 2.5}) == "3.5"
    assert json.loads(TOOLS["weather"].run({"city": "Ulm"}))["unit"] == "C"
    assert TOOLS["weather"].run({"city": "nowhere"}) == "error: LookupError: no such place"


def test_each_format_is_read_as_its_models_write_it() -> None:
    one, two = Call("add", {"a": 1, "b": 2}), Call("add", {})
    text = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
    assert hermes_calls(f'I add.\n{text}\n<tool_call>{{"name": "add"}}</tool_call>') == [one, two]
    assert hermes_calls("the sum is 3") == [] and llama_calls("the sum is 3") == [] and llama_calls("{1, 2}") == []
    assert llama_calls('<|python_tag|>{"name": "add", "parameters": {"a": 1, "b": 2}}') == [one]
    assert llama_calls('{"name": "add", "parameters": {}}; {"name": "add", "parameters": {}}') == [two, two]
    read = pattern_calls(r"CALL (?P<name>\w+)\((?P<arguments>.*?)\)")
    assert read('CALL add({"a": 1, "b": 2}) CALL add({})') == [one, two]
    for pattern in ("(", "(?P<name>x)"):
        with pytest.raises(DataError, match=r"rollout\.tools\.pattern"):
            pattern_calls(pattern)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("{", "no JSON"),
        ('{"name": "add", "arguments": {"a": NaN}}', "NaN is no JSON"),
        ('{"name": 1}', 'no object with "name"'),
        ("[]", 'no object with "name"'),
        ('{"name": "add", "arguments": "1"}', "arguments are no object"),
        ("__import__('os').system('true')", "no JSON"),
        ("[" * 5000, "no JSON"),
        ('{"name": "' + "x" * 30_000 + '"}', "longer than"),
    ],
)
def test_what_is_no_call_is_a_fault_in_words(text: str, fault: str) -> None:
    (call,) = hermes_calls(f"<tool_call>{text}</tool_call>")
    assert call.arguments is None and fault in call.fault
    assert hermes_calls("<tool_call>{")[0].fault == "<tool_call> is not closed"


@settings(deadline=None, max_examples=150)
@given(st.text(alphabet='<>/tool_call{}":,[]name arguments\n1;|', max_size=60), st.sampled_from(sorted(FORMATS)))
def test_any_text_is_read_without_a_fault_of_ours(text: str, shape: str) -> None:
    for reply in (text, f"<tool_call>{text}</tool_call>", '{"name"' + text):
        for call in FORMATS[shape](reply):
            assert call.arguments is None or isinstance(call.arguments, dict)


CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'


def started(**changes: Any) -> FunctionCalls:
    calling = Calling(**{"tools": TOOLS, "read": hermes_calls, "calls_per_turn": 2, "calls": 3, **changes})
    episode = FunctionCalls(calling, ({"role": "user", "content": "1 + 2?"},))
    episode.start()
    return episode


def contents(step: Any) -> list[str]:
    return [message["content"] for message in step.messages]


def test_every_call_of_a_reply_is_answered_and_a_reply_without_one_ends_the_episode() -> None:
    episode = started()
    step = episode.step(CALL + CALL)
    assert contents(step) == ["3", "3"] and {m["role"] for m in step.messages} == {"tool"}
    assert step.messages[0]["name"] == "add" and not step.done
    last = episode.step("it is 3")
    assert last.done and last.reason == "stop" and last.raw is None
    with pytest.raises(RuntimeError, match="over"):
        episode.step("again")


def test_calls_a_turn_and_calls_an_episode_are_bounded_and_zero_means_none() -> None:
    episode = started(calls_per_turn=1)
    assert contents(episode.step(CALL + CALL)) == ["error: at most 1 calls in a reply: none was run"]
    assert contents(episode.step(CALL)) == contents(episode.step(CALL)) == ["3"]
    assert contents(episode.step(CALL)) == ["no calls are left; give the final answer"]
    last = episode.step(CALL)
    assert last.done and last.reason == "tool_limit" and not last.messages
    two = started(calls=3)
    two.step(CALL + CALL)
    assert contents(two.step(CALL + CALL)) == ["3", "no calls are left; give the final answer"]
    none = started(calls=0)
    assert "no calls are left" in contents(none.step(CALL))[0] and none.step(CALL).reason == "tool_limit"
    assert "at most 0 calls" in contents(started(calls_per_turn=0).step(CALL))[0]


def test_a_call_that_cannot_be_run_is_told_and_thinking_calls_nothing() -> None:
    episode = started(calls=9)
    assert "no function 'rm'" in contents(episode.step(CALL.replace("add", "rm")))[0]
    assert "cannot be read" in contents(episode.step("<tool_call>{</tool_call>"))[0]
    assert "b is missing" in contents(episode.step('<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'))[0]
    assert started().step(f"<think>{CALL}</think>3").done and started().step(f"<think>{CALL}").done
    assert started().step(f"<think>a</think>so<think>{CALL}").done
    assert without_thoughts("<think>a</think>b") == "b"


def test_tools_in_words_and_answers_of_a_user() -> None:
    calling = Calling(TOOLS, hermes_calls, 1, 3, "SHAPE", "user")
    opening = FunctionCalls(calling, ({"role": "user", "content": "q"},)).start()
    assert [m["role"] for m in opening] == ["system", "user"] and "SHAPE" in opening[0]["content"]
    own = FunctionCalls(calling, ({"role": "system", "content": "mine"}, {"role": "user", "content": "q"}))
    first, second = own.start()
    assert first["content"].startswith("mine\n\nYou may call") and second["content"] == "q"
    (answer,) = own.step(CALL).messages
    assert answer == {"role": "user", "content": "<tool_response>\n3\n</tool_response>"}


def test_a_recipes_functions_become_the_environment_of_its_tasks(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text('def double(n: int) -> int:\n    """Twice n."""\n    return 2 * n\n')
    found = TaskSet("t", [Task("a", "q")], (), None, None, (), None, (), "")
    assert with_tools(found, ToolSettings(()), tmp_path) is found
    with_them = with_tools(found, ToolSettings(["mine.py:double"]), tmp_path)
    assert with_them.tools[0]["function"]["name"] == "double" and with_them.blocking
    episode = with_them.environment(found.train[0])
    episode.start()
    assert contents(episode.step('<tool_call>{"name": "double", "arguments": {"n": 4}}</tool_call>')) == ["8"]
    assert with_tools(found, ToolSettings(["mine.py:double"], show="system"), tmp_path).tools == ()
    with pytest.raises(DataError, match="environment of its own"):
        with_tools(with_them, ToolSettings(["mine.py:double"]), tmp_path)
    with pytest.raises(DataError, match="two functions are called double"):
        with_tools(found, ToolSettings(["mine.py:double", "mine.py:double"]), tmp_path)
