"""Attention over blocks against attention with one dense mask: values, gradients, windows, grouped heads."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from batches import batch

from gropius.train.attention import layout
from gropius.train.pack import pack
from gropius.train.tree import fused_attention, tree_attention


def dense(rows, one, window, scale):
    """The definition: every pair of tokens, masked by the ancestor relation and the window."""
    q, k, v = (t.transpose(0, 1) for t in rows)
    repeat = q.shape[0] // k.shape[0]
    at, of = np.arange(one.run_tokens)[:, None], np.arange(one.run_tokens)[None, :]
    seen = (of <= at) & (at < one.ends[of])
    if window is not None:
        seen &= one.positions[at] - one.positions[of] < window
    scores = q @ k.repeat_interleave(repeat, 0).transpose(1, 2) * scale
    scores = scores.masked_fill(~torch.from_numpy(seen), -torch.inf)
    return (torch.softmax(scores, -1) @ v.repeat_interleave(repeat, 0)).transpose(0, 1)


def tensors(size, heads, dtype=torch.float64):
    stream = torch.Generator().manual_seed(0)
    shapes = [(size, heads, 8), (size, 2, 8), (size, 2, 8)]
    return [torch.randn(s, generator=stream, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes]


@pytest.mark.parametrize("heads", [2, 6])
@pytest.mark.parametrize("window", [None, 1, 4])
@pytest.mark.parametrize("block_tokens", [1, 7, 48])
@pytest.mark.parametrize("function", [tree_attention, fused_attention])
def test_blocks_equal_the_dense_mask(function, block_tokens, window, heads):
    (one,) = pack(batch(seed=5), budget_tokens=1 << 20)
    rows = tensors(one.run_tokens, heads)
    upstream = torch.randn(one.run_tokens, heads, 8, dtype=torch.float64)
    expected = dense(rows, one, window, 0.3)
    wanted = torch.autograd.grad(expected, rows, upstream)
    found = function(rows, layout(one, block_tokens=block_tokens), window, 0.3)
    gradients = torch.autograd.grad(found, rows, upstream)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    for ours, theirs in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)


def test_large_scores_stay_finite_where_a_whole_block_is_hidden():
    (one,) = pack(batch(seed=5), budget_tokens=1 << 20)
    rows = [(t.detach() * 300).requires_grad_() for t in tensors(one.run_tokens, 2, torch.float32)]
    found = tree_attention(rows, layout(one, block_tokens=7), 2, 1.0)
    gradients = torch.autograd.grad(found.sum(), rows)
    assert all(bool(torch.isfinite(t).all()) for t in (found, *gradients))


def test_bfloat16_values_keep_float32_scores():
    (one,) = pack(batch(seed=5), budget_tokens=1 << 20)
    q, k, v = tensors(one.run_tokens, 6, torch.float32)
    expected = dense((q, k, v), one, None, 0.3)
    found = tree_attention((q, k, v.bfloat16()), layout(one), None, 0.3)
    assert found.dtype == torch.bfloat16
    assert float((found.float() - expected).detach().norm()) < 6e-3 * float(expected.detach().norm())


def test_every_query_has_its_place_and_every_key_its_uses():
    (one,) = pack(batch(seed=6), budget_tokens=1 << 20)
    where = layout(one, block_tokens=16)
    queries = torch.cat([blocks.queries.flatten() for blocks in where.blocks])
    keys = torch.cat([blocks.keys.flatten() for blocks in where.blocks])
    assert queries[where.place].tolist() == list(range(one.run_tokens))
    bags = torch.split(where.uses, torch.diff(where.bounds, append=torch.tensor([len(where.uses)])).tolist())
    assert all(bool((keys[bag] == token).all()) and len(bag) > 0 for token, bag in enumerate(bags))
