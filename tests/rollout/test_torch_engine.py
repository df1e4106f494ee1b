"""The in-process engine's own promises: what it computes once, what it frees, how it dies, what it says."""

import asyncio
import weakref

import numpy as np
import pytest
import torch
from tests.conformance.test_engines import MODELS as ENGINES
from tests.conformance.test_engines import batch, bench_of, loaded, log_softmax, prompt

from gropius.errors import EngineError
from gropius.rollout import graphs
from gropius.rollout.past import Past, Pasts
from gropius.rollout.torch_engine import TorchEngine, position_bytes
from gropius.types import Request, Sampling

MODELS = [name for name in ENGINES if name.endswith(("/own", "/transformers"))]


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
    narrow = bench_of("llama/own", token_budget=1000).engine
    assert "at most 1,500 positions, 500 of them between turns" in narrow.describe()
    narrow._path.decoder.reserve(10, 96, 0, 1000)
    assert narrow._path.cache_bytes == 960 * position_bytes(narrow.loaded.model, narrow._path)
    assert "at most 1,000 positions (" in bench_of("gpt2/transformers", token_budget=1000).engine.describe()
    line = TorchEngine(loaded("gemma3")).describe()
    assert "transformers" in line and "Gemma3ForCausalLM" in line and "\n" not in line
    assert "reads its conversation from the beginning" in line and "beginning" not in narrow.describe()


class Recorded:
    """In a CUDA graph's place: what was captured runs again on replay, into the same tensor."""

    def __init__(self):
        self.captured = self.replayed = 0

    def __call__(self, step):
        logits = step()
        self.captured += 1

        def replay():
            self.replayed += 1
            return logits.copy_(step())

        return replay


@pytest.mark.parametrize("name", ["llama/own", "qwen2-window/own", "qwen3/own"])
def test_captured_steps_draw_what_the_steps_themselves_draw(name, monkeypatch):
    monkeypatch.setattr(graphs, "SLOT_COUNTS", (1, 4, 16))
    plain, replayed, record = bench_of(name), bench_of(name), Recorded()
    path = replayed.engine._path
    path.graphs = graphs.StepGraphs(path.decoder, record)
    requests = batch(max_tokens=20, stop_token_ids=(5, 6, 7, 8, 9))
    for version in range(2):
        for mine, theirs in zip(replayed.draw(*requests), plain.draw(*requests), strict=True):
            assert mine.token_ids.tolist() == theirs.token_ids.tolist()
            np.testing.assert_allclose(mine.logprobs, theirs.logprobs, atol=2e-5)
        assert 0 < len(path.graphs) <= 3
        for bench in (plain, replayed):
            bench.engine.set_policy(version, "")
        assert len(path.graphs) == 0
    assert record.replayed > 2 * record.captured


