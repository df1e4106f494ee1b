"""Environments beside the event loop: others go on, faults stay one episode's, nothing is waited for at the end."""

import asyncio
import dataclasses
import threading
import time

import numpy as np
import pytest
from tests.rollout.scripted import EOS, TASKS, Echo, N, V, Y, coin, plan, player

from gropius.errors import DataError, RunHalted
from gropius.rollout.collect import collect
from gropius.rollout.partners import PLACES, beside
from gropius.train.deadline import within
from gropius.types import Sampling


def run(the_player, tasks=TASKS, **changes):
    return asyncio.run(collect(tasks, plan(max_turns=5, group_size=2, **changes), the_player))


def test_others_decode_while_an_environment_answers():
    """The first environment answers only once all the others are over: it would never be, in turn."""
    over, all_over = [], threading.Event()

    class Waits(Echo):
        def step(self, reply):
            if self.task.key == "t0":
                assert all_over.wait(20)
            else:
                over.append(self.task.key)
                if len(over) == 6:
                    all_over.set()
            return super().step("y")

    groups = run(player(coin(), lambda task: Waits(task)), TASKS, seed=3)
    assert [e.finish_reason for g in groups for e in g.episodes] == ["environment_end"] * 8


@pytest.mark.parametrize("blocking", [True, False])
def test_what_comes_out_is_the_same_beside_and_in_turn(blocking):
    the_player = player(coin(0.4), Echo)
    the_player.tasks = dataclasses.replace(the_player.tasks, blocking=blocking)
    found = [[e.response_ids.tolist() for e in g.episodes] for g in run(the_player)]
    assert found == [[e.response_ids.tolist() for e in g.episodes] for g in run(player(coin(0.4), Echo))]
    threads = []

    class Notes(Echo):
        def step(self, reply):
            threads.append(threading.current_thread() is threading.main_thread())
            return super().step(reply)

    noting = player(coin(0.4), Notes)
    noting.tasks = dataclasses.replace(noting.tasks, blocking=blocking)
    run(noting)
    assert set(threads) == {not blocking}


def test_no_more_calls_at_once_than_there_are_places():
    now, most, lock = [0], [0], threading.Lock()

    class Counts(Echo):
        def step(self, reply):
            with lock:
                now[0] += 1
                most[0] = max(most[0], now[0])
            time.sleep(0.002)
            with lock:
                now[0] -= 1
            return super().step("y")

    asyncio.run(collect(TASKS, plan(max_turns=2, group_size=12), player(coin(), Counts)))
    assert 1 < most[0] <= PLACES


def test_a_fault_of_an_environment_voids_its_episode_and_one_at_the_start_is_refused():
    class Fails(Echo):
        def step(self, reply):
            raise StopIteration if self.task.key == "t0" else KeyError("lost")

    class NoStart(Echo):
        def start(self):
            raise OSError("no board")

    groups = run(player(coin(), Fails))
    assert {e.finish_reason for g in groups for e in g.episodes} == {"error"}
    assert "KeyError: 'lost'" in groups[1].episodes[0].error and "RuntimeError" in groups[0].episodes[0].error
    with pytest.raises(DataError, match="no board"):
        run(player(coin(), NoStart))


def test_an_environment_that_never_answers_is_named_and_leaves_no_request():
    for_ever = threading.Event()

    class Hangs(Echo):
        def step(self, reply):
            for_ever.wait(60)
            return super().step(reply)

    the_player = player(coin(), Hangs)
    began = time.monotonic()
    with pytest.raises(RunHalted, match=r"the environment is late: a step of the environment of t0 .*2 are waiting"):
        asyncio.run(
            within(the_player, 0.2, lambda watched: collect(TASKS[:1], plan(max_turns=3, group_size=2), watched))
        )
    assert the_player.engine.active == 0 and time.monotonic() - began < 30
    for_ever.set()


def test_cancelling_a_collection_waits_for_no_environment_and_leaves_no_task():
    entered, for_ever = threading.Event(), threading.Event()

    class Hangs(Echo):
        def step(self, reply):
            entered.set()
            for_ever.wait(60)
            return super().step(reply)

    def mixed(prompt_ids, drawn_ids):  # some end at once, others go on for ever
        logits = np.full(V, -np.inf)
        logits[[Y, N] if not drawn_ids else [EOS if drawn_ids[0] == Y else N]] = 0.0
        return logits

    the_player = player(mixed, Hangs)

    async def cancelled():
        job = asyncio.create_task(collect(TASKS, plan(sampling=Sampling(10**6, stop_token_ids=(EOS,))), the_player))
        while not entered.is_set():
            await asyncio.sleep(0)
        job.cancel()
        await asyncio.gather(job, return_exceptions=True)
        return [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]

    assert asyncio.run(cancelled()) == [] and the_player.engine.active == 0
    for_ever.set()
    for thread in [thread for thread in threading.enumerate() if thread.name == "environment"]:
        thread.join(10)
        assert not thread.is_alive()


def test_an_answer_that_comes_after_the_loop_is_closed_is_nobodys():
    gate, done = threading.Event(), threading.Event()

    def late():
        gate.wait(60)
        done.set()
        return 1

    async def left():
        job = asyncio.create_task(beside(late))
        await asyncio.sleep(0)
        job.cancel()

    asyncio.run(left())
    gate.set()
    assert done.wait(10)
