"""What training over several ranks keeps of their number, and where the rest goes.

    python benchmarks/ranks.py [--model tiny|smollm2] [--ranks 2] [--rounds 3] [--threads 1] [--shard optimiser|all]
                               [--prompts N]

One optimiser step on the same rows by 1 rank, then by all ranks, each rank with `--threads` threads; medians. Printed:
wall and CPU seconds of the step; efficiency = wall of one / (ranks · wall of all), and the same of CPU seconds, which a
busy neighbour does not disturb (CPU of one / CPU of all ranks together); the balance of the deal (cost of the mean rank
/ cost of the busiest); and what a step costs that has nothing to compute: the exchange alone.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

import torch
from step import OBJECTIVE, SHAPES
from step import rows as rows_of

from gropius.distributed.seat import seat
from gropius.distributed.world import World
from gropius.models.load import load_model
from gropius.train.forward import Forward
from gropius.train.optim import Optimiser, OptimiserSettings
from gropius.train.pack import pack
from gropius.train.shares import evenly
from gropius.train.step import Learner, LearnerSettings
from gropius.train.team import POLICY, Team

PACK_TOKENS = 2048


def main() -> None:
    """Measure, in processes of their own, one rank and several."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SHAPES, default="smollm2")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--prompts", type=int, default=0, help="of the batch; by itself the shape's own")
    parser.add_argument("--shard", choices=("optimiser", "all"), default="optimiser")
    given = parser.parse_args()
    if seat() is not None:
        rank(given)
        return
    found = {ranks: started(given, ranks) for ranks in (1, given.ranks)}
    one, all_ = found[1], found[given.ranks]
    print(f"{given.model}, {given.threads} thread a rank, {one['tokens']} tokens a step in {one['packs']} packs")
    for ranks, row in found.items():
        print(
            f"{ranks} rank{'s' if ranks > 1 else ' '}  wall {row['wall']:.2f} s  CPU {row['cpu']:.2f} s (all ranks)  "
            f"gradient norm {row['norm']:.6g}"
        )
    print(
        f"efficiency: wall {one['wall'] / (given.ranks * all_['wall']):.1%}, CPU {one['cpu'] / all_['cpu']:.1%}; "
        f"balance {all_['balance']:.1%}; exchange alone: wall {all_['idle_wall']:.2f} s, CPU {all_['idle_cpu']:.2f} s "
        f"(dealing {all_['dealing']:.3f} s of it on every rank)"
    )


def started(given: argparse.Namespace, ranks: int) -> dict[str, float]:
    """Run this file once a rank under torchrun; what rank 0 measured."""
    words = [f"--{name}={value}" for name, value in vars(given).items()]
    environment = os.environ | {"OMP_NUM_THREADS": str(given.threads), "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", __file__, *words],
        env=environment, stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    found: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def rank(given: argparse.Namespace) -> None:
    """One rank of one measurement: the same step again and again, and the step that has nothing to compute."""
    where = seat()
    assert where is not None
    torch.set_num_threads(given.threads)
    shape = SHAPES[given.model]
    loaded = load_model(shape.source, device="cpu")
    rows = rows_of(shape, given.prompts or shape.prompts, seed=0)
    # One rank is measured as it runs in practice: alone, without a group around it.
    team = Team(World(where, torch.device("cpu"), 600.0), given.shard) if where.size > 1 else Team()
    team.lead = lambda *_: None  # type: ignore[method-assign]  # every rank makes the same calls here
    way = team.join(POLICY, loaded.model, Forward.of)
    settings = LearnerSettings(pack_tokens=PACK_TOKENS)
    learner = Learner(way, OBJECTIVE, Optimiser(way.model, OptimiserSettings(learning_rate=1e-9)), settings, team)
    walls, cpus, norm = [], [], 0.0
    for n in range(given.rounds + 1):
        wall, cpu, report = timed(team, lambda: learner.update(rows))
        if n:  # the first one gathers memory
            walls.append(wall)
            cpus.append(cpu)
            norm = norm or report.grad_norm
    idle = [timed(team, lambda: exchange(learner, team)) for _ in range(given.rounds)] if not team.alone else []
    began = time.process_time()
    packs, dealt = evenly(lambda tokens: pack(rows, budget_tokens=tokens), PACK_TOKENS, where.size)
    spent = [sum(packs[i].cost for i in mine) for mine in dealt]
    found = {
        "wall": statistics.median(walls), "cpu": statistics.median(cpus), "norm": norm, "packs": len(packs),
        "tokens": sum(one.run_tokens for one in packs), "balance": sum(spent) / len(spent) / max(spent),
        "idle_wall": statistics.median([one[0] for one in idle] or [0.0]),
        "idle_cpu": statistics.median([one[1] for one in idle] or [0.0]), "dealing": time.process_time() - began,
    }  # fmt: skip
    if where.rank == 0:
        print(json.dumps(found), flush=True)


def timed(team: Team, work):  # type: ignore[no-untyped-def]
    """Wall seconds from the moment that all ranks begin to the moment that all are done; CPU seconds of all of them."""
    team.any(False)
    wall, cpu = time.perf_counter(), time.process_time()
    report = work()
    mine = time.process_time() - cpu
    team.any(False)
    wall = time.perf_counter() - wall
    every = team.merged({"cpu": mine})
    return wall, sum(one["cpu"] for one in every), report


def exchange(learner: Learner, team: Team) -> None:
    """What the ranks say to each other in a step, and the step itself, with rows that weigh nothing."""
    with learner.forward.running():
        learner._idle(True)
    team.merged({})
    learner.optimiser.step()


if __name__ == "__main__":
    main()
