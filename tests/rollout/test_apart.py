"""Engines apart: they hold exactly the trainer's weights, and one that is lost changes no response."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.conformance.test_engines import batch, loaded
from tests.rollout.hosts import engines

from gropius.errors import EngineError, MismatchError
from gropius.models.load import LoadedModel
from gropius.rollout.apart import Engines
from gropius.rollout.remote import EngineLost
from gropius.rollout.torch_engine import TorchEngine


def draw(engine, requests):
    async def together():
        return await asyncio.gather(*(engine.complete(request) for request in requests))

    return asyncio.run(together())


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return loaded("llama")


@pytest.fixture
def closing() -> Iterator[list[Engines]]:
    made: list[Engines] = []
    yield made
    for engine in made:
        asyncio.run(engine.close())


def ids(completions) -> list[list[int]]:
    return [completion.token_ids.tolist() for completion in completions]


def test_an_engine_apart_draws_the_same_bits_as_one_beside_the_trainer(model: LoadedModel, closing: list) -> None:
    apart, _ = engines(model)
    closing.append(apart)
    apart.set_policy(3, model.digest())
    own = TorchEngine(model)
    own.set_policy(3, model.digest())
    for mine, theirs in zip(draw(own, batch()), draw(apart, batch()), strict=True):
        assert mine.token_ids.tolist() == theirs.token_ids.tolist()
        np.testing.assert_array_equal(mine.logprobs, theirs.logprobs)
        assert (theirs.policy_version, theirs.weight_digest) == (3, model.digest())
    size = sum(parameter.nbytes for parameter in model.model.parameters())
    assert apart.transfer is not None and (apart.transfer.version, apart.transfer.bytes) == (3, size)
    assert apart.last_probe is not None and apart.last_probe.tokens > 0 and apart.last_probe.largest < 1e-3


def test_a_hand_over_that_ends_with_other_weights_is_refused(model: LoadedModel, closing: list) -> None:
    apart, _ = engines(model)
    closing.append(apart)
    with pytest.raises(EngineError, match=r"engine 0 .* it holds the weights .* after the hand-over of not these"):
        apart.set_policy(1, "not these wei")


def test_an_engine_that_computes_something_else_is_refused_by_the_probe(model: LoadedModel, closing: list) -> None:
    apart, hosts = engines(model)
    closing.append(apart)
    hosts[0].engine._path.refresh = lambda: None  # it goes on drawing from what it had fused before
    with pytest.raises(MismatchError, match="engine 0"):
        apart.set_policy(1, model.digest())


def test_weights_are_refused_while_responses_are_drawn_from_the_ones_before(model: LoadedModel, closing: list) -> None:
    apart, hosts = engines(model)
    closing.append(apart)
    apart.set_policy(1, model.digest())

    async def both():
        drawing = [asyncio.create_task(apart.complete(request)) for request in batch(30)]
        while not hosts[0].engine.busy:
            await asyncio.sleep(0.001)
        try:
            await apart._send(dict(apart._pool.engines))
        finally:
            for task in drawing:
                task.cancel()

    with pytest.raises(EngineError, match="while responses were being drawn"):
        asyncio.run(both())


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("lives", [0, 5])
def test_what_a_lost_engine_had_under_way_is_drawn_once_more_and_is_the_same(
    count: int, lives: int, model: LoadedModel, closing: list
) -> None:
    calm, _ = engines(model, count)
    notes: list[str] = []
    shaken, hosts = engines(model, count, dies={0: lives}, note=notes.append)
    closing += [calm, shaken]
    for each in (calm, shaken):
        each.set_policy(0, model.digest())
    expected, found = draw(calm, batch()), draw(shaken, batch())
    assert ids(expected) == ids(found)
    answered = [*hosts[0].drawn[:lives], *(stream for host in hosts[1:] for stream in host.drawn)]
    assert sorted(answered) == sorted(request.stream for request in batch())
    its_own = 12 if count == 1 else 6  # four groups of three siblings, dealt in turn
    assert shaken.losses["engine 0"].requeued == its_own - lives
    assert any("engine 0" in note and "lost" in note for note in notes)
    assert len(hosts) == count + (count == 1)  # the last one is started again at once
    shaken.set_policy(1, model.digest())
    assert len(hosts) == count + 1 and ids(draw(shaken, batch())) == ids(expected)


def test_engines_are_started_again_no_more_often_than_asked(model: LoadedModel, closing: list) -> None:
    apart, _ = engines(model, restarts=1, dies={0: 2, 1: 2})
    closing.append(apart)
    apart.set_policy(0, model.digest())
    with pytest.raises(EngineLost, match=r"engine 0 was lost: signal SIGKILL.*cluster.restarts = 1"):
        draw(apart, batch())


def test_an_engine_that_does_not_answer_a_hand_over_is_given_up_and_started_again(
    model: LoadedModel, closing: list
) -> None:
    notes: list[str] = []
    apart, hosts = engines(model, note=notes.append)
    closing.append(apart)
    hosts[0].server._hear = lambda *given: None
    apart._apart, patient = replace(apart._apart, deadline_s=0.2), apart._begin

    def begin(name: str):
        apart._apart = replace(apart._apart, deadline_s=60.0)
        return patient(name)

    apart._begin = begin
    apart.set_policy(0, model.digest())
    assert len(hosts) == 2 and "did not take the weights over within 0.2 s" in notes[0] and "engine 0" in notes[0]
    assert ids(draw(apart, batch())) == ids(draw(TorchEngine(model), batch()))


def test_a_stranger_without_the_secret_is_not_served(model: LoadedModel, closing: list) -> None:
    from gropius.rollout.remote import RemoteEngine

    apart, hosts = engines(model)
    closing.append(apart)
    with pytest.raises(EngineLost):
        draw(RemoteEngine(hosts[0].address, "another"), batch()[:1])


def test_only_what_is_trained_travels_and_tied_tensors_once(closing: list) -> None:
    tied = loaded("qwen3")
    apart, _ = engines(tied)
    closing.append(apart)
    apart.set_policy(0, tied.digest())
    unique = {id(p): p.nbytes for p in tied.model.parameters()}
    assert apart.transfer is not None and apart.transfer.bytes == sum(unique.values())


def test_a_copy_is_kept_where_the_trainer_moves_meanwhile(model: LoadedModel, closing: list) -> None:
    apart, _ = engines(model, dies={0: 2})
    closing.append(apart)
    apart._apart = replace(apart._apart, keep=True)
    apart.set_policy(0, model.digest())
    expected = draw(TorchEngine(model), batch())
    before = {name: value.clone() for name, value in model.model.state_dict().items()}
    try:
        with torch.no_grad():
            for parameter in model.model.parameters():
                parameter.mul_(1.5)
        assert ids(draw(apart, batch())) == ids(expected)
    finally:
        model.model.load_state_dict(before)
