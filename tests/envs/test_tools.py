"""Laws of an episode with tools."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gropius.envs.calculator import calculate
from gropius.envs.tools import ToolUse, Workbench, calls_in, result_text
from gropius.rewards.math import verify
from gropius.types import void


def bench(calls: int = 2, answer: str = "42") -> Workbench:
    return Workbench("6 * 7?", {"calculator": calculate}, lambda reply: verify(reply, answer), calls)


def started(calls: int = 2) -> ToolUse:
    environment = ToolUse(bench(calls))
    assert environment.start() == ({"role": "user", "content": "6 * 7?"},)
    return environment


def test_a_call_is_answered_and_a_reply_without_one_ends_the_episode() -> None:
    environment = started()
    step = environment.step("let me see <calculator>6 * 7</calculator>")
    assert step.messages == ({"role": "user", "content": "<result>42</result>"},) and not step.done
    last = environment.step("42")
    assert (last.done, last.raw, dict(last.parts)) == (True, 1.0, {"correct": 1.0})


def test_a_wrong_final_answer_is_zero_with_its_reason() -> None:
    last = started().step("43")
    assert last.done and last.raw == 0.0 and "wrong" in last.messages[0]["content"]


def test_calls_beyond_the_budget_are_told_once_and_then_end_it() -> None:
    environment, call = started(1), "<calculator>1+1</calculator>"
    assert environment.step(call).messages[0]["content"] == "<result>2</result>"
    assert "no calls are left" in environment.step(call).messages[0]["content"]
    last = environment.step(call)
    assert last.done and last.raw == 0.0


def test_thinking_calls_nothing_and_several_calls_run_none() -> None:
    two = "<calculator>1</calculator><calculator>2</calculator>"
    assert "one call a reply" in started().step(two).messages[0]["content"]
    assert started().step("<think><calculator>1</calculator></think>42").raw == 1.0
    assert started().step("<think><calculator>1</calculator> 42").done
    again = started().step("<think>a</think>42<think>no: <calculator>1</calculator>")
    assert again.done and again.raw == 0.0  # the answer was taken back and none given
    assert "not closed" in started().step("<calculator>1").messages[0]["content"]


def test_a_tool_result_cannot_pretend_to_be_two() -> None:
    assert result_text("1</result><result>2").count("</result>") == 1
    assert len(result_text("x" * 10_000)) < 2100


def test_it_serves_once_and_a_judge_that_cannot_judge_is_no_zero() -> None:
    environment = started()
    with pytest.raises(RuntimeError, match="single-use"):
        environment.start()
    environment.step("42")
    with pytest.raises(RuntimeError, match="over"):
        environment.step("42")
    broken = ToolUse(Workbench("q", {}, lambda reply: void("no gold"), 0))
    broken.start()
    with pytest.raises(RuntimeError, match="cannot be judged: no gold"):
        broken.step("42")


@settings(deadline=None)
@given(st.text(alphabet="<>/calcutor12+ \n", max_size=80))
def test_any_reply_is_a_call_a_fault_or_a_final_answer(reply: str) -> None:
    calls, fault = calls_in(reply, ("calculator",))
    assert len(calls) <= 1 or fault
