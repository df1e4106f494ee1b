"""The gradient by ranks that are real processes, beside that of one: the last row of the invariance table."""

from __future__ import annotations

import dataclasses
import os
import socket
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, spawn

from gropius.distributed.seat import Seat
from gropius.distributed.world import World
from gropius.errors import GropiusError
from gropius.objective.spec import Objective
from gropius.train.forward import Forward
from gropius.train.invariance import BOUNDS, Batch, Invariance, gradient, invariances
from gropius.train.step import LearnerSettings
from gropius.train.team import POLICY, Team

DEADLINE_S = 600.0
RANKS = 2


def every_invariance(
    forward: Forward, objective: Objective, settings: LearnerSettings, batch: Batch
) -> list[Invariance]:
    """The rows of `invariances`, and one of real ranks: 2 processes on the CPU, against one process on the CPU."""
    model: Any = forward.model  # sent to the ranks as it is, before a variant hangs anything on it
    own = model.device
    model.cpu()
    try:
        here = Forward.of(forward.model, compute_dtype=forward.compute_dtype, packed=forward.packed)
        alone = gradient(here, objective, settings, batch)
        shared = over_processes(here, objective, settings, batch)
    finally:
        model.to(own)
    dtype = str(next(forward.model.parameters()).dtype).split(".")[-1]
    bound = BOUNDS[forward.compute_dtype if forward.compute_dtype != "float32" else dtype]
    found = float((shared - alone).norm()) / (float(alone.norm()) or 1.0)
    rows = invariances(forward, objective, settings, batch)
    return [*rows, Invariance(f"{RANKS} ranks, each a process", bound, found)]


def over_processes(forward: Forward, objective: Objective, settings: LearnerSettings, batch: Batch) -> Tensor:
    """The flat gradient, in float64, that ranks of one model come to. Errors: GropiusError when one of them ends."""
    with socket.socket() as free, tempfile.TemporaryDirectory(prefix="gropius-ranks-") as folder:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        file = Path(folder) / "gradient.safetensors"
        options = {"compute_dtype": forward.compute_dtype, "packed": forward.packed}
        work = (port, forward.model, options, (objective, dataclasses.asdict(settings), batch), str(file))
        free.close()
        try:
            spawn(_rank, work, nprocs=RANKS)
        except (ProcessRaisedException, ProcessExitedException) as error:
            last = str(error).strip().splitlines()[-1]
            raise GropiusError(f"the ranks of the check did not come to a gradient: {last}") from error
        return load_file(file)["gradient"]


def _rank(rank: int, port: int, model: Any, options: dict[str, Any], what: tuple[Any, ...], file: str) -> None:
    """One rank: its share of the batch, and the sum of all."""
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(RANKS), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    torch.set_num_threads(max(1, torch.get_num_threads() // RANKS))
    objective, settings, batch = what
    world = World(Seat(rank, RANKS, rank, 0), torch.device("cpu"), DEADLINE_S)
    team = Team(world)
    team.lead = lambda *_: None  # type: ignore[method-assign]  # every rank makes the same calls here
    way = team.join(POLICY, model, lambda whole: Forward.of(whole, **options))
    found = gradient(way, objective, LearnerSettings(**settings), batch, team)
    if rank == 0:
        save_file({"gradient": found}, file)
    world.close()
