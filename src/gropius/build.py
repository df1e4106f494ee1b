"""The composition root: the only file that turns names into objects."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from gropius.doctor.watch import Watch
from gropius.errors import RecipeError
from gropius.models.chat import ChatFormat
from gropius.models.heap import keep_freed_memory
from gropius.models.load import LoadedModel, load_model, save_model
from gropius.models.lora import CONFIG as ADAPTER_CONFIG
from gropius.models.lora import LoraSettings
from gropius.models.tiny import TinyShape
from gropius.objective.spec import Objective
from gropius.recipe import from_dict
from gropius.recipe.capacity import refuse_what_cannot_fit
from gropius.recipe.resolve import Resolved
from gropius.records import faults
from gropius.records.reader import RunReader
from gropius.records.sinks import Place, Sinks
from gropius.records.writer import RunWriter
from gropius.rewards import InProcessScorer, MixedScorer, PoolSettings, open_scorer
from gropius.rewards import isolation as isolating
from gropius.rollout.apart import Engines
from gropius.rollout.collect import Player
from gropius.rollout.fitting import fitting
from gropius.rollout.torch_engine import TorchEngine
from gropius.rollout.vllm.engine import VllmEngine
from gropius.rollout.vllm.open import Trainer, open_vllm
from gropius.tasks import TaskSet, load_tasks
from gropius.tasks.functions import ToolSettings, require_partner, with_tools
from gropius.train import advance, ending, keep, loop, memory, randomness, reference
from gropius.train import resume as continuing
from gropius.train.checkpoint import Snapshot
from gropius.train.conversation import conversation
from gropius.train.critic import Critic, trunk_of
from gropius.train.engines import open_engines
from gropius.train.forward import Forward
from gropius.train.hand_over import Divided
from gropius.train.interrupt import StopRequest
from gropius.train.keep import Keeper
from gropius.train.loop import Run, State
from gropius.train.machine import machine_of
from gropius.train.optim import Optimiser, OptimiserSettings, settings_of
from gropius.train.origin import origin
from gropius.train.progress import Progress
from gropius.train.sft import WarmStart, imitation, warm_start
from gropius.train.step import Learner, LearnerSettings, UpdateReport
from gropius.train.team import CRITIC, POLICY, REFERENCE, Team


def tasks(resolved: Resolved) -> TaskSet:
    """The task set of a recipe."""
    data = resolved.data
    found = load_tasks(data.source, data.options, resolved.seed, data.columns, data.held_out, resolved.base_dir)
    return with_tools(found, ToolSettings(**resolved.rollout.tools.model_dump()), resolved.base_dir)


def reward_parts(resolved: Resolved, found: TaskSet) -> list[dict[str, Any]]:
    """The `[[reward]]` tables of a recipe, or the task set's own. Errors: RecipeError when there are none."""
    parts = [part.model_dump() for part in resolved.reward] or [{"name": name} for name in found.rewards]
    if not parts:
        raise RecipeError(
            f'data.source = "{resolved.data.source}" brings no reward of its own; write [[reward]] with a name'
        )
    return parts


def scorer(resolved: Resolved, found: TaskSet) -> InProcessScorer | MixedScorer:
    """The scorer of a recipe, a person's functions in their pool; whoever asks for it closes it.

    Errors: RecipeError, also for a group-wise reward with groups that are not scored whole.
    """
    pool = PoolSettings(resolved.reward_pool.workers, resolved.reward_pool.deadline_s)
    judge = open_scorer(reward_parts(resolved, found), resolved.base_dir, pool)
    objective = resolved.objective
    if judge.unit == "group" and (objective.selection.dead == "grow" or objective.advantage.baseline == "greedy"):
        raise RecipeError(
            "a group-wise reward compares all siblings, but grown siblings and a greedy baseline are scored apart; "
            'write objective.selection.dead = "refill", and another objective.advantage.baseline than "greedy"'
        )
    return judge


def isolation(resolved: Resolved, found: TaskSet) -> dict[str, Any] | None:
    """How programs of the model are isolated in this run; None without any. See `rewards.isolation`.

    Errors: SandboxUnavailable (exit 3) when this machine cannot isolate as demanded.
    """
    return isolating.isolation(reward_parts(resolved, found), found.sandbox)


