"""The weights as the decode path wants them: fused, in the rollout's number format, refreshed from the trainer's own.

q, k and v are one matrix, gate and up another; norm weights stay apart. The first goes by key head: its query heads,
its key, its value, so that a row's answer is taken apart without a copy. Rotary pairs are laid side by side (dimension
j next to j + e/2), so that a rotation is one complex product; queries and keys are permuted alike, which leaves their
products as they are. Only what must be copied is copied: in the trainer's own number format the other
matrices are the trainer's tensors themselves. A LoRA adapter is merged into the copy, anew from base and adapter at
every refresh: no error gathers, and the trainer's tensors are never touched.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from gropius.models.lora import effective_weight

FAMILY = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
ROTARY = ("default", "linear", "llama3", "yarn")


def why_not(model: PreTrainedModel) -> str:
    """Why a model cannot take the engine's own decode path; an empty string when it can."""
    kind = type(model).__name__
    if kind not in FAMILY:
        return f"{kind} is not one of {', '.join(FAMILY)}"
    config = model.config
    rotary = (config.rope_parameters or {}).get("rope_type", "default")
    if rotary not in ROTARY:
        return f"rotary positions of the kind {rotary} depend on the length"
    if (config.rope_parameters or {}).get("partial_rotary_factor", 1) != 1:
        return "only a part of each head is rotated"
    if config.hidden_act != "silu":
        return f"the activation is {config.hidden_act}"
    if getattr(config, "pretraining_tp", 1) not in (None, 1):
        return "its matrices are split for tensor parallelism"
    linear = [module for layer in model.model.layers for module in layer.modules() if not list(module.children())]
    strange = {type(m).__name__ for m in linear if isinstance(m, nn.Linear) and type(m) is not nn.Linear}
    return f"its linear layers are {', '.join(sorted(strange))}" if strange else ""


@dataclass(eq=False)
class Matrix:
    """A linear map x → x Wᵀ + b. packed: W in the layout of the CPU's matrix library, where that is worth it."""

    weight: Tensor
    bias: Tensor | None = None
    packed: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        if self.packed is not None:
            flat = x.reshape(-1, x.shape[-1])
            y: Tensor = torch.ops.mkldnn._linear_pointwise(flat, self.packed, self.bias, "none", [], "")
            return y.view(*x.shape[:-1], y.shape[-1])
        return nn.functional.linear(x, self.weight, self.bias)

    def pack(self) -> None:
        """Lay the weights out for bfloat16 products on this CPU (oneDNN would else do it in every call)."""
        if self.weight.dtype == torch.bfloat16 and self.weight.device.type == "cpu" and _can_pack():
            self.packed = torch.ops.mkldnn._reorder_linear_weight(self.weight, 64)


@dataclass(eq=False)
class LayerWeights:
    """One decoder layer. window: how many positions back it sees, 0 for all."""

    input_norm: Tensor
    qkv: Matrix
    q_norm: Tensor | None
    k_norm: Tensor | None
    output: Matrix
    mlp_norm: Tensor
    gate_up: Matrix
    down: Matrix
    window: int


