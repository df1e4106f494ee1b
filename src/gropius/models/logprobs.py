"""From hidden states to the log-probability of chosen tokens, without ever holding the logits of all positions.

    z = softcap(h Wᵀ + b) · scale / T        logprob_t = z[y_t] − log Σ_v exp z[v]        entropy = −Σ_v p_v log p_v

The sampling temperature T is applied here and nowhere else. Only wanted positions are given in, rows are worked in
chunks, and the backward pass forms its gradients chunk by chunk from recomputed logits: _T · _V numbers never exist.
One loss is built on top of this; there is no fused loss beside it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from gropius.errors import ModelError

CHUNK_NUMBERS = 1 << 23  # logits held at once: 32 MiB in float32
GATHERED_NUMBERS = 1 << 26  # their gradients held at once in the compute dtype, for one product: 128 MiB in 16 bits
SUMMED_AT_ONCE = 2048  # tokens of the vocabulary that one float32 product sums over, on a CPU


@dataclass(frozen=True, eq=False)
class Head:
    """The map from hidden states to logits. weight [_V, d], bias [_V] or None, softcap: c·tanh(z/c), 0 is off;
    scale: a factor on the logits that some architectures have.
    """

    weight: Tensor
    bias: Tensor | None = None
    softcap: float = 0.0
    scale: float = 1.0

    @classmethod
    def of(cls, model: PreTrainedModel) -> Head:
        """The head of a transformers model, checked on three tokens against the model's own logits.

        Raises ModelError where the architecture does something else between hidden states and logits.
        """
        layer = model.get_output_embeddings()
        if not isinstance(layer, nn.Linear):
            raise ModelError(f"{type(model).__name__} has no linear output head; log-probabilities need one")
        config = model.config.get_text_config()
        scale = float(getattr(config, "logit_scale", None) or 1.0) / float(
            getattr(config, "logits_scaling", None) or 1.0
        )
        head = cls(layer.weight, layer.bias, float(getattr(config, "final_logit_softcapping", None) or 0.0), scale)
        head._check(model)
        return head

    def logits(self, hidden: Tensor) -> Tensor:
        """[_T, d] → [_T, _V], before the temperature."""
        z = nn.functional.linear(hidden, self.weight, self.bias)
        if self.softcap:
            z = self.softcap * torch.tanh(z / self.softcap)
        return z * self.scale if self.scale != 1.0 else z

    @torch.no_grad()
    def _check(self, model: PreTrainedModel) -> None:
        ids = torch.arange(3, device=self.weight.device)[None] % self.weight.shape[0]
        theirs = model(input_ids=ids, use_cache=False).logits.double()
        ours = self.logits(backbone(model)(input_ids=ids, use_cache=False).last_hidden_state).double()
        if not torch.allclose(ours, theirs, rtol=1e-3, atol=1e-3 * max(1.0, float(theirs.abs().max()))):
            raise ModelError(
                f"{type(model).__name__} does more between hidden states and logits than weight, bias, softcap and "
                "scale; it cannot be trained here without its own Head"
            )


def backbone(model: PreTrainedModel) -> nn.Module:
    """The decoder below the head: its `last_hidden_state` [_N, _T, d] is what the head reads (final norm included)."""
    body = model.get_decoder() if hasattr(model, "get_decoder") else None
    return body if isinstance(body, nn.Module) and body is not model else model.base_model


def token_logprobs(
    hidden: Tensor,
    head: Head,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    entropy: bool = False,
    float32_head: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Log-probability of each target and, when asked, the entropy of each position's distribution.

    hidden [_T, d]: of the positions that predict the targets, and of no others. targets [_T]: token ids.
    temperature: the sampling temperature, > 0. float32_head: compute the head in float32 whatever dtype the rest has.
    Returns logprobs [_T] and entropy [_T] (nats) or None; float32, or float64 for float64 inputs; both differentiable
    in hidden, head.weight and head.bias. No position: empty tensors. Without gradients nothing is kept for a backward.
    """
    if not temperature > 0:
        raise ValueError(f"temperature = {temperature}: log-probabilities of a policy need a temperature above 0")
    if hidden.ndim != 2 or targets.shape != hidden.shape[:1]:
        raise ValueError(f"hidden {tuple(hidden.shape)} and targets {tuple(targets.shape)} must be [_T, d] and [_T]")
    dtype = _compute_dtype(hidden, float32_head)
    knobs = _Knobs(head.scale / temperature, head.softcap, dtype, entropy)
    logprobs, entropies = _ChunkedLogprobs.apply(hidden, head.weight, head.bias, targets, knobs)  # type: ignore[no-untyped-call]
    return logprobs, entropies if entropy else None


