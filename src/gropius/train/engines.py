"""The engines of a recipe that are processes of their own: where each runs, and on how much of the machine."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace

import torch

from gropius.distributed.launch import new_secret
from gropius.models.load import LoadedModel
from gropius.recipe.resolve import Resolved
from gropius.rollout.apart import Apart, Engines, Start
from gropius.rollout.engine_process import EngineProcess, Told


def open_engines(
    resolved: Resolved, loaded: LoadedModel, note: Callable[[str], None], start: Start | None = None
) -> Engines:
    """Start `cluster.engines` engines; whoever asks for them closes them. start: how, None: processes of this machine.

    Errors: EngineError, with its last words, when one does not come up.
    """
    cluster, secret = resolved.cluster, new_secret()
    told = Told(resolved.as_dict(), secret, cluster.bind, "", threads_of(resolved), cluster.deadline_s)
    apart = Apart(cluster.engines, secret, cluster.restarts, resolved.train.mismatch_bound, resolved.model.dtype)

    def process(number: int) -> EngineProcess:
        return EngineProcess(number, replace(told, device=device_of(resolved, number, torch.cuda.device_count())))

    return Engines(loaded, start or process, apart, note)


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
    """CPU threads of one engine: the recipe's, else an equal share of the cores."""
    return resolved.train.threads or max(1, (os.cpu_count() or 1) // resolved.cluster.engines)