@pytest.mark.parametrize("name", ["llama/own", "qwen2-window/own", "gemma3/transformers"])
def test_an_engine_at_rest_holds_no_cache_and_draws_the_same_again(name):
    bench = bench_of(name)
    path = bench.engine._path
    first = bench.draw(*batch(max_tokens=12))
    bench.engine.rest()
    assert path.cache_bytes == 0
    for one, other in zip(first, bench.draw(*batch(max_tokens=12)), strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()
        assert one.logprobs.tobytes() == other.logprobs.tobytes()


def test_captured_steps_go_with_the_slots_they_read():
    bench = bench_of("llama/own")
    path = bench.engine._path
    path.graphs = graphs.StepGraphs(path.decoder, Recorded())
    bench.draw(*batch(max_tokens=12))
    slots = weakref.ref(path.decoder.keys)
    bench.engine.rest()
    assert slots() is None and len(path.graphs) == 0


def test_rest_in_the_middle_of_a_response_takes_nothing_from_it():
    calm, disturbed = bench_of("llama/own"), bench_of("llama/own")

    async def draw():
        tasks = [asyncio.create_task(disturbed.engine.complete(request)) for request in batch(max_tokens=12)]
        while not len(disturbed.engine._batch):
            await asyncio.sleep(0)
        disturbed.engine.rest()
        assert disturbed.engine._path.cache_bytes > 0
        return await asyncio.gather(*tasks)

    for one, other in zip(calm.draw(*batch(max_tokens=12)), asyncio.run(draw()), strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()


def test_where_steps_cannot_be_captured_they_run_as_they_are_and_it_is_said():
    plain, refused = bench_of("llama/own"), bench_of("llama/own")

    def no(step):
        step()
        raise RuntimeError("operation not permitted when stream is capturing")

    refused.engine._path.graphs = graphs.StepGraphs(refused.engine._path.decoder, no)
    with pytest.warns(UserWarning, match="not captured.*not permitted"):
        mine = refused.draw(*batch())
    for one, other in zip(mine, plain.draw(*batch()), strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()


STOPS = tuple(range(4, 30))


def turns_of(bench, turns=3, goes_on=True):
    """Conversations of several turns, other ids between them; what was drawn, with its log-probabilities."""

    async def conversation(group, member):
        ids, drawn, said = prompt(3 + group), 0, []
        for turn in range(turns):
            sampling = Sampling(9, stop_token_ids=STOPS)
            stream = (4, 4, group, member)
            found = await bench.engine.complete(Request(ids, sampling, stream, drawn, goes_on=goes_on))
            said.append(found)
            drawn += len(found.token_ids)
            ids = (*ids, *found.token_ids.tolist(), *prompt(1 + (turn + member) % 3, member))
        return said

    async def everyone():
        return await asyncio.gather(*(conversation(group, member) for group in range(2) for member in range(4)))

    return asyncio.run(everyone())


@pytest.mark.parametrize("name", [name for name in MODELS if name.endswith("/own")])
def test_a_later_turn_reads_only_what_is_new_and_draws_the_same(name):
    keeps, anew = bench_of(name), bench_of(name)
    for kept, read in zip(turns_of(keeps), turns_of(anew, goes_on=False), strict=True):
        for a, b in zip(kept, read, strict=True):
            assert a.token_ids.tolist() == b.token_ids.tolist()
            np.testing.assert_allclose(a.logprobs, b.logprobs, atol=2e-5)
    some, all_of_it = keeps.engine.stats, anew.engine.stats
    assert some.prompt_tokens == all_of_it.prompt_tokens
    assert some.prompt_tokens_computed < 0.6 * all_of_it.prompt_tokens_computed
    assert some.prompt_tokens_computed + some.prompt_tokens_kept == all_of_it.prompt_tokens_computed
    assert all_of_it.prompt_tokens_kept == 0


def test_what_is_kept_between_turns_is_bounded_and_goes_with_its_weights():
    narrow = bench_of("llama/own", token_budget=80)
    roomy = bench_of("llama/own")
    for a, b in zip(turns_of(narrow), turns_of(roomy), strict=True):
        assert [c.token_ids.tolist() for c in a] == [c.token_ids.tolist() for c in b]
    assert narrow.engine._pasts.positions <= 40
    assert narrow.engine.stats.prompt_tokens_kept < roomy.engine.stats.prompt_tokens_kept
    assert len(roomy.engine._pasts) and roomy.engine.stats.peak_cache_bytes >= roomy.engine._pasts.bytes > 0
    roomy.engine.set_policy(1, "new")
    assert len(roomy.engine._pasts) == 0 and roomy.engine._pasts.positions == roomy.engine._pasts.bytes == 0


def test_a_past_serves_only_a_prompt_that_goes_on_from_it():
    def past(*ids):
        tensor = torch.zeros(1, 1, len(ids), 2)
        return Past(ids, tensor, tensor)

    pasts = Pasts(10)
    for stream, ids in (((1,), (5, 6)), ((2,), (5, 6)), ((3,), (5, 6))):
        pasts.put(stream, past(*ids))
    assert pasts.take((1,), (5, 7, 8)) is None and pasts.take((2,), (5, 6)) is None
    assert pasts.take((4,), (5, 6, 7)) is None
    assert pasts.take((3,), (5, 6, 7)).ids == (5, 6) and pasts.take((3,), (5, 6, 7)) is None
    assert pasts.positions == 0
    for stream in range(4):
        pasts.put((stream,), past(1, 2, 3, 4))
    assert len(pasts) == 2 and pasts.positions == 8
    assert pasts.take((0,), (1, 2, 3, 4, 5)) is None and pasts.take((3,), (1, 2, 3, 4, 5)) is not None
    pasts.put((9,), past(*range(11)))
    assert pasts.take((9,), tuple(range(12))) is None
    pasts.put((2,), past(1))
    assert pasts.positions == 1
    pasts.put((2,), past(*range(10)))  # the whole budget, and not a position more
    assert pasts.positions == 10 and pasts.bytes == 2 * 10 * 2 * 4
    assert pasts.take((2,), tuple(range(11))) is not None
    for stream in range(2):
        pasts.put((stream,), past(*range(5)))
    assert len(pasts) == 2 and pasts.positions == 10