@dataclass(frozen=True)
class _Knobs:
    factor: float  # logits are multiplied by this after the softcap: scale / temperature
    softcap: float
    dtype: torch.dtype  # of the matrix product
    entropy: bool


def _compute_dtype(hidden: Tensor, float32_head: bool) -> torch.dtype:
    if float32_head:
        return torch.promote_types(torch.float32, hidden.dtype)
    if hidden.dtype != torch.float64 and torch.is_autocast_enabled(hidden.device.type):
        return torch.get_autocast_dtype(hidden.device.type)
    return hidden.dtype


def _scaled_logits(rows: Tensor, weight: Tensor, bias: Tensor | None, knobs: _Knobs) -> tuple[Tensor, Tensor | None]:
    """Logits [c, _V] at the temperature in the accumulation dtype, and d softcap / d z where there is a softcap."""
    z = torch.mm(rows, weight.t())
    z = z.to(torch.promote_types(torch.float32, z.dtype))
    if bias is not None:
        z += bias
    slope = None
    if knobs.softcap:
        bounded = torch.tanh_(z.div_(knobs.softcap))
        slope = 1.0 - bounded.square()
        z = bounded.mul(knobs.softcap)
    return (z.mul_(knobs.factor) if knobs.factor != 1.0 else z), slope


