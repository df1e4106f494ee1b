"""A recorded run as the measurement of a plan."""

from __future__ import annotations

import numpy as np
import pytest

from gropius.errors import DataError, UsageError
from gropius.objective.presets import PRESETS
from gropius.plan import recorded
from gropius.plan.cost import ModelShape, Workload, cost
from gropius.plan.machines import Machine
from gropius.plan.question import scale_of
from gropius.plan.signal import ESTIMATORS


class Table:
    def __init__(self, rows):
        self.rows = rows

    def to_pylist(self):
        return self.rows


def row(group, member, raw, *, step=1, status="scored", reward=0.0, length=3):
    return {"step": step, "group_id": group, "member": member, "status": status, "raw": raw, "reward": reward,
            "loss_mask": [True] * length}  # fmt: skip


@pytest.fixture
def reader(monkeypatch):
    tables: dict[int, Table] = {}

    class Reader:
        def __init__(self, folder):
            self.folder, self.problems = folder, ["step 3 is damaged"]

        def steps(self):
            return sorted(tables)

        def table(self, step, columns):
            return tables[step]

    monkeypatch.setattr(recorded, "RunReader", Reader)
    return tables


def test_groups_of_a_run_become_counts_of_solved_responses(reader, tmp_path):
    reader[1] = Table([row("a", 0, 1.0), row("a", 1, 0.0, length=5), row("b", 0, 1.0), row("b", 1, 1.0)])
    reader[2] = Table([row("c", 0, 0.5, step=2), row("c", 1, None, step=2, reward=1.0)])
    counts, notes = recorded.from_run(tmp_path)
    assert np.stack([counts.solved, counts.sampled, counts.step], 1).tolist() == [[1, 2, 1], [2, 2, 1], [1, 2, 2]]
    assert counts.response_tokens == pytest.approx(20 / 6)
    assert any("no raw metric" in note for note in notes) and "step 3 is damaged" in notes


def test_void_unscored_and_greedy_responses_are_left_out(reader, tmp_path):
    reader[1] = Table([row("a", 0, 1.0), row("a", 1, None, status="void", reward=None), row("a", -1, 1.0),
                       row("b", 0, None, status=None, reward=None)])  # fmt: skip
    counts, _ = recorded.from_run(tmp_path)
    assert counts.sampled.tolist() == [1]
    reader.clear()
    with pytest.raises(DataError, match="no scored group"):
        recorded.from_run(tmp_path)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_has_an_estimator(name):
    scale, note = scale_of(PRESETS[name].objective)
    assert scale in ESTIMATORS
    if name in ("grpo", "dapo", "gspo"):
        assert (scale, note) == ("group_std", "")


SHAPE = ModelShape(4, 128, 4, 4, 32, 352, 100)


@pytest.mark.parametrize("training_s", [0.0, 2.0])
def test_a_machine_taken_from_a_run_costs_what_the_run_took(training_s):
    measured = recorded.Timing(Workload(8, 8, 20, 60, live_share=0.5 if training_s else 0.0), 1.5, training_s)
    machine = recorded.calibrated(SHAPE, measured, Machine("unit", 1e12, 50e9, 1e12))
    times = {p.name: p.time_s for p in cost(SHAPE, measured.load, machine).phases}
    assert times["prefill"] + times["decode"] == pytest.approx(1.5, rel=1e-6)
    if training_s:
        assert times["training"] + times["update"] == pytest.approx(2.0, rel=1e-6)


def test_twice_the_responses_of_a_recorded_step_take_twice_the_time_where_operations_bind():
    measured = recorded.Timing(Workload(8, 8, 20, 60, live_share=1.0), 1.5, 2.0)
    machine = recorded.calibrated(SHAPE, measured, Machine("unit", 1e12, 50e9, 1e12))
    double = cost(SHAPE, Workload(16, 8, 20, 60, live_share=1.0), machine)
    assert double.step_s == pytest.approx(2 * 3.5, rel=0.01)


def test_the_times_of_a_run_are_medians_without_its_first_step(monkeypatch, tmp_path):
    class Reader:
        def __init__(self, folder):
            self.folder = folder

        def metrics_by_step(self):
            rows = [(9.0, 5.0, 640, 320), (1.0, 2.0, 640, 160), (2.0, 4.0, 640, 320), (3.0, 3.0, 640, 480)]
            names = ("sampling_time_s", "training_time_s", "tokens_sampled", "tokens_trained")
            return {i: dict(zip(names, row, strict=True)) for i, row in enumerate(rows)}

        def resolved(self):
            return {"rollout": {"prompts": 8, "group_size": 8}}

    monkeypatch.setattr(recorded, "RunReader", Reader)
    took = recorded.timing(tmp_path, 20.0)
    assert (took.sampling_s, took.training_s) == (2.0, 3.0)
    assert (took.load.responses, took.load.response_tokens, took.load.live_share) == (64, 10.0, 0.5)
    monkeypatch.setattr(Reader, "metrics_by_step", lambda self: {})
    with pytest.raises(UsageError, match="no step times"):
        recorded.timing(tmp_path, 20.0)


def steps_of(longest, tokens, noise=0.0):
    """Metrics of steps whose sampling takes 10 ms a decode step and 1 ms a token."""
    chance = np.random.default_rng(0)
    return {
        i: {
            "completions/max_length": x, "tokens_sampled": n, "tokens_trained": n, "training_time_s": 1.0,
            "sampling_time_s": 0.01 * x + 1e-3 * n + noise * chance.standard_normal(),
        }
        for i, (x, n) in enumerate(zip(longest, tokens, strict=True))
    }  # fmt: skip


@pytest.mark.parametrize(
    ("longest", "noise", "told"),
    [
        (range(60, 108, 4), 0.0, 0.01),
        (range(60, 108, 4), 0.01, 0.01),
        ([100] * 12, 0.5, 0.0),
        (range(60, 64), 0.0, 0.0),
    ],
)
def test_the_fixed_time_of_a_decode_step_is_told_where_the_steps_of_a_run_tell_it(
    monkeypatch, tmp_path, longest, noise, told
):
    tokens = [640 + 37 * (i * i % 5) for i in range(len(longest))]
    rows = steps_of(longest, tokens, noise)

    class Reader:
        def __init__(self, folder):
            self.folder = folder

        def metrics_by_step(self):
            return rows

        def resolved(self):
            return {"rollout": {"prompts": 4, "group_size": 8}}

    monkeypatch.setattr(recorded, "RunReader", Reader)
    took = recorded.timing(tmp_path, 5.0)
    assert took.step_s == pytest.approx(told, rel=0.2)
    machine = recorded.calibrated(SHAPE, took, Machine("unit", 1e12, 50e9, 1e12))
    assert machine.step_overhead_s == took.step_s and ("too alike" in machine.source) == (not told)
    times = {p.name: p.time_s for p in cost(SHAPE, took.load, machine).phases}
    assert times["prefill"] + times["decode"] == pytest.approx(took.sampling_s, rel=1e-6)
