"""The norm of a gradient is exact whatever its size, and clipping is the formula."""

import math

import pytest
import torch
from torch import nn

from gropius.train.clip import AT_ONCE, clip, total_norm


def test_small_squares_beside_large_ones_are_not_lost_among_millions():
    """As of an embedding of which a step saw a few rows: a float32 sum over the whole tensor is off by a hundredth."""
    gradient = torch.randn(6_000_000, generator=torch.Generator().manual_seed(0)) * 1e-3
    gradient[:300_000] *= 300
    assert total_norm([gradient]) == pytest.approx(float(gradient.double().norm()), rel=1e-7)


@pytest.mark.parametrize("numbers", [0, 1, AT_ONCE - 1, AT_ONCE, AT_ONCE + 1, 3 * AT_ONCE + 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_norm_is_that_of_all_tensors_laid_end_to_end(numbers, dtype):
    generator = torch.Generator().manual_seed(1)
    parts = [torch.randn(numbers, generator=generator).to(dtype), torch.randn(3, 7, generator=generator).t().to(dtype)]
    flat = torch.cat([part.double().flatten() for part in parts])
    assert total_norm(parts) == pytest.approx(float(flat.norm()), rel=1e-14 if dtype == torch.float64 else 1e-6)


def test_no_tensor_has_norm_0():
    assert total_norm([]) == 0.0


@pytest.mark.parametrize("place", [0, 2 * AT_ONCE + 3])
@pytest.mark.parametrize("number", [math.inf, -math.inf, math.nan])
def test_one_number_that_is_not_finite_makes_the_norm_so(place, number):
    gradient = torch.ones(2 * AT_ONCE + 5)
    gradient[place] = number
    assert not math.isfinite(total_norm([torch.ones(3), gradient]))


@pytest.mark.parametrize("bound", [0.5, 1e3])
def test_clipping_is_that_of_torch(bound):
    torch.manual_seed(2)
    ours, theirs = nn.Linear(30, 20), nn.Linear(30, 20)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        a.grad = torch.randn_like(a)
        b.grad = a.grad.clone()
    gradients = [p.grad for p in ours.parameters()]
    norm = total_norm(gradients)
    assert norm == pytest.approx(float(nn.utils.clip_grad_norm_(theirs.parameters(), bound)), rel=1e-6)
    clip(gradients, bound, norm)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=2e-7, atol=0)