def _normalised(z: Tensor, targets: Tensor, entropy: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """Of logits z [c, _V], which are used up: log-probability of the targets, log Σ exp z, and the entropy if wanted.

    With s = z − max z and m = Σ exp s the entropy is log m − Σ s exp s / m: one exponential serves all three.
    """
    top = z.amax(dim=-1)
    shifted = z.sub_(top[:, None])
    chosen = shifted.gather(1, targets[:, None])[:, 0]
    weights = torch.exp(shifted) if entropy else None
    mass = (shifted.exp_() if weights is None else weights).sum(-1)
    log_mass = mass.log()
    spread = None if weights is None else log_mass - weights.mul_(shifted).sum(-1) / mass
    return chosen - log_mass, top + log_mass, spread


class _ChunkedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, knobs: _Knobs
    ) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies, chunk by chunk; the normaliser of each row is what backward needs."""
        total = torch.promote_types(torch.float32, hidden.dtype)
        logprobs = hidden.new_empty(len(targets), dtype=total)
        normaliser = torch.empty_like(logprobs)
        entropy = torch.empty_like(logprobs) if knobs.entropy else hidden.new_empty(0, dtype=total)
        cast_weight = weight.to(knobs.dtype)
        with torch.autocast(hidden.device.type, enabled=False):
            for piece in _chunks(len(targets), weight.shape[0]):
                z, _ = _scaled_logits(hidden[piece].to(knobs.dtype), cast_weight, bias, knobs)
                chosen, normaliser[piece], spread = _normalised(z, targets[piece], knobs.entropy)
                logprobs[piece] = chosen
                if spread is not None:
                    entropy[piece] = spread
        ctx.save_for_backward(hidden, weight, cast_weight, bias, targets, normaliser, entropy)
        ctx.set_materialize_grads(False)
        ctx.knobs = knobs
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, g_logprobs: Tensor | None, g_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        """d logprob / d z = 1[y] − p;  d entropy / d z = −p (log p + H). An output that no loss reads costs nothing."""
        if g_logprobs is None and g_entropy is None:
            return None, None, None, None, None
        hidden, weight, cast_weight, bias, targets, normaliser, entropy = ctx.saved_tensors
        g_logprobs = torch.zeros_like(normaliser) if g_logprobs is None else g_logprobs
        knobs: _Knobs = ctx.knobs
        total = normaliser.dtype
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        g_hidden = torch.empty_like(hidden) if wants_hidden else None
        gathered = _WeightGradient(weight, len(targets), knobs.dtype) if wants_weight else None
        g_bias = torch.zeros_like(bias, dtype=total) if wants_bias else None
        with torch.autocast(hidden.device.type, enabled=False):
            for piece in _chunks(len(targets), weight.shape[0]):
                rows = hidden[piece].to(knobs.dtype)
                z, slope = _scaled_logits(rows, cast_weight, bias, knobs)
                of_entropy = (g_entropy[piece], entropy[piece]) if g_entropy is not None else None
                g = _logit_gradient(z, targets[piece], normaliser[piece], g_logprobs[piece], of_entropy)
                g = g.mul_(knobs.factor) if knobs.factor != 1.0 else g
                g = g.mul_(slope) if slope is not None else g
                if g_bias is not None:
                    g_bias += g.sum(0)
                g = g.to(knobs.dtype)
                if g_hidden is not None:
                    g_hidden[piece] = _over_vocabulary(g, cast_weight)
                if gathered is not None:
                    gathered.add(g, rows)
            g_weight = gathered.total().to(weight.dtype) if gathered is not None else None
        return (
            g_hidden,
            g_weight,
            None if g_bias is None else g_bias.to(bias.dtype),
            None,
            None,
        )


def _over_vocabulary(g: Tensor, weight: Tensor) -> Tensor:
    """g [c, _V] · W [_V, d] ; on a CPU a float32 sum is taken in blocks of the vocabulary.

    A BLAS may add all _V products of a narrow matrix to one number, where the many small ones are lost beside the sum:
    of 150,000 tokens and d = 4, an error of 1e-4 of the gradient; in blocks 5e-7, and 1e-7 for 4e-7 at d = 576.
    """
    if g.device.type != "cpu" or g.dtype != torch.float32:
        return torch.mm(g, weight)
    blocks = zip(g.split(SUMMED_AT_ONCE, dim=1), weight.split(SUMMED_AT_ONCE), strict=True)
    total = g.new_zeros(len(g), weight.shape[1])
    for part, rows in blocks:
        total += torch.mm(part, rows)
    return total


class _WeightGradient:
    """Σ gᵀ h over chunks, [_V, d] in float32 at least. In 16 bits one product over many chunks: each costs a pass over
    the whole head, and on a CPU two more to widen and add it.
    """

    def __init__(self, weight: Tensor, rows: int, dtype: torch.dtype) -> None:
        self.weight = weight
        self.sum: Tensor | None = None
        held = min(rows, GATHERED_NUMBERS // weight.shape[0]) if dtype.itemsize == 2 else 0
        self.g = weight.new_empty((held, weight.shape[0]), dtype=dtype)
        self.h = weight.new_empty((held, weight.shape[1]), dtype=dtype)
        self.filled = 0

    def add(self, g: Tensor, rows: Tensor) -> None:
        """Take a chunk of gradients [c, _V] and of the rows [c, d] they belong to."""
        if self.filled + len(g) > len(self.g):
            self._flush()
        if len(g) > len(self.g):
            self._sum(g, rows)
            return
        self.g[self.filled : self.filled + len(g)] = g
        self.h[self.filled : self.filled + len(g)] = rows
        self.filled += len(g)

    def total(self) -> Tensor:
        """The sum of everything taken."""
        self._flush()
        if self.sum is None:
            return torch.zeros_like(self.weight, dtype=torch.promote_types(torch.float32, self.g.dtype))
        return self.sum

    def _flush(self) -> None:
        if self.filled:
            self._sum(self.g[: self.filled], self.h[: self.filled])
            self.filled = 0

    def _sum(self, g: Tensor, rows: Tensor) -> None:
        product = torch.mm(g.t(), rows)
        if self.sum is None:
            self.sum = product.to(torch.promote_types(torch.float32, product.dtype))
        else:
            self.sum += product


def _logit_gradient(
    z: Tensor, targets: Tensor, normaliser: Tensor, g_logprobs: Tensor, of_entropy: tuple[Tensor, Tensor] | None
) -> Tensor:
    logp = z.sub_(normaliser[:, None])
    p = logp.exp()
    if of_entropy is None:
        g = p.mul_(-g_logprobs[:, None])
    else:
        g_entropy, entropy = of_entropy
        g = p.mul_(-g_logprobs[:, None] - (logp + entropy[:, None]).mul_(g_entropy[:, None]))
    return g.scatter_add_(1, targets[:, None], g_logprobs[:, None])


def _chunks(rows: int, vocabulary: int) -> list[slice]:
    size = max(16, CHUNK_NUMBERS // max(1, vocabulary))
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]
