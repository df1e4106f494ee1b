"""Tokens, floating-point operations, time and memory of a step, from a model's shape and a machine's speed. No torch.

Counted for matrix products and attention; everything else of a step is in the efficiencies of the machine. A prompt is
run once for its group when `shared_prompt` is on, in prefill and in training.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from gropius.errors import UsageError
from gropius.plan.machines import Machine

STATE_BYTES = 16  # weight, gradient and two moments of AdamW in float32, a parameter
ACTIVATION_BYTES = 34  # a token, layer and unit of width, with fused attention, 2-byte activations
RECOMPUTED_BYTES = 4  # the same when every layer is recomputed from its input


@dataclass(frozen=True)
class ModelShape:
    """A decoder. kv_heads x head_size is the width of keys and values; tied: the head is the embedding."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    mlp: int
    vocabulary: int
    tied: bool = True

    @property
    def block_parameters(self) -> int:
        """Of all layers: query, key, value, output and a gated MLP of three matrices."""
        attention = self.hidden * self.head_size * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.mlp)

    @property
    def matmul_parameters(self) -> int:
        """N: parameters that take part in matrix products, the head included."""
        return self.block_parameters + self.hidden * self.vocabulary

    @property
    def parameters(self) -> int:
        """All of them: an untied embedding is stored and takes no product."""
        return self.matmul_parameters + (0 if self.tied else self.hidden * self.vocabulary)

    @property
    def kv_elements(self) -> int:
        """Numbers in the cache of one token."""
        return 2 * self.layers * self.kv_heads * self.head_size


def shape_of(config: Mapping[str, Any], where: str = "config.json") -> ModelShape:
    """The shape that a Hugging Face config describes.

    Errors: UsageError naming the key that is missing.

    >>> shape_of({"num_hidden_layers": 30, "hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3,
    ...           "intermediate_size": 1536, "vocab_size": 49152, "tie_word_embeddings": True}).matmul_parameters
    134479872
    """

    def need(key: str) -> int:
        value = config.get(key)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise UsageError(f"{where}: {key} is {value!r}; a positive whole number is needed to count the model")
        return value

    heads = need("num_attention_heads")
    hidden = need("hidden_size")
    kv_heads = need("num_key_value_heads") if config.get("num_key_value_heads") is not None else heads
    head_size = need("head_dim") if config.get("head_dim") is not None else hidden // heads
    return ModelShape(
        need("num_hidden_layers"), hidden, heads, kv_heads, head_size, need("intermediate_size"),
        need("vocab_size"), bool(config.get("tie_word_embeddings", False)),
    )  # fmt: skip


@dataclass(frozen=True)
class Workload:
    """What a step does. Lengths in tokens, the mean over responses.

    epochs: passes over a rollout batch; updates: optimiser steps of one pass. anchor_pass: log-probabilities of the
    snapshot are computed anew (more than one update a batch). reference: a KL target is evaluated. live_share: share of
    the groups that is trained (dead ones are skipped exactly). rows: responses decoded at once, 0 = all. length_spread:
    longest over mean response: finished rows leave, so that the last steps of a wave decode few. pack_tokens: of one
    micro-batch. rollout_bytes: of a weight while decoding. drawn: responses drawn for one that is trained on (refilled
    groups). cached_tokens: positions that the sampler's cache comes to hold, 0 = as many as the responses of a step
    take (an evaluation may need more).
    """

    prompts: int
    group_size: int
    prompt_tokens: float
    response_tokens: float
    epochs: int = 1
    steps: int = 1
    shared_prompt: bool = True
    anchor_pass: bool = False
    reference: bool = False
    recompute: bool = False
    live_share: float = 1.0
    rows: int = 0
    length_spread: float = 1.0
    pack_tokens: int = 8192
    rollout_bytes: int = 2
    updates: int = 1
    drawn: float = 1.0
    cached_tokens: int = 0

    @property
    def responses(self) -> int:
        """Q · G."""
        return self.prompts * self.group_size

    @property
    def sequence_tokens(self) -> float:
        """Q · G · (P + R): every position of every row, as peers count."""
        return self.responses * (self.prompt_tokens + self.response_tokens)

    @property
    def unique_tokens(self) -> float:
        """Positions really computed in one pass: the prompt once a group when it is shared."""
        if not self.shared_prompt:
            return self.sequence_tokens
        return self.prompts * (self.prompt_tokens + self.group_size * self.response_tokens)


@dataclass(frozen=True)
class PhaseCost:
    """One phase of a step: tokens it computes, operations, bytes it must read, and seconds."""

    name: str
    tokens: float
    flops: float
    bytes: float
    time_s: float


@dataclass(frozen=True)
class Footprint:
    """Bytes of one device that a shape alone does not tell; the defaults are rules of thumb, a probe measures them.

    base_bytes: of the process itself. activation_bytes: kept a token for the backward pass, 0 = 34 (4 when recomputed)
    a layer and unit of width. cast_bytes: weights kept once more in the type of the products. logits_bytes: at the
    head, 0 = chunks of 1024 tokens. cache_bytes: of a number in the sampler's cache, 0 = as a rollout weight.
    trained: parameters with a gradient and two moments, 0 = all of them (an adapter has few).
    """

    base_bytes: float = 0.0
    activation_bytes: float = 0.0
    cast_bytes: float = 0.0
    logits_bytes: float = 0.0
    cache_bytes: int = 0
    trained: int = 0


