"""The simulator against laws whose answer is known without it."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from gropius.errors import UsageError
from gropius.plan.cluster import Cluster, Engine, Faults, Job, Layout, Trainer, Transfer
from gropius.plan.lengths import Constant, Recorded, lognormal
from gropius.plan.simulate import simulate

ENGINE = Engine(64, row_s=0.002, step_s=0.01, weights_s=0.03, position_s=1e-6, prefill_s=0.001, response_s=0.005)
TRAINER = Trainer(0.002, update_s=0.3, state_s=0.4, exchange_s=0.2, step_s=0.5, doubling=0.9)
TRANSFER = Transfer(1e9, 1e9, 0.25, colocated_s=0.75)
CLUSTER = Cluster(ENGINE, TRAINER, TRANSFER)
JOB = Job(8, 4, Constant(50), 20.0, steps=6)
TAIL = lognormal(100.0, 1.2, 2000)
LONG = lognormal(60.0, 1.5, 2000)
SMOOTH = Cluster(Engine(10_000, step_s=0.01), Trainer(1e-3), Transfer())  # rows do not slow each other


def generation(engines, job=JOB):
    """Seconds in which each engine draws its share of constant lengths: prompts, overhead, then steps of one width."""
    rows = job.prompts * job.group_size // engines
    tokens = job.lengths.tokens
    before = rows * ENGINE.response_s + rows / job.group_size * job.prompt_tokens * ENGINE.prefill_s
    return before + tokens * ENGINE.pace(rows, rows * (job.prompt_tokens + tokens / 2))


def training(devices, job=JOB):
    tokens = job.prompts * (job.prompt_tokens + job.group_size * job.lengths.tokens)
    longest = job.prompt_tokens + job.lengths.tokens
    return TRAINER.seconds(tokens, longest, devices) + TRAINER.step_s


def test_one_device_takes_the_sum_of_its_parts():
    found = simulate(CLUSTER, Layout("one", 1, 1, colocated=True), JOB)
    assert found.step_s == pytest.approx(generation(1) + training(1) + TRANSFER.colocated_s)
    assert found.engine_busy == pytest.approx(generation(1) / found.step_s)
    assert found.trainer_busy == pytest.approx(training(1) / found.step_s)
    assert found.transfer == pytest.approx(TRANSFER.colocated_s / found.step_s)
    assert found.engine_fill == pytest.approx(found.engine_busy)


def test_separate_and_synchronous_is_a_sum_too_each_part_on_its_own_devices():
    found = simulate(CLUSTER, Layout("sync", 2, 4), JOB)
    # eight groups over two engines by the fewest rows: siblings alternate, and the first of each is on engine 1
    rows, prefills = 16, 8
    first = prefills * JOB.prompt_tokens * ENGINE.prefill_s + rows * ENGINE.response_s
    drawn = first + 50 * ENGINE.pace(rows, rows * (20 + 25))
    assert found.step_s == pytest.approx(drawn + training(4) + TRANSFER.seconds)
    assert found.staleness == {0: 1.0} and found.token_staleness == 0


def test_constant_lengths_one_step_off_take_the_longer_of_sampling_and_training():
    for trainers in (1, 4):
        found = simulate(CLUSTER, Layout("off", 1, trainers, staleness=1, swap=False), replace(JOB, steps=12))
        assert found.step_s == pytest.approx(max(generation(1), training(trainers)) + TRANSFER.seconds)
        assert found.staleness == {1: 1.0} and found.token_staleness == 1


def test_a_synchronous_step_lasts_as_long_as_the_longest_response():
    job = Job(4, 8, TAIL, steps=1, seed=3)
    lengths = TAIL.draw(np.random.default_rng([3, 1]), 32)
    assert simulate(SMOOTH, Layout("sync", 3, 1), job).total_s == pytest.approx(
        0.01 * lengths.max() + 1e-3 * lengths.sum()
    )


def test_the_mean_of_the_longest_of_n_uniform_lengths_is_known():
    """E[max of n of 1..m] = m − Σ_{k<m} (k/m)^n."""
    n, m = 16, 40
    job = Job(4, 4, Recorded(tuple(range(1, m + 1))), steps=600)
    found = simulate(replace(SMOOTH, trainer=Trainer(0.0)), Layout("sync", 4, 1), job)
    expected = m - sum((k / m) ** n for k in range(1, m))
    assert found.step_s == pytest.approx(0.01 * expected, rel=0.01)


def test_one_slot_draws_responses_one_after_another_and_refilled_slots_are_never_empty():
    lengths = TAIL.draw(np.random.default_rng([0, 1]), 32)
    one = replace(SMOOTH, engine=replace(SMOOTH.engine, slots=1), trainer=Trainer(0.0))
    job = Job(8, 4, TAIL, steps=1)
    assert simulate(one, Layout("sync", 1, 1), job).total_s == pytest.approx(0.01 * lengths.sum())
    two = replace(one, engine=replace(one.engine, slots=2))
    ends = [0.0, 0.0]
    for tokens in lengths:
        ends[ends.index(min(ends))] += 0.01 * tokens
    assert simulate(two, Layout("sync", 1, 1), job).total_s == pytest.approx(max(ends))


def test_a_batch_of_shrinking_width_takes_the_integral_of_its_pace():
    """Rows of 1, 2, …, n tokens and no memory traffic: Σ over steps of step_s + row_s · rows still running."""
    n = 12
    cluster = Cluster(Engine(99, row_s=0.1, step_s=1.0), Trainer(0.0))
    found = simulate(cluster, Layout("sync", 1, 1), Job(n, 1, Sequence(range(1, n + 1)), steps=1))
    assert found.total_s == pytest.approx(sum(1.0 + 0.1 * (n - k) for k in range(n)))


def test_a_decode_step_takes_the_longer_of_memory_and_arithmetic_and_an_update_its_share_and_its_exchange():
    engine = Engine(9, row_s=0.1, step_s=1.0, weights_s=0.2, position_s=0.01)
    assert engine.pace(3, 50.0) == pytest.approx(1.7) and engine.pace(9, 50.0) == pytest.approx(1.9)
    assert Trainer(1.0, exchange_s=4.0).seconds(8.0, 1.0, 4) == pytest.approx(2.0 + 3.0)
    assert Trainer(1.0, shards=8).seconds(4.0, 4.0, 2) == pytest.approx(2.0)
    assert Trainer(1.0, shards=8).seconds(2.0, 8.0, 2) == pytest.approx(4.0)


def test_a_batch_bound_by_memory_reads_a_cache_that_grows_with_every_token():
    """Two lengths: 8 rows of 20 + k positions for 30 steps, then 4 of them for 40 more; the others' cache is let go."""
    cluster = Cluster(Engine(9, weights_s=0.03, position_s=1e-4), Trainer(0.0))
    job = Job(8, 1, Sequence([30, 70] * 4), 20.0, steps=1)
    first = 30 * (0.03 + 1e-4 * 8 * (20 + 15))
    rest = 40 * (0.03 + 1e-4 * 4 * (20 + 50))
    assert simulate(cluster, Layout("sync", 1, 1), job).total_s == pytest.approx(first + rest)


