"""Laws of the cost model: hand-worked counts, published tables, measured runs of the development machine."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gropius.errors import UsageError
from gropius.plan.cost import ModelShape, Workload, cost, shape_of
from gropius.plan.machines import MACHINES, Machine, machine
from gropius.plan.probe import probe

SMOL = ModelShape(30, 576, 9, 3, 64, 1536, 49152)
TEN = ModelShape(8, 256, 4, 4, 64, 768, 4096)
TWO_CORES = Machine("2 cores", 440e9, 45e9, 24e9, 1, 0.48, 0.42, 1.0)


def phase(report, name):
    return next(p for p in report.phases if p.name == name)


def test_the_matmul_parameters_of_smollm2_are_134_5_million_and_its_cache_23_kb_a_token():
    assert SMOL.matmul_parameters == 134_479_872
    assert SMOL.kv_elements * 2 == 23_040


@pytest.mark.parametrize(("ratio", "group", "gain"), [(0.25, 4, 1.18), (1, 8, 1.78), (2, 16, 2.67), (8, 8, 4.5)])
def test_sharing_the_prompt_saves_g_p_plus_r_over_p_plus_g_r(ratio, group, gain):
    load = Workload(2, group, 100 * ratio, 100)
    assert load.sequence_tokens / load.unique_tokens == pytest.approx(gain, abs=0.005)


def test_operations_of_a_step_are_two_n_a_decoded_and_six_n_a_trained_token():
    load = Workload(4, 8, 45, 64)
    report = cost(SMOL, load, machine("h200"))
    assert phase(report, "training").tokens == 4 * (45 + 8 * 64) == 2228
    attention = 12 * 30 * 9 * 64 * 4 * (45**2 / 2 + 8 * 64 * (45 + 32))
    assert phase(report, "training").flops == pytest.approx(6 * 134_479_872 * 2228 + attention)
    assert phase(report, "decode").tokens == 2048
    recomputed = cost(SMOL, replace(load, recompute=True), machine("h200"))
    assert phase(recomputed, "training").flops == pytest.approx(phase(report, "training").flops * 8 / 6)


@pytest.mark.parametrize(
    ("shape", "load", "measured"),
    [(SMOL, Workload(2, 8, 128, 128), 491), (TEN, Workload(8, 8, 64, 64), 6127)],
)
def test_training_speed_of_two_models_on_two_cores_is_within_25_percent_of_measured(shape, load, measured):
    report = cost(shape, load, TWO_CORES)
    assert load.sequence_tokens / phase(report, "training").time_s == pytest.approx(measured, rel=0.25)


def test_decode_speed_at_64_rows_on_two_cores_is_within_25_percent_of_measured():
    load = Workload(8, 8, 64, 128)
    report = cost(SMOL, load, TWO_CORES)
    assert 64 * 128 / phase(report, "decode").time_s == pytest.approx(685, rel=0.25)


def test_decode_is_bound_by_bandwidth_for_few_rows_and_by_operations_for_many():
    h200 = replace(machine("h200"), decode_efficiency=1.0, bandwidth_efficiency=1.0)
    short = {"prompt_tokens": 1, "response_tokens": 1}
    one, many = (cost(SMOL, Workload(n, 1, **short), h200) for n in (1, 2000))
    assert phase(one, "decode").time_s == pytest.approx(phase(one, "decode").bytes / 4.8e12, rel=1e-6)
    assert phase(many, "decode").time_s == pytest.approx(phase(many, "decode").flops / 989e12, rel=1e-6)


def test_dead_groups_cost_sampling_and_no_training():
    load = Workload(16, 8, 64, 64)
    whole, half = cost(SMOL, load, TWO_CORES), cost(SMOL, replace(load, live_share=0.5), TWO_CORES)
    assert phase(half, "training").flops == pytest.approx(phase(whole, "training").flops / 2)
    assert phase(half, "decode") == phase(whole, "decode")


def test_more_devices_divide_time_and_states_and_pay_for_the_link():
    load = Workload(64, 16, 512, 512)
    one, eight = cost(SMOL, load, machine("h100")), cost(SMOL, load, machine("h100", 8))
    assert eight.step_s < one.step_s and eight.step_s > one.step_s / 8.5
    assert eight.memory_bytes["states"] == pytest.approx(one.memory_bytes["states"] / 8)
    slow = cost(SMOL, load, replace(machine("h100", 8), link=1e9))
    assert slow.step_s > eight.step_s


def test_a_critic_adds_a_second_model_of_states_and_a_second_training_pass():
    report = cost(SMOL, Workload(4, 8, 45, 64), machine("h200"))
    assert report.critic["memory_bytes"] == 16 * SMOL.parameters
    assert report.critic["time_s"] >= phase(report, "training").time_s


def test_a_model_that_does_not_fit_is_said_not_to_fit():
    llama = ModelShape(32, 4096, 32, 8, 128, 14336, 128256, tied=False)
    assert llama.parameters == pytest.approx(8.03e9, rel=0.01)
    load = Workload(32, 8, 512, 1024)
    assert not cost(llama, load, machine("h100")).fits
    assert cost(llama, load, machine("h100", 8)).fits


def test_refusals_name_what_to_write():
    with pytest.raises(UsageError, match='did you mean "h100"'):
        machine("h1000")
    with pytest.raises(UsageError, match="live_share"):
        cost(SMOL, Workload(1, 1, 1, 1, live_share=2.0), MACHINES["l4"])
    with pytest.raises(UsageError, match="vocab_size"):
        shape_of({"num_hidden_layers": 1, "hidden_size": 8, "num_attention_heads": 1, "intermediate_size": 8})


def test_a_probe_measures_a_machine_that_can_be_planned_with():
    small = ModelShape(2, 32, 4, 2, 8, 48, 64)
    here = probe(small, 8, seconds=0.1)
    report = cost(small, Workload(1, 2, 8, 8), here)
    assert here.flops > 0 and here.bandwidth > 0 and here.memory_bytes > 1e8 and report.step_s > 0
