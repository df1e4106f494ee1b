"""Packs through variable-length attention: the parts that are built, an imitation of the kernel, and the choice."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest
import torch
from batches import ARCHITECTURES, batch, build, row

from gropius.train import forward as forward_room
from gropius.train import varlen as room
from gropius.train.forward import Forward
from gropius.train.pack import pack
from gropius.train.varlen import choose, varlen


def imitation(
    q, k, v, bounds_q, bounds_k, longest_q, longest_k, *, softmax_scale, causal, window_size
):  # the signature of flash_attn's kernel
    """Each sequence by itself: its queries are the last of its keys, and look back as far as the window reaches."""
    assert causal and bounds_q.dtype == bounds_k.dtype == torch.int32 and q.dtype == k.dtype == v.dtype
    outputs = []
    for n in range(len(bounds_q) - 1):
        own = q[bounds_q[n] : bounds_q[n + 1]].transpose(0, 1)
        keys, values = (t[bounds_k[n] : bounds_k[n + 1]].transpose(0, 1) for t in (k, v))
        size_q, size_k = own.shape[1], keys.shape[1]
        assert 0 < size_q <= longest_q and size_q <= size_k <= longest_k
        back = torch.arange(size_q)[:, None] + (size_k - size_q) - torch.arange(size_k)
        seen = back >= 0 if window_size == (-1, -1) else (back >= 0) & (back <= window_size[0])
        assert window_size[1] in (-1, 0)
        out = torch.nn.functional.scaled_dot_product_attention(
            own, keys, values, attn_mask=seen, scale=softmax_scale, enable_gqa=True
        )
        outputs.append(out.transpose(0, 1))
    return torch.cat(outputs)


@pytest.fixture
def flash(monkeypatch):
    monkeypatch.setattr(forward_room, "choose", lambda device, dtype: ("flash", ""))
    monkeypatch.setattr(room, "kernel", lambda: imitation)


def test_a_part_is_a_sequence_whose_keys_are_the_path_that_leads_to_it():
    rows = [row([1, 2, 3], [4, 5, 6]), row([1, 2, 3], [4, 7, 8], member=1), row([9], [4, 4], group="h", member=2)]
    (one,) = pack(rows, budget_tokens=100)
    found = varlen(one)
    assert found.bounds_q.tolist() == [0, *np.cumsum([stop - start for start, stop, _ in one.parts])]
    for n, (start, stop, depth) in enumerate(one.parts):
        keys = found.keys[found.bounds_k[n] : found.bounds_k[n + 1]].tolist()
        assert keys[depth:] == list(range(start, stop)) and one.positions[keys].tolist() == list(range(len(keys)))
    assert (found.longest_q, found.longest_k) == (5, 5)
    assert one.ids[found.keys].tolist() == [1, 2, 3, 4, 5, 1, 2, 3, 4, 7, 9, 4]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_it_gives_the_numbers_and_gradients_of_the_blocks(name, flash, monkeypatch):
    model, rows = build(name), batch(seed=6)
    (one,) = pack(rows, budget_tokens=1 << 20)
    results = {}
    for kind in ("flash", "blocks"):
        monkeypatch.setattr(forward_room, "choose", lambda device, dtype, kind=kind: (kind, ""))
        forward = Forward.of(model)
        assert forward.packed and forward.kernel == kind, forward.describe()
        model.zero_grad()
        logprobs, _ = forward.logprobs(one)
        logprobs.square().sum().backward()
        results[kind] = (logprobs.detach(), torch.cat([p.grad.flatten() for p in model.parameters()]))
    for a, b in zip(results["flash"], results["blocks"], strict=True):
        assert (a - b).norm() <= 1e-9 * b.norm()


def test_where_the_kernel_does_not_fit_the_next_one_is_taken_and_it_is_said(flash, monkeypatch):
    def refusing(*given, **options):
        raise RuntimeError("head dimension 8 is not supported")

    monkeypatch.setattr(room, "kernel", lambda: refusing)
    forward = Forward.of(build("llama"))
    assert forward.packed and forward.kernel == "sdpa"
    assert "head dimension 8 is not supported" in forward.describe() and "\n" not in forward.describe()


def test_a_kernel_that_forgets_the_window_is_found_out(flash, monkeypatch):
    monkeypatch.setattr(room, "kernel", lambda: lambda *g, **o: imitation(*g, **{**o, "window_size": (-1, -1)}))
    assert Forward.of(build("mistral", torch.float32)).kernel == "sdpa"


CUDA, HALF = torch.device("cuda"), torch.bfloat16


@pytest.mark.parametrize(
    ("device", "dtype", "installed", "kernel", "why"),
    [
        (torch.device("cpu"), HALF, True, "blocks", ""),
        (CUDA, HALF, True, "flash", ""),
        (CUDA, torch.float16, True, "flash", ""),
        (CUDA, HALF, False, "sdpa", "not installed"),
        (CUDA, torch.float32, True, "sdpa", "16 bits"),
        (torch.device("mps"), HALF, True, "sdpa", "needs CUDA"),
    ],
)
def test_flash_attention_is_chosen_on_cuda_in_16_bits_where_it_is_installed(
    device, dtype, installed, kernel, why, monkeypatch
):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if installed else None)
    chosen, reason = choose(device, dtype)
    assert chosen == kernel and why in reason and bool(reason) is bool(why)


def test_what_is_chosen_is_said_in_one_line():
    assert Forward.of(build("llama")).describe() == "training runs packs, attention by blocks of the tree on the CPU"
    assert "padded rows" in Forward.of(build("llama"), packed=False).describe()
