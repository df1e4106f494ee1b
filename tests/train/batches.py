"""Tiny random models of every architecture that the packs are proved on, and batches of rows to run through them."""

from __future__ import annotations

import numpy as np
import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from gropius.train.sequences import TrainSequence

VOCABULARY = 61
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
ARCHITECTURES = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=False)),
    "llama_tied": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=True)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SHAPE, tie_word_embeddings=True)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=16, tie_word_embeddings=False)),
    "gemma3": lambda: Gemma3ForCausalLM(
        Gemma3TextConfig(**SHAPE, head_dim=16, sliding_window=5, layer_types=["sliding_attention", "full_attention"])
    ),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SHAPE, head_dim=8, sliding_window=6)),
}


def build(name: str, dtype: torch.dtype = torch.float64, seed: int = 0) -> PreTrainedModel:
    """A random model with weights large enough that every token matters to every other."""
    torch.manual_seed(seed)
    model = ARCHITECTURES[name]()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.1)
    model = model.to(dtype).eval()
    if dtype == torch.float64:
        _keep_float64(model)
    return model


def _keep_float64(model: PreTrainedModel) -> None:
    """The norms of transformers round to float32 whatever they are given; here they keep what they get."""
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            gemma = type(module).__name__.startswith("Gemma")
            eps = module.eps if gemma else module.variance_epsilon

            def forward(x, module=module, gemma=gemma, eps=eps):
                scale = 1.0 + module.weight if gemma else module.weight
                return scale * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps))

            module.forward = forward


def row(
    prompt: list[int], response: list[int], *, group: str = "g", member: int = 0, mask: list[int] | None = None, **given
) -> TrainSequence:
    """One row; its advantage and weight are 1 and 1/_T unless given."""
    size = len(response)
    own = np.ones(size, bool) if mask is None else np.array(mask, bool)
    defaults = {
        "advantage": np.where(own, 1.0, 0.0),
        "weight": np.where(own, 1.0 / max(size, 1), 0.0),
        "keep": np.ones(size, bool),
        "sampler_logprobs": np.zeros(size, np.float32),
    }
    return TrainSequence(
        group_id=group,
        member=member,
        episode=member,
        prompt_ids=np.array(prompt, np.int64),
        response_ids=np.array(response, np.int64),
        mask=own,
        **{**defaults, **given},
    )


def batch(seed: int = 0, groups: int = 4, size: int = 4) -> list[TrainSequence]:
    """Ragged groups with multi-turn masks, repeated answers, answers that begin alike, and skipped rows."""
    stream = np.random.default_rng(seed)
    rows = []
    for g in range(groups):
        prompt = [1, 2, *stream.integers(3, VOCABULARY, int(stream.integers(1, 14))).tolist()]
        start = stream.integers(3, VOCABULARY, 3).tolist()
        for m in range(size):
            response = stream.integers(3, VOCABULARY, int(stream.integers(1, 16))).tolist()
            if m % 2:
                response = start + response
            if m == 2 and rows:
                response = rows[-1].response_ids.tolist()
            mask = stream.random(len(response)) < 0.7
            dead = (g + m) % 5 == 4
            values = np.where(mask & (not dead), stream.normal(size=len(response)), 0.0)
            rows.append(
                row(
                    prompt,
                    response,
                    group=f"g{g}",
                    member=len(rows),
                    mask=mask.tolist(),
                    advantage=values,
                    weight=np.where(mask, stream.random(len(response)), 0.0),
                    sampler_logprobs=stream.normal(-3, 0.5, len(response)).astype(np.float32),
                    skipped=bool(dead),
                )
            )
    return rows
