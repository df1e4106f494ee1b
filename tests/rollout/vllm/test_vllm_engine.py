"""The trainer's side of vLLM, with an imitation in its place: hand-over, probe, stamps, rest, what is dropped."""

import asyncio
import contextlib
import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.rollout.vllm.benches import closed, draw, in_process, in_thread
from tests.rollout.vllm.imitation import Imitation

from gropius.errors import EngineError, MismatchError, RecipeError
from gropius.models.load import load_model
from gropius.models.lora import LoraSettings
from gropius.models.tiny import TinyShape
from gropius.recipe.schema import VllmTable
from gropius.rollout.torch_engine import TorchEngine
from gropius.rollout.vllm import open as opening
from gropius.rollout.vllm import program
from gropius.rollout.vllm.engine import VllmEngine, VllmOptions
from gropius.rollout.vllm.place import ReachedPlace
from gropius.rollout.vllm.weights import policy_tensors
from gropius.types import Request, Sampling

SHAPE = TinyShape(hidden=32, layers=2, heads=2, kv_heads=1, mlp=48, context=64)


def tiny(seed=0):
    return load_model("tiny", seed=seed, tiny=SHAPE)


def requests(count=4, **rules):
    return [Request((9, 10 + n, 11), Sampling(8, **rules), (1, 2, 3, n)) for n in range(count)]


def recorded(**changes):
    """A maker of imitations that keeps what it made in `.made`."""

    def make(start):
        make.made = type("Changed", (Imitation,), changes)(start)
        return make.made

    return make


@contextlib.contextmanager
def engine_of(loaded, core=Imitation, **options):
    engine = in_thread(loaded, core, **options)
    try:
        yield engine
    finally:
        closed(engine)


def test_a_process_of_another_interpreter_draws_what_this_one_would_and_its_death_is_told():
    loaded = tiny()
    engine = in_process(loaded)
    try:
        for version in range(2):  # the second time into the same memory
            with torch.no_grad():
                for parameter in loaded.model.parameters():
                    parameter.mul_(1.05)
            engine.set_policy(version, f"digest {version}")
            assert engine.last_probe.largest < 1e-4 and engine.last_probe.tokens == 32
            ours = TorchEngine(loaded)
            for theirs, mine in zip(draw(engine, *requests()), draw(ours, *requests()), strict=True):
                assert theirs.token_ids.tolist() == mine.token_ids.tolist()
                np.testing.assert_allclose(theirs.logprobs, mine.logprobs, atol=1e-5)
                assert (theirs.policy_version, theirs.weight_digest) == (version, f"digest {version}")

        async def killed_midway():
            rows = [asyncio.create_task(engine.complete(r)) for r in requests(3, temperature=1.5)]
            await asyncio.sleep(0)
            os.kill(engine._link._place.process.pid, signal.SIGKILL)
            return await asyncio.gather(*rows, return_exceptions=True)

        fates = asyncio.run(killed_midway())
        assert any(isinstance(fate, EngineError) for fate in fates)
        assert all("SIGKILL" in str(fate) for fate in fates if isinstance(fate, BaseException))
        with pytest.raises(EngineError, match="SIGKILL"):
            draw(engine, *requests(1))
        with pytest.raises(EngineError, match="SIGKILL"):
            engine.set_policy(9, "later")
    finally:
        closed(engine)


def test_a_packed_copy_of_the_head_that_is_not_renewed_is_caught_at_the_first_hand_over():
    with engine_of(tiny(), recorded(stale=True)) as engine, pytest.raises(MismatchError, match="tied head"):
        engine.set_policy(0, "")


def test_a_copy_that_is_renewed_once_and_then_forgotten_is_caught_by_the_next_hand_over():
    loaded, make = tiny(), recorded()
    with engine_of(loaded, make) as engine:
        engine.set_policy(0, "")
        make.made.stale = True
        with torch.no_grad():
            loaded.model.lm_head.weight.mul_(1.2)
        with pytest.raises(MismatchError, match="does not hold the policy's weights"):
            engine.set_policy(1, "")


def test_a_tensor_that_does_not_arrive_is_caught():
    loaded = tiny()

    def forgetful(self, tensors):
        Imitation.load(self, ((name, tensor) for name, tensor in tensors if "layers.1.mlp.up" not in name))

    with engine_of(loaded, recorded(load=forgetful)) as engine, pytest.raises(MismatchError):
        engine.set_policy(0, "")


def test_the_probe_looks_at_other_tokens_every_time():
    make = recorded()
    asked = []
    with engine_of(tiny(), make) as engine:
        made, add = make.made, make.made.add
        made.add = lambda key, request: (asked.append(tuple(request["prompt"])), add(key, request))
        for version in range(3):
            engine.set_policy(version, "")
    assert len(set(asked)) == 12


