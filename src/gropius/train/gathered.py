"""Tensors that lie in parts on several ranks, put together as they are read, a bucket at a time, and not kept."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

FORMATS = {
    torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int64: "I64",
    torch.int32: "I32", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
BUCKET_BYTES = 64 << 20  # whole tensors held at once while all are read; one larger than that is a bucket by itself


class Gathered(Mapping[str, Tensor]):
    """A mapping by name. parts: this rank's, of the shapes of the whole. whole: asks all ranks for some, by name."""

    def __init__(self, parts: Mapping[str, Tensor], whole: Callable[[Sequence[str]], dict[str, Tensor]]) -> None:
        self.parts, self.whole = parts, whole

    def __getitem__(self, name: str) -> Tensor:
        return self.whole([name])[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.parts)

    def __len__(self) -> int:
        return len(self.parts)

    def buckets(self) -> Iterator[dict[str, Tensor]]:
        """All of them, in order. A bucket is emptied when the next is asked for."""
        for names in bucketed(self.parts):
            found = self.whole(names)
            yield found
            found.clear()


def bucketed(tensors: Mapping[str, Tensor]) -> Iterator[list[str]]:
    """Names in order, in lists of at most BUCKET_BYTES, or of one larger tensor."""
    names: list[str] = []
    held = 0
    for name, tensor in tensors.items():
        if names and held + tensor.nbytes > BUCKET_BYTES:
            yield names
            names, held = [], 0
        names.append(name)
        held += tensor.nbytes
    if names:
        yield names


def read(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a mapping, in order, however it is held. Whoever keeps none of them holds one bucket at most."""
    if not isinstance(tensors, Gathered):
        yield from tensors.items()
        return
    for bucket in tensors.buckets():
        for name in list(bucket):
            yield name, bucket.pop(name)


def parts_of(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """The same names, shapes and formats without asking another rank for anything."""
    return tensors.parts if isinstance(tensors, Gathered) else tensors


def write(tensors: Mapping[str, Tensor], path: Path) -> None:
    """A safetensors file of them. What is gathered goes to the disk a bucket at a time."""
    if not isinstance(tensors, Gathered):
        save_file({name: t.detach().cpu().contiguous() for name, t in tensors.items()}, path, {"format": "pt"})
        return
    # The widest first, so that each begins at a multiple of its own width.
    parts = dict(sorted(tensors.parts.items(), key=lambda item: -item[1].itemsize))
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, part in parts.items():
        begin, end = end, end + part.nbytes
        entries[name] = {"dtype": FORMATS[part.dtype], "shape": list(part.shape), "data_offsets": [begin, end]}
    head = json.dumps(entries).encode()
    head += b" " * (-len(head) % 8)
    with path.open("wb") as stream:
        stream.write(struct.pack("<Q", len(head)) + head)
        for _, tensor in read(Gathered(parts, tensors.whole)):
            stream.write(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
            del tensor  # or it would still be there while the next bucket is put together


def full(tensor: Tensor) -> Tensor:
    """A divided tensor put together on every rank; any other as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that lies on this rank."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