def model(resolved: Resolved, folder: Path | None = None, device: str = "") -> LoadedModel:
    """The policy of a recipe, or the one in a folder (of a checkpoint), with float32 master weights.

    A folder holds the whole model, or an adapter: then the recipe's base is read, and the adapter put into it.
    device: of a rank; "" is the recipe's. From here on the process keeps freed memory (`models.heap`).
    """
    keep_freed_memory()
    table = resolved.model
    lora = LoraSettings(**table.lora.model_dump(exclude={"dropout"})) if table.lora.on else None
    if folder is not None and (folder / ADAPTER_CONFIG).is_file():
        lora, folder = LoraSettings(adapter=str(folder)), None
    source = str(folder) if folder is not None else table.source
    tiny = TinyShape(**table.tiny.model_dump()) if source == "tiny" else None
    where = device or table.device
    return load_model(source, dtype="float32", device=where, seed=resolved.seed, tiny=tiny, lora=lora)


@dataclass(eq=False)
class Parts:
    """What training, evaluation and warm start have in common.

    facts: stored beside the resolved recipe. judge: how the scorer describes itself.
    """

    loaded: LoadedModel
    tasks: TaskSet
    chat: ChatFormat
    player: Player
    scorer: InProcessScorer | MixedScorer
    close: Callable[[], None]
    facts: dict[str, Any]
    judge: tuple[str, ...]
    team: Team


def open_parts(resolved: Resolved, progress: Progress, folder: Path | None = None, team: Team | None = None) -> Parts:
    """What a recipe's verbs have in common; whoever asks for it closes it. folder: of a model, None is the recipe's."""
    torch.set_num_threads(resolved.train.threads or torch.get_num_threads())
    found = tasks(resolved)
    require_partner(found, resolved.rollout.max_turns)
    judge = scorer(resolved, found)
    loaded = model(resolved, folder, team.device if team else "")
    chat = conversation(resolved, found, loaded)
    found, dropped = fitting(found, chat, loaded.context_length, resolved.data.overlong)
    apart = resolved.cluster.engines > 0
    own = open_engines(resolved, loaded, progress.note) if apart else engine(resolved, loaded)
    described = tuple(judge.describe())
    for line in (*dropped, *found.notes, *loaded.notes, own.describe(), *described):
        progress.note(line)
    programs = isolation(resolved, found)
    for line in isolating.described(programs):
        progress.note(line)
    team = team or Team()
    player = Player(team.engines(own, progress.note), chat, found, judge, loaded.context_length)

    def close() -> None:
        asyncio.run(player.engine.close())
        judge.close()

    facts = {"sandbox": programs} if programs else {}
    return Parts(loaded, found, chat, player, judge, close, facts, described, team)


def engine(resolved: Resolved, loaded: LoadedModel) -> TorchEngine | VllmEngine:
    """An engine of this process, on a whole copy of the weights; whoever asks for it closes it."""
    rollout, train = resolved.rollout, resolved.train
    if rollout.engine == "torch":
        return TorchEngine(
            loaded, token_budget=rollout.token_budget, dtype=resolved.model.dtype, cuda_graphs=rollout.cuda_graphs
        )
    trainer = Trainer(resolved.model.dtype, train.mismatch_bound, resolved.seed, train.threads)
    return open_vllm(loaded, rollout.vllm.model_dump(), trainer)


def forward(resolved: Resolved, policy: PreTrainedModel) -> Forward:
    """The way over packs of a model, as the recipe wants it computed."""
    return Forward.of(
        policy,
        compute_dtype=resolved.model.dtype,
        float32_head=resolved.model.head_dtype == "float32",
        recompute=resolved.train.recompute,
    )


def join(resolved: Resolved, team: Team, name: str, loaded: LoadedModel) -> Forward:
    """The model, or a copy of it, as what the ranks call `name`."""
    make = functools.partial(forward, resolved)
    return team.join(name, loaded.model, functools.partial(trunk_of, make) if name == CRITIC else make)


def learner_for(resolved: Resolved, parts: Parts, objective: Objective, settings: OptimiserSettings) -> Learner:
    """The policy under an objective, over all ranks of the team."""
    if parts.team.divided:  # while there is a whole model to copy
        wanted = {REFERENCE: reference.is_a_copy(resolved, parts.loaded), CRITIC: has_own_trunk(resolved)}
        for name in (name for name, is_wanted in wanted.items() if is_wanted):
            join(resolved, parts.team, name, parts.loaded)
    way = join(resolved, parts.team, POLICY, parts.loaded)
    optimiser = Optimiser(way.model, settings)
    parts.team.lead("optimiser", settings)
    parts.team.watch(optimiser, parts.loaded)
    return Learner(
        way,
        objective,
        optimiser,
        LearnerSettings(
            temperature=resolved.rollout.temperature or 1.0,
            pack_tokens=resolved.train.pack_tokens,
            entropy=True,
        ),
        parts.team,
    )


