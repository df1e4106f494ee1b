"""Recipe → Resolved: every default and every derived number explicit; what is run, hashed and stored. No torch."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gropius.errors import ObjectiveError, RecipeError, SafetyRefusal
from gropius.naming import check_options, names_a_function
from gropius.objective.presets import resolve as resolve_objective
from gropius.objective.spec import AXES, Objective
from gropius.recipe.fields import Table
from gropius.recipe.load import LoadedRecipe, Source, from_mapping, load
from gropius.recipe.rules import Draft, broken_rules
from gropius.recipe.schema import (
    CheckpointTable,
    CriticTable,
    DataTable,
    DoctorTable,
    EvalTable,
    ModelTable,
    RecordTable,
    RewardPoolTable,
    RewardTable,
    RolloutTable,
    SftTable,
    TrainTable,
)
from gropius.recipe.schema_cluster import ClusterTable
from gropius.recipe.wording import place, show
from gropius.tasks import TASKS

FORMAT = 1
DEFAULT_TOKEN_BUDGET = 65_536


class ResolvedRollout(RolloutTable):
    """`[rollout]` with the bounds derived."""

    max_episode_tokens: int
    token_budget: int
    grow_limit: int


class ResolvedTrain(TrainTable):
    """`[train]` with the mismatch bound derived."""

    mismatch_bound: float


class ResolvedEval(EvalTable):
    """`[eval]` with the temperature derived."""

    temperature: float


@dataclass(frozen=True)
class Derived:
    """Numbers that follow from the keys. Bounds count the tokens that the model writes at most.

    greedy_responses_per_step: extra greedy responses, when the baseline asks for them. user_code: the module:function
    names that the run would import.
    """

    responses_per_step: int
    greedy_responses_per_step: int
    responses_per_update: int
    optimiser_steps_per_step: int
    optimiser_steps: int
    responses: int
    tokens_per_response_bound: int
    tokens_per_step_bound: int
    tokens_bound: int
    needs_reference: bool
    user_code: tuple[str, ...]


@dataclass(frozen=True)
class Resolved:
    """A recipe with nothing left implicit. `sha256` covers all that decides the run: not `name`, `out` or where it lay.

    preset: what the objective was written from; nothing asks for it. base_dir: relative paths start here. notes: what
    is legal and perhaps not meant. `data.held_out`, `data.system_prompt` and `reward` may still be absent: the task
    set's own are then used.
    """

    name: str
    seed: int
    out: str
    model: ModelTable
    data: DataTable
    void_limit: float
    reward: tuple[RewardTable, ...]
    reward_pool: RewardPoolTable
    rollout: ResolvedRollout
    objective: Objective
    train: ResolvedTrain
    critic: CriticTable
    sft: SftTable
    eval: ResolvedEval
    record: RecordTable
    checkpoint: CheckpointTable
    doctor: DoctorTable
    cluster: ClusterTable
    derived: Derived
    preset: str
    base_dir: Path
    notes: tuple[str, ...] = ()

    @property
    def folder(self) -> Path:
        """The run folder: `out`/`name`, from the current directory."""
        return Path(self.out) / self.name

    @property
    def sha256(self) -> str:
        """SHA-256 of the canonical JSON of `tables()` without `name`, `out`, `doctor` and `cluster`."""
        return decisive_hash(self.tables())

    def tables(self) -> dict[str, Any]:
        """Every key of the recipe as nested tables, JSON-ready: an infinite number is the text "inf"."""
        tables: dict[str, Any] = {}
        for name in RECIPE_KEYS:
            value = getattr(self, name)
            if isinstance(value, Table):
                value = value.model_dump()
            elif isinstance(value, Objective):
                value = value.as_dict()
            elif isinstance(value, tuple):
                value = [part.model_dump() for part in value]
            tables[name] = _finite(value)
        return tables

    def as_dict(self) -> dict[str, Any]:
        """What `resolved.json` holds: tables, derived numbers, hash, digests of user code, and `base_dir`."""
        return {
            "format": FORMAT,
            "sha256": self.sha256,
            **self.tables(),
            "preset": self.preset,
            "derived": _finite(dataclasses.asdict(self.derived)),
            "notes": list(self.notes),
            "code": code_digests(self),
            "base_dir": str(self.base_dir),
        }


RECIPE_KEYS = (
    "name", "seed", "out", "model", "data", "void_limit", "reward", "reward_pool", "rollout", "objective", "train",
    "critic", "sft", "eval", "record", "checkpoint", "doctor", "cluster",
)  # fmt: skip


INDECISIVE = ("name", "out", "doctor", "cluster")


def canonical_json(value: Any) -> str:
    """One text for one value: sorted keys, no spaces, strict JSON.

    >>> canonical_json({"b": 1, "a": [0.5]})
    '{"a":[0.5],"b":1}'
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def decisive_hash(tables: Mapping[str, Any]) -> str:
    """SHA-256 of the canonical JSON of the tables that decide a run, as they are: what they lack is not filled in."""
    decisive = {key: tables[key] for key in RECIPE_KEYS if key in tables and key not in INDECISIVE}
    return hashlib.sha256(canonical_json(decisive).encode()).hexdigest()


