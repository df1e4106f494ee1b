"""The engine's own forward pass for the Llama family: prompts in one wide pass, then one token a row and step.

Keys and values live in slots: row b of a step is slot b, and the cache is [layer, 2, slot, kv head, position, e], keys
before values, so that the active slots are one contiguous stretch and attention is two batched products without a copy.
Every row has its own position. What a layer makes of x is [..., kv head, g + 2, e]: the g queries of that head, its key
and its value. Residuals, norms and, on a CPU, the cache are float32; products with weights are in the shadow's format.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gropius.rollout.past import Past
from gropius.rollout.shadow import LayerWeights, Shadow
from gropius.rollout.shared import Order, SharedPrompts, shared_attention

WIDTH_STEP = (
    16  # attention reads whole multiples of this many positions: the softmax of an odd width is 20 times slower
)


def width_of(position: int) -> int:
    """The positions that attention reads where `position` is the largest of a step."""
    return (position // WIDTH_STEP + 1) * WIDTH_STEP


@dataclass(frozen=True, eq=False)
class PromptState:
    """What the pass over one prompt leaves. keys, values [layer, kv head, _P, e]; logits [_V] after its last token."""

    keys: Tensor
    values: Tensor
    logits: Tensor

    @property
    def length(self) -> int:
        """Tokens of the prompt."""
        return int(self.keys.shape[2])


class FusedDecoder:
    """Prefill and decode over slots. One instance a model; not to be used from two tasks at once."""

    def __init__(self, shadow: Shadow) -> None:
        self.shadow = shadow
        # One query a row in bfloat16 makes the CPU library copy every key; float32 products take the slots in place.
        self.cache_dtype = torch.float32 if shadow.device.type == "cpu" else shadow.dtype
        self._norm: Callable[..., Tensor] = _plain_norm
        if shadow.device.type != "cpu":
            self._norm = torch.nn.functional.rms_norm
        self.shared = SharedPrompts(shadow.kv_heads, self.cache_dtype, shadow.device)
        self._hold(self._cache(0, 0))

    @property
    def cache_bytes(self) -> int:
        """Memory of the slots and of shared prompts, keys and values together."""
        return 2 * self.keys.numel() * self.keys.element_size() + self.shared.bytes

    def reserve(self, slots: int, positions: int, used: int, budget: int) -> None:
        """Make room for so many slots and positions; what the first `used` slots hold is kept.

        Room once made is kept for later, unless slots × positions would then pass the budget.
        """
        have_slots, have_positions = self.keys.shape[1], self.keys.shape[3]
        if slots <= have_slots and positions <= have_positions:
            return
        positions = -(-positions // WIDTH_STEP) * WIDTH_STEP
        if max(slots, have_slots) * max(positions, have_positions) <= budget:
            slots, positions = max(slots, have_slots), max(positions, have_positions)
        kept = min(positions, have_positions)
        new = self._cache(slots, positions)
        new[:, :, :used, :, :kept] = self._slots[:, :, :used, :, :kept]
        self._hold(new)

    def release(self) -> None:
        """Give the memory of the slots back."""
        self._hold(self._cache(0, 0))

    @torch.inference_mode()
    def prefill(self, prompts: Sequence[tuple[int, ...]]) -> list[PromptState]:
        """One pass over prompts of about the same length (padded at their ends)."""
        shadow = self.shadow
        lengths = [len(prompt) for prompt in prompts]
        longest = max(lengths)
        ids = torch.zeros(len(prompts), longest, dtype=torch.int64)
        for row, prompt in enumerate(prompts):
            ids[row, : len(prompt)] = torch.tensor(prompt)
        ids = ids.to(shadow.device)
        turn = shadow.rotations[:longest][None, :, None, None]
        x = shadow.embedding[ids].float()
        keys, values = [], []
        for layer in shadow.layers:
            q, k, v = self._apart(self._qkv(layer, x, turn))
            keys.append(k)
            values.append(v)
            mixed = _prompt_attention(q, k, v, layer.window)
            x = self._after_attention(layer, x, mixed.transpose(1, 2).flatten(2))
        last = torch.tensor(lengths, device=shadow.device) - 1
        logits = self._logits(x[torch.arange(len(prompts), device=shadow.device), last])
        all_keys, all_values = torch.stack(keys), torch.stack(values)
        return [
            PromptState(all_keys[:, row, :, :length], all_values[:, row, :, :length], logits[row])
            for row, length in enumerate(lengths)
        ]

    @torch.inference_mode()
    def extend(self, pasts: Sequence[Past], suffixes: Sequence[tuple[int, ...]]) -> list[PromptState]:
        """One pass over what follows each past (padded at the ends); the states of the whole conversations."""
        shadow = self.shadow
        device, lengths = shadow.device, [len(suffix) for suffix in suffixes]
        had = torch.tensor([len(past.ids) for past in pasts], device=device)
        longest, widest = max(lengths), int(had.max())
        ids = torch.zeros(len(pasts), longest, dtype=torch.int64)
        for row, suffix in enumerate(suffixes):
            ids[row, : len(suffix)] = torch.tensor(suffix)
        ids = ids.to(device)
        positions = had[:, None] + torch.arange(longest, device=device)
        turn = shadow.rotations[positions.clamp(max=len(shadow.rotations) - 1)][:, :, None, None]
        seen = _conversation_positions(had, positions, widest)
        x = shadow.embedding[ids].float()
        keys, values = [], []
        for index, layer in enumerate(shadow.layers):
            q, k, v = self._apart(self._qkv(layer, x, turn))
            keys.append(k)
            values.append(v)
            all_k = torch.cat([_padded([past.keys[index] for past in pasts], widest), k], dim=2)
            all_v = torch.cat([_padded([past.values[index] for past in pasts], widest), v], dim=2)
            back = positions[:, :, None] - seen[:, None, :]
            mask = (back >= 0) & (back < layer.window) if layer.window else back >= 0
            mixed = _masked_attention(q, all_k, all_v, mask)
            x = self._after_attention(layer, x, mixed.transpose(1, 2).flatten(2))
        last = torch.tensor(lengths, device=device) - 1
        logits = self._logits(x[torch.arange(len(pasts), device=device), last])
        new_k, new_v = torch.stack(keys), torch.stack(values)
        return [
            PromptState(
                torch.cat([past.keys, new_k[:, row, :, :length]], dim=2),
                torch.cat([past.values, new_v[:, row, :, :length]], dim=2),
                logits[row],
            )
            for row, (past, length) in enumerate(zip(pasts, lengths, strict=True))
        ]

    @torch.inference_mode()
    def place(self, state: PromptState, slots: list[int]) -> None:
        """Copy a prompt's keys and values into the slots of its siblings."""
        self.keys[:, slots, :, : state.length] = state.keys[:, None]
        self.values[:, slots, :, : state.length] = state.values[:, None]

    @torch.inference_mode()
    def move(self, sources: list[int], targets: list[int], positions: int) -> None:
        """Copy the first `positions` positions of slots to others (all of `targets` are free)."""
        self.keys[:, targets, :, :positions] = self.keys[:, sources, :, :positions]
        self.values[:, targets, :, :positions] = self.values[:, sources, :, :positions]

    @torch.inference_mode()
    def step(self, ids: Tensor, positions: Tensor, width: int) -> Tensor:
        """Logits [_B, _V] after feeding one token to each of the slots 0 … _B − 1, at its own position [_B].

        width: positions of the slots that attention reads, a multiple of WIDTH_STEP above the largest position in a
        slot (`width_of`). A row with a shared prompt has in its slot what comes after it.
        """
        shadow = self.shadow
        rows, kv, e = len(ids), shadow.kv_heads, shadow.head_size
        turn = shadow.rotations[positions][:, None, None]
        order = self.shared.order() if self.shared else None
        own = positions if order is None else positions - order.lengths
        place = (self._places(own),)
        back = own[:, None] - torch.arange(width, device=shadow.device)
        windows = {layer.window for layer in shadow.layers}
        masks = {window: self._mask(back, window) for window in windows}
        prompt_masks = {} if order is None else {window: self._prompt_mask(order, own, window) for window in windows}
        views = self._views(rows, width)
        x = shadow.embedding[ids].float()
        for index, (layer, (slots, keys, values)) in enumerate(zip(shadow.layers, views, strict=True)):
            made = self._qkv(layer, x, turn).view(rows * kv, -1, e)
            slots.index_put_(place, made[:, -2:])
            mask = masks[layer.window]
            if order is None:
                mixed = _slot_attention(made[:, :-2], keys, values, mask)
            else:
                mixed = shared_attention(made[:, :-2], order, index, prompt_masks[layer.window], (keys, values, mask))
            x = self._after_attention(layer, x, mixed.view(rows, -1))
        return self._logits(x)

    def _cache(self, slots: int, positions: int) -> Tensor:
        shadow = self.shadow
        shape = (len(shadow.layers), 2, slots, shadow.kv_heads, positions, shadow.head_size)
        return torch.zeros(shape, dtype=self.cache_dtype, device=shadow.device)

    def _hold(self, slots: Tensor) -> None:
        """Make these the slots; keys and values [layer, slot, kv head, position, e] are views of them."""
        self._slots, self.keys, self.values = slots, slots[:, 0], slots[:, 1]
        self._viewed: tuple[int, int] | None = None
        self._seen: list[tuple[Tensor, Tensor, Tensor]] = []

    def _views(self, rows: int, width: int) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Of each layer: all its e-vectors; keys [_B · k, e, width] and values [_B · k, width, e] that a step reads."""
        if self._viewed != (rows, width):
            self._viewed = (rows, width)
            self._seen = [
                (
                    slots.view(-1, self.shadow.head_size),
                    slots[0, :rows].flatten(0, 1)[:, :width].transpose(1, 2),
                    slots[1, :rows].flatten(0, 1)[:, :width],
                )
                for slots in self._slots
            ]
        return self._seen

    def _places(self, positions: Tensor) -> Tensor:
        """[_B · k, 2] where the new key and value of each row and head go in a layer's cache seen as a list."""
        capacity, kv = self.keys.shape[3], self.shadow.kv_heads
        heads = torch.arange(len(positions) * kv, device=positions.device)
        place = heads * capacity + positions.repeat_interleave(kv)
        return torch.stack((place, place + self.keys[0].numel() // self.shadow.head_size), dim=1)

    def _mask(self, back: Tensor, window: int) -> Tensor:
        """[_B · k, 1, width] additive: a row sees its own past, at most `window` positions of it."""
        hidden = back < 0
        if window:
            hidden |= back >= window
        mask = torch.zeros(back.shape, dtype=self.cache_dtype, device=back.device).masked_fill_(hidden, -torch.inf)
        return mask.repeat_interleave(self.shadow.kv_heads, 0)[:, None]

    def _prompt_mask(self, order: Order, own: Tensor, window: int) -> Tensor:
        """[_B · k, 1, _P] the same for the shared prompts: what a shorter one does not have is hidden."""
        at = torch.arange(order.width, device=own.device)
        back = order.lengths[:, None] + own[:, None] - at
        return self._mask(back.masked_fill_(at >= order.lengths[:, None], -1), window)

    def _qkv(self, layer: LayerWeights, x: Tensor, turn: Tensor) -> Tensor:
        """[..., d] → [..., k, g + 2, e], queries and keys rotated by `turn` [..., 1, 1, e/2]."""
        shadow = self.shadow
        kv, e = shadow.kv_heads, shadow.head_size
        made: Tensor = layer.qkv(self._normed(x, layer.input_norm)).float().unflatten(-1, (kv, -1, e))
        if layer.q_norm is not None and layer.k_norm is not None:
            made[..., :-2, :] = self._norm(made[..., :-2, :], (e,), layer.q_norm, shadow.epsilon)
            made[..., -2, :] = self._norm(made[..., -2, :], (e,), layer.k_norm, shadow.epsilon)
        torch.view_as_complex(made.unflatten(-1, (e // 2, 2)))[..., :-1, :].mul_(turn)
        return made.to(self.cache_dtype)

    def _apart(self, made: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[n, s, k, g + 2, e] → queries [n, h, s, e], keys and values [n, k, s, e]."""
        by_head = made.transpose(1, 2)
        return made[..., :-2, :].flatten(2, 3).transpose(1, 2), by_head[..., -2, :], by_head[..., -1, :]

    def _after_attention(self, layer: LayerWeights, x: Tensor, mixed: Tensor) -> Tensor:
        x = x + layer.output(mixed.to(self.shadow.dtype))
        gate, up = layer.gate_up(self._normed(x, layer.mlp_norm)).chunk(2, dim=-1)
        return x.add_(layer.down(torch.nn.functional.silu(gate).mul_(up)))

    def _logits(self, x: Tensor) -> Tensor:
        logits: Tensor = self.shadow.head(self._normed(x, self.shadow.final_norm))
        return logits.float()

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        """x [..., d] normed, in the number format of the products."""
        return self._norm(x, (x.shape[-1],), weight, self.shadow.epsilon).to(self.shadow.dtype)


def _plain_norm(x: Tensor, shape: tuple[int], weight: Tensor, epsilon: float) -> Tensor:
    """`rms_norm` of float32 in four operations; PyTorch's own has nine on a CPU and gives the same within rounding.

    x · w / √(mean x² + ε) = √d · w · x / hypot(‖x‖, √(d ε)).
    """
    d = shape[0]
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return (x / torch.hypot(length, length.new_full((), math.sqrt(d * epsilon)))).mul_(weight).mul_(math.sqrt(d))


def _prompt_attention(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """Causal attention over prompts. q [n, h, _P, e], k and v [n, k, _P, e] → [n, h, _P, e]."""
    groups, length = q.shape[1] // k.shape[1], q.shape[2]
    if groups > 1:
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    if not window or length <= window:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    at = torch.arange(length, device=q.device)
    back = at[:, None] - at
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=(back >= 0) & (back < window))


def _conversation_positions(had: Tensor, positions: Tensor, widest: int) -> Tensor:
    """[n, widest + s] the position of every key: of the padded pasts, then of what is new; padding lies in no past."""
    old = torch.arange(widest, device=had.device).expand(len(had), -1)
    never = torch.iinfo(torch.int64).max // 2
    return torch.cat([old.masked_fill(old >= had[:, None], never), positions], dim=1)


def _padded(parts: Sequence[Tensor], width: int) -> Tensor:
    """[n, k, width, e] of parts [k, ≤ width, e], zeros behind each."""
    return torch.stack([torch.nn.functional.pad(part, (0, 0, 0, width - part.shape[1])) for part in parts])


def _masked_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Attention of new positions over whole conversations. q [n, h, s, e], k and v [n, k, m, e], mask [n, s, m]."""
    groups = q.shape[1] // k.shape[1]
    if groups > 1:
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None])


def _slot_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """One query position a row. q [_B·k, g, e] (the query heads of a kv head side by side), k [_B·k, e, m] and
    v [_B·k, m, e], mask [_B·k, 1, m] → [_B·k, g, e].
    """
    return torch.bmm(torch.softmax(torch.baddbmm(mask, q, k, alpha=q.shape[-1] ** -0.5), dim=-1), v)
