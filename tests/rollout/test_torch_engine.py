"""The in-process engine's own promises: what it computes once, what it frees, how it dies, what it says."""

import asyncio

import numpy as np
import pytest
from tests.conformance.test_engines import MODELS, batch, bench_of, loaded, log_softmax, prompt

from gropius.errors import EngineError
from gropius.rollout.torch_engine import TorchEngine
from gropius.types import Request, Sampling


@pytest.mark.parametrize("name", [name for name in MODELS if name.startswith(("llama", "gemma3"))])
def test_a_small_token_budget_lets_rows_wait_and_changes_no_response(name):
    requests = [
        Request(prompt(3 + i % 5), Sampling(4 + 3 * (i % 4), stop_token_ids=(5, 6)), (9, 9, i, 0)) for i in range(14)
    ]
    wide, narrow = bench_of(name), bench_of(name, token_budget=64)
    for a, b in zip(wide.draw(*requests), narrow.draw(*requests), strict=True):
        assert a.token_ids.tolist() == b.token_ids.tolist()
    assert narrow.engine.stats.peak_rows < wide.engine.stats.peak_rows


@pytest.mark.parametrize("name", [name for name in MODELS if name.startswith("llama")])
def test_nothing_more_is_decoded_for_a_cancelled_request(name):
    bench = bench_of(name)

    async def all_cancelled():
        tasks = [asyncio.create_task(bench.engine.complete(request)) for request in batch(max_tokens=30)]
        for _ in range(6):
            await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        while bench.engine._task is not None and not bench.engine._task.done():
            await asyncio.sleep(0)

    asyncio.run(all_cancelled())
    assert bench.engine.stats.decode_steps < 10 and bench.engine.stats.completions == 0


@pytest.mark.parametrize("name", [name for name in MODELS if name.startswith("llama")])
def test_a_dead_engine_tells_every_caller_its_last_words(name, monkeypatch):
    bench = bench_of(name)

    def fall_over(*_):
        raise MemoryError("no memory for 3 slots")

    monkeypatch.setattr(bench.engine._path, "step", fall_over)

    async def all_fail():
        return await asyncio.gather(*(bench.engine.complete(r) for r in batch()), return_exceptions=True)

    results = asyncio.run(all_fail())
    assert all(isinstance(result, EngineError) and "no memory for 3 slots" in str(result) for result in results)
    assert isinstance(results[0].__cause__, MemoryError)
    with pytest.raises(EngineError, match="no memory"):
        bench.draw(batch()[0])


@pytest.mark.parametrize("name", [name for name in MODELS if name.startswith("llama")])
def test_weights_may_not_change_under_responses_that_are_being_drawn(name):
    bench = bench_of(name)

    async def change_midway():
        task = asyncio.create_task(bench.engine.complete(batch()[0]))
        for _ in range(4):
            await asyncio.sleep(0)
        try:
            bench.engine.set_policy(1, "new")
        finally:
            task.cancel()

    with pytest.raises(EngineError, match="being drawn"):
        asyncio.run(change_midway())


@pytest.mark.parametrize("name", [name for name in MODELS if name.startswith(("llama", "gemma3"))])
def test_the_prompt_of_siblings_is_computed_once(name):
    bench = bench_of(name)
    bench.draw(*batch())
    assert bench.engine.stats.prompt_tokens == 3 * (1 + 4 + 9 + 6)
    assert bench.engine.stats.prompt_tokens_computed == 1 + 4 + 9 + 6


@pytest.mark.parametrize("name", [name for name in MODELS if name.startswith(("llama", "gemma3"))])
def test_a_finished_response_frees_its_slot_at_once(name):
    bench = bench_of(name)
    lengths = (2, 3, 20)
    bench.draw(*(Request(prompt(4, i), Sampling(n), (i,)) for i, n in enumerate(lengths)))
    stats = bench.engine.stats
    assert stats.tokens == sum(lengths) and stats.decode_steps == max(lengths) - 1


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_in_bfloat16_the_own_path_stays_within_a_stated_bound(name):
    bench = bench_of(f"{name}/own", dtype="bfloat16")
    errors = []
    requests = batch()
    for request, completion in zip(requests, bench.draw(*requests), strict=True):
        for t in (0, 5, 11):
            seen = (*request.prompt_ids, *completion.token_ids[:t].tolist())
            exact = log_softmax(bench.logits_after(seen, len(request.prompt_ids)))[completion.token_ids[t]]
            errors.append(abs(completion.logprobs[t] - exact))
    assert np.mean(errors) < 0.05 and max(errors) < 0.3
    assert "bfloat16" in bench.engine.describe()


def test_one_line_says_which_path_is_used():
    assert "own" in TorchEngine(loaded("llama")).describe()
    line = TorchEngine(loaded("gemma3")).describe()
    assert "transformers" in line and "Gemma3ForCausalLM" in line and "\n" not in line
