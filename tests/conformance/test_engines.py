"""What every engine promises, over all engines: scripted, in-process on its own path and on transformers', vLLM.

The protocol that vLLM is reached by is held with an imitation in its place; vLLM itself is among the slow tests, where
GROPIUS_VLLM_PYTHON names an interpreter that has it.
"""

import asyncio
import dataclasses
import math
from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest
import torch
from tests.rollout import hosts
from tests.rollout.vllm import benches
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from gropius.errors import DataError, EngineError
from gropius.models.load import LoadedModel
from gropius.models.tiny import tiny_tokenizer
from gropius.rollout.apart import Engines
from gropius.rollout.engine import Engine, ScriptedEngine
from gropius.rollout.torch_engine import TorchEngine
from gropius.rollout.vllm.engine import VllmEngine
from gropius.types import Bound, Request, Sampling

VOCABULARY, CONTEXT = 104, 48
SHAPE = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": CONTEXT,
    "initializer_range": 0.3, "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3,
}  # fmt: skip
WIDE = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
CONFIGS = {
    "llama": lambda: LlamaConfig(**SHAPE, attention_bias=True, mlp_bias=True),
    "qwen2": lambda: Qwen2Config(**SHAPE),
    "qwen2-window": lambda: Qwen2Config(**SHAPE, use_sliding_window=True, sliding_window=6, max_window_layers=1),
    "qwen3": lambda: Qwen3Config(**SHAPE, head_dim=16, tie_word_embeddings=True),
    "gemma3": lambda: Gemma3TextConfig(
        **SHAPE, head_dim=16, sliding_window=6, layer_types=["sliding_attention", "full_attention"],
        query_pre_attn_scalar=16,
    ),
    "mistral": lambda: MistralConfig(**SHAPE, head_dim=8, sliding_window=6),
    # vLLM has no heads narrower than 32 on a CPU
    "llama-wide": lambda: LlamaConfig(**SHAPE | WIDE, attention_bias=True, mlp_bias=True),
    "qwen3-wide": lambda: Qwen3Config(**SHAPE | WIDE, tie_word_embeddings=True),
    "mistral-wide": lambda: MistralConfig(**SHAPE | WIDE, sliding_window=6),
    "gpt2": lambda: GPT2Config(
        vocab_size=VOCABULARY, n_positions=CONTEXT, n_embd=32, n_layer=2, n_head=4, initializer_range=0.3,
        attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0, pad_token_id=0, bos_token_id=2, eos_token_id=3,
    ),
}  # fmt: skip
IN_PROCESS = [name for name in CONFIGS if not name.endswith("wide")]
VLLM = tuple(f"{name}/vllm" for name in CONFIGS if name.endswith("wide"))
ENGINES = (
    "scripted",
    *(f"{name}/own" for name in IN_PROCESS if name not in ("gemma3", "gpt2")),
    *(f"{name}/transformers" for name in IN_PROCESS),
    *(f"{name}/imitation" for name in ("llama", "qwen3")),
    *(f"{name}/apart" for name in ("llama", "qwen3")),
)
MODELS = tuple(name for name in ENGINES if name != "scripted")
SLOW = tuple(pytest.param(name, marks=pytest.mark.slow) for name in VLLM)


@cache
def model_of(name: str) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        model = AutoModelForCausalLM.from_config(CONFIGS[name]()).eval()
        for parameter in model.parameters():
            parameter.data += 0.05 * torch.randn_like(parameter)  # norms and biases are not left at 1 and 0
    # What a model's own file says about sampling must change nothing.
    model.generation_config.update(temperature=0.01, top_k=1, top_p=0.01, do_sample=True, max_new_tokens=1)
    return model


def loaded(name: str) -> LoadedModel:
    return LoadedModel(model_of(name), tiny_tokenizer(), name, CONTEXT, (3,), 0)


@dataclass
class Bench:
    """An engine and the policy that it must be."""

    engine: Engine
    logits_after: object

    def draw(self, *requests: Request):
        async def together():
            return await asyncio.gather(*(self.engine.complete(request) for request in requests))

        return asyncio.run(together())


def scripted_policy(prompt_ids, drawn_ids):
    seen = (*prompt_ids, *drawn_ids)
    spread = np.random.default_rng([len(seen), *seen[-3:]])
    return spread.normal(size=VOCABULARY) * 2


