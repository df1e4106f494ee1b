"""A pack computes what its sequences compute one at a time: values and parameter gradients."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from batches import ARCHITECTURES, batch, build

from gropius.train.forward import Forward
from gropius.train.pack import pack

TEMPERATURE = 0.8


def alone(model, rows, probe):
    """Every row by itself through the untouched model: log-probabilities, and the gradient of their probed sum."""
    model.zero_grad()
    values = []
    for sequence, weights in zip(rows, probe, strict=True):
        ids = torch.from_numpy(np.concatenate([sequence.prompt_ids, sequence.response_ids]))[None]
        logits = model(input_ids=ids, use_cache=False).logits[0] / TEMPERATURE
        logp = torch.log_softmax(logits, -1)[len(sequence.prompt_ids) - 1 : -1]
        chosen = logp.gather(1, torch.from_numpy(sequence.response_ids)[:, None])[:, 0]
        own = torch.from_numpy(sequence.mask)
        (chosen[own] * torch.from_numpy(weights[sequence.mask]).to(chosen.dtype)).sum().backward()
        values.append(torch.where(own, chosen, 0.0).detach().numpy())
    return values, {n: p.grad.clone() for n, p in model.named_parameters()}


def packed(model, rows, probe, **options):
    model.zero_grad()
    forward = Forward.of(model, packed=options.pop("packed", True))
    values = [None] * len(rows)
    for one in pack(rows, **{"budget_tokens": 1 << 20, "skip": False, **options}):
        logprobs, _ = forward.logprobs(one, temperature=TEMPERATURE)
        weights = np.concatenate([probe[i][rows[i].mask] for i in one.index])
        (logprobs * torch.from_numpy(weights).to(logprobs.dtype)).sum().backward()
        start = 0
        for i in one.index:
            size = int(rows[i].mask.sum())
            values[i] = np.zeros(len(rows[i].mask))
            values[i][rows[i].mask] = logprobs[start : start + size].detach().numpy()
            start += size
    return values, {n: p.grad.clone() for n, p in model.named_parameters()}, forward


def compare(model, rows, bound, **options):
    stream = np.random.default_rng(1)
    probe = [stream.normal(size=len(s.mask)) for s in rows]
    expected, gradient = alone(model, rows, probe)
    found, ours, forward = packed(model, rows, probe, **options)
    for a, b, s in zip(expected, found, rows, strict=True):
        if s.mask.any():
            np.testing.assert_allclose(b, a, rtol=bound, atol=bound)
    whole = torch.cat([g.flatten() for g in gradient.values()]).norm()
    for name, g in gradient.items():
        assert (ours[name] - g).norm() <= bound * whole, name
    return forward


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_pack_equals_one_sequence_at_a_time_in_float64(name):
    forward = compare(build(name), batch(), 1e-9)
    assert forward.packed and forward.note == ""


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_pack_equals_one_sequence_at_a_time_in_float32(name):
    compare(build(name, torch.float32), batch(seed=3), 1e-5)
