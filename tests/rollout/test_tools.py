"""Episodes with functions on the chat templates of two families: what was drawn is trained, all else is masked."""

import asyncio
import json

import numpy as np
import pytest
from tests.models.families import stop_ids, templates, tokenizer_of
from tests.rollout.scripted import Judge

from gropius.envs.calling import Calling, FunctionCalls
from gropius.envs.functions import FORMATS, tool_of
from gropius.models.chat import ChatFormat
from gropius.rollout.collect import CollectPlan, Player, collect
from gropius.rollout.engine import ScriptedEngine
from gropius.tasks.base import TaskSet
from gropius.types import Sampling, Task

NAMES = sorted(templates())
QUESTION = Task("t", "What is 2 + 3?", "5")
ran = []


def add(a: int, b: int) -> int:
    """The sum of two numbers.

    a: one
    b: the other
    """
    ran.append((a, b))
    if a > 1000:
        raise OverflowError("too large for me <|im_end|><|eot_id|>")
    return a + b


TOOL = tool_of(add)


def call(name, a, b):
    """A call as the family writes it, with spaces that no renderer would give back."""
    if name.startswith("llama"):
        return f'{{"name":  "add", "parameters": {{"a": {a} ,"b": {b}}}}}'
    return f'<tool_call>\n{{"name":  "add", "arguments": {{"a": {a} ,"b": {b}}}}}\n</tool_call>'


def played(name, script, **calling):
    """One episode in which the model writes the script, turn by turn."""
    ran.clear()
    tokenizer = tokenizer_of(name)
    stops = stop_ids(name, tokenizer)
    opening = tokenizer("assistant\n" if name.startswith("qwen") else "assistant<|end_header_id|>").input_ids

    def policy(prompt_ids, drawn_ids):
        ids, size = list(prompt_ids), len(opening)
        turn = sum(ids[i : i + size] == opening for i in range(len(ids) - size + 1)) - 1
        wanted = [*tokenizer(script[turn], add_special_tokens=False).input_ids, stops[0]]
        logits = np.full(len(tokenizer), -np.inf)
        logits[wanted[len(drawn_ids)]] = 0.0
        return logits

    read = FORMATS["llama" if name.startswith("llama") else "hermes"]
    tools = Calling(**{"tools": {"add": TOOL}, "read": read, "calls_per_turn": 1, "calls": 4, **calling})
    tasks = TaskSet("t", [QUESTION], (), None, lambda t: FunctionCalls(tools, t.messages()), (), None, (), "")
    chat = ChatFormat(tokenizer, stop_token_ids=stops, tools=[TOOL.schema])
    engine = ScriptedEngine(policy, decode=tokenizer.decode, vocabulary=len(tokenizer))
    plan = CollectPlan(Sampling(400, stop_token_ids=stops), 1, 0, 1, max_turns=9)
    (group,) = asyncio.run(collect([QUESTION], plan, Player(engine, chat, tasks, Judge(), 4096)))
    return group.episodes[0], tokenizer, chat


def said(episode, tokenizer, mask=True):
    ids = episode.response_ids[episode.loss_mask == mask]
    return tokenizer.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("name", NAMES)
def test_the_row_is_the_conversation_as_the_template_lays_it_out_and_only_the_models_words_are_trained(name):
    script = [call(name, 2, 3), call(name, 40, 2), "It is 5."]
    episode, tokenizer, _ = played(name, script)
    assert ran == [(2, 3), (40, 2)] and episode.finish_reason == "stop"
    stop = tokenizer.eos_token
    assert said(episode, tokenizer) == "".join(f"{text}{stop}" for text in script)
    assert all(f"{answer}" in said(episode, tokenizer, mask=False) for answer in (5, 42))
    assert [m["role"] for m in episode.messages] == ["user", "assistant", "tool", "assistant", "tool", "assistant"]
    rendered = tokenizer.apply_chat_template(
        list(episode.messages[:-1]), tools=[TOOL.schema], tokenize=False, add_generation_prompt=True
    )
    row = tokenizer.decode([*episode.prompt_ids, *episode.response_ids], skip_special_tokens=False)
    assert row == rendered + script[-1] + stop
    assert '"name": "add"' in tokenizer.decode(episode.prompt_ids) and "one" in tokenizer.decode(episode.prompt_ids)


@pytest.mark.parametrize("name", NAMES)
def test_what_a_model_gets_wrong_comes_back_as_a_message_and_as_text_not_as_control_tokens(name):
    unread = call(name, 2, 3).replace('"b"', "b")
    script = [call(name, 2, 3).replace("add", "mul"), unread, call(name, '"2"', 3), call(name, 2000, 3), "I give up"]
    episode, tokenizer, chat = played(name, script)
    answers = [message["content"] for message in episode.messages if message["role"] == "tool"]
    assert [answer.startswith("error: ") for answer in answers] == [True] * 4 and ran == [(2000, 3)]
    assert "no function 'mul'" in answers[0] and "no JSON" in answers[1]
    assert "not an integer" in answers[2] and "OverflowError" in answers[3]
    masked = episode.response_ids[~episode.loss_mask].tolist()
    text = tokenizer.decode(masked)
    assert all(answer in text or json.dumps(answer) in text for answer in answers)
    closing = sum(masked.count(stop) for stop in chat.stop_token_ids)
    assert closing == 4 and said(episode, tokenizer).count("add") == 3  # the templates' own, none of the message's


@pytest.mark.parametrize("name", NAMES)
def test_no_calls_means_that_none_runs(name):
    episode, tokenizer, _ = played(name, [call(name, 2, 3), call(name, 2, 3)], calls=0)
    assert not ran and episode.finish_reason == "tool_limit"
    assert "no calls are left" in said(episode, tokenizer, mask=False)
    episode, _, _ = played(name, ["5"], calls=0)
    assert episode.finish_reason == "stop" and episode.completion == "5"


@pytest.mark.parametrize("name", NAMES)
def test_thoughts_and_the_calls_that_follow_them_stay_as_drawn_and_calls_within_thoughts_do_not_run(name):
    thought = f"<think>\nshall I {call(name, 9, 9)}?\n</think>\n\n"
    script = [thought + call(name, 2, 3), "<think>\n\n</think>\n\n5"]
    episode, tokenizer, chat = played(name, script)
    assert ran == [(2, 3)] and said(episode, tokenizer) == "".join(f"{text}{tokenizer.eos_token}" for text in script)
    assert not chat.drops_thoughts("tool")
    assert chat.drops_thoughts("user") == (name in ("qwen", "qwen/qwen3"))
