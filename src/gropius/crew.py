"""Runs of several ranks: who starts them, what rank 0 and the others do, and how they end.

Rank 0 is the run as it is alone: it owns the run folder, the tasks, the rewards and the order of things. The others
hold their part of the model, answer its calls, and draw responses with an engine of their own.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence

import torch

from gropius import build
from gropius.distributed import launch as launching
from gropius.distributed.seat import seat
from gropius.distributed.world import World, device_of
from gropius.errors import GropiusError, RecipeError, RunHalted
from gropius.models.load import LoadedModel
from gropius.objective.spec import Objective, override
from gropius.recipe.resolve import Resolved
from gropius.records.writer import RESOLVED
from gropius.rollout.remote import EngineLost
from gropius.rollout.server import EngineServer
from gropius.train.advance import energies_of
from gropius.train.critic import Critic
from gropius.train.memory import is_out_of_memory, of_a_rank
from gropius.train.optim import Optimiser, OptimiserSettings
from gropius.train.progress import Progress
from gropius.train.reference import KINDS
from gropius.train.step import Learner, LearnerSettings
from gropius.train.team import POLICY, Team


def starts_ranks(resolved: Resolved) -> bool:
    """True in the process that a person started, when the recipe asks for several ranks."""
    return resolved.cluster.trainer_ranks > 1 and seat() is None


def follows(resolved: Resolved) -> bool:
    """True in a rank other than 0. Errors: RecipeError when torchrun started another number than the recipe's."""
    where = seat()
    if where is None:
        return False
    if where.size != resolved.cluster.trainer_ranks:
        raise RecipeError(
            f"cluster.trainer_ranks = {resolved.cluster.trainer_ranks} and {where.size} ranks were started; write "
            f"--set cluster.trainer_ranks={where.size}"
        )
    return where.rank > 0


def start_ranks(resolved: Resolved, words: Sequence[str], progress: Progress, trusted: bool) -> int:
    """Start the ranks on this machine with a verb and its arguments; when they are lost, resume. The exit code."""
    again = ["resume", str(resolved.folder), *(["--trust-code"] if trusted else [])]

    def said(attempt: int) -> Sequence[str]:
        return again if attempt and (resolved.folder / RESOLVED).is_file() else words

    cluster = resolved.cluster
    progress.note(f"{cluster.trainer_ranks} trainer ranks on this machine")
    threads = resolved.train.threads or max(1, (os.cpu_count() or 1) // cluster.trainer_ranks)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    return launching.launch(
        launching.Launch(cluster.trainer_ranks, cluster.bind, cluster.restarts, said), progress.note
    )


@contextlib.contextmanager
def leading(resolved: Resolved, show: Callable[[Exception], None]) -> Iterator[Team]:
    """Rank 0's team, or a team of one. The others are sent home at the end, however it comes.

    show: an error, to a person.
    """
    if seat() is None:
        yield Team()
        return
    with launching.ends_with_word(show):
        if resolved.cluster.trainer_ranks == 1:
            yield Team()
            return
        team = _team(resolved)
        try:
            yield team
        except GropiusError as error:
            if isinstance(error, EngineLost):
                raise RuntimeError(f"connection: {error}") from error
            _send_home(team)
            raise
        _send_home(team)


def resumes() -> bool:
    """True in a rank that is started again: the run goes on from its last checkpoint."""
    where = seat()
    return where is not None and where.attempt > 0


def _send_home(team: Team) -> None:
    with contextlib.suppress(RuntimeError, RunHalted):  # whoever is gone need not be told
        team.close()


def _team(resolved: Resolved) -> Team:
    where = seat()
    assert where is not None
    cluster = resolved.cluster
    world = World(where, device_of(resolved.model.device, where), cluster.deadline_s, cluster.bind)
    return Team(world, cluster.shard, divided=cluster.engines > 0)


