"""The weights that engines in other processes are handed, wherever they lie, and what is computed with them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from numpy.typing import NDArray
from torch import Tensor

from gropius.models.load import LoadedModel
from gropius.rollout.vllm import probe
from gropius.types import Completion, Request


class Source(Protocol):
    """The policy as it is now, for engines that hold a copy of it."""

    def buckets(self) -> Iterator[Mapping[str, Tensor]]:
        """Every tensor by name, some at a time; they are there until the next are asked for."""
        ...

    def digest(self) -> str:
        """Of all that `buckets` gave."""
        ...

    def logprobs(self, asked: Sequence[Request], drawn: Sequence[Completion]) -> Sequence[NDArray[Any]]:
        """What the trainer makes of tokens that were drawn, [_T] each."""
        ...


class Whole:
    """A model that lies whole in this process. dtype: what log-probabilities are computed in."""

    def __init__(self, loaded: LoadedModel, dtype: torch.dtype) -> None:
        self._loaded, self._dtype = loaded, dtype

    def buckets(self) -> Iterator[Mapping[str, Tensor]]:
        """One tensor at a time: nothing is copied."""
        for name, tensor in self._loaded.handed().items():
            yield {name: tensor}

    def digest(self) -> str:
        """See `Source.digest`."""
        return self._loaded.digest()

    def logprobs(self, asked: Sequence[Request], drawn: Sequence[Completion]) -> Sequence[NDArray[Any]]:
        """The model's full forward pass."""
        pairs = zip(asked, drawn, strict=True)
        return [probe.trainer_logprobs(self._loaded, self._dtype, request, found) for request, found in pairs]
