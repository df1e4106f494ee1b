"""Laws of the budget split: worked numbers, simulation, the fit's honesty, what is recommended."""

from __future__ import annotations

import json

import numpy as np
import pytest

from gropius.errors import DataError, UsageError
from gropius.plan.beta import BetaMixture, Fit, fit, point_mass
from gropius.plan.counts import PassCounts, counts, from_groups, read_counts
from gropius.plan.signal import ESTIMATORS, binary_weight, signal
from gropius.plan.split import Budget, plan_split, schedule


def known(*rates: float) -> Fit:
    """A fit without uncertainty at given pass rates."""
    one = point_mass(list(rates))
    return Fit(one, BetaMixture(one.weight[None], one.a[None], one.b[None]), {}, 1000, float(np.mean(rates)))


@pytest.mark.parametrize(
    ("p", "group", "dead", "factor"),
    [(0.02, 4, 0.922, 12.9), (0.02, 8, 0.851, 6.70), (0.02, 16, 0.724, 3.62), (0.1, 4, 0.656, 2.91),
     (0.1, 8, 0.431, 1.76), (0.1, 16, 0.185, 1.23), (0.5, 4, 0.125, 1.14), (0.5, 8, 0.0078, 1.008)],
)  # fmt: skip
def test_useless_groups_and_over_sampling_are_the_closed_form_on_both_sides(p, group, dead, factor):
    for rate in (p, 1 - p):
        row = plan_split(known(rate), Budget(512), [group]).row
        assert row.dead.value == pytest.approx(p**group + (1 - p) ** group, rel=1e-9)
        assert row.dead.value == pytest.approx(dead, abs=6e-4)
        assert row.refill_factor.value == pytest.approx(factor, rel=4e-3)


def test_all_failed_and_all_solved_are_counted_apart():
    row = plan_split(known(0.1), Budget(512), [4]).row
    assert row.all_failed.value == pytest.approx(0.9**4) and row.all_solved.value == pytest.approx(0.1**4)


@pytest.mark.parametrize(
    ("p", "live_32", "live_4"),
    [(0.05, 12.900616248663987, 23.7424), (0.1, 15.450610588753198, 44.0064), (0.5, 16, 112)],
)
def test_512_responses_split_as_16_x_32_or_128_x_4(p, live_32, live_4):
    plan = plan_split(known(p), Budget(512), [4, 32])
    assert [row.prompts for row in plan.rows] == [128, 16]
    assert plan.rows[0].live_prompts.value == pytest.approx(live_4, rel=1e-8)
    assert plan.rows[1].live_prompts.value == pytest.approx(live_32, rel=1e-8)


def test_early_hard_prompts_want_8_to_16_siblings_and_later_ones_fewer_and_more_prompts():
    chosen = [plan_split(known(p), Budget(512)).row for p in (0.05, 0.1, 0.3, 0.5)]
    assert [row.group_size for row in chosen] == [16, 8, 4, 4]
    assert [row.prompts for row in chosen] == [32, 64, 128, 128]


ROWS = {  # p, dr_grpo, rloo, population, sample, maxrl
    (4, 0.05): (0.75, 1.0, 1.7100059808498338, 1.4809086200392825, 2.8525),
    (8, 0.1): (0.875, 1.0, 2.3276890521071754, 2.1773537339824114, 5.217031),
    (16, 0.5): (0.9375, 1.0, 1.9341226048784481, 1.8727061553544584 + 2.6e-14, 1.99993896484375),
    (2, 0.9): (0.5, 1.0, 1.0, 0.7071067811865476, 1.0),
}


@pytest.mark.parametrize("key", ROWS)
def test_expected_weight_of_a_prompt_is_exact_for_every_scale(key):
    group, p = key
    names = ("none", "leave_one_out", "group_std", "group_std_sample", "group_mean")
    assert [binary_weight(p, group, n) for n in names] == pytest.approx(ROWS[key], rel=1e-7)