class Sequence:
    """Lengths as written."""

    def __init__(self, tokens):
        self.tokens, self.mean = list(tokens), float(np.mean(list(tokens)))

    def draw(self, rng, count):
        return np.resize(np.asarray(self.tokens, np.int64), count)


LAYOUTS = [
    Layout(f"{'colocated' if shared else 'separate'} {s:g} {late} {swap} {chunks}", 4, 4 if shared else 3, shared, s,
           swap, late, chunks)
    for shared in (False, True)
    for s in (0, 0.25, 1, 2.5)
    for late in ("wait", "drop")
    for swap in (True, False)
    for chunks in ((1, 3) if not shared else (1,))
]  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda one: one.name)
def test_what_holds_in_every_layout(layout):
    """No group older than the bound, the right number of groups, shares within 1, the same again by the same seed."""
    cluster = replace(CLUSTER, engine=replace(ENGINE, slots=16))
    for seed in range(2):
        job = Job(8, 4, LONG, 20.0, steps=12, seed=seed)
        found = simulate(cluster, layout, job)
        assert max(found.staleness) <= layout.bound
        assert sum(found.staleness.values()) == pytest.approx(1)
        assert 0 <= found.token_staleness <= layout.bound
        assert found.responses_s * found.step_s == pytest.approx(32)
        for share in (found.engine_busy, found.engine_fill, found.trainer_busy, found.transfer):
            assert 0 < share <= 1 + 1e-9
        assert found == simulate(cluster, layout, job)
        if layout.late == "wait" or layout.bound == 0:
            assert found.dropped == 0