def test_a_resting_engine_gives_its_weights_back_and_draws_again_only_after_a_hand_over():
    make = recorded()
    with engine_of(tiny(), make, sleeps=True) as engine:
        engine.set_policy(0, "")
        before = [c.token_ids.tolist() for c in draw(engine, *requests())]
        engine.rest()
        engine.rest()
        assert make.made.events == ["started", "loaded", "asleep"]
        with pytest.raises(EngineError, match="set_policy"):
            draw(engine, *requests(1))
        engine.set_policy(0, "")
        assert [c.token_ids.tolist() for c in draw(engine, *requests())] == before


def test_an_engine_that_cannot_sleep_is_left_awake():
    make = recorded(can_sleep=False)
    with engine_of(tiny(), make, sleeps=True) as engine:
        engine.set_policy(0, "")
        engine.rest()
        assert len(draw(engine, *requests(1))[0].token_ids) == 8 and "asleep" not in make.made.events


def test_nothing_is_drawn_before_weights_were_handed_over():
    with engine_of(tiny()) as engine, pytest.raises(EngineError, match="set_policy"):
        draw(engine, *requests(1))


def slowly(self):
    time.sleep(0.02)
    return Imitation.step(self)


def test_weights_may_not_change_under_responses_and_cancelled_ones_leave_the_worker():
    make = recorded(step=slowly)
    with engine_of(tiny(), make) as engine:
        engine.set_policy(0, "")

        async def changed_midway():
            rows = [asyncio.create_task(engine.complete(r)) for r in requests(2)]
            await asyncio.sleep(0.05)
            with pytest.raises(EngineError, match="2 responses were being drawn"):
                engine.set_policy(1, "")
            for row in rows:
                row.cancel()
            await asyncio.gather(*rows, return_exceptions=True)

        asyncio.run(changed_midway())
        engine.set_policy(1, "one")  # what was cancelled is in nobody's way
        assert make.made.rows == {}
        assert draw(engine, *requests(1))[0].weight_digest == "one"


def test_a_stop_string_ends_the_response_here_and_in_the_worker():
    loaded, make = tiny(), recorded(step=slowly)
    with engine_of(loaded, make) as engine:
        engine.set_policy(0, "")
        (free,) = draw(engine, *requests(1))
        text = loaded.tokenizer.decode(free.token_ids.tolist())
        (cut,) = draw(engine, *requests(1, stop_strings=(text[2:4],)))
        assert cut.finish_reason == "stop" and cut.token_ids.tolist() == free.token_ids[: len(cut.token_ids)].tolist()
        assert len(cut.token_ids) <= 4
        deadline = time.monotonic() + 5
        while make.made.rows and time.monotonic() < deadline:
            time.sleep(0.01)
        assert make.made.rows == {}


def test_what_the_worker_refuses_ends_that_request_alone():
    def picky(self, key, request):
        if request["limit"] == 7:
            raise ValueError("not seven")
        Imitation.add(self, key, request)

    with engine_of(tiny(), recorded(add=picky)) as engine:
        engine.set_policy(0, "")
        good = requests(1)[0]
        bad = Request(good.prompt_ids, Sampling(7), good.stream)

        async def both():
            return await asyncio.gather(engine.complete(good), engine.complete(bad), return_exceptions=True)

        fine, refused = asyncio.run(both())
        assert len(fine.token_ids) == 8 and "not seven" in str(refused)


def test_a_core_that_fails_at_work_is_told_in_its_own_words():
    def broken(self):
        raise MemoryError("no room for 3 rows")

    with engine_of(tiny(), recorded(step=broken)) as engine, pytest.raises(EngineError, match="no room for 3 rows"):
        engine.set_policy(0, "")


def test_a_core_that_does_not_start_is_told_in_its_own_words():
    def fails(start):
        raise SystemExit("no device of this kind")

    with pytest.raises(EngineError, match="did not start: SystemExit: no device of this kind"):
        in_thread(tiny(), fails)


def table(**changes):
    return VllmTable(**changes).model_dump()


TRAINER = opening.Trainer("float32", 0.01, seed=2**40 + 5, threads=2)


def test_without_vllm_the_recipe_is_told_where_to_name_it(monkeypatch):
    monkeypatch.setattr(opening.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RecipeError, match=r"rollout\.vllm\.python"):
        opening.open_vllm(tiny(), table(), TRAINER)


def test_an_interpreter_or_a_server_that_is_not_there_is_named():
    with pytest.raises(EngineError, match="/no/python"):
        opening.open_vllm(tiny(), table(python="/no/python"), TRAINER)
    with pytest.raises(EngineError, match=r"/no/socket.*start the server"):
        opening.open_vllm(tiny(), table(mode="server", address="/no/socket"), TRAINER)