@pytest.mark.parametrize("scale", ESTIMATORS)
def test_signal_variance_and_energy_are_the_moments_of_real_groups(scale):
    """Advantages of drawn groups, computed response by response, times the scores of one logit."""
    random, mixture, group = np.random.default_rng(3), BetaMixture(*map(np.array, ([0.4, 0.6], [0.8, 5], [4.0, 3]))), 5
    p = mixture.draw(40_000, random)
    r = (random.random((len(p), group)) < p[:, None]).astype(float)
    mean = r.mean(1, keepdims=True)
    std = r.std(1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        a = {
            "group_std": (r - mean) / std,
            "group_std_sample": (r - mean) / r.std(1, ddof=1, keepdims=True),
            "none": r - mean,
            "leave_one_out": (r - mean) * group / (group - 1),
            "group_mean": (r - mean) / mean,
        }[scale]
    a = np.where(std > 0, a, 0.0)
    gradient = (a * (r - p[:, None])).mean(1)
    exact = signal(mixture, group, scale)
    tolerance = 5 / np.sqrt(len(p))
    assert gradient.mean() == pytest.approx(float(exact.mean), abs=tolerance * gradient.std())
    assert gradient.var() == pytest.approx(float(exact.variance), rel=0.08)
    assert (a**2).mean() == pytest.approx(float(exact.energy), rel=0.03)


def test_predicted_dead_share_and_live_prompts_of_a_thousand_mixtures_lie_in_the_simulated_intervals():
    random = np.random.default_rng(7)
    misses = 0
    for _ in range(1000):
        k = int(random.integers(1, 4))
        mixture = BetaMixture(
            random.dirichlet(np.ones(k)), 10 ** random.uniform(-1, 1.5, k), 10 ** random.uniform(-1, 1.5, k)
        )
        group, steps = int(random.choice([2, 4, 8, 16])), 200
        row = plan_split(known_mixture(mixture), Budget(group * 16), [group]).row
        solved = random.binomial(group, mixture.draw(steps * row.prompts, random)).reshape(steps, row.prompts)
        live = ((solved > 0) & (solved < group)).sum(1)
        error = 3.3 * max(live.std(), 0.05) / np.sqrt(steps)  # 99.9 %
        misses += abs(live.mean() - row.live_prompts.value) > error
        misses += abs(1 - live.mean() / row.prompts - row.dead.value) > error / row.prompts
        assert row.live_spread == pytest.approx(live.std(), abs=0.25 * max(row.live_spread, 0.6))
    assert misses <= 2 * 6  # two figures of a thousand mixtures at 99.9 %: 2 expected


def known_mixture(mixture: BetaMixture) -> Fit:
    wide = BetaMixture(mixture.weight[None], mixture.a[None], mixture.b[None])
    return Fit(mixture, wide, {}, 1000, float(mixture.mean))


def test_the_fitted_interval_covers_the_true_dead_share_about_as_often_as_it_says():
    random, covered, trials = np.random.default_rng(11), 0, 30
    for _ in range(trials):
        truth = BetaMixture(np.array([0.5, 0.5]), random.uniform(0.3, 3, 2), random.uniform(0.5, 6, 2))
        fitted = fit(counts(random.binomial(8, truth.draw(150, random)).tolist(), 8), components=2, draws=60)
        low, high = np.quantile(fitted.samples.dead(8), [0.025, 0.975])
        covered += low <= float(truth.dead(8)) <= high
    assert covered >= 0.86 * trials


def test_a_fit_recovers_two_kinds_of_prompts_and_prefers_one_component_for_one_kind():
    random = np.random.default_rng(2)
    truth = BetaMixture(np.array([0.5, 0.5]), np.array([1.0, 30.0]), np.array([30.0, 4.0]))
    mixed = fit(counts(random.binomial(16, truth.draw(600, random)).tolist(), 16))
    assert mixed.components == 2
    assert float(mixed.mixture.dead(4)) == pytest.approx(float(truth.dead(4)), abs=0.03)
    single = fit(counts(random.binomial(16, random.beta(3, 3, 600)).tolist(), 16))
    assert single.components == 1
    assert (single.mixture.a[0], single.mixture.b[0]) == (pytest.approx(3, rel=0.3), pytest.approx(3, rel=0.3))


def test_the_same_seed_gives_the_same_plan():
    measured = counts([0, 1, 5, 8, 8, 2, 0], 8)
    first, second = (plan_split(measured, Budget(64), seed=5).as_dict() for _ in range(2))
    assert first == second and json.loads(json.dumps(first, allow_nan=False)) == first


@pytest.mark.parametrize("solved", [[0], [8], [0] * 40, [8] * 40, [3]])
def test_hopeless_mastered_and_tiny_measurements_still_give_finite_plans(solved):
    plan = plan_split(counts(solved, 8), Budget(64))
    json.dumps(plan.as_dict(), allow_nan=False)
    assert all(0 <= row.dead.low <= row.dead.value <= row.dead.high <= 1 + 1e-9 for row in plan.rows)


def test_growing_all_failed_groups_costs_what_a_simulation_costs():
    random, group, limit = np.random.default_rng(4), 4, 16
    mixture = BetaMixture(np.array([1.0]), np.array([0.7]), np.array([4.0]))
    row = plan_split(known_mixture(mixture), Budget(4000, grow_limit=limit), [group]).row
    p = mixture.draw(40_000, random)
    size, solved = np.full(len(p), group), random.binomial(group, p)
    for _ in range(limit // group - 1):
        more = solved == 0
        solved[more] = random.binomial(group, p[more])
        size[more] += group
    assert row.grow_responses / row.prompts == pytest.approx(size.mean(), rel=0.01)
    assert row.grow_live == pytest.approx(((solved > 0) & (solved < size)).mean(), abs=0.01)


def test_a_rising_pass_rate_gives_a_schedule_of_falling_group_sizes():
    random = np.random.default_rng(9)
    rates = np.repeat([0.06, 0.12, 0.3, 0.5], 100)
    solved = random.binomial(8, random.beta(rates * 8, (1 - rates) * 8))
    steps = np.repeat(np.arange(40), 10)
    measured = PassCounts(solved, np.full(400, 8), steps)
    phases = schedule(measured, Budget(512))
    sizes = [phase.group_size for phase in phases if phase.measured]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] >= 8 and sizes[-1] <= 4
    assert [phase.step for phase in phases] == sorted(phase.step for phase in phases)


def test_a_budget_of_tokens_is_counted_in_responses_of_the_mean_length():
    assert Budget(51200, "tokens", 100.0).responses == 512
    with pytest.raises(UsageError, match="--response-tokens"):
        _ = Budget(51200, "tokens").responses
    with pytest.raises(UsageError, match="does not pay for one group"):
        plan_split(known(0.5), Budget(3), [4, 8])


def test_recorded_groups_become_counts_and_void_groups_leave():
    class Recorded:
        def __init__(self, step, raw):
            self.step, self.task_key, self.raw = step, "t", raw

    measured = from_groups([Recorded(1, [1, 0, 0.5]), Recorded(2, []), Recorded(3, [1.0, 1.0])])
    assert (measured.solved.tolist(), measured.sampled.tolist(), measured.step.tolist()) == ([1, 2], [3, 2], [1, 3])


@pytest.mark.parametrize(
    ("text", "message"),
    [('{"solved": [9], "sampled": 8}', "9 solved of 8"), ("[]", "no prompt"), ('[[1]]', "row 0"), ("{", "JSON"),
     ('[[0.5, 8]]', "whole numbers"), ('"x"', "list of rows")],
)  # fmt: skip
def test_a_malformed_file_of_counts_is_refused_by_its_row(tmp_path, text, message):
    path = tmp_path / "counts.json"
    path.write_text(text)
    with pytest.raises(DataError, match=message):
        read_counts(path)


def test_the_three_shapes_of_a_file_of_counts_are_one_measurement(tmp_path):
    texts = [
        '{"solved": [0, 3], "sampled": 8}',
        "[[0, 8], [3, 8]]",
        '[{"solved": 0, "sampled": 8}, {"solved": 3, "sampled": 8}]',
    ]
    for text in texts:
        path = tmp_path / "counts.json"
        path.write_text(text)
        measured = read_counts(path)
        assert (measured.solved.tolist(), measured.sampled.tolist()) == ([0, 3], [8, 8])
