"""A prompt held once for its siblings: the same responses, whoever joins, leaves or goes on."""

import asyncio

import numpy as np
import pytest
import torch
from tests.conformance.test_engines import bench_of, log_softmax, prompt

from gropius.rollout import paths
from gropius.rollout.shared import SharedPrompts
from gropius.types import Request, Sampling

MODELS = ["llama", "qwen2", "qwen3", "mistral"]


def siblings() -> list[Request]:
    """Groups of unequal size and prompts of unequal length, one of a single response; they end one after another."""
    groups = [(prompt(9), 5), (prompt(17, 3), 3), (prompt(4, 1), 1), (prompt(12, 2), 4)]
    return [
        Request(ids, Sampling(2 + (5 * member + 3 * group) % 19), (1, group, member, 0))
        for group, (ids, size) in enumerate(groups)
        for member in range(size)
    ]


@pytest.mark.parametrize("name", MODELS)
def test_log_probabilities_are_those_of_a_full_pass(name, monkeypatch):
    monkeypatch.setattr(paths, "SHARE_FROM", 1)
    bench = bench_of(f"{name}/own")
    for request, completion in zip(siblings(), bench.draw(*siblings()), strict=True):
        seen = (*request.prompt_ids, *completion.token_ids.tolist())
        for t, token in enumerate(completion.token_ids):
            exact = log_softmax(bench.logits_after(seen[: len(request.prompt_ids) + t], len(request.prompt_ids)))
            assert abs(completion.logprobs[t] - exact[token]) < 1e-4


@pytest.mark.parametrize("name", MODELS)
def test_responses_are_those_of_slots_that_hold_the_prompt(name, monkeypatch):
    apart = bench_of(f"{name}/own", token_budget=200).draw(*siblings())
    monkeypatch.setattr(paths, "SHARE_FROM", 1)
    bench = bench_of(f"{name}/own", token_budget=200)  # some rows wait, and join siblings that are under way
    for a, b in zip(apart, bench.draw(*siblings()), strict=True):
        assert a.token_ids.tolist() == b.token_ids.tolist()
    assert not bench.engine._path.decoder.shared and bench.engine._path.decoder.shared.bytes == 0


def test_a_long_prompt_is_held_once_and_a_short_one_is_copied(monkeypatch):
    bench = bench_of("llama/own")
    seen = []
    step = bench.engine._path.step
    monkeypatch.setattr(
        bench.engine._path, "step", lambda *a: (seen.append(bench.engine._path.decoder.shared.lengths()), step(*a))[1]
    )
    monkeypatch.setattr(paths, "SHARE_FROM", 3 * 17)
    bench.draw(*(Request(ids, Sampling(3), (group, member)) for group, ids in enumerate((prompt(17), prompt(16, 3)))
                 for member in range(4)))  # fmt: skip
    assert seen[0].tolist() == [17] * 4 + [0] * 4
    assert bench.engine._path.decoder.keys.shape[3] <= 32


def test_a_conversation_goes_on_from_a_shared_prompt(monkeypatch):
    def talk():
        bench = bench_of("qwen3/own")
        first = [Request(prompt(11), Sampling(6, stop_token_ids=tuple(range(40))), (1, 0, n, 0), goes_on=True)
                 for n in range(4)]  # fmt: skip

        async def both():
            said = await asyncio.gather(*map(bench.engine.complete, first))
            then = [Request((*r.prompt_ids, *c.token_ids.tolist(), 7, 8, 9), Sampling(5), r.stream)
                    for r, c in zip(first, said, strict=True)]  # fmt: skip
            return [*said, *await asyncio.gather(*map(bench.engine.complete, then))]

        return [c.token_ids.tolist() for c in asyncio.run(both())], bench.engine.stats.prompt_tokens_kept

    apart, kept = talk()
    monkeypatch.setattr(paths, "SHARE_FROM", 1)
    shared, also_kept = talk()
    assert shared == apart and kept == also_kept > 0


class Held:
    """A prompt of so many positions."""

    def __init__(self, length, value):
        self.keys = self.values = torch.full((1, 2, length, 4), float(value))
        self.length = length


def test_rows_and_prompts_stay_together_while_rows_come_and_go():
    long, short = Held(20, 1), Held(3, 2)
    shared = SharedPrompts(2, torch.float32, torch.device("cpu"))
    shared.add([long, None, short, short])
    shared.add([long])
    assert shared.lengths().tolist() == [20, 0, 3, 3, 20]
    order = shared.order()
    assert order.width == 32
    rows_back = order.into[order.back.view(5, 2)]  # where a row and head was put, that row and head sits
    expected = torch.arange(10).view(5, 2)
    assert torch.equal(rows_back[[0, 2, 3, 4]], expected[[0, 2, 3, 4]])
    shared.keep(np.array([4, 3, 1]))
    assert shared.prompt(0) is long and shared.prompt(1) is short and shared.prompt(2) is None
    before = shared.order().keys
    shared.keep(np.array([1, 2]))
    assert shared.lengths().tolist() == [3, 0] and shared.order().keys.shape[2] == 16 < before.shape[2]
    shared.keep(np.array([1]))
    assert not shared and shared.bytes == 0 and shared.lengths().tolist() == [0]