@dataclass(frozen=True)
class CostReport:
    """The phases of a step, its time, the memory of one device, and what a critic would add.

    memory_bytes: by purpose, of one device; fits: it is within the device. critic: memory and seconds a step that PPO
    adds, with a value model of the same shape. assumptions: what the numbers rest on.
    """

    phases: tuple[PhaseCost, ...]
    step_s: float
    run_s: float
    tokens: float
    memory_bytes: Mapping[str, float]
    fits: bool
    critic: Mapping[str, float]
    assumptions: tuple[str, ...]

    @property
    def peak_bytes(self) -> float:
        """Of one device: the resident, and the larger of the cache and the activations; an engine rests meanwhile."""
        m = self.memory_bytes
        moving = max(m["cache"], m["activations"] + m["logits"])
        return m["process"] + m["states"] + m["rollout weights"] + m["reference"] + moving

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "phases": [asdict(p) for p in self.phases],
            "step_s": self.step_s,
            "run_s": self.run_s,
            "tokens": self.tokens,
            "memory_bytes": dict(self.memory_bytes),
            "peak_bytes": self.peak_bytes,
            "fits": self.fits,
            "critic": dict(self.critic),
            "assumptions": list(self.assumptions),
        }


def cost(shape: ModelShape, workload: Workload, machine: Machine, footprint: Footprint | None = None) -> CostReport:
    """What a step of this workload costs this model on this machine.

    Prefill 2N a token; decode max(bytes / bandwidth, operations / speed) a step; scoring 2N a token; training 6N (8N
    with recomputation) a token of the live groups, plus attention. `count` devices work data-parallel: the batch is
    divided, states are sharded, gradients are summed once an update.
    Errors: UsageError for a workload without responses or a share outside 0..1.
    """
    _check(workload)
    phases = (
        _prefill(shape, workload, machine),
        _decode(shape, workload, machine),
        *_scoring(shape, workload, machine),
        _training(shape, workload, machine, workload.epochs),
        _update(shape, workload, machine),
        _overhead(workload, machine),
    )
    step = sum(p.time_s for p in phases)
    known = footprint or Footprint()
    memory = _memory(shape, workload, machine, known)
    report = CostReport(
        phases, step, step * workload.steps, workload.sequence_tokens * workload.steps, memory, True,
        _critic(shape, workload, machine, step), _assumptions(workload, machine),
    )  # fmt: skip
    return CostReport(**{**vars(report), "fits": report.peak_bytes <= machine.memory_bytes})


def _check(workload: Workload) -> None:
    if workload.prompts < 1 or workload.group_size < 1 or workload.response_tokens <= 0:
        raise UsageError("a step needs at least one prompt, one response and one token of response")
    if not 0 <= workload.live_share <= 1:
        raise UsageError(f"live_share is {workload.live_share:g}; write the share of groups that is trained, 0 to 1")


def _attention(shape: ModelShape, workload: Workload, shared: bool) -> float:
    """Operations of one forward pass's attention: 4 · L · heads · head_size · Σ positions · context."""
    p, r = workload.prompt_tokens, workload.response_tokens
    prompt = p * p / 2 * (1 if shared else workload.group_size)
    response = workload.group_size * r * (p + r / 2)
    return 4 * shape.layers * shape.heads * shape.head_size * workload.prompts * (prompt + response)


def _prefill(shape: ModelShape, workload: Workload, machine: Machine) -> PhaseCost:
    copies = 1 if workload.shared_prompt else workload.group_size
    prompts = workload.prompts * workload.drawn * copies
    p = workload.prompt_tokens
    tokens = prompts * p
    attention = 4 * shape.layers * shape.heads * shape.head_size * prompts * p * p / 2
    flops = 2 * shape.block_parameters * tokens + attention
    return PhaseCost(
        "prefill", tokens, flops, workload.rollout_bytes * shape.matmul_parameters, machine.compute_s(flops)
    )


def _decode(shape: ModelShape, workload: Workload, machine: Machine) -> PhaseCost:
    """Waves of `rows` responses; every decode step reads the weights and the cache of each row that is not over."""
    per_device = math.ceil(workload.responses / machine.count)
    rows = min(workload.rows or per_device, per_device)
    waves = per_device / rows * workload.drawn
    alive = rows / workload.length_spread  # the mean over a wave's steps: as many as its longest response has tokens
    context = workload.prompt_tokens + workload.response_tokens / 2
    weight_bytes = workload.rollout_bytes * shape.matmul_parameters
    cache_bytes = alive * context * shape.kv_elements * workload.rollout_bytes
    attention = 4 * shape.layers * shape.heads * shape.head_size * alive * context
    flops = 2 * shape.matmul_parameters * alive + attention
    step_s = max(
        (weight_bytes + cache_bytes) / (machine.bandwidth * machine.bandwidth_efficiency),
        flops / (machine.flops * machine.decode_efficiency),
    )
    steps = workload.response_tokens * workload.length_spread * waves
    total = machine.count * steps
    return PhaseCost(
        "decode", workload.responses * workload.response_tokens * workload.drawn, flops * total,
        (weight_bytes + cache_bytes) * total, steps * (step_s + machine.step_overhead_s),
    )  # fmt: skip


