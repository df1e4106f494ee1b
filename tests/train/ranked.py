"""Real ranks in a test: one warm process forks them, so each job starts at once. Its cases say what the ranks do.

The warm process never computes a gradient, so a fork of it may. It reads one JSON job a line and answers with one line.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import socket
import subprocess
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class Ranked:
    """The warm process, seen from a test."""

    def __init__(self) -> None:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def run(self, case: str, ranks: int, **job: Any) -> Any:
        """What rank 0 of a case answers. Fails when any rank does."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps({"case": case, "ranks": ranks, **job}) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        assert answer["codes"] == [0] * ranks, answer
        return answer["found"]

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)


@contextlib.contextmanager
def ranked() -> Iterator[Ranked]:
    """A warm process for as long as it is needed."""
    server = Ranked()
    try:
        yield server
    finally:
        server.close()


def _team(job: dict[str, Any]) -> Any:
    import torch

    from gropius.distributed.seat import seat
    from gropius.distributed.world import World
    from gropius.train.team import Team

    where = seat()
    assert where is not None
    return Team(World(where, torch.device("cpu"), 60.0), job.get("mode", "optimiser"))


def _rows(job: dict[str, Any]) -> list[Any]:
    """The batch of a job: all rows, only the first few, some dead, or one whose loss is not finite."""
    import numpy as np
    from batches import batch

    rows = batch()[: job.get("rows")]
    for i in job.get("dead", ()):
        rows[i] = dataclasses.replace(rows[i], skipped=True, weight=rows[i].weight * 0)
    for i in job.get("broken", ()):
        rows[i] = dataclasses.replace(rows[i], advantage=np.full_like(rows[i].advantage, np.inf))
    return rows


def gradient(job: dict[str, Any]) -> Any:
    """‖g − g₀‖ / ‖g₀‖ of the ranks' gradient against that of one process, and what the reports say."""
    import torch
    from batches import build

    from gropius.objective.presets import resolve
    from gropius.train.forward import Forward
    from gropius.train.invariance import Batch, Catcher
    from gropius.train.step import Learner, LearnerSettings
    from gropius.train.team import Team

    dtype = getattr(torch, job.get("dtype", "float32"))
    settings = LearnerSettings(pack_tokens=job.get("pack_tokens", 4096), entropy=True)
    options = {"recompute": job.get("recompute", False), "packed": job.get("packed", True)}
    options["compute_dtype"] = job.get("compute_dtype", "float32")
    team, rows, objective = _team(job), Batch(_rows(job)).sequences, resolve(job.get("objective", "dapo"))
    found = []
    for crowd in (Team(), team):
        model = adapted(build(job.get("model", "llama"), dtype), job)
        if job.get("frozen"):
            next(model.parameters()).requires_grad_(False)
        way = crowd.join("policy", model, lambda whole: Forward.of(whole, **options)) if crowd.alone else None
        if way is None:
            own = crowd.join  # the calls of rank 0 are made by all: there is no follower here
            crowd.lead = lambda *_: None
            way = own("policy", model, lambda whole: Forward.of(whole, **options))
        catcher = Catcher(way.model)
        learner = Learner(way, objective, catcher, settings, crowd)
        scores = learner.score(rows)
        anchor = scores.logprobs if team.rank == 0 or crowd.alone else found[0]["scores"]
        report = learner.update(rows, [a if a is None else a + 0.01 for a in anchor])
        found.append({"report": report, "scores": scores.logprobs, "gradient": catcher.caught})
    alone, ranks = found
    if ranks["gradient"] is None:
        return {"taken": ranks["report"].taken, "refused": ranks["report"].refused}
    if team.rank:
        return None
    scale = float(alone["gradient"].norm())
    import numpy as np

    gaps = [abs(a - b).max() for a, b in zip(alone["scores"], ranks["scores"], strict=True) if a is not None and len(a)]
    same = [(a is None) == (b is None) for a, b in zip(alone["scores"], ranks["scores"], strict=True)]
    return {
        "difference": float((ranks["gradient"] - alone["gradient"]).norm()) / scale,
        "scores": float(np.max(gaps)) if gaps else 0.0,
        "loss": abs(ranks["report"].loss - alone["report"].loss),
        "metrics": {
            name: abs(value - alone["report"].metrics[name]) for name, value in ranks["report"].metrics.items()
        },
        "counts": [[getattr(one["report"], name) for name in ("live", "all_tokens")] for one in found],
        "same": all(same),
    }


def adapted(model: Any, job: dict[str, Any]) -> Any:
    """With the adapter that a job asks for, away from where it began."""
    import torch

    from gropius.models.lora import LoraSettings, attach

    if not job.get("lora"):
        return model
    found = attach(model, LoraSettings(rank=job["lora"], bias=job.get("bias", "none")), 0, "a test")
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in found.trained.values():
            parameter += 0.1 * torch.randn_like(parameter)
    return model