def test_waiting_for_old_groups_is_what_keeps_the_bound():
    """A tail so long that new groups overtake old ones: dropping throws some away, waiting costs time."""
    job = Job(8, 4, lognormal(60.0, 2.0, 5000), steps=30)
    wait, drop = (simulate(SMOOTH, Layout(late, 8, 8, staleness=2, late=late), job) for late in ("wait", "drop"))
    assert drop.dropped > 0 and wait.dropped == 0
    assert drop.step_s < wait.step_s
    assert max(wait.staleness) == 2


def test_more_staleness_is_never_slower_when_rows_do_not_slow_each_other():
    for lengths in (Constant(80), TAIL):
        job = Job(8, 4, lengths, steps=40)
        times = [simulate(SMOOTH, Layout("a", 4, 4, staleness=s), job).total_s for s in (0, 0.5, 1, 2, 4, 8, 16)]
        assert all(later <= earlier * (1 + 1e-9) for earlier, later in pairwise(times))
        assert times[-1] < times[0]


def test_far_ahead_the_slower_side_sets_the_pace():
    job = Job(8, 4, TAIL, steps=60)
    slow = replace(SMOOTH, trainer=Trainer(0.05), transfer=Transfer(fixed_s=0.5))
    found = simulate(slow, Layout("a", 4, 2, staleness=16), job)
    assert found.trainer_busy == pytest.approx(1 - found.transfer, abs=1e-9)
    one_slot = Cluster(Engine(1, step_s=0.01), Trainer(1e-6))
    found = simulate(one_slot, Layout("a", 4, 1, staleness=8), replace(job, lengths=Constant(100)))
    assert found.step_s == pytest.approx(32 * 100 * 0.01 / 4)
    assert found.engine_busy == pytest.approx(1)


def test_weights_swapped_between_tokens_make_tokens_fresher_than_their_group():
    job = Job(8, 4, TAIL, steps=40)
    found = simulate(SMOOTH, Layout("a", 4, 4, staleness=2), job)
    assert found.carried > 0
    drained = simulate(SMOOTH, Layout("a", 4, 4, staleness=2, swap=False), job)
    assert drained.carried == 0 and found.token_staleness < drained.token_staleness


def test_a_row_that_crosses_a_swap_has_tokens_of_both_versions():
    """Lengths 100 and 300 in turn, one group a step, s = 1: by hand. Training takes one second, 100 decode steps."""
    cluster = Cluster(Engine(9, step_s=0.01), Trainer(0.0, step_s=1.0))
    found = simulate(cluster, Layout("a", 1, 1, staleness=1), Job(1, 1, Sequence([100, 300]), steps=2))
    # group 1 (100 tokens, v0) ends at 1 s, trained by 2 s; group 2 (300, v0) has 200 tokens of v0, ends at 3 s at v1
    assert found.staleness == {1: 1.0}
    assert found.token_staleness == pytest.approx(200 / 300)


