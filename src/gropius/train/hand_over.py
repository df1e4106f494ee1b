"""The policy's weights on their way to whoever draws: to the engines of this process, or from the ranks' parts.

With engines in processes of their own the ranks hold parts alone. Parts are put together a bucket at a time, hashed,
sent to every engine and let go; the digest of all of them is the policy's, and the engines' own must be the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from gropius.models.digest import combined, tensor_digests
from gropius.models.load import LoadedModel
from gropius.rollout.apart import Engines
from gropius.train.gathered import Gathered
from gropius.train.sequences import TrainSequence
from gropius.train.step import Learner
from gropius.train.team import HANDED
from gropius.types import Completion, Request

if TYPE_CHECKING:
    from gropius.train.loop import Run


def hand_over(run: Run) -> str:
    """From now on the policy as it is draws: the digest of its weights, which its responses will carry."""
    team, version, engine = run.learner.team, run.learner.optimiser.steps, run.player.engine
    if team.divided and isinstance(engine, Engines):
        return engine.hand_over(version)
    team.publish(run.loaded.model, version)
    digest = run.loaded.digest()
    engine.set_policy(version, digest)
    return digest


def digest_of(run: Run) -> str:
    """The digest of the policy's weights as they are."""
    if not run.learner.team.divided:
        return run.loaded.digest()
    source = Divided(run.loaded, run.learner)
    for _ in source.buckets():
        pass
    return source.digest()


class Divided:
    """The weights of a policy that no process holds whole."""

    def __init__(self, loaded: LoadedModel, learner: Learner) -> None:
        self._loaded, self._learner = loaded, learner
        self._digests: dict[str, bytes] = {}

    def buckets(self) -> Iterator[Mapping[str, Tensor]]:
        """Put together by all ranks, at most `gathered.BUCKET_BYTES` at a time."""
        self._digests.clear()
        whole = self._learner.team.gathered(HANDED)
        assert isinstance(whole, Gathered)
        for bucket in whole.buckets():
            self._digests |= tensor_digests(bucket)
            yield bucket

    def digest(self) -> str:
        """Of the tensors that `buckets` gave last."""
        return combined(self._digests, self._loaded.preamble)

    def logprobs(self, asked: Sequence[Request], drawn: Sequence[Completion]) -> Sequence[NDArray[Any]]:
        """By all ranks, as they score a batch."""
        old = self._learner
        settings = dataclasses.replace(old.settings, temperature=1.0, skip=False)
        learner = Learner(old.forward, old.objective, old.optimiser, settings, old.team)
        rows = [_row(n, *pair) for n, pair in enumerate(zip(asked, drawn, strict=True))]
        return [np.zeros(0, np.float32) if row is None else row for row in learner.score(rows).logprobs]


def _row(number: int, request: Request, drawn: Completion) -> TrainSequence:
    size = len(drawn.token_ids)
    return TrainSequence(
        group_id="",
        member=number,
        episode=number,
        prompt_ids=np.asarray(request.prompt_ids, np.int64),
        response_ids=np.asarray(drawn.token_ids, np.int64),
        mask=np.ones(size, np.bool_),
        sampler_logprobs=np.asarray(drawn.logprobs, np.float32),
        advantage=np.zeros(size),
        weight=np.zeros(size),
        keep=np.ones(size, np.bool_),
    )