def bench_of(name: str, **settings) -> Bench:
    if name == "scripted":
        engine = ScriptedEngine(
            scripted_policy, vocabulary=VOCABULARY, context_length=CONTEXT, decode=tiny_tokenizer().decode
        )
        return Bench(engine, lambda ids, length: scripted_policy(ids[:length], ids[length:]))
    architecture, path = name.split("/")
    if path in ("imitation", "vllm", "apart"):
        engine = worker_engine(name)
        engine.set_policy(0, digest_of(engine))
    else:
        engine = TorchEngine(loaded(architecture), path=path, **settings)

    @torch.no_grad()
    def logits_after(ids, length):
        return model_of(architecture)(torch.tensor([ids]), use_cache=False).logits[0, -1].double().numpy()

    return Bench(engine, logits_after)


STARTED: dict[str, VllmEngine] = {}


def digest_of(engine: Engine) -> str:
    """Of the weights it draws from; an engine apart is handed no others than those it is told."""
    return engine.loaded.digest() if isinstance(engine, Engines) else "abc"


def worker_engine(name: str) -> VllmEngine | Engines:
    """Started once; the last test closes it."""
    architecture, path = name.split("/")
    if name not in STARTED:
        make = {"imitation": benches.in_thread, "vllm": benches.on_vllm, "apart": hosts.engine}[path]
        STARTED[name] = make(loaded(architecture))
    return STARTED[name]


@pytest.fixture(params=[*ENGINES, *SLOW])
def bench(request) -> Bench:
    return bench_of(request.param)


@pytest.fixture(params=[*MODELS, *SLOW])
def model_bench(request) -> Bench:
    return bench_of(request.param)


def prompt(length: int, salt: int = 0) -> tuple[int, ...]:
    return tuple(int(x) for x in np.random.default_rng([length, salt]).integers(4, VOCABULARY, length))


def log_softmax(z, temperature=1.0):
    z = np.asarray(z, np.float64) / temperature
    return z - (z.max() + math.log(np.exp(z - z.max()).sum()))


def batch(max_tokens=12, temperature=1.0, **rules):
    """Twelve requests: prompts of 1 to 9 tokens, three siblings each."""
    sampling = Sampling(max_tokens, temperature, **rules)
    return [
        Request(prompt(length), sampling, (1, 2, group, member))
        for group, length in enumerate((1, 4, 9, 6))
        for member in range(3)
    ]


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probabilities_are_those_of_a_full_forward_pass(bench, temperature):
    requests = batch(temperature=temperature)
    for request, completion in zip(requests, bench.draw(*requests), strict=True):
        assert len(completion.token_ids) == 12 and completion.finish_reason == "length"
        ids, length = list(request.prompt_ids), len(request.prompt_ids)
        for t in (0, 1, 6, 11):
            seen = tuple(ids + completion.token_ids[:t].tolist())
            exact = log_softmax(bench.logits_after(seen, length), temperature)[completion.token_ids[t]]
            assert completion.logprobs[t] == pytest.approx(exact, abs=1e-4)
        np.testing.assert_array_equal(completion.logprobs, completion.drawn_logprobs)


