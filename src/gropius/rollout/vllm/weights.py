"""Weights from trainer to worker through memory that both map: one copy in, none on the wire, no file, no pickle.

The memory is anonymous (Linux `memfd`): it has no name, lies on no disk, and
ends with the last process that holds it.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gropius.errors import EngineError
from gropius.models.lora import NAME as ADAPTER
from gropius.models.lora import Adapter, effective_weight

ALIGNMENT = 64
DTYPES = {
    str(dtype)[6:]: dtype
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8, torch.bool)
}
Named = tuple[str, Tensor]


def policy_tensors(model: nn.Module, merged: bool = True) -> list[Named]:
    """The parameters and persistent buffers under the names of a Hugging Face checkpoint; tied ones once.

    A linear layer with a LoRA adapter (peft) counts as one of W + s · B A, made anew from the two; not merged, as W.
    """
    seen: set[int] = set()
    named = []
    adapted = {f"{name}.": layer for name, layer in model.named_modules() if getattr(layer, "base_layer", None)}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        prefix = next((prefix for prefix in adapted if name.startswith(prefix)), "")
        if not prefix:
            named.append((name, tensor.detach()))
        elif name.startswith(f"{prefix}base_layer."):
            leaf = name.removeprefix(f"{prefix}base_layer.")
            weight = effective_weight(adapted[prefix]) if merged and leaf == "weight" else tensor.detach()
            named.append((prefix + leaf, weight))
    return named


def adapter_tensors(adapter: Adapter) -> list[Named]:
    """A and s · B of every adapted layer, under peft's names: the scale of each layer is in its B."""
    found: list[Named] = []
    for name, layer in adapter.layers.items():
        of: Any = layer
        found.append((f"base_model.model.{name}.lora_A.weight", of.lora_A[ADAPTER].weight.detach()))
        scaled = of.lora_B[ADAPTER].weight.detach() * of.scaling[ADAPTER]
        found.append((f"base_model.model.{name}.lora_B.weight", scaled))
    return found


class SharedWeights:
    """The trainer's end: memory for one set of weights, made at the first hand-over and used for every later one."""

    def __init__(self) -> None:
        self.file: int | None = None
        self._map: mmap.mmap | None = None

    def write(self, tensors: Sequence[Named], dtype: torch.dtype) -> tuple[list[dict[str, Any]], bool]:
        """Copy the tensors in, floating ones as `dtype`. What lies where, and whether the memory is a new one.

        Raises EngineError where the system has no anonymous memory (other than Linux), or too little of it.
        """
        entries, size = _layout(tensors, dtype)
        fresh = self._map is None or len(self._map) < size
        if fresh:
            self._make(size)
        assert self._map is not None
        for (_, tensor), entry in zip(tensors, entries, strict=True):
            if tensor.numel():
                _view(self._map, entry).copy_(tensor)
        return entries, fresh

    def close(self) -> None:
        """Give the memory back."""
        if self.file is not None:
            os.close(self.file)
        self.file = self._map = None

    def _make(self, size: int) -> None:
        self.close()
        if not hasattr(os, "memfd_create"):
            raise EngineError("weights are handed to vLLM through anonymous memory, which only Linux has")
        try:
            self.file = os.memfd_create("gropius-weights")
            os.posix_fallocate(self.file, 0, size)
            self._map = mmap.mmap(self.file, size)
        except OSError as error:
            self.close()
            raise EngineError(
                f"no memory for {size / 1e6:,.0f} MB of weights on their way: {error.strerror}"
            ) from error


class ReceivedWeights:
    """The worker's end of the same memory."""

    def __init__(self, file: int) -> None:
        try:
            self._map = mmap.mmap(file, os.fstat(file).st_size)
        finally:
            os.close(file)

    def tensors(self, entries: Iterable[Mapping[str, Any]]) -> Iterator[Named]:
        """Views of the memory, valid until the next hand-over. Raises ValueError for what does not lie in it."""
        for entry in entries:
            if entry["offset"] + _bytes(entry) > len(self._map):
                raise ValueError(f"{entry['name']} lies outside the memory that was handed over")
            yield str(entry["name"]), _view(self._map, entry)


def _layout(tensors: Sequence[Named], dtype: torch.dtype) -> tuple[list[dict[str, Any]], int]:
    entries, offset = [], 0
    for name, tensor in tensors:
        kind = dtype if tensor.is_floating_point() else tensor.dtype
        entry = {"name": name, "dtype": str(kind)[6:], "shape": list(tensor.shape), "offset": offset}
        entries.append(entry)
        offset += -(-_bytes(entry) // ALIGNMENT) * ALIGNMENT
    return entries, max(offset, mmap.PAGESIZE)


def _bytes(entry: Mapping[str, Any]) -> int:
    count = 1
    for size in entry["shape"]:
        count *= int(size)
    return count * DTYPES[entry["dtype"]].itemsize


def _view(memory: mmap.mmap, entry: Mapping[str, Any]) -> Tensor:
    dtype, shape = DTYPES[entry["dtype"]], entry["shape"]
    count = _bytes(entry) // dtype.itemsize
    if not count:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=entry["offset"]).view(shape)
