"""Measure this machine at a model's own shape, in about ten seconds. Torch is imported when it is called."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from gropius.errors import UsageError
from gropius.plan.machines import Machine

if TYPE_CHECKING:
    import torch

    from gropius.plan.cost import ModelShape

TOKENS, LENGTH, CONTEXT, HEAD_TOKENS = 1024, 128, 128, 256


def probe(shape: ModelShape, rows: int = 32, seconds: float = 10.0) -> Machine:
    """A Machine whose rates are those of one layer and the head of this very shape, so that its efficiencies are 1.

    rows: responses decoded at once. seconds: what the probe may take, at least one run of each kind. Timed: a layer
    forward and backward on 1024 tokens in sequences of 128, the head with its log-probabilities on 256; a layer and the
    head on `rows` tokens against a cache of 128; a read of 256 MiB. The best run counts, so that a neighbour disturbs
    little; what is not in a layer or the head (rewards, tokenising, Python between steps) is not measured.
    Needs torch; errors: UsageError when it is missing.
    """
    try:
        import torch
    except ImportError as error:
        raise UsageError("a probe of this machine needs torch; name an accelerator instead, e.g. h100") from error
    layer, share = _Layer(shape), seconds / 5
    trained = shape.layers * _best(layer.train, share) / TOKENS + _best(layer.train_head, share) / HEAD_TOKENS
    per_token = 6 * shape.matmul_parameters + 12 * shape.layers * shape.heads * shape.head_size * LENGTH / 2
    step = shape.layers * _best(lambda: layer.decode(rows), share) + _best(lambda: layer.decode_head(rows), share)
    decoded = rows * (2 * shape.matmul_parameters + 4 * shape.layers * shape.heads * shape.head_size * CONTEXT)
    block = torch.ones(64 * 2**20)
    streaming = block.numel() * block.element_size() / _best(lambda: block.sum(), share)
    rate = per_token / trained
    return Machine(
        "this machine", rate, streaming, _memory_bytes(), 1, 1.0, decoded / step / rate, 1.0,
        source=f"measured in {seconds:g} s at this shape and {rows} rows, float32, {torch.get_num_threads()} threads",
    )  # fmt: skip


class _Layer:
    """The weights of one decoder layer and of the head, and the four things that are timed."""

    def __init__(self, shape: ModelShape):
        import torch

        width = shape.head_size * (shape.heads + 2 * shape.kv_heads)
        sizes = (
            (shape.hidden, width), (shape.heads * shape.head_size, shape.hidden), (shape.hidden, 2 * shape.mlp),
            (shape.mlp, shape.hidden),
        )  # fmt: skip
        self.shape = shape
        self.weights = [torch.randn(*size).mul_(0.02).requires_grad_(True) for size in sizes]
        self.head = torch.randn(shape.hidden, shape.vocabulary).mul_(0.02).requires_grad_(True)
        self.x = torch.randn(TOKENS // LENGTH, LENGTH, shape.hidden, requires_grad=True)

    def forward(self, x: torch.Tensor, keys: torch.Tensor | None = None) -> torch.Tensor:
        """[rows, length, hidden] → the same; keys: a cache to attend to instead of the tokens themselves."""
        import torch
        from torch.nn import functional

        s, (rows, length, _) = self.shape, x.shape
        joined = functional.rms_norm(x, (s.hidden,)) @ self.weights[0]
        q, k, v = torch.split(joined, [s.heads * s.head_size, *[s.kv_heads * s.head_size] * 2], -1)
        q, k, v = (t.reshape(rows, length, -1, s.head_size).transpose(1, 2) for t in (q, k, v))
        if keys is not None:
            k = v = keys
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=keys is None, enable_gqa=True)
        x = x + mixed.transpose(1, 2).reshape(rows, length, -1) @ self.weights[1]
        gate, up = (functional.rms_norm(x, (s.hidden,)) @ self.weights[2]).chunk(2, -1)
        return x + (functional.silu(gate) * up) @ self.weights[3]

    def train(self) -> None:
        """One layer, forward and backward."""
        import torch

        torch.autograd.grad(self.forward(self.x).square().mean(), [self.x, *self.weights])

    def train_head(self) -> None:
        """The head with log-probabilities of one token a position, forward and backward."""
        import torch

        hidden = self.x.reshape(-1, self.shape.hidden)[:HEAD_TOKENS]
        logits = hidden @ self.head
        torch.autograd.grad((logits[:, 0] - logits.logsumexp(-1)).mean(), [self.x, self.head])

    def decode(self, rows: int) -> None:
        """One layer on one token a row, against a cache."""
        import torch

        with torch.no_grad():
            keys = torch.randn(1, self.shape.kv_heads, CONTEXT, self.shape.head_size)
            self.forward(self.x[0, :1].expand(rows, 1, -1), keys.expand(rows, -1, -1, -1))

    def decode_head(self, rows: int) -> None:
        """The head on one token a row, with the softmax that sampling needs."""
        import torch

        with torch.no_grad():
            (self.x[0, :1].expand(rows, -1) @ self.head).softmax(-1).cumsum(-1)


def _best(work: Callable[[], object], seconds: float) -> float:
    """The shortest of the runs that fit into `seconds`, after one to warm up; at least one is timed."""
    work()
    best, end = float("inf"), time.perf_counter() + seconds
    while best == float("inf") or time.perf_counter() < end:
        start = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - start)
    return best


def _memory_bytes() -> float:
    names = ("SC_PAGE_SIZE", "SC_PHYS_PAGES")
    if not hasattr(os, "sysconf") or not set(names) <= set(os.sysconf_names):
        return float("inf")
    return float(os.sysconf(names[0]) * os.sysconf(names[1]))