def test_truncated_sampling_gives_both_log_probabilities(bench):
    for rules in ({"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.2}, {"top_k": 20, "top_p": 0.8, "min_p": 0.05}):
        request = Request(prompt(5), Sampling(1, 0.9, **rules), (3, 0, 0, 0))
        whole = log_softmax(bench.logits_after(request.prompt_ids, 5), 0.9)
        kept = allowed(np.exp(whole), **rules)
        for member in range(20):
            (completion,) = bench.draw(Request(prompt(5), request.sampling, (3, 0, 0, member)))
            token = int(completion.token_ids[0])
            assert token in kept
            assert completion.logprobs[0] == pytest.approx(whole[token], abs=1e-4)
            mass = math.log(np.exp(whole[list(kept)]).sum())
            assert completion.drawn_logprobs[0] == pytest.approx(whole[token] - mass, abs=1e-4)


def allowed(p, top_k=0, top_p=1.0, min_p=0.0):
    """The tokens that the rules leave, written the slow way."""
    order = [int(i) for i in np.argsort(-p, kind="stable")]
    order = order[: top_k or None]
    total, before, left = sum(p[order]), 0.0, []
    for token in order:
        if top_p < 1 and before >= top_p * total:
            break
        before += p[token]
        left.append(token)
    return {token for token in left if p[token] >= min_p * p[order[0]]}


def test_the_stop_token_comes_back_with_its_log_probability(bench):
    requests = batch(max_tokens=20, stop_token_ids=tuple(range(4, 40)))
    completions = bench.draw(*requests)
    stopped = [c for c in completions if c.finish_reason == "stop"]
    assert len(stopped) >= 6
    for completion in stopped:
        assert completion.token_ids[-1] in range(4, 40)
        assert not set(completion.token_ids[:-1].tolist()) & set(range(4, 40))
        assert len(completion.logprobs) == len(completion.token_ids) and completion.logprobs[-1] < 0
    free = bench.draw(*batch(max_tokens=20))
    for long, short in zip(free, completions, strict=True):
        assert long.token_ids[: len(short.token_ids)].tolist() == short.token_ids.tolist()


def test_a_stop_string_ends_the_response_at_the_token_that_completes_it(bench):
    text_of = tiny_tokenizer().decode
    for request, free in zip(batch(), bench.draw(*batch()), strict=True):
        end = text_of(free.token_ids.tolist())[2:4] or "x"
        sampling = Sampling(12, stop_strings=(end,))
        (completion,) = bench.draw(Request(request.prompt_ids, sampling, request.stream))
        text = text_of(completion.token_ids.tolist())
        assert completion.finish_reason == "stop" and end in text
        assert end not in text_of(completion.token_ids[:-1].tolist())


def test_greedy_tokens_are_those_of_transformers_generate(model_bench):
    model = model_bench.engine.loaded.model
    requests = batch(temperature=0.0)[::3]
    for request, completion in zip(requests, model_bench.draw(*requests), strict=True):
        theirs = model.generate(
            torch.tensor([request.prompt_ids]), max_new_tokens=12, do_sample=False, eos_token_id=None, temperature=None,
            top_k=None, top_p=None,
        )  # fmt: skip
        assert completion.token_ids.tolist() == theirs[0, len(request.prompt_ids) :].tolist()
        assert (completion.drawn_logprobs == 0).all() and (completion.logprobs < 0).all()


def test_a_response_is_the_same_whatever_else_is_in_the_batch(bench):
    requests = batch(max_tokens=16, stop_token_ids=(5, 6, 7, 8, 9))
    together = bench.draw(*requests)
    for index in (0, 4, 11):
        (alone,) = bench.draw(requests[index])
        assert alone.token_ids.tolist() == together[index].token_ids.tolist()
        np.testing.assert_allclose(alone.logprobs, together[index].logprobs, atol=1e-4)


def test_a_later_turn_goes_on_in_its_stream(bench):
    first = Request(prompt(4), Sampling(6), (1, 1, 1, 1))
    (whole,) = bench.draw(first)
    rest = Request(prompt(4) + tuple(whole.token_ids[:2].tolist()), Sampling(4), first.stream, offset=2)
    (later,) = bench.draw(rest)
    assert later.token_ids.tolist() == whole.token_ids[2:].tolist()


def test_siblings_differ_and_the_same_stream_repeats(bench):
    draws = [tuple(c.token_ids.tolist()) for c in bench.draw(*batch(), *batch())]
    assert draws[:12] == draws[12:]
    assert len(set(draws[:12])) == 12


def test_a_models_own_generation_config_changes_nothing(model_bench):
    requests = [Request(prompt(4), Sampling(3, temperature=1.5), (5, 0, 0, member)) for member in range(12)]
    drawn = {tuple(c.token_ids.tolist()) for c in model_bench.draw(*requests)}
    assert len(drawn) > 6  # its temperature 0.01, top_k 1 and max_new_tokens 1 would give one response of one token


def test_an_empty_prompt_a_strange_id_and_an_overlong_prompt_are_refused(bench):
    for ids in ((), (VOCABULARY,), (-1,), prompt(CONTEXT + 1)):
        with pytest.raises(DataError):
            bench.draw(Request(ids, Sampling(2), (0,)))
    assert len(bench.draw(Request(prompt(3), Sampling(2), (0,)))[0].token_ids) == 2


def test_one_token_and_the_context_limit_end_a_response(bench):
    one, last, none = bench.draw(
        Request(prompt(3), Sampling(1), (0,)),
        Request(prompt(CONTEXT - 2), Sampling(9), (0,)),
        Request(prompt(CONTEXT), Sampling(9), (0,)),
    )
    assert [len(c.token_ids) for c in (one, last, none)] == [1, 2, 0]
    assert {c.finish_reason for c in (one, last, none)} == {"length"}
    assert len(none.logprobs) == len(none.drawn_logprobs) == 0


def test_every_completion_carries_the_version_and_digest_of_its_policy(bench):
    assert bench.draw(Request(prompt(3), Sampling(1), (0,)))[0].policy_version == 0
    digest = digest_of(bench.engine)
    bench.engine.set_policy(7, digest)
    (completion,) = bench.draw(Request(prompt(3), Sampling(1), (0,)))
    assert (completion.policy_version, completion.weight_digest) == (7, digest)


def test_new_weights_are_used_after_set_policy_and_only_the_trainers_tensors_hold_them(model_bench):
    model = model_bench.engine.loaded.model
    request = Request(prompt(5), Sampling(6), (4, 4, 4, 4))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    (old,) = model_bench.draw(request)
    try:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.1).add_(0.01)
        model_bench.engine.set_policy(1, digest_of(model_bench.engine))
        (new,) = model_bench.draw(request)
        for t in (0, 5):
            seen = (*request.prompt_ids, *new.token_ids[:t].tolist())
            exact = log_softmax(model_bench.logits_after(seen, 5))[new.token_ids[t]]
            assert new.logprobs[t] == pytest.approx(exact, abs=1e-4)
        assert abs(new.logprobs[0] - old.logprobs[0]) > 1e-3 or new.token_ids[0] != old.token_ids[0]
    finally:
        model.load_state_dict(before)


def test_a_cancelled_request_leaves_and_its_neighbours_are_untouched(bench):
    requests = batch(max_tokens=24)
    expected = bench.draw(*requests)

    async def some_cancelled():
        tasks = [asyncio.create_task(bench.engine.complete(request)) for request in requests]
        for _ in range(6):
            await asyncio.sleep(0)
        for task in tasks[::2]:
            task.cancel()
        return await asyncio.gather(*tasks, return_exceptions=True)

    results = asyncio.run(some_cancelled())
    assert all(isinstance(result, asyncio.CancelledError) for result in results[::2])
    for result, wanted in zip(results[1::2], expected[1::2], strict=True):
        assert result.token_ids.tolist() == wanted.token_ids.tolist()
    assert bench.draw(requests[0])[0].token_ids.tolist() == expected[0].token_ids.tolist()


def test_a_bound_lowered_on_the_way_cuts_a_response_and_changes_no_token(bench):
    if isinstance(bench.engine, VllmEngine | Engines):
        pytest.skip("looks at no bound: the collection cuts what it returns")
    whole = bench.draw(*batch(max_tokens=20))
    bound = Bound()

    async def course():
        requests = [dataclasses.replace(request, bound=bound, spent=i % 2) for i, request in enumerate(batch(20))]
        jobs = [asyncio.create_task(bench.engine.complete(request)) for request in requests]
        for _ in range(4):
            await asyncio.sleep(0)
        bound.limit = 9
        return await asyncio.gather(*jobs)

    for i, (cut, same) in enumerate(zip(asyncio.run(course()), whole, strict=True)):
        assert cut.finish_reason == "cancelled" and len(cut.token_ids) == 9 - i % 2
        assert cut.token_ids.tolist() == same.token_ids[: len(cut.token_ids)].tolist()
    (nothing,) = bench.draw(dataclasses.replace(batch()[0], bound=bound, spent=9))
    assert nothing.finish_reason == "cancelled" and len(nothing.token_ids) == 0
    (short,) = bench.draw(dataclasses.replace(batch(5)[0], bound=bound))
    assert short.finish_reason == "length" and len(short.token_ids) == 5


def test_a_closed_engine_refuses(bench):
    asyncio.run(bench.engine.close())
    for name in [name for name, engine in STARTED.items() if engine is bench.engine]:
        del STARTED[name]
    with pytest.raises(EngineError, match="closed"):
        bench.draw(Request(prompt(3), Sampling(2), (0,)))
