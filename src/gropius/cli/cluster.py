"""`--cluster`: the parts of a run on the machines of a Ray, watched from here."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from gropius.cli.console import Console
from gropius.distributed.controller import Controller
from gropius.distributed.launch import SECRET
from gropius.distributed.parts import LEASE, Job, Need

if TYPE_CHECKING:
    from gropius.distributed.by_ray import RayCluster
    from gropius.recipe import Resolved


def over_cluster(resolved: Resolved, words: Sequence[str], address: str) -> int:
    """Run the ranks and reward hosts of a recipe on a Ray. The exit code of rank 0.

    Errors: UsageError where there is no Ray; RunHalted when parts are lost more often than restarts allow.
    """
    from gropius.distributed.by_ray import connected

    cluster = resolved.cluster
    processors = resolved.train.threads or max(1, (os.cpu_count() or 1) // cluster.trainer_ranks)
    wanted = (cluster.trainer_ranks + cluster.engines) * processors + cluster.reward_hosts
    with connected(address, cluster.lost_after_s * LEASE, wanted) as ray, Console() as console:
        return Controller(ray, job_of(resolved, words, ray), console.note, _show).run()


def job_of(resolved: Resolved, words: Sequence[str], ray: RayCluster) -> Job:
    """What is to run: one GPU for each rank and engine where there are any and the recipe does not say "cpu"."""
    cluster = resolved.cluster
    gpus = 1.0 if resolved.model.device != "cpu" and ray.total("GPU") else 0.0
    left = int(ray.total("CPU")) - cluster.reward_hosts
    threads = resolved.train.threads or max(1, left // (cluster.trainer_ranks + cluster.engines))
    computes = Need(threads, gpus)
    return Job(
        words=words,
        ranks=cluster.trainer_ranks,
        engines=cluster.engines,
        rewards=cluster.reward_hosts,
        needs={"rank": computes, "engine": computes, "reward host": Need(1.0)},
        recipe=resolved.as_dict(),
        restarts=cluster.restarts,
        deadline_s=cluster.deadline_s,
        lost_after_s=cluster.lost_after_s,
        secret=os.environ.get(SECRET) or secrets.token_hex(16),
        folder=os.getcwd(),
        environment={"OMP_NUM_THREADS": str(threads)},
    )


def _show(text: str, error: bool) -> None:
    stream = sys.stderr if error else sys.stdout
    stream.write(text)
    stream.flush()