class Follower:
    """What a rank other than 0 holds, and the calls it answers."""

    def __init__(self, resolved: Resolved, team: Team) -> None:
        assert team.world is not None
        self.resolved, self.team = resolved, team
        self.loaded: LoadedModel = build.model(resolved, device=str(team.world.device))
        self.server: EngineServer | None = None
        # vLLM spreads over devices by itself, and rank 0 has it; engines in processes of their own are rank 0's too
        if resolved.rollout.engine == "torch" and not resolved.cluster.engines:
            engine = build.engine(resolved, self.loaded)
            self.server = EngineServer(engine, launching.secret(), resolved.cluster.bind)
        self.optimiser: Optimiser | None = None
        self.critic: Critic | None = None

    def join(self, name: str) -> None:
        """A model is divided over the ranks; what lies here is overwritten by rank 0's."""

        build.join(self.resolved, self.team, name, self.loaded)

    def optimise(self, settings: OptimiserSettings) -> None:
        """An optimiser of this rank's part."""
        self.optimiser = Optimiser(self.team.forwards[POLICY].model, settings)
        self.team.watch(self.optimiser, self.loaded)

    def learner(self, settings: dict[str, object], objective: Objective | None = None) -> Learner:
        """A learner as rank 0 has one."""
        assert self.optimiser is not None
        forward = self.team.forwards[POLICY]
        made = LearnerSettings(**settings)  # type: ignore[arg-type]
        return Learner(forward, objective or self.resolved.objective, self.optimiser, made, self.team)

    def publish(self, version: int) -> None:
        """The engine takes the weights over and stamps what it draws with what it has."""
        self.team.publish(self.loaded.model, version)
        if self.server is not None:
            self.server.engine.set_policy(version, self.loaded.digest())

    def answer(self, call: str, given: list[object]) -> None:
        """Make one call."""
        team, args = self.team, given
        match call:
            case "join":
                self.join(*args)  # type: ignore[arg-type]
            case "optimiser":
                self.optimise(*args)  # type: ignore[arg-type]
            case "publish":
                self.publish(*args)  # type: ignore[arg-type]
            case "engines" if self.server is not None:
                team.merged({"host": self.server.host, "port": self.server.port})
            case "score":
                name, settings, rows, entropy = args
                self.learner(settings).score(rows, forward=team.forwards[name], entropy=entropy)  # type: ignore
            case "update":
                objective, settings, bonus, beside, *rest = args
                learner = self.learner(settings, override(Objective(), objective))  # type: ignore[arg-type]
                learner.bonus = bonus  # type: ignore[assignment]
                learner.update(*rest, also=(lambda: self.answer(*team.led())) if beside else None)  # type: ignore
            case "reference":
                KINDS[str(args[0])](team)
            case "whole":
                team.whole(*args)  # type: ignore[arg-type]
            case "put":
                team.put(str(args[0]), None)
            case "refresh":
                team.refresh(str(args[0]))
            case "energies":
                energies_of(self.learner(args[0]), args[1])  # type: ignore[arg-type]
            case "critic":
                self.critic = build.critic_for(self.resolved, self.learner(args[0]), self.loaded)  # type: ignore
            case "critic.values" if self.critic is not None:
                self.critic.values(*args)  # type: ignore[arg-type]
            case "critic.accumulate" if self.critic is not None:
                self.critic.accumulate(*args)  # type: ignore[arg-type]
            case "critic.step" if self.critic is not None:
                self.critic.step()
            case "restore":
                team.receive(*args)  # type: ignore[arg-type]
            case _:
                raise RunHalted(f"rank {team.rank} was asked for {call!r}, which it cannot do now")


def follow(resolved: Resolved, show: Callable[[Exception], None]) -> None:
    """A rank other than 0, from its start to the end of the run. Leaves the process when rank 0 is gone.

    show: an error, to a person. Out of memory here is the end of the run: this rank leaves word of it.
    """
    # Rank 0 decides when the run stops. What started the ranks here sends SIGTERM only when the run is lost; torchrun
    # sends it to every rank when it is asked to stop.
    ours = launching.OUTCOME in os.environ
    for number in (signal.SIGINT, signal.SIGHUP, *(() if ours else (signal.SIGTERM,))):
        signal.signal(number, signal.SIG_IGN)
    torch.set_num_threads(resolved.train.threads or torch.get_num_threads())
    team = _team(resolved)
    try:
        follower = Follower(resolved, team)
        while (said := team.led())[0] != "end":
            follower.answer(*said)
    except (RuntimeError, MemoryError, RunHalted) as error:
        if is_out_of_memory(error):
            show(of_a_rank(team.rank, error, resolved.train.pack_tokens))
            launching.leave_word(RunHalted.exit_code)
            os._exit(RunHalted.exit_code)
        if isinstance(error, RunHalted) or launching.lost_sight(error):
            print(f"rank {team.rank}: {str(error).splitlines()[0][:200]}", file=sys.stderr)
            os._exit(launching.LOST)
        raise