def test_a_row_stands_still_while_weights_travel():
    """The same, and a hand-over takes two seconds: 1 s drawn, 1 trained, 2, 1 for the last 100 tokens, 1 trained, 2."""
    cluster = Cluster(Engine(9, step_s=0.01), Trainer(0.0, step_s=1.0), Transfer(fixed_s=2.0))
    found = simulate(cluster, Layout("a", 1, 1, staleness=1), Job(1, 1, Sequence([100, 300]), steps=2))
    assert found.total_s == pytest.approx(8.0) and found.token_staleness == pytest.approx(200 / 300)


def test_siblings_that_end_together_are_one_group():
    """Two groups of two equal siblings, one group a step, both begun at once: the second is over after 50 tokens."""
    cluster = Cluster(Engine(9, step_s=0.01), Trainer(0.0))
    found = simulate(cluster, Layout("a", 1, 1, staleness=1), Job(1, 2, Sequence([10, 10, 50, 50]), steps=2))
    assert found.total_s == pytest.approx(0.5)


def test_parts_of_a_batch_are_trained_while_the_rest_is_drawn():
    job = Job(8, 1, Sequence([10, 20, 30, 40, 50, 60, 70, 80]), steps=1)
    cluster = Cluster(Engine(99, step_s=1.0), Trainer(0.0, update_s=5.0))
    assert simulate(cluster, Layout("a", 1, 1), job).total_s == pytest.approx(80 + 5)
    parts = simulate(cluster, Layout("a", 1, 1, chunks=8), job)
    assert parts.total_s == pytest.approx(80 + 5)  # the last part waits for the longest, the others are done by then
    slow = replace(cluster, trainer=Trainer(0.0, update_s=20.0))
    assert simulate(slow, Layout("a", 1, 1, chunks=8), job).total_s == pytest.approx(10 + 8 * 20)


def test_a_queue_bounds_what_is_drawn_ahead_whatever_staleness_would_allow():
    """Engines that are always ahead: a group waits until the queue before it is trained: it is queue / prompts old."""
    ahead = Cluster(Engine(10_000, step_s=1e-6), Trainer(0.0, step_s=1.0))
    job = Job(4, 2, Constant(10), steps=40)
    for queue, age in ((4, 1), (8, 2), (20, 5), (0, 8), (400, 8)):
        found = simulate(ahead, Layout("a", 4, 1, staleness=8, queue=queue), job)
        assert found.staleness == {age: 1.0}
    parts = simulate(ahead, Layout("a", 4, 1, staleness=8, chunks=4, queue=4), job)
    assert parts.staleness == {1: 1.0}


def test_recomputing_the_cache_after_a_swap_costs_its_prefill():
    base = Cluster(Engine(9, step_s=0.01, prefill_s=0.001), Trainer(0.0, step_s=1.0))
    job = Job(1, 1, Sequence([100, 300]), steps=2)
    anew = replace(base, transfer=Transfer(recompute=True))
    layout = Layout("a", 1, 1, staleness=1)
    found, plain = simulate(anew, layout, job), simulate(base, layout, job)
    assert found.total_s - plain.total_s == pytest.approx(0.001 * 200)


def test_dead_groups_cost_no_training_and_prompts_are_trained_once_a_group():
    job = replace(JOB, steps=2)
    whole, half = (simulate(CLUSTER, Layout("s", 1, 1), replace(job, live_share=x)).step_s for x in (1.0, 0.5))
    tokens = job.prompts * (20 + 4 * 50)
    assert whole - half == pytest.approx(0.5 * tokens * TRAINER.token_s)
    apart = simulate(CLUSTER, Layout("s", 1, 1), replace(job, shared_prompt=False)).step_s
    extra = job.prompts * 3 * 20
    assert apart - whole == pytest.approx(extra * (TRAINER.token_s + ENGINE.prefill_s))


def test_time_has_no_unit_of_its_own():
    """Everything three times as slow takes three times as long."""

    def slower(x, names):
        return replace(x, **{name: 3 * getattr(x, name) for name in names})

    times = ("row_s", "step_s", "weights_s", "position_s", "prefill_s", "response_s")
    slow = Cluster(
        slower(ENGINE, times), slower(TRAINER, ("token_s", "update_s", "state_s", "exchange_s", "step_s")),
        Transfer(3e9, 1e9, 0.75),
    )  # fmt: skip
    job, layout = Job(8, 4, TAIL, 20.0, steps=10), Layout("a", 3, 2, staleness=1.5)
    assert simulate(slow, layout, job).step_s == pytest.approx(3 * simulate(CLUSTER, layout, job).step_s, rel=1e-6)


