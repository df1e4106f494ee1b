"""Real ranks in a test: one warm process forks them, so each job starts at once. Its cases say what the ranks do.

The warm process never computes a gradient, so a fork of it may. It reads one JSON job a line and answers with one line.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
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
    from gropius.train.team import Team

    return Team(_world(job), job.get("mode", "optimiser"))


def _world(job: dict[str, Any], deadline_s: float = 60.0) -> Any:
    import torch

    from gropius.distributed.seat import seat
    from gropius.distributed.world import World

    where = seat()
    assert where is not None
    return World(where, torch.device("cpu"), deadline_s)


def exchange(job: dict[str, Any]) -> Any:
    """Everything that ranks say to each other, as each of them heard it."""
    import torch

    world = _world(job)
    words = ["", "a", "ü" * 1000]
    heard = [world.broadcast(word.encode() if world.rank == 0 else None).decode() for word in words]
    gathered = [part.decode() for part in world.gather((f"r{world.rank}" * (world.rank + 1)).encode())]
    empty = [part.decode() for part in world.gather(b"")]
    flags = [world.any(False), world.any(world.rank == 2), world.any(True)]
    tensor = torch.arange(4.0) if world.rank == 0 else torch.full((4,), 9.0)
    world.spread([tensor])
    mine = {"heard": heard, "gathered": gathered, "empty": empty, "any": flags, "spread": tensor.tolist()}
    every = [json.loads(part) for part in world.gather(json.dumps(mine).encode())]
    return {name: [one[name] for one in every] for name in mine} if every else None


def missing(job: dict[str, Any]) -> Any:
    """A rank that leaves without a word, as rank 0 sees it: after a call that all answered."""
    from gropius.distributed.launch import lost_sight

    world = _world(job, deadline_s=10.0)
    if world.rank:
        world.await_call()
        os._exit(0)
    world.call()
    try:
        world.call()
    except RuntimeError as error:
        return {"said": str(error), "lost": lost_sight(error), "later": world._calls == 2}
    return {"said": "", "lost": False, "later": False}


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


def _counted(*names: str) -> list[int]:
    """An entry for every call of an exchange from now on. names: what versions of torch call it, the newest first."""
    import torch.distributed as dist

    calls: list[int] = []
    name = next(name for name in names if hasattr(dist, name))
    honest = getattr(dist, name)

    def counted(*given: Any, **more: Any) -> Any:
        calls.append(1)
        return honest(*given, **more)

    setattr(dist, name, counted)
    return calls


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
        crowd.lead = lambda *_: None  # the calls of rank 0 are made by all: there is no follower here
        own = {**options, "compute_dtype": job["alone_dtype"]} if crowd.alone and "alone_dtype" in job else options
        way = crowd.join("policy", model, functools.partial(Forward.of, **own))
        ran: list[int] = []
        way.model.model.layers[0].input_layernorm.register_forward_hook(lambda *_, ran=ran: ran.append(1))
        catcher = Catcher(way.model)
        learner = Learner(way, objective, catcher, settings, crowd)
        scores = learner.score(rows)
        scored, summed = len(ran), _counted("reduce_scatter_single", "reduce_scatter_tensor")
        anchor = scores.logprobs if team.rank == 0 or crowd.alone else found[0]["scores"]
        report = learner.update(rows, [a if a is None else a + 0.01 for a in anchor])
        twice = (len(ran) - scored) / max(scored, 1)
        found.append({"report": report, "scores": scores.logprobs, "gradient": catcher.caught, "passes": twice})
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
        "passes": [one["passes"] for one in found],
        "summed": len(summed),
        "counts": [[getattr(one["report"], name) for name in ("live", "all_tokens")] for one in found],
        "same": all(same),
    }


def layout(job: dict[str, Any]) -> Any:
    """What is divided, and what lies whole on a rank after a forward pass and after letting go."""
    import torch
    from batches import build
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

    from gropius.train.forward import Forward
    from gropius.train.pack import pack
    from gropius.train.team import POLICY

    team = _team(job)
    team.lead = lambda *_: None
    stranger = build("llama", torch.float32, seed=team.rank)
    way = team.join(POLICY, stranger, functools.partial(Forward.of, compute_dtype=job["compute_dtype"]))
    names = dict(way.model.named_parameters())
    whole = team.whole(POLICY, list(names))
    mine = torch.cat([value.flatten() for value in whole.values()])
    own = torch.cat([p.detach().flatten() for p in build("llama", torch.float32).parameters()])
    with torch.no_grad():
        way.logprobs(pack(_rows(job)[:2], budget_tokens=1000, skip=False)[0])
    layers = way.model.model.layers
    left = {n: str(p.dtype) for n, p in layers[0].named_parameters() if not isinstance(p, DTensor)}
    way.sharded.let_go()
    return {
        "rank 0's": bool(torch.equal(mine, own)),
        "units": sum(isinstance(module, FSDPModule) for module in way.sharded.modules()),
        "left": left,
        "after": sum(not isinstance(p, DTensor) for p in way.sharded.parameters()),
        "frees": way.sharded._forward.head.weight.to_local().shape[0] < own.numel(),
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
        crew.follow(resolved, print)
        return None
    progress = Silent()
    with crew.leading(resolved, lambda error: print(error, file=sys.stderr)) as team:
        if "resume" in job:
            return str(build.resume(Path(job["resume"]), None, progress, settings, team))
        return str(build.train(resolved, progress, team))


def divided(job: dict[str, Any]) -> Any:
    """A run whose engines draw elsewhere, watched: what this rank ever held whole at once, and beside its parts."""
    import gc

    import torch
    from torch.distributed.tensor import DTensor
    from torch.multiprocessing.reductions import StorageWeakRef

    from gropius.train import engines, gathered
    from gropius.train.team import CRITIC, HANDED, POLICY, REFERENCE, Team, local, moments_of

    gathered.BUCKET_BYTES = job["bucket"]
    if job.get("threads"):
        engines.EngineProcess = InThread
    asked, seen = [], {"most": 0, "beside": 0, "model": 0, "asked": 0}
    honest = Team.whole

    def beside(team: Team) -> int:
        """Bytes of all tensors here that are no part of what is divided."""
        names = [POLICY, REFERENCE, CRITIC, moments_of(POLICY), moments_of(CRITIC)]
        parts = [local(t) for held in names for t in team.parts(held).values()]
        mine = {t.untyped_storage().data_ptr() for t in parts}
        every = [t for t in gc.get_objects() if type(t) in (torch.Tensor, torch.nn.Parameter)]
        held = {s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for t in every if not isinstance(t, DTensor))}
        return sum(size for place, size in held.items() if place not in mine)

    def whole(team: Team, name: str, keys: list[str]) -> dict[str, torch.Tensor]:
        if name == HANDED and keys[0] == next(iter(team.parts(HANDED))):  # once a hand-over: it takes its time
            seen["beside"] = max(seen["beside"], beside(team))
        seen["model"] = sum(t.nbytes for t in team.parts(POLICY).values())
        found = honest(team, name, keys)
        divided = [found[key] for key in keys if isinstance(team.parts(name)[key], DTensor)]
        asked.extend((StorageWeakRef(t.untyped_storage()), t.nbytes) for t in divided)
        asked[:] = [(ref, size) for ref, size in asked if not ref.expired()]
        seen["most"] = max(seen["most"], sum(size for _, size in asked))
        seen["asked"] += name == HANDED
        return found

    Team.whole = whole
    folder = run({**job, "settings": [*job["settings"], "cluster.engines=1"]})
    Path(job["notes"], f"rank-{os.environ['RANK']}.json").write_text(json.dumps(seen))
    return folder


class InThread:
    """An engine in this process, as `EngineProcess` makes one in another."""

    def __init__(self, number: int, told: Any) -> None:
        from gropius.hosting import EngineHost
        from gropius.recipe import from_dict
        from gropius.rollout.remote import Address

        self._host = EngineHost(from_dict(told.recipe), told.secret, told.bind, told.device)
        self.address = Address(told.bind, self._host.server.port, f"engine {number}")
        self.describes = self._host.describe()

    def ended(self) -> str:
        """It lives."""
        return ""

    def end(self) -> None:
        """Stop it."""
        self._host.close()


CASES = {case.__name__: case for case in (exchange, missing, layout, gradient, references, culprits, run, divided)}


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
