"""The composition root: the only file that turns names into objects."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from gropius.errors import DataError, RecipeError, RunFolderError
from gropius.models.chat import ChatFormat
from gropius.models.load import LoadedModel, load_model, save_model
from gropius.models.tiny import TinyShape
from gropius.objective.spec import Objective
from gropius.recipe import from_dict
from gropius.recipe.capacity import Machine, refuse_what_cannot_fit
from gropius.recipe.resolve import Resolved
from gropius.records.reader import RunReader
from gropius.records.writer import RunWriter
from gropius.rewards import load_scorer
from gropius.rewards.base import Scorer
from gropius.rollout.collect import Player
from gropius.rollout.torch_engine import TorchEngine
from gropius.tasks import TaskSet, load_tasks
from gropius.train import checkpoint, loop
from gropius.train.checkpoint import weight_digest
from gropius.train.evaluate import HeldOut
from gropius.train.forward import Forward
from gropius.train.interrupt import StopRequest
from gropius.train.loop import Run, State
from gropius.train.optim import Optimiser, OptimiserSettings
from gropius.train.progress import Progress
from gropius.train.sft import WarmStart, imitation, warm_start
from gropius.train.step import Learner, LearnerSettings, UpdateReport
from gropius.types import Task


def tasks(resolved: Resolved) -> TaskSet:
    """The task set of a recipe."""
    data = resolved.data
    return load_tasks(data.source, data.options, resolved.seed, data.columns, data.held_out, resolved.base_dir)


def scorer(resolved: Resolved, found: TaskSet) -> Scorer:
    """The scorer of a recipe: its own parts, or the task set's."""
    parts = [part.model_dump() for part in resolved.reward] or [{"name": name} for name in found.rewards]
    if not parts:
        raise RecipeError(
            f'data.source = "{resolved.data.source}" brings no reward of its own; write [[reward]] with a name'
        )
    return load_scorer(parts, resolved.base_dir)


def model(resolved: Resolved, folder: Path | None = None) -> LoadedModel:
    """The policy of a recipe, or the one in a Hugging Face folder (of a checkpoint), with float32 master weights."""
    table = resolved.model
    source = str(folder) if folder is not None else table.source
    tiny = TinyShape(**table.tiny.model_dump()) if source == "tiny" else None
    return load_model(source, dtype="float32", device=table.device, seed=resolved.seed, tiny=tiny)


@dataclass(eq=False)
class _Parts:
    """What training, evaluation and warm start have in common."""

    loaded: LoadedModel
    tasks: TaskSet
    chat: ChatFormat
    player: Player


def _parts(resolved: Resolved, progress: Progress, folder: Path | None = None) -> _Parts:
    torch.set_num_threads(resolved.train.threads or torch.get_num_threads())
    found = tasks(resolved)
    judge = scorer(resolved, found)
    loaded = model(resolved, folder)
    system = resolved.data.system_prompt if resolved.data.system_prompt is not None else found.system_prompt
    chat = ChatFormat.for_model(loaded, system_prompt=system)
    found = _fitting(resolved, found, (chat, loaded), progress)
    engine = TorchEngine(loaded, token_budget=resolved.rollout.token_budget, dtype=resolved.model.dtype)
    for line in (*found.notes, *loaded.notes, engine.describe(), *getattr(judge, "describe", tuple)()):
        progress.note(line)
    return _Parts(loaded, found, chat, Player(engine, chat, found, judge, loaded.context_length))


def _learner(resolved: Resolved, parts: _Parts, objective: Objective, settings: OptimiserSettings) -> Learner:
    forward = Forward.of(parts.loaded.model, compute_dtype=resolved.model.dtype)
    return Learner(
        forward,
        objective,
        Optimiser(parts.loaded.model, settings),
        LearnerSettings(
            temperature=resolved.rollout.temperature or 1.0,
            pack_tokens=resolved.train.pack_tokens,
            entropy=True,
        ),
    )


def _optimiser_settings(resolved: Resolved) -> OptimiserSettings:
    t = resolved.train
    per_step = t.updates * t.epochs
    return OptimiserSettings(
        learning_rate=t.learning_rate,
        total_steps=t.steps * per_step,
        warmup_steps=t.warmup_steps * per_step,
        schedule=t.schedule,
        final_ratio=t.final_ratio,
        weight_decay=t.weight_decay,
        beta1=t.beta1,
        beta2=t.beta2,
        adam_epsilon=t.adam_epsilon,
        grad_clip=t.grad_clip,
    )


def train(resolved: Resolved, progress: Progress) -> Path:
    """Run a recipe from its beginning: warm start, held-out before, all steps, held-out after. The run folder.

    Errors: RunFolderError when the folder is taken; everything `train.loop.train` raises.
    """
    parts = _parts(resolved, progress)
    refuse_what_cannot_fit(resolved, parts.loaded.model.num_parameters(), _machine(resolved, parts.loaded))
    with RunWriter.create(resolved.folder, resolved.as_dict()) as writer, StopRequest(progress.note) as stop:
        if resolved.sft.steps:
            _warm_start(resolved, parts, progress)
        run = _run(resolved, parts, writer, progress, stop)
        return loop.train(run)