class Shadow:
    """The weights of one model, fused. dtype: number format of the matrix products of the rollout."""

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype) -> None:
        config = model.config
        self.model: Any = model
        self.dtype = dtype
        self.heads = config.num_attention_heads
        self.kv_heads = config.num_key_value_heads
        self.head_size = getattr(config, "head_dim", None) or config.hidden_size // self.heads
        self.epsilon = config.rms_norm_eps
        self.device = model.lm_head.weight.device
        self.layers: list[LayerWeights] = []
        self.embedding = self.final_norm = torch.empty(0)
        self.head = Matrix(torch.empty(0))
        self.rotations = self._rotations()
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Take the trainer's weights over. Fused matrices are copied; the rest is shared where the format allows."""
        body = self.model.model
        self.layers = [self._layer(layer, index) for index, layer in enumerate(body.layers)]
        self.embedding = body.embed_tokens.weight.detach()
        self.final_norm = body.norm.weight.detach().float()
        self.head = self._matrix(self.model.lm_head.weight, self.model.lm_head.bias)
        self.head.pack()

    def _layer(self, layer: Any, index: int) -> LayerWeights:
        attention, mlp = layer.self_attn, layer.mlp
        q_norm, k_norm = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
        qkv = [attention.q_proj, attention.k_proj, attention.v_proj]
        biases = [part.bias for part in qkv]
        order = self._head_order()
        fused = torch.cat([effective_weight(part) for part in qkv])[order].to(self.dtype)
        bias = None if biases[0] is None else torch.cat([b.detach() for b in biases])[order].to(self.dtype)
        gate_up = torch.cat([effective_weight(mlp.gate_proj), effective_weight(mlp.up_proj)]).to(self.dtype)
        mlp_bias = None
        if mlp.gate_proj.bias is not None:
            mlp_bias = torch.cat([mlp.gate_proj.bias.detach(), mlp.up_proj.bias.detach()]).to(self.dtype)
        pairs = self._pairs()
        weights = LayerWeights(
            input_norm=layer.input_layernorm.weight.detach().float(),
            qkv=Matrix(fused, bias),
            q_norm=None if q_norm is None else q_norm.weight.detach().float()[pairs],
            k_norm=None if k_norm is None else k_norm.weight.detach().float()[pairs],
            output=self._matrix(effective_weight(attention.o_proj), attention.o_proj.bias),
            mlp_norm=layer.post_attention_layernorm.weight.detach().float(),
            gate_up=Matrix(gate_up, mlp_bias),
            down=self._matrix(effective_weight(mlp.down_proj), mlp.down_proj.bias),
            window=self._window(index),
        )
        for matrix in (weights.qkv, weights.output, weights.gate_up, weights.down):
            matrix.pack()
        return weights

    def _matrix(self, weight: Tensor, bias: Tensor | None) -> Matrix:
        return Matrix(weight.detach().to(self.dtype), None if bias is None else bias.detach().to(self.dtype))

    def _pairs(self) -> Tensor:
        """[e] the dimensions of a head with j and j + e/2 side by side."""
        return torch.arange(self.head_size, device=self.device).view(2, -1).t().reshape(-1)

    def _head_order(self) -> Tensor:
        """Rows of q, k and v, one above the other, by key head: its queries and its key in pairs, its value."""
        h, kv, e = self.heads, self.kv_heads, self.head_size
        rows = torch.arange((h + 2 * kv) * e, device=self.device).view(-1, e)
        turned = rows[: h + kv, self._pairs()]
        parts = (turned[:h].view(kv, -1, e), turned[h:, None], rows[h + kv :, None])
        return torch.cat(parts, dim=1).reshape(-1)

    def _window(self, index: int) -> int:
        config = self.model.config
        kinds = getattr(config, "layer_types", None)
        window = getattr(config, "sliding_window", None) or 0
        if kinds is not None:
            return window if kinds[index] == "sliding_attention" else 0
        return window if getattr(config, "use_sliding_window", True) else 0

    @torch.no_grad()
    def _rotations(self) -> Tensor:
        """[context, e/2] complex: the rotation of every position, as the model's own rotary module gives it."""
        context = self.model.config.max_position_embeddings
        positions = torch.arange(context, device=self.device)[None]
        cos, sin = self.model.model.rotary_emb(torch.zeros(1, dtype=torch.float32, device=self.device), positions)
        half = self.head_size // 2
        return torch.complex(cos[0, :, :half].float(), sin[0, :, :half].float())


def _can_pack() -> bool:
    """True where this PyTorch lays weights out ahead and the product stays what it is (tried once, on a small one)."""
    if not _PACKS:
        _PACKS.append(_try_packing())
    return _PACKS[0]


_PACKS: list[bool] = []


def _try_packing() -> bool:
    ops = torch.ops.mkldnn
    if not (hasattr(ops, "_reorder_linear_weight") and hasattr(ops, "_linear_pointwise")):
        return False
    weight = torch.linspace(-1, 1, 64 * 32).view(64, 32).to(torch.bfloat16)
    x = torch.linspace(-1, 1, 4 * 32).view(4, 32).to(torch.bfloat16)
    try:
        y = ops._linear_pointwise(x, ops._reorder_linear_weight(weight, 4), None, "none", [], "")
    except (RuntimeError, NotImplementedError, TypeError):  # a CPU or build without bfloat16 kernels
        return False
    return torch.allclose(y.float(), nn.functional.linear(x.float(), weight.float()), rtol=0.02, atol=0.02)
