"""Layouts compared, and the speeds that a model makes of a machine."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from gropius.errors import UsageError
from gropius.plan import cluster_question as ask
from gropius.plan.cluster import Cluster, Engine, Job, Trainer, Transfer, least_trainer, speeds
from gropius.plan.cost import ModelShape, Workload, cost
from gropius.plan.layouts import compare, layouts
from gropius.plan.lengths import Constant, lognormal
from gropius.plan.machines import machine
from gropius.plan.question import typed

SHAPE = ModelShape(28, 3584, 28, 4, 128, 18944, 152064, tied=False)
LOAD = Workload(64, 8, 128.0, 2000.0)
JOB = Job(16, 4, Constant(100), steps=8)


def best(engine, trainer, transfer=None, lengths=None):
    made = Cluster(engine, trainer, transfer or Transfer())
    job = replace(JOB, lengths=lengths or JOB.lengths)
    return compare(made, job, layouts(8, 1, 1, (1.0,), "wait"))


def row(found, name):
    return next(one for one in found.rows if one.layout.name.startswith(name))


def test_what_holds_a_step_back_is_the_part_that_was_made_slow():
    fast = Engine(10_000, step_s=1e-4)
    trainer = best(fast, Trainer(0.01))
    assert row(trainer, "colocated").held_back_by == "trainer"
    assert row(best(Engine(1, step_s=0.01), Trainer(1e-7)), "colocated").held_back_by == "engines"
    slow = best(fast, Trainer(1e-7), Transfer(fixed_s=30.0))
    assert row(slow, "separate, synchronous").held_back_by == "hand-over"
    tail = best(Engine(10_000, step_s=0.01), Trainer(1e-7), lengths=lognormal(100.0, 1.5, 4000))
    assert row(tail, "colocated").held_back_by == "long tail"


def test_the_best_is_the_fastest_and_each_kind_is_at_its_best_split():
    found = best(Engine(16, step_s=0.01, row_s=0.001), Trainer(2e-3))
    assert found.best.outcome.step_s == min(one.outcome.step_s for one in found.rows)
    for one in found.rows:
        same = [t.outcome.step_s for t in found.tried if t.layout.name == one.layout.name]
        assert not same or one.layout in [t.layout for t in found.tried if t.outcome.step_s == min(same)]
        assert one.layout.devices <= 8


def test_whole_engines_and_a_trainer_that_fits_are_all_that_is_tried():
    for kind in layouts(64, 4, 8, (1.0,), "wait"):
        for one in kind:
            assert one.engine_devices % 4 == 0 and one.trainer_devices >= 8 and one.devices <= 64
    assert {one.name for kind in layouts(1, 1, 1, (1.0,), "wait") for one in kind} == {
        "colocated", "colocated, partial rollouts"
    }  # fmt: skip
    with pytest.raises(UsageError, match="take more devices"):
        layouts(2, 4, 1, (1.0,), "wait")


def test_speeds_are_those_of_the_cost_model():
    h100 = replace(machine("h100"), link=450e9)
    made = speeds(SHAPE, LOAD, h100)
    report = {p.name: p.time_s for p in cost(SHAPE, LOAD, h100).phases}
    assert made.trainer.token_s * LOAD.unique_tokens == pytest.approx(report["training"])
    assert made.trainer.state_s == pytest.approx(report["update"])
    assert made.engine.weights_s == pytest.approx(2 * SHAPE.matmul_parameters / (0.6 * 3350e9))
    two = speeds(SHAPE, LOAD, h100, tensor_parallel=2)
    assert two.engine.pace(8, 1e4) == pytest.approx(made.engine.pace(8, 1e4) / 2)
    assert made.transfer.seconds == pytest.approx(2 * SHAPE.parameters / 450e9)
    room = made.engine.slots * 2 * SHAPE.kv_elements * 2128 + 2 * SHAPE.parameters
    assert 0.88 < room / 80e9 <= 0.9
    with pytest.raises(UsageError, match="raise tensor_parallel"):
        speeds(replace(SHAPE, layers=200), LOAD, h100)
    assert least_trainer(SHAPE, h100) == math.ceil(16 * SHAPE.parameters / 72e9)


def test_a_capped_lognormal_has_the_mean_that_was_asked():
    for mean, spread, cap in ((1000.0, 1.0, 8192), (64.0, 0.5, 0), (300.0, 2.0, 1000)):
        assert lognormal(mean, spread, cap).mean == pytest.approx(mean, rel=0.01)
    with pytest.raises(UsageError, match="limit of 10 tokens"):
        lognormal(20.0, 1.0, 10)


def test_what_source_says_fills_what_was_not_asked():
    known = ask.Known(12, 6, 400, Constant(33))
    step = ask.job(ask.ClusterQuestion(), known)
    assert (step.prompts, step.group_size, step.lengths) == (12, 6, Constant(33))
    step = ask.job(ask.ClusterQuestion(prompts=3, response_tokens=50.0, spread=0.0), known)
    assert (step.prompts, step.group_size, step.lengths) == (3, 6, Constant(50))
    with pytest.raises(UsageError, match="needs all of"):
        ask.device(ask.ClusterQuestion(tflops=1.0), None)
    assert typed({"staleness": [1, 2]}, {"staleness": (0.5,)}) == {"staleness": (1.0, 2.0)}
    with pytest.raises(UsageError, match="list of numbers"):
        typed({"staleness": ["a"]}, {"staleness": (0.5,)})