def train(resolved: Resolved, progress: Progress, team: Team | None = None) -> Path:
    """Run a recipe from its beginning: warm start, held-out before, all steps, held-out after. The run folder.

    Errors: RunFolderError when the folder is taken; everything `train.loop.train` raises.
    """
    faults.arm_from_environment()
    randomness.seed_all(resolved.seed)
    with closing(open_parts(resolved, progress, team=team)) as parts:
        every, trained = parts.loaded.sizes
        refuse_what_cannot_fit(resolved, every, machine_of(resolved.folder, parts.loaded), trained=trained)
        now = _origin(resolved, parts, None)
        document = resolved.as_dict() | parts.facts | {"origin": now}
        with RunWriter.create(resolved.folder, document) as writer, StopRequest(progress.note) as stop:
            writer.write_tokenizer(parts.loaded.tokenizer.backend_tokenizer.to_str())
            if resolved.sft.steps:
                warm_up(resolved, parts, progress, stop)
            return loop.train(_run(resolved, parts, now, (writer, progress, stop)))


def resume(
    folder: Path, step: int | None, progress: Progress, settings: Sequence[str] = (), team: Team | None = None
) -> Path:
    """Go on with a run from its checkpoint of `step` (None: the newest whole one, or its beginning). The run folder.

    settings: changes of harmless keys. Errors: RunFolderError when there is no usable checkpoint, when the run is over,
    or, difference by difference, when recipe, data, code or tokenizer are not those the run began with.
    """
    faults.arm_from_environment()
    with RunWriter.reopen(folder) as writer, StopRequest(progress.note) as stop:
        document = RunReader(folder).resolved()
        resolved = from_dict(document, settings)
        start, passed_over = continuing.choose(folder, step, document)
        for note in (*passed_over, start.describe()):
            progress.note(note)
        continuing.refuse_finished(folder, resolved, start.step)
        randomness.seed_all(resolved.seed)
        with closing(open_parts(resolved, progress, start.model, team)) as parts:
            now = _origin(resolved, parts, start.resumed)
            for note in continuing.refuse_changes(folder, start, resolved, now):
                progress.note(note)
            writer.rewind(start.step, start.metrics_bytes)
            stamp = isolating.restamped(document.get("sandbox"), parts.facts.get("sandbox"))
            if settings or stamp != document.get("sandbox"):
                writer.describe(document | resolved.as_dict() | ({"sandbox": stamp} if stamp else {}))
            if start.snapshot is None and resolved.sft.steps:
                warm_up(resolved, parts, progress, stop)
            run = _run(resolved, parts, now, (writer, progress, stop))
            if start.snapshot is not None:
                _put_back(run, start.snapshot)
            return loop.train(run)


def fork(resolved: Resolved, source: tuple[Path, int | None], progress: Progress, team: Team | None = None) -> Path:
    """A new run of another recipe, from the whole state of a checkpoint of another run. The run folder.

    source: run folder and step (None: the newest whole one). Its counters go on; the data order begins anew where the
    tasks are others. Errors: RunFolderError when there is no usable checkpoint, or nothing left to do.
    """
    faults.arm_from_environment()
    folder, snapshot = continuing.forked(source, resolved)
    with closing(open_parts(resolved, progress, folder / "model", team)) as parts:
        now = _origin(resolved, parts, snapshot.facts["origin"])
        lineage, notes = continuing.lineage(source[0], snapshot, resolved, now)
        for note in notes:
            progress.note(note)
        document = resolved.as_dict() | parts.facts | {"origin": now, "fork": lineage}
        with RunWriter.create(resolved.folder, document) as writer, StopRequest(progress.note) as stop:
            run = _run(resolved, parts, now, (writer, progress, stop))
            _put_back(run, snapshot)
            run.state.measured.clear()
            if snapshot.facts["origin"]["tasks"] != now["tasks"]:
                run.state.position, run.ahead = 0, ()
            keep.now(run)
            return loop.train(run)


def _origin(resolved: Resolved, parts: Parts, began: Mapping[str, Any] | None) -> dict[str, Any]:
    """What a run begins with, to compare with when it goes on. began: the same of the run that a checkpoint is of."""
    return origin(resolved, parts.tasks, parts.loaded, parts.judge, began)


