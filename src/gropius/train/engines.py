"""The engines of a recipe that are processes of their own: where each runs, and on how much of the machine."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from gropius.distributed.keeper import BOOK, book
from gropius.distributed.launch import new_secret
from gropius.distributed.launch import secret as agreed
from gropius.errors import EngineError
from gropius.models.load import LoadedModel
from gropius.recipe.resolve import Resolved
from gropius.rollout.apart import Apart, Engines, Host
from gropius.rollout.engine_process import EngineProcess, Told
from gropius.rollout.remote import Address

LOOK_S, SAME_S = 0.1, 20.0  # a connection that broke while its engine lived is made again after SAME_S


def open_engines(
    resolved: Resolved,
    loaded: LoadedModel,
    note: Callable[[str], None],
    start: Callable[[int, Told], Host] | None = None,
) -> Engines:
    """Start `cluster.engines` engines; whoever asks for them closes them. start: how, from what each must be told;
    None: processes of this machine, or those that the controller of a cluster starts.

    Errors: EngineError, with its last words, when one does not come up.
    """
    cluster = resolved.cluster
    elsewhere = BOOK in os.environ  # the controller of a cluster starts them
    secret = agreed() if elsewhere else new_secret()
    told = Told(resolved.as_dict(), secret, cluster.bind, "", threads_of(resolved), cluster.deadline_s)
    bound, beside = resolved.train.mismatch_bound, resolved.train.max_staleness > 0
    apart = Apart(
        cluster.engines, secret, cluster.restarts, bound, resolved.model.dtype, beside, deadline_s=cluster.deadline_s
    )
    posted = Posted(cluster.deadline_s)

    def begin(number: int) -> Host:
        if elsewhere and start is None:
            return posted(number)
        device = device_of(resolved, number, torch.cuda.device_count())
        return (start or EngineProcess)(number, replace(told, device=device))

    return Engines(loaded, begin, apart, note)


class Posted:
    """Engines that the controller of a cluster starts, found in its book. deadline_s: for one to be there."""

    def __init__(self, deadline_s: float) -> None:
        self._deadline_s, self._seen = deadline_s, dict[int, int]()

    def __call__(self, number: int) -> Elsewhere:
        """The n-th engine, when it listens; one that was lost is another after it was started again."""
        began = time.monotonic()
        while time.monotonic() - began < self._deadline_s:
            found = book()["engines"].get(str(number))
            if found is not None:
                address, port, name, describes, started = found
                if started > self._seen.get(number, 0) or time.monotonic() - began > SAME_S:
                    self._seen[number] = started
                    return Elsewhere(Address(address, port, name), describes)
            time.sleep(LOOK_S)
        raise EngineError(f"engine {number} is not there after {self._deadline_s:g} s (cluster.deadline_s)")


@dataclass
class Elsewhere:
    """An engine that others start and end."""

    address: Address
    describes: str

    def ended(self) -> str:
        """The controller says it."""
        return ""

    def end(self) -> None:
        """Nothing: it serves the next that asks."""


def device_of(resolved: Resolved, number: int, gpus: int) -> str:
    """The device of the n-th engine: the recipe's, else the GPUs after those of the ranks, in turn; "" is model.device.

    A machine whose ranks leave no GPU shares them.
    """
    named = resolved.cluster.engine_devices
    if named:
        return named[number % len(named)]
    if not gpus or resolved.model.device not in ("auto", "cuda"):
        return ""
    ranks = resolved.cluster.trainer_ranks
    spare = range(ranks, gpus) if gpus > ranks else range(gpus)
    return f"cuda:{spare[number % len(spare)]}"


def threads_of(resolved: Resolved) -> int:
    """CPU threads of one engine: the recipe's, else an equal share of the cores; the trainer has one where it trains
    at the same time.
    """
    share = resolved.cluster.engines + (resolved.train.max_staleness > 0)
    return resolved.train.threads or max(1, (os.cpu_count() or 1) // share)
