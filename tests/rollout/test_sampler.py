"""One draw a row, exactly from the distribution asked for, with its log-probabilities."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gropius.rollout.sampler import CANDIDATES, Rules, _first_above, draw
from gropius.types import Sampling


def rules(n, **settings):
    return Rules.of([Sampling(1, **settings)] * n)


def slow_distribution(z, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """The distribution as the definition says, in float64 on a sorted list. Ties do not occur in these tests."""
    p = np.exp(z / temperature - (z / temperature).max())
    p /= p.sum()
    order = list(np.argsort(-p))
    kept = order[: top_k or len(order)]
    total, before, left = p[kept].sum(), 0.0, []
    for token in kept:
        if top_p < 1 and left and before >= top_p * total:
            break
        left.append(token)
        before += p[token]
    left = [token for token in left if p[token] >= min_p * p[order[0]]]
    q = np.zeros_like(p)
    q[left] = p[left]
    return p, q / q.sum()


CASES = [
    {},
    {"temperature": 0.6},
    {"temperature": 1.7},
    {"top_k": 7},
    {"top_p": 0.8},
    {"min_p": 0.1},
    {"temperature": 0.8, "top_k": 30, "top_p": 0.9, "min_p": 0.02},
]


@pytest.mark.parametrize("vocabulary", [40, 700])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_sampled_frequencies_match_the_distribution(vocabulary, case):
    """Chi-square over 20,000 draws, five standard deviations: fails by chance in fewer than one of 10⁵ runs."""
    n = 20_000
    z = np.random.default_rng(3).normal(size=vocabulary) * 2
    u = np.random.default_rng(4).random(n)
    found = draw(torch.tensor(z).expand(n, -1), rules(n, **case), u)
    whole, q = slow_distribution(z, **case)
    counts = np.bincount(found.ids, minlength=vocabulary)
    assert counts[q == 0].sum() == 0
    likely = q * n >= 5
    expected = np.append(q[likely] * n, max(q[~likely].sum() * n, 1e-9))
    seen = np.append(counts[likely], counts[~likely].sum())
    if expected[-1] < 5:
        expected, seen = expected[:-1], seen[:-1]
    freedom = len(expected) - 1
    assert ((seen - expected) ** 2 / expected).sum() < freedom + 5 * math.sqrt(2 * max(freedom, 1)) + 5
    np.testing.assert_allclose(found.logprobs, np.log(whole[found.ids]), atol=2e-5)
    np.testing.assert_allclose(found.drawn_logprobs, np.log(q[found.ids]), atol=2e-5)


@pytest.mark.parametrize("vocabulary", [3, 255, 256, 512, 513, 1000])
def test_the_draw_inverts_the_cumulative_distribution_at_every_block_edge(vocabulary):
    z = np.random.default_rng(vocabulary).normal(size=vocabulary)
    p = np.exp(z) / np.exp(z).sum()
    edges = np.cumsum(p)
    u = np.concatenate([[0.0], np.maximum(edges[:-1] - 1e-6, 0), edges[:-1] + 1e-6, [1 - 2**-53]])
    found = draw(torch.tensor(z).expand(len(u), -1), rules(len(u)), u)
    wanted = np.minimum(np.searchsorted(edges, u, side="right"), vocabulary - 1)
    assert (found.ids == wanted).mean() > 0.99 and np.abs(found.ids - wanted).max() <= 1


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.floats(0, 1, exclude_max=True), st.sampled_from([5, 300, 600]))
def test_a_token_of_probability_zero_is_never_drawn(seed, u, vocabulary):
    random = np.random.default_rng(seed)
    z = np.where(random.random(vocabulary) < 0.9, -np.inf, random.normal(size=vocabulary))
    z[random.integers(vocabulary)] = 0.0
    for case in ({}, {"top_p": 0.9}, {"top_k": 3}):
        found = draw(torch.tensor(z)[None], rules(1, **case), np.array([u]))
        assert np.isfinite(z[found.ids[0]]) and np.isfinite(found.logprobs[0])


def test_a_number_rounded_up_to_the_whole_mass_takes_the_last_token_that_has_any():
    edges = torch.tensor([[0.25, 1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 1.0]], dtype=torch.float64)
    assert _first_above(edges, torch.ones(2, 1, dtype=torch.float64)).tolist() == [[1], [3]]


def test_rows_keep_their_own_rules_in_any_company():
    z = torch.randn(6, 900, generator=torch.Generator().manual_seed(0)) * 3
    samplings = [
        Sampling(1), Sampling(1, temperature=0.0), Sampling(1, top_k=4), Sampling(1, 0.5, top_p=0.5),
        Sampling(1, min_p=0.3), Sampling(1, 2.0, top_k=600, top_p=0.99),
    ]  # fmt: skip
    u = np.random.default_rng(1).random(6)
    together = draw(z, Rules.of(samplings), u)
    for i in range(6):
        alone = draw(z[i : i + 1], Rules.of(samplings[i : i + 1]), u[i : i + 1])
        assert alone.ids[0] == together.ids[i]
        assert alone.logprobs[0] == pytest.approx(together.logprobs[i], abs=1e-6)
        assert alone.drawn_logprobs[0] == pytest.approx(together.drawn_logprobs[i], abs=1e-6)


def test_top_p_keeps_more_than_the_first_candidates_where_the_mass_is_spread():
    vocabulary = 20 * CANDIDATES
    z = torch.linspace(0, 0.1, vocabulary)[None].expand(300, -1)
    found = draw(z, rules(300, top_p=0.9), np.random.default_rng(0).random(300))
    assert len(set(found.ids.tolist())) > CANDIDATES
    assert found.ids.min() > 0.09 * vocabulary  # the least likely tenth is cut
    np.testing.assert_allclose(found.drawn_logprobs - found.logprobs, -math.log(0.9), atol=1e-3)


def test_greedy_takes_the_largest_logit_whatever_the_number():
    z = torch.tensor([[0.0, 3.0, 1.0], [5.0, 3.0, 1.0]])
    found = draw(z, rules(2, temperature=0.0), np.array([0.0, 0.999]))
    assert found.ids.tolist() == [1, 0]
    assert found.drawn_logprobs.tolist() == [0.0, 0.0]
    np.testing.assert_allclose(found.logprobs, torch.log_softmax(z, -1).amax(-1), atol=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_not_finite_stop_the_run(bad):
    with pytest.raises(ValueError, match="not finite"):
        draw(torch.tensor([[0.0, bad, 1.0]]), rules(1), np.array([0.5]))


def test_large_logits_neither_overflow_nor_lose_the_log_probability():
    z = torch.tensor([[1e4, 1e4 - 1.0, -1e4]])
    found = draw(z, rules(1), np.array([0.0]))
    assert found.logprobs[0] == pytest.approx(-math.log(1 + math.exp(-1)), abs=1e-3)