def _put_back(run: Run, snapshot: Snapshot) -> None:
    """Everything of a snapshot; that sampler and trainer agree is measured again, with the weights just loaded."""
    keep.put_back(run, snapshot)
    run.state = State(**snapshot.facts["state"] | {"agreed": False})
    if run.judge is not None:
        run.judge.remember(run.state.scorer)
    advance.set_bonus(run)
    if run.state.pack_tokens:
        memory.shrink(run, run.state.pack_tokens)


def _run(
    resolved: Resolved, parts: Parts, began: dict[str, Any], around: tuple[RunWriter, Progress, StopRequest]
) -> Run:
    writer, progress, stop = around
    learner = learner_for(resolved, parts, resolved.objective, _settings(resolved))
    progress.note(learner.forward.describe())
    if parts.team.divided and isinstance(parts.player.engine, Engines):
        parts.player.engine.source = Divided(parts.loaded, learner)
    weights = {part.name: part.weight for part in getattr(parts.player.scorer, "parts", ())}
    return Run(
        plan=resolved,
        loaded=parts.loaded,
        tasks=parts.tasks,
        player=parts.player,
        learner=learner,
        reference=reference.make(resolved, parts.loaded, learner, functools.partial(forward, resolved)),
        part_weights=weights,
        writer=writer,
        progress=progress,
        state=State(),
        stop=stop,
        keeper=Keeper(background=resolved.checkpoint.background),
        copies=Sinks(resolved.record.sinks, Place(writer.folder, resolved.as_dict()), progress.note),
        origin=began,
        randomness=randomness.capture(),
        watch=Watch(writer.folder, resolved.doctor.pause_on) if resolved.doctor.every else None,
        judge=parts.scorer,
        critic=critic_for(resolved, learner, parts.loaded),
    )


def _settings(resolved: Resolved) -> OptimiserSettings:
    return settings_of(resolved.train, resolved.train, resolved.derived.optimiser_steps_per_step)


def has_own_trunk(resolved: Resolved) -> bool:
    """True where a critic has a model of its own."""
    return resolved.objective.needs_critic and resolved.critic.trunk != "shared"


def critic_for(resolved: Resolved, learner: Learner, loaded: LoadedModel) -> Critic | None:
    """The critic of a recipe, where its objective needs one."""
    table, per_step = resolved.critic, resolved.derived.optimiser_steps_per_step * resolved.critic.epochs
    settings = settings_of(table, resolved.train, per_step, resolved.train.steps)

    def trunk() -> Forward:
        made = join(resolved, learner.team, CRITIC, loaded)
        learner.team.refresh(CRITIC)
        return made

    return Critic.beside(learner, table, settings, trunk) if resolved.objective.needs_critic else None


def warm_up(resolved: Resolved, parts: Parts, progress: Progress, stop: StopRequest | None = None) -> None:
    """The supervised steps before the first round, on the tasks' own solutions."""
    s = resolved.sft
    learner = learner_for(resolved, parts, imitation(), settings_of(s, resolved.train))
    learner.settings = LearnerSettings(pack_tokens=resolved.train.pack_tokens)

    def report(step: int, update: UpdateReport) -> None:
        if step == s.steps or step % max(1, s.steps // 4) == 0:
            progress.note(f"warm start {step}/{s.steps}: {update.loss:.4f} nats a token")
        if stop is not None and stop.asked:
            raise ending.stopped_before_a_step(resolved.folder, stop.asked)

    plan = WarmStart(s.steps, s.batch, resolved.seed, parts.loaded.context_length)
    warm_start(parts.tasks, parts.chat, learner, plan, report)


def sft(resolved: Resolved, progress: Progress) -> Path:
    """The warm start alone; saves the model as the run's checkpoint 0 and measures before and after."""
    with (
        closing(open_parts(resolved, progress)) as parts,
        RunWriter.create(resolved.folder, resolved.as_dict() | parts.facts) as writer,
    ):
        for label in ("before", "after"):
            if getattr(resolved.eval, label) and parts.tasks.held_out:
                parts.player.engine.set_policy(0, parts.loaded.digest())
                found = asyncio.run(loop.evaluate_held_out(resolved, parts.loaded, parts.player))
                progress.held_out(label, found)
                writer.write_metrics(0, found.metrics())
            if label == "before":
                warm_up(resolved, parts, progress)
        save_model(parts.loaded, writer.folder / "model")
        return writer.folder