def test_the_table_of_a_recipe_becomes_options_and_the_place_that_it_names(monkeypatch):
    found = {}

    def caught(loaded, options, place, **settings):
        found.update(options=options, place=place, **settings)

    monkeypatch.setattr(opening, "VllmEngine", caught)
    opening.open_vllm(tiny(), table(python="/p", enforce_eager=True, hang_s=7.0), TRAINER)
    assert found["options"].sleeps and found["options"].enforce_eager and found["options"].hang_s == 7
    assert found["options"].dtype == "float32" and 0 <= found["options"].seed < 2**31 and found["bound"] == 0.01
    assert found["place"].args[0] == "/p" and found["place"].args[2] == {"OMP_NUM_THREADS": "2"}
    changes = {"mode": "server", "dtype": "bfloat16", "devices": "1"}
    opening.open_vllm(tiny(), table(python="/p", **changes), TRAINER)
    assert not found["options"].sleeps and found["options"].dtype == "bfloat16"
    assert found["place"].args[2]["CUDA_VISIBLE_DEVICES"] == "1"
    monkeypatch.setattr(opening.importlib.util, "find_spec", lambda name: object())
    opening.open_vllm(tiny(), table(), TRAINER)
    assert found["mailbox"] is not None  # in this process
    assert issubclass(VllmEngine, object) and Path(opening.program.__file__).is_file()


def test_an_adapter_arrives_merged_under_the_names_of_the_base():
    peft = pytest.importorskip("peft", reason="peft is not installed")
    loaded = tiny()
    names = [name for name, _ in policy_tensors(loaded.model)]
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    peft.inject_adapter_in_model(config, loaded.model)
    assert [name for name, _ in policy_tensors(loaded.model)] == names
    with engine_of(loaded) as engine:
        engine.set_policy(0, "")  # the probe runs the adapter's own forward pass
        assert engine.last_probe.largest < 1e-4


def adapted(**settings):
    pytest.importorskip("peft", reason="peft is not installed")
    settings = {"rank": 3, "alpha": 6.0, "target_modules": ("q_proj", "down_proj"), **settings}
    return load_model("tiny", tiny=SHAPE, lora=LoraSettings(**settings))


def test_an_adapter_may_go_alone_after_its_base_went_once_and_once_more_after_a_rest():
    loaded, make = adapted(), recorded()
    with engine_of(loaded, make, sleeps=True, **opening.apart(loaded.adapter)) as engine:
        for version in range(3):
            with torch.no_grad():
                for parameter in loaded.adapter.trained.values():
                    parameter.add_(0.1)
            engine.set_policy(version, "")
            assert engine.last_probe.largest < 1e-4
        assert make.made.events == ["started", "loaded", "adapted", "adapted", "adapted"]
        engine.rest()
        engine.set_policy(3, "")
        assert make.made.events[5:] == ["asleep", "loaded", "adapted"]
        theirs, mine = draw(engine, *requests()), draw(TorchEngine(loaded), *requests())
        assert [c.token_ids.tolist() for c in theirs] == [c.token_ids.tolist() for c in mine]


def test_an_old_adapter_is_caught():
    loaded = adapted()

    def once(self, tensors):
        if "adapted" not in self.events:
            Imitation.adapt(self, tensors)

    with engine_of(loaded, recorded(adapt=once), **opening.apart(loaded.adapter)) as engine:
        engine.set_policy(0, "")
        with torch.no_grad():
            for parameter in loaded.adapter.trained.values():
                parameter.add_(0.1)
        with pytest.raises(MismatchError):
            engine.set_policy(1, "")


def test_what_vllm_cannot_hold_beside_an_adapter_is_refused(monkeypatch):
    found = {}
    monkeypatch.setattr(opening, "VllmEngine", lambda loaded, options, place, **more: found.update(options=options))
    opening.open_vllm(adapted(), table(python="/p", lora="adapter"), TRAINER)
    assert (found["options"].lora_rank, found["options"].lora_modules) == (3, ("down_proj", "q_proj"))
    opening.open_vllm(adapted(), table(python="/p"), TRAINER)
    assert found["options"].lora_rank == 0
    with_bias = adapted()
    with_bias.model.model.norm.register_parameter("bias", torch.nn.Parameter(torch.zeros(1)))
    with pytest.raises(RecipeError, match=r'model\.norm\.bias is trained too.*rollout\.vllm\.lora = "merged"'):
        opening.open_vllm(with_bias, table(python="/p", lora="adapter"), TRAINER)


def test_a_server_serves_one_trainer_after_another_and_refuses_another_model(tmp_path):
    address = tmp_path / "socket"
    threading.Thread(target=program._serve_many, args=(str(address), Imitation), daemon=True).start()
    while not address.exists():
        time.sleep(0.01)
    assert address.stat().st_mode & 0o077 == 0  # nobody else's

    def reached(loaded):
        return VllmEngine(loaded, VllmOptions(), lambda: ReachedPlace(str(address)), bound=1e-3)

    for seed in range(2):
        loaded = tiny(seed)
        engine = reached(loaded)
        engine.set_policy(seed, "")
        theirs, mine = draw(engine, *requests()), draw(TorchEngine(loaded), *requests())
        assert [c.token_ids.tolist() for c in theirs] == [c.token_ids.tolist() for c in mine]
        if seed == 0:
            engine._link._place.wire.close()  # it vanishes, in the middle of a response
        closed(engine)
    with pytest.raises(EngineError, match="holds another model"):
        reached(load_model("tiny", tiny=TinyShape(hidden=16, layers=1, heads=2, kv_heads=1, mlp=16, context=32)))
    engine = reached(tiny())
    engine.set_policy(5, "again")
    closed(engine)
