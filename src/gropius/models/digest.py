"""One digest for one set of weights: equal only for equal bits."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
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
    names: dict[int, str] = {}
    tensors = []
    for name, tensor in sorted(named):
        if id(tensor) not in names:
            names[id(tensor)] = name
            tensors.append((name, tensor.detach()))
    with ThreadPoolExecutor(max_workers=2) as pool:
        digests = list(pool.map(lambda item: _one(*item), tensors))
    whole = hashlib.sha256(before.encode())
    for digest in digests:
        whole.update(digest)
    return whole.hexdigest()


def _one(name: str, tensor: Tensor) -> bytes:
    digest = hashlib.sha256(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
    flat = tensor.cpu().contiguous().flatten()
    if flat.numel():
        digest.update(flat.view(torch.uint8).numpy().data)
    return digest.digest()