def resolve(recipe: str | Path | Mapping[str, Any], settings: Sequence[str] = ()) -> Resolved:
    """Read a recipe (a file, a built-in name, or nested tables), apply `a.b=value` settings, and make all explicit.

    Errors: RecipeError with file, line and key of every fault.
    """
    loaded = from_mapping(recipe, settings) if isinstance(recipe, Mapping) else load(recipe, settings)
    return resolve_loaded(loaded)


def resolve_loaded(loaded: LoadedRecipe) -> Resolved:
    """Derive what is implicit, refuse what contradicts or does nothing; see `resolve`."""
    recipe, source = loaded.recipe, loaded.source
    preset, objective = _objective(recipe.objective, source)
    draft = Draft(recipe, objective, loaded.explicit)
    refuse_broken(draft, source)
    return made_explicit(draft, source, preset)


def refuse_broken(draft: Draft, source: Source) -> None:
    """Refuse what contradicts or does nothing. Errors: RecipeError, a line for every fault."""
    data = draft.recipe.data
    if data.source in TASKS:
        try:
            check_options(f"task set {data.source}", TASKS[data.source], data.options, RecipeError)
        except RecipeError as error:
            raise RecipeError(f"{_located(source, 'data.options')}{error}") from error
    faults = [_located(source, key) + message for key, message in broken_rules(draft)]
    if faults:
        raise RecipeError("\n".join(faults))


def refuse_user_code(resolved: Resolved, *, trusted: bool) -> None:
    """A recipe alone never runs code: a person has to say that the code it names may run.

    Errors: SafetyRefusal naming what would be imported.
    """
    if resolved.derived.user_code and not trusted:
        names = ", ".join(show(name) for name in resolved.derived.user_code)
        raise SafetyRefusal(
            f"this recipe imports and runs code with your rights: {names}. Read that code, then "
            "repeat the command with --trust-code"
        )


def code_digests(resolved: Resolved) -> dict[str, str | None]:
    """SHA-256 of the file behind each module:function name, without importing it.

    A name is looked up where `gropius.naming` looks first: a file beside the recipe. None for an installed module,
    which cannot be found without running its package.
    """
    digests: dict[str, str | None] = {}
    for name in resolved.derived.user_code:
        place_name = name.rpartition(":")[0]
        relative = place_name if place_name.endswith(".py") else place_name.replace(".", "/") + ".py"
        file = resolved.base_dir / relative
        digests[name] = hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else None
    return digests


def _located(source: Source, key: str) -> str:
    return place(source.where(_path(key)), key)


def _path(key: str) -> tuple[str | int, ...]:
    return tuple(int(part) if part.isdecimal() else part for part in key.split("."))


def _objective(table: Mapping[str, Any], source: Source) -> tuple[str, Objective]:
    overrides = dict(table)
    preset = overrides.pop("preset", "grpo")
    if not isinstance(preset, str):
        raise RecipeError(_located(source, "objective.preset") + f"expected a name in quotes, got {show(preset)}")
    for axis, fields in overrides.items():
        if not isinstance(fields, Mapping) and axis in AXES:
            raise RecipeError(_located(source, f"objective.{axis}") + f"is a table; write [objective.{axis}]")
    try:
        return preset, resolve_objective(preset, overrides)
    except ObjectiveError as error:
        message = str(error)
        named = [f"objective.{key}" for key in re.findall(rf"\b((?:{'|'.join(AXES)})\.\w+|preset\b)", message)]
        where = next((place for key in named if (place := source.where(_path(key))) != source.label), source.label)
        if where.startswith("--set ") and message.startswith(where.removeprefix("--set ")):
            raise RecipeError(f"--set {message}") from error
        raise RecipeError(f"{where}: {message}") from error