def _scoring(shape: ModelShape, workload: Workload, machine: Machine) -> tuple[PhaseCost, ...]:
    tokens = workload.unique_tokens
    flops = 2 * shape.matmul_parameters * tokens + _attention(shape, workload, workload.shared_prompt)
    passes = (("anchor log-probs", workload.anchor_pass), ("reference log-probs", workload.reference))
    return tuple(
        PhaseCost(name, tokens, flops, 4 * shape.matmul_parameters, machine.compute_s(flops))
        for name, on in passes
        if on
    )


def _training(shape: ModelShape, workload: Workload, machine: Machine, passes: float) -> PhaseCost:
    factor = 8 if workload.recompute else 6
    tokens = workload.unique_tokens * workload.live_share * passes
    attention = _attention(shape, workload, workload.shared_prompt) * workload.live_share * passes
    flops = factor * shape.matmul_parameters * tokens + factor / 2 * attention
    return PhaseCost("training", tokens, flops, 0.0, machine.training_s(flops))


def _update(shape: ModelShape, workload: Workload, machine: Machine) -> PhaseCost:
    """AdamW moves 28 bytes a parameter; devices sum 4-byte gradients over their link."""
    taken = workload.epochs * workload.updates
    moved = 28 * shape.parameters * taken
    n = machine.count
    link = 0.0 if n == 1 else 2 * (n - 1) / n * 4 * shape.parameters * taken / machine.link
    time = moved / n / (machine.bandwidth * machine.bandwidth_efficiency) + link
    return PhaseCost("update", 0.0, 0.0, moved, time)


def _overhead(workload: Workload, machine: Machine) -> PhaseCost:
    """What does not grow with the model: turn-taking, scoring, records, launching an update. Responses are divided."""
    responses = math.ceil(workload.responses / machine.count) * workload.drawn
    updates = workload.epochs * workload.updates
    seconds = responses * machine.response_s + updates * machine.update_s + machine.fixed_s
    return PhaseCost("overhead", 0.0, 0.0, 0.0, max(seconds, 0.0))


def _memory(shape: ModelShape, workload: Workload, machine: Machine, known: Footprint) -> dict[str, float]:
    per_device = math.ceil(workload.responses / machine.count)
    rows = min(workload.rows or per_device, per_device)
    cached = rows * workload.response_tokens * workload.length_spread
    cached += workload.prompt_tokens * (rows / workload.group_size if workload.shared_prompt else rows)
    pack = min(float(workload.pack_tokens), workload.unique_tokens / machine.count)
    unit = (RECOMPUTED_BYTES if workload.recompute else ACTIVATION_BYTES) * shape.hidden * shape.layers
    trained = known.trained or shape.parameters
    return {
        "process": known.base_bytes,
        "states": (4 * shape.parameters + (STATE_BYTES - 4) * trained) / machine.count,
        "rollout weights": float(workload.rollout_bytes * shape.parameters),
        "reference": workload.rollout_bytes * shape.parameters / machine.count if workload.reference else 0.0,
        "cache": (workload.cached_tokens or cached) * shape.kv_elements * (known.cache_bytes or workload.rollout_bytes),
        "activations": pack * (known.activation_bytes or unit) + known.cast_bytes,
        "logits": known.logits_bytes or 12.0 * min(pack, 1024.0) * shape.vocabulary,
    }


def _critic(shape: ModelShape, workload: Workload, machine: Machine, step_s: float) -> dict[str, float]:
    """A value model of the policy's shape: 16 bytes a parameter, one forward for values, training of every token."""
    full = Workload(**{**vars(workload), "live_share": 1.0})
    tokens = workload.unique_tokens
    values = 2 * shape.matmul_parameters * tokens + _attention(shape, workload, workload.shared_prompt)
    time = machine.compute_s(values) + _training(shape, full, machine, workload.epochs).time_s
    time += _update(shape, workload, machine).time_s
    return {
        "memory_bytes": STATE_BYTES * shape.parameters / machine.count,
        "time_s": time,
        "time_share": time / step_s if step_s else 0.0,
    }


def _assumptions(workload: Workload, machine: Machine) -> tuple[str, ...]:
    return (
        f"{machine.name}: {machine.flops / 1e12:g} TFLOP/s, {machine.bandwidth / 1e9:g} GB/s, {machine.source}",
        f"share of the peak reached: training {machine.training_efficiency:g}, decode {machine.decode_efficiency:g}, "
        f"bandwidth {machine.bandwidth_efficiency:g}",
        "AdamW in float32, 16 bytes a parameter; activations 34 bytes a token, layer and unit of width"
        + (", recomputed" if workload.recompute else ""),
        "logits in chunks of 1024 tokens; rewards, tokenising and environments are not counted",
    )
