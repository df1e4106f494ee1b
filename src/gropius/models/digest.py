"""One digest for one set of weights: equal only for equal bits."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor, nn


def weight_digest(model: nn.Module) -> str:
    """Sha256 over name, type, shape and bytes of every parameter and buffer, tied ones once."""
    return tensor_digest(model.state_dict(keep_vars=True).items())


def tensor_digest(named: Iterable[tuple[str, Tensor]], before: str = "") -> str:
    """Sha256 over name, type, shape and bytes of each tensor in order of their names, a tensor of two names once.

    before: text that comes first, of what else decides. The tensors are hashed apart (in threads), then their digests.
    """
    return combined(tensor_digests(distinct(named)), before)


def distinct(named: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Tensors in order of their names, one of two names once, under the first."""
    found = {id(tensor): (name, tensor) for name, tensor in sorted(named, key=lambda item: item[0], reverse=True)}
    return dict(sorted(found.values(), key=lambda item: item[0]))


def tensor_digests(tensors: Mapping[str, Tensor]) -> dict[str, bytes]:
    """Of each tensor apart, in threads."""
    with ThreadPoolExecutor(max_workers=2) as pool:
        return dict(zip(tensors, pool.map(lambda item: _one(item[0], item[1].detach()), tensors.items()), strict=True))


def combined(digests: Mapping[str, bytes], before: str = "") -> str:
    """Of tensors in order of their names, from the digests of each. before: as in `tensor_digest`."""
    whole = hashlib.sha256(before.encode())
    for name in sorted(digests):
        whole.update(digests[name])
    return whole.hexdigest()


def _one(name: str, tensor: Tensor) -> bytes:
    digest = hashlib.sha256(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
    flat = tensor.cpu().contiguous().flatten()
    if flat.numel():
        digest.update(flat.view(torch.uint8).numpy().data)
    return digest.digest()
