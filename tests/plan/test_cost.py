"""Laws of the cost model: hand-worked counts, published tables, measured runs of the development machine."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gropius.errors import UsageError
from gropius.plan.cost import Footprint, ModelShape, Workload, cost, shape_of
from gropius.plan.machines import MACHINES, Machine, machine

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


def test_what_is_refilled_is_drawn_again_and_not_trained_on():
    load = Workload(8, 8, 64, 64)
    once, twice = cost(SMOL, load, TWO_CORES), cost(SMOL, replace(load, drawn=2.0), TWO_CORES)
    for name in ("prefill", "decode"):
        assert phase(twice, name).time_s == pytest.approx(2 * phase(once, name).time_s)
    assert phase(twice, "training") == phase(once, "training")


def test_finished_rows_leave_a_wave_so_that_a_long_tail_costs_steps_and_no_row_work():
    unlimited = replace(TWO_CORES, bandwidth=float("inf"))
    even, tail = (cost(SMOL, Workload(8, 8, 0, 64, length_spread=s), unlimited) for s in (1.0, 4.0))
    assert phase(tail, "decode").flops == pytest.approx(phase(even, "decode").flops)
    assert phase(tail, "decode").time_s == pytest.approx(phase(even, "decode").time_s)
    paced = replace(unlimited, step_overhead_s=0.5)
    extra = [phase(cost(SMOL, Workload(8, 8, 0, 64, length_spread=s), paced), "decode").time_s for s in (1.0, 4.0)]
    assert extra[1] - extra[0] == pytest.approx(3 * 64 * 0.5)


def test_overhead_is_of_responses_updates_and_the_step():
    here = replace(TWO_CORES, response_s=0.01, update_s=2.0, fixed_s=100.0)
    report = cost(SMOL, Workload(4, 8, 64, 64, epochs=3, updates=2), here)
    assert phase(report, "overhead").time_s == pytest.approx(32 * 0.01 + 6 * 2.0 + 100.0)
    assert phase(report, "update").bytes == 28 * SMOL.parameters * 6


def test_cache_and_activations_take_turns_in_the_same_memory():
    load = Workload(8, 8, 64, 64)
    rule, known = cost(SMOL, load, TWO_CORES), cost(SMOL, load, TWO_CORES, Footprint(base_bytes=3e9))
    memory = rule.memory_bytes
    moving = memory["cache"], memory["activations"] + memory["logits"]
    assert min(moving) > 0
    assert rule.peak_bytes == pytest.approx(sum(memory.values()) - min(moving))
    assert known.peak_bytes == pytest.approx(rule.peak_bytes + 3e9)


def test_an_adapter_has_gradients_and_moments_of_its_own_only():
    load = Workload(8, 8, 64, 64)
    whole, adapter = (cost(SMOL, load, TWO_CORES, Footprint(trained=n)).memory_bytes["states"] for n in (0, 1_000_000))
    assert whole == 16 * SMOL.parameters
    assert adapter == 4 * SMOL.parameters + 12_000_000
