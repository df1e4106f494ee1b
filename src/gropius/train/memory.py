"""Out of memory in a micro-batch: the same batch again in smaller packs. The loss is a weighted sum: the same one."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import torch

from gropius.errors import RunHalted

if TYPE_CHECKING:
    from gropius.train.loop import Run

T = TypeVar("T")
LEAST_PACK_TOKENS = 16


def with_less(run: Run, work: Callable[[], T]) -> T:
    """Do work of the learner; as often as memory runs out, halve the token budget of a pack and do it again.

    The smaller budget stays, is part of the saved state, and is said. Errors: RunHalted when no smaller one helps, or
    when memory ran out while the optimiser was moving the weights.
    """
    learner = run.learner
    steps = learner.optimiser.steps
    while True:
        try:
            return work()
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            reason = first_words(error)
            if not learner.team.alone:  # the others stand in the middle of an exchange
                learner.team.astray = True
                raise of_a_rank(learner.team.rank, error, learner.settings.pack_tokens) from None
        if any(float(value) > steps for name, value in learner.optimiser.tensors().items() if name.endswith(".step")):
            raise RunHalted(
                f"memory ran out while the optimiser moved the weights ({reason}); they are half old and half new. "
                f"Go on from the last checkpoint, with less on this device: gropius resume {run.writer.folder}"
            )
        learner.optimiser.zero()
        smaller = learner.settings.pack_tokens // 2
        if smaller < LEAST_PACK_TOKENS:
            raise RunHalted(f"memory runs out even in packs of {learner.settings.pack_tokens} tokens: {reason}")
        shrink(run, smaller)
        run.progress.note(
            f"step {run.state.step + 1}: out of memory ({reason}); the same batch again in packs of {smaller} tokens, "
            "and so from now on. Write train.pack_tokens to keep it"
        )


def of_a_rank(rank: int, error: BaseException, pack_tokens: int) -> RunHalted:
    """What is said when memory runs out on one of several ranks: to start again would end in the same way."""
    return RunHalted(
        f"rank {rank} ran out of memory ({first_words(error)}); write a smaller train.pack_tokens than {pack_tokens}, "
        'or cluster.shard = "all", and resume the run'
    )


def first_words(error: BaseException) -> str:
    """The first line of an error, cut."""
    return str(error).splitlines()[0][:200] if str(error) else "no memory"


def shrink(run: Run, pack_tokens: int) -> None:
    """Use a smaller token budget from now on."""
    learner = run.learner
    learner.settings = dataclasses.replace(learner.settings, pack_tokens=pack_tokens)
    run.state.pack_tokens = pack_tokens
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def is_out_of_memory(error: BaseException) -> bool:
    """True for what torch and Python raise when memory runs out, on any device."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    text = str(error).lower()
    return any(words in text for words in ("can't allocate memory", "not enough memory", "out of memory"))