def test_every_layout_of_a_seed_draws_the_same_lengths():
    job = Job(8, 4, TAIL, steps=1)
    tokens = [simulate(SMOOTH, layout, job) for layout in (Layout("a", 1, 1), Layout("b", 4, 2, chunks=4))]
    assert tokens[0].tokens_s * tokens[0].step_s == pytest.approx(tokens[1].tokens_s * tokens[1].step_s)
    other = simulate(SMOOTH, Layout("a", 1, 1), replace(job, seed=1))
    assert other.total_s != tokens[0].total_s


def test_no_faults_change_nothing():
    job = Job(8, 4, TAIL, 20.0, steps=10)
    for layout in (Layout("a", 3, 2, staleness=1.5), Layout("c", 4, 4, colocated=True)):
        without = simulate(CLUSTER, layout, job)
        assert simulate(replace(CLUSTER, faults=Faults(math.inf, 1000.0, 3)), layout, job) == without
        rare = simulate(replace(CLUSTER, faults=Faults(1e15, 1000.0, 3)), layout, job)
        assert rare == without


def test_a_trainer_that_fails_goes_back_to_its_checkpoint_as_often_as_the_law_says():
    """Work w under exponential failures of rate r, restart R: E[time] = (1/r + R)(exp(r·w) − 1)."""
    cluster = Cluster(Engine(99, step_s=0.1), Trainer(0.0, step_s=5.0), faults=Faults(600.0, 20.0, 4))
    job, layout = Job(1, 1, Constant(50), steps=400), Layout("c", 4, 4, colocated=True)
    rate, work = 4 / 600, 4 * 10.0
    expected = 100 * (1 / rate + 20.0) * (math.exp(rate * work) - 1)
    times = [simulate(cluster, layout, replace(job, seed=seed)) for seed in range(24)]
    assert np.mean([one.total_s for one in times]) == pytest.approx(expected, rel=0.03)
    assert all(one.redone > 0 and one.failures > 0 for one in times)


def test_an_engine_that_fails_gives_its_responses_to_the_others_and_the_run_ends():
    cluster = replace(SMOOTH, faults=Faults(40.0, 5.0, 1000))
    job, layout = Job(8, 4, TAIL, steps=10), Layout("a", 8, 1, staleness=1)
    one = replace(cluster, faults=replace(cluster.faults, mtbf_s=60.0))
    found = simulate(one, layout, job)
    assert found.failures > 0
    assert max(found.staleness) <= 1
    assert found.total_s > simulate(SMOOTH, layout, job).total_s


def test_a_checkpoint_costs_its_seconds_when_it_is_due():
    job = replace(JOB, steps=6)
    due = replace(CLUSTER, faults=Faults(checkpoint_every=3, checkpoint_s=6.0))
    layout = Layout("s", 1, 1)
    assert simulate(due, layout, job).total_s - simulate(CLUSTER, layout, job).total_s == pytest.approx(12.0)


@pytest.mark.parametrize(
    ("layout", "says"),
    [
        (Layout("none", 0, 4), "both need at least one"),
        (Layout("late", 2, 2, late="later"), 'write "wait" or "drop"'),
        (Layout("back", 2, 2, staleness=-1), "staleness is at least 0"),
        (Layout("many", 2, 2, chunks=9), "a chunk holds at least one prompt"),
        (Layout("short", 2, 2, staleness=1, queue=7), "never holds the 8 that the trainer takes at once"),
    ],
)
def test_a_layout_that_cannot_run_is_refused(layout, says):
    with pytest.raises(UsageError, match=says):
        simulate(CLUSTER, layout, JOB)