def resume(folder: Path, step: int | None, progress: Progress) -> Path:
    """Go on with a run from its checkpoint of `step` (None: the newest whole one). The run folder.

    Errors: RunFolderError when there is no usable checkpoint, or tasks or recipe are not those the run began with.
    """
    resolved = from_dict(RunReader(folder).resolved())
    root = folder / "checkpoints"
    newest = checkpoint.newest(root)
    for note in newest.notes:
        progress.note(note)
    chosen = newest.folder if step is None else root / f"step-{step:06d}"
    if chosen is None:
        raise RunFolderError(f"{folder}: no complete checkpoint to go on from")
    snapshot = checkpoint.load(chosen)
    parts = _parts(resolved, progress, chosen / "model")
    if snapshot.facts["tasks"] != parts.tasks.fingerprint:
        raise RunFolderError(f"{folder}: the tasks are not those the run began with; restore the data, or train anew")
    with RunWriter.reopen(folder, last_step=snapshot.step) as writer, StopRequest(progress.note) as stop:
        run = _run(resolved, parts, writer, progress, stop)
        run.learner.optimiser.restore(dict(snapshot.tensors.get("optimiser", {})), snapshot.facts["optimiser_steps"])
        run.state = State(**snapshot.facts["state"])
        if run.reference is not None:
            for name, parameter in run.reference.model.named_parameters():
                parameter.data.copy_(snapshot.tensors["reference"][name])
        progress.note(f"going on from {chosen.name}")
        return loop.train(run)


def _run(resolved: Resolved, parts: _Parts, writer: RunWriter, progress: Progress, stop: StopRequest) -> Run:
    learner = _learner(resolved, parts, resolved.objective, _optimiser_settings(resolved))
    if learner.forward.note:
        progress.note(learner.forward.note)
    reference = None
    if resolved.objective.needs_reference:
        frozen = copy.deepcopy(parts.loaded.model).requires_grad_(False)
        reference = Forward.of(frozen, compute_dtype=resolved.model.dtype)
    weights = {part.name: part.weight for part in getattr(parts.player.scorer, "parts", ())}
    return Run(
        plan=resolved,
        loaded=parts.loaded,
        tasks=parts.tasks,
        player=parts.player,
        learner=learner,
        reference=reference,
        part_weights=weights,
        writer=writer,
        progress=progress,
        state=State(),
        stop=stop,
    )


def _warm_start(resolved: Resolved, parts: _Parts, progress: Progress) -> None:
    s = resolved.sft
    settings = OptimiserSettings(
        learning_rate=s.learning_rate,
        total_steps=s.steps,
        warmup_steps=s.warmup_steps,
        schedule=s.schedule,
        final_ratio=s.final_ratio,
        weight_decay=s.weight_decay,
        grad_clip=s.grad_clip,
    )
    learner = _learner(resolved, parts, imitation(), settings)
    learner.settings = LearnerSettings(pack_tokens=resolved.train.pack_tokens)

    def report(step: int, update: UpdateReport) -> None:
        if step == s.steps or step % max(1, s.steps // 4) == 0:
            progress.note(f"warm start {step}/{s.steps}: {update.loss:.4f} nats a token")

    plan = WarmStart(s.steps, s.batch, resolved.seed, parts.loaded.context_length)
    warm_start(parts.tasks, parts.chat, learner, plan, report)


def sft(resolved: Resolved, progress: Progress) -> Path:
    """The warm start alone; saves the model as the run's checkpoint 0 and measures before and after."""
    parts = _parts(resolved, progress)
    with RunWriter.create(resolved.folder, resolved.as_dict()) as writer:
        for label in ("before", "after"):
            if getattr(resolved.eval, label) and parts.tasks.held_out:
                parts.player.engine.set_policy(0, weight_digest(parts.loaded.model))
                found = asyncio.run(loop.evaluate_held_out(resolved, parts.loaded, parts.player))
                progress.held_out(label, found)
                writer.write_metrics(0, found.metrics())
            if label == "before":
                _warm_start(resolved, parts, progress)
        save_model(parts.loaded, writer.folder / "model")
        return writer.folder


def evaluate(resolved: Resolved, progress: Progress, folder: Path | None = None) -> HeldOut:
    """Measure a recipe's model, or the one in `folder`, on the held-out tasks."""
    parts = _parts(resolved, progress, folder)
    parts.player.engine.set_policy(0, weight_digest(parts.loaded.model))
    return asyncio.run(loop.evaluate_held_out(resolved, parts.loaded, parts.player))


def _machine(resolved: Resolved, loaded: LoadedModel) -> Machine:
    """Memory of the device that the model lies on, and free disk where the run folder will be."""
    place = resolved.folder.absolute()
    while not place.exists():
        place = place.parent
    if loaded.model.device.type == "cuda":
        memory = torch.cuda.get_device_properties(loaded.model.device).total_memory
    else:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Machine(memory, shutil.disk_usage(place).free)


def _fitting(resolved: Resolved, found: TaskSet, parts: tuple[ChatFormat, LoadedModel], progress: Progress) -> TaskSet:
    """The tasks whose prompts, after the template, leave room for an answer; the others dropped or refused."""
    chat, loaded = parts
    limit = loaded.context_length

    def fitting(half: str, rows: Sequence[Task]) -> tuple[Task, ...]:
        """The rows of one half that fit."""
        lengths = {task.key: len(chat.prompt_ids(task.messages())) for task in rows}
        long = [task for task in rows if lengths[task.key] + 1 > limit]
        if long and resolved.data.overlong == "refuse":
            raise DataError(
                f"{long[0].key}: the prompt has {lengths[long[0].key]} tokens after the template and the model's "
                f"context is {limit}, which leaves no room for an answer ({len(long)} such {half} rows); shorten them, "
                'or write data.overlong = "drop"'
            )
        if long:
            progress.note(f"{len(long)} {half} rows dropped: their prompts leave no room in a context of {limit}")
        return tuple(task for task in rows if lengths[task.key] + 1 <= limit)

    return dataclasses.replace(found, train=fitting("train", found.train), held_out=fitting("held-out", found.held_out))