def references(job: dict[str, Any]) -> Any:
    """A reference by the policy's own adapter: what it scores on ranks and alone, before and after the policy moves."""
    import numpy as np
    import torch
    from batches import build

    from gropius.objective.presets import resolve
    from gropius.train.forward import Forward
    from gropius.train.optim import Optimiser, OptimiserSettings
    from gropius.train.reference import KINDS
    from gropius.train.step import Learner, LearnerSettings
    from gropius.train.team import POLICY, Team, full

    ranks, rows, found = _team(job), _rows(job), []
    for team in (Team(), ranks):
        team.lead = lambda *_: None
        way = team.join(POLICY, adapted(build("llama_tied", torch.float32), job), Forward.of)
        optimiser = Optimiser(way.model, OptimiserSettings(learning_rate=1e-2))
        learner = Learner(way, resolve("dapo"), optimiser, LearnerSettings(pack_tokens=60), team)
        reference = KINDS[job["kind"]](team)
        before = {name: full(p.detach()).clone() for name, p in way.model.named_parameters()}
        scores = [learner.score(rows, forward=reference.forward).logprobs]  # before the policy ever ran
        taken = learner.update(rows).taken
        scores.append(learner.score(rows, forward=reference.forward).logprobs)
        if job["kind"] == "copy":
            reference.refresh()
        scores += [learner.score(rows, forward=reference.forward).logprobs, learner.score(rows).logprobs]
        moved = [n for n, p in way.model.named_parameters() if not torch.equal(full(p.detach()), before[n])]
        trained = [n for n, p in way.model.named_parameters() if p.requires_grad]
        found.append({"scores": scores, "taken": taken, "moved": moved, "trained": trained})
    if ranks.rank:
        return None
    flat = [[np.concatenate([x for x in rows if x is not None]) for rows in one["scores"]] for one in found]
    gaps = [float(abs(alone - shared).max()) for alone, shared in zip(*flat, strict=True)]
    first, again, refreshed, policy = flat[1]
    return {
        "gaps": gaps,
        "still": bool((first == again).all()),
        "is_policy": bool((refreshed == policy).all()),
        "apart": float(abs(again - policy).max()),
        "moved": found[1]["moved"] == found[1]["trained"] == found[0]["moved"] and found[1]["taken"],
    }


def culprits(job: dict[str, Any]) -> Any:
    """A row whose loss is not finite: what the ranks say, and whether a weight moved."""
    import torch
    from batches import build

    from gropius.objective.presets import resolve
    from gropius.train.forward import Forward
    from gropius.train.optim import Optimiser, OptimiserSettings
    from gropius.train.step import Learner, LearnerSettings
    from gropius.train.team import full

    team = _team(job)
    team.lead = lambda *_: None
    way = team.join("policy", build("llama_tied", torch.float32), Forward.of)
    learner = Learner(
        way, resolve("dapo"), Optimiser(way.model, OptimiserSettings()), LearnerSettings(pack_tokens=64), team
    )
    before = [full(p.detach()).clone() for p in way.model.parameters()]
    report = learner.update(_rows(job))
    after = [full(p.detach()) for p in way.model.parameters()]
    moved = any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
    return {"culprits": report.culprits, "taken": report.taken, "moved": moved, "refused": report.refused}


def run(job: dict[str, Any]) -> Any:
    """A whole run of several ranks, as `gropius train` makes it in each of them."""
    from small import RECIPE

    from gropius import build, crew
    from gropius.recipe import from_dict, resolve
    from gropius.records.reader import RunReader
    from gropius.train.progress import Silent

    settings = [*job.get("settings", ()), f"cluster.trainer_ranks={job['ranks']}"]
    if "resume" in job:
        resolved = from_dict(RunReader(Path(job["resume"])).resolved(), settings)
    else:
        resolved = resolve(RECIPE, settings)
    if crew.follows(resolved):
        crew.follow(resolved)
        return None
    progress = Silent()
    with crew.leading(resolved, lambda error: print(error, file=sys.stderr)) as team:
        if "resume" in job:
            return str(build.resume(Path(job["resume"]), None, progress, settings, team))
        return str(build.train(resolved, progress, team))


CASES = {case.__name__: case for case in (gradient, references, culprits, run)}


def _rank(job: dict[str, Any], rank: int, port: int, out: int) -> int:
    """One rank, in a fork."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(job["ranks"]), LOCAL_RANK=str(rank))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GROPIUS_SECRET="a secret")
    if job["ranks"] == 1:
        del os.environ["RANK"]
    try:
        found = CASES[job["case"]](job)
        if rank == 0:
            os.write(out, json.dumps(found).encode())
        return 0
    except BaseException:
        traceback.print_exc()
        return 1


def _serve() -> None:
    import torch

    torch.set_num_threads(1)
    sys.path.insert(0, str(Path(__file__).parent))
    import batches  # noqa: F401
    import peft  # noqa: F401

    from gropius import build, crew  # noqa: F401

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        job = json.loads(line)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        reading, writing = os.pipe()
        children = []
        for rank in range(job["ranks"]):
            child = os.fork()
            if child == 0:
                os.close(reading)
                os._exit(_rank(job, rank, port, writing))
            children.append(child)
        os.close(writing)
        with os.fdopen(reading) as pipe:
            said = pipe.read()
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        answers.write(json.dumps({"codes": codes, "found": json.loads(said) if said else None}) + "\n")
        answers.flush()


if __name__ == "__main__":
    _serve()