def made_explicit(draft: Draft, source: Source, preset: str) -> Resolved:
    """Every key and every derived number of a draft that nothing speaks against."""
    recipe, rollout = draft.recipe, draft.recipe.rollout
    bound = recipe.train.mismatch_bound
    return Resolved(
        name=recipe.name or _name(source),
        seed=recipe.seed,
        out=recipe.out,
        model=recipe.model,
        data=recipe.data,
        void_limit=recipe.void_limit,
        reward=recipe.reward,
        reward_pool=recipe.reward_pool,
        rollout=ResolvedRollout(
            **_with(
                rollout,
                max_episode_tokens=draft.episode_tokens,
                token_budget=rollout.token_budget or max(DEFAULT_TOKEN_BUDGET, 2 * draft.episode_tokens),
                grow_limit=rollout.grow_limit or 4 * rollout.group_size,
            )
        ),
        objective=draft.objective,
        train=ResolvedTrain(**_with(recipe.train, mismatch_bound=bound or draft.mismatch_bound)),
        critic=recipe.critic,
        sft=recipe.sft,
        eval=ResolvedEval(
            **_with(
                recipe.eval,
                temperature=rollout.temperature if recipe.eval.temperature is None else recipe.eval.temperature,
            )
        ),
        record=recipe.record,
        checkpoint=recipe.checkpoint,
        doctor=recipe.doctor,
        cluster=recipe.cluster,
        derived=_derive(draft),
        preset=preset,
        base_dir=source.base_dir,
        notes=tuple(_notes(draft)),
    )


def _derive(draft: Draft) -> Derived:
    recipe, rollout, train = draft.recipe, draft.recipe.rollout, draft.recipe.train
    per_response = min(rollout.max_tokens * rollout.max_turns, draft.episode_tokens)
    greedy = rollout.prompts if draft.objective.advantage.baseline == "greedy" else 0
    per_step = per_response * (draft.begun + greedy)
    if draft.objective.selection.dead == "refill":
        per_step *= 1 + rollout.refill_attempts
    return Derived(
        responses_per_step=draft.responses,
        greedy_responses_per_step=greedy,
        responses_per_update=draft.responses // train.updates,
        optimiser_steps_per_step=train.updates * train.epochs,
        optimiser_steps=train.steps * train.updates * train.epochs,
        responses=train.steps * draft.responses,
        tokens_per_response_bound=per_response,
        tokens_per_step_bound=per_step,
        tokens_bound=train.steps * per_step,
        needs_reference=draft.objective.needs_reference,
        user_code=tuple(
            dict.fromkeys(
                [name for name in draft.names if names_a_function(name)]
                + ([str(recipe.data.options.get("taskset"))] if recipe.data.source == "verifiers" else [])
            )
        ),
    )


def _notes(draft: Draft) -> list[str]:
    train, evaluation, notes = draft.recipe.train, draft.recipe.eval, []
    if train.warmup_steps > train.steps:
        notes.append(
            f"train.warmup_steps = {train.warmup_steps} is more than train.steps = {train.steps}: "
            "the learning rate never reaches its peak"
        )
    if train.max_staleness and not draft.reads_sampler:
        notes.append(
            f"train.max_staleness = {train.max_staleness}: nothing in the objective corrects for older weights; "
            'objective.ratio.correction = "truncate" with correction_high = 2.0 does'
        )
    if evaluation.every > train.steps:
        notes.append(
            f"eval.every = {evaluation.every} is more than train.steps = {train.steps}: nothing is measured on the way"
        )
    if not draft.recipe.checkpoint.final and not draft.recipe.checkpoint.every:
        notes.append("checkpoint.every = 0 and checkpoint.final = false: the trained weights are not kept")
    return notes


def _name(source: Source) -> str:
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(source.label).stem).strip("-.")
    return name or "run"


def _with(table: Table, **changes: Any) -> dict[str, Any]:
    return {key: getattr(table, key) for key in type(table).model_fields} | changes


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
