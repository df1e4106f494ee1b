"""A run with functions, from sampling to the optimiser step, on the chat templates of two families."""

import textwrap

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from tests.models.families import stop_ids, templates, tokenizer_of
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from gropius import build
from gropius.recipe import resolve
from gropius.train.progress import Silent

pytestmark = pytest.mark.slow
SHAPE = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 4096, "tie_word_embeddings": True,
}  # fmt: skip
MINE = '''
from gropius.tasks.base import TaskSet, fingerprint
from gropius.types import Task

CALL = {call!r}
PAIRS = ((1, 2), (3, 4), (5, 3))


def add(a: int, b: int) -> int:
    """The sum of two numbers."""
    return a + b


def sums():
    rows = [Task(f"{{a}}+{{b}}", f"{{a}} + {{b}}?", str(a + b), {{"pair": (a, b)}}) for a, b in PAIRS]

    def solution(task):
        return (
            {{"role": "assistant", "content": CALL % tuple(task.metadata["pair"])}},
            {{"role": "tool", "name": "add", "content": task.answer}},
            {{"role": "assistant", "content": task.answer}},
        )

    return TaskSet("sums", rows, (), solution, None, ("math",), None, (), fingerprint(rows, ()))
'''
CALLS = {
    "qwen": '<tool_call>\n{"name": "add", "arguments": {"a": %d, "b": %d}}\n</tool_call>',
    "llama": '{"name": "add", "parameters": {"a": %d, "b": %d}}',
}
RETURNED = {"qwen": "<tool_response>", "llama": "<|start_header_id|>ipython"}
OPENING = {"qwen": "<|im_start|>assistant\n", "llama": "<|start_header_id|>assistant<|end_header_id|>\n\n"}
RECIPE = """
    out = "{folder}/runs"
    [model]
    source = "{folder}/model"
    [data]
    source = "mine.py:sums"
    [[reward]]
    name = "math"
    [rollout]
    prompts = 3
    group_size = 4
    max_tokens = 80
    max_turns = 6
    [rollout.tools]
    functions = ["mine.py:add"]
    format = "{format}"
    [sft]
    steps = 100
    batch = 3
    learning_rate = 5e-3
    [train]
    steps = 2
    learning_rate = 1e-3
    threads = 1
    [eval]
    before = false
    after = false
    [checkpoint]
    final = false
"""


def prepared(name, folder):
    """A model of the family with random weights, functions, tasks whose solutions call them, and a recipe."""
    family, tokenizer = name.partition("/")[0], tokenizer_of(name)
    stops = list(stop_ids(name, tokenizer))
    kind, config = (Qwen3ForCausalLM, Qwen3Config) if family == "qwen" else (LlamaForCausalLM, LlamaConfig)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = kind(config(**SHAPE, vocab_size=len(tokenizer), eos_token_id=stops, bos_token_id=1, pad_token_id=0))
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    (folder / "mine.py").write_text(MINE.format(call=CALLS[family]))
    shape = {"qwen": "hermes", "llama": "llama"}[family]
    (folder / "recipe.toml").write_text(textwrap.dedent(RECIPE.format(folder=folder, format=shape)))
    return tokenizer


@pytest.mark.parametrize("name", sorted(templates()))
def test_functions_are_called_and_trained_on_by_a_model_of_the_family(tmp_path, name):
    tokenizer, family = prepared(name, tmp_path), name.partition("/")[0]
    progress = Silent()
    run = build.train(resolve(tmp_path / "recipe.toml"), progress)
    assert len(progress.steps) == 2
    assert all(step["sampling/sampling_logp_difference/max"] < 1e-3 for step in progress.steps)
    rows = [row for file in sorted(run.glob("rollouts/*.parquet")) for row in pq.read_table(file).to_pylist()]
    answered = [row for row in rows if row["response_text"].count("add") and not all(row["loss_mask"])]
    assert len(rows) == 24 and len(answered) > 12 and any(row["reward"] == 1.0 for row in answered)
    for row in rows:
        ids, mask = np.array(row["response_ids"]), np.array(row["loss_mask"])
        assert (np.array(row["sampler"])[~mask] == 0).all() and (np.array(row["weight"])[~mask] == 0).all()
        edges = np.flatnonzero(np.diff(mask)) + 1
        for tokens, own in zip(np.split(ids, edges), np.split(mask, edges), strict=True):
            # what the template writes, from the answer of a function to the opening of a turn, is not the model's
            text = tokenizer.decode(tokens, skip_special_tokens=False)
            assert own[0] or (RETURNED[family] in text and text.endswith(OPENING[family])), text
    assert any(abs(np.array(row["contribution"])[np.array(row["loss_mask"])]).sum() > 0 for row in answered)
