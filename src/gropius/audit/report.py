"""From a foreign configuration to the objective it runs: statements with places, caveats, a recipe. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gropius.audit.dialect import Dialect, Parsed, Units, Values, Words
from gropius.errors import ObjectiveError
from gropius.objective.formula import formula
from gropius.objective.presets import PRESETS, resolve
from gropius.objective.spec import Objective, override
from gropius.objective.validate import EFFECTS, check

FINDINGS = ("inexpressible", "unread", "contradiction", "no_effect", "trap")
# Presets that a recipe starts from: those whose name still says what it is when a field is changed.
FAMILIAR = ("grpo", "dr_grpo", "dapo", "gspo", "gspo_token", "cispo", "rloo", "reinforce", "reinforce_pp",
            "reinforce_pp_baseline", "opo", "sapo", "gmpo", "dppo")  # fmt: skip


@dataclass(frozen=True)
class Statement:
    """One sentence about one axis, and where upstream does it."""

    axis: str
    text: str
    where: str


@dataclass(frozen=True)
class Remark:
    """One caveat that holds; `keys` are the options it is about."""

    kind: str
    text: str
    where: str
    keys: tuple[str, ...]


@dataclass(frozen=True)
class Audit:
    """One configuration, read.

    objective: what it runs, with what cannot be expressed left out; None when there is no equivalent at all.
    exact: nothing is left out. units: what batch sizes count. run: recipe keys. unread: options whose value is no
    literal. strangers: options that this audit does not look at.
    """

    source: str
    dialect: Dialect
    objective: Objective | None
    exact: bool
    statements: tuple[Statement, ...]
    remarks: tuple[Remark, ...]
    units: Units
    run: Mapping[str, Any]
    unread: Mapping[str, str]
    strangers: tuple[str, ...]

    @property
    def findings(self) -> tuple[Remark, ...]:
        """Remarks that a person should act on: everything but the conditions."""
        return tuple(r for r in self.remarks if r.kind in FINDINGS)

    @property
    def on_policy(self) -> bool:
        """True when a rollout batch is used once, by one optimiser step: every ratio to the snapshot is 1."""
        return self.units.updates <= 1 and self.units.epochs <= 1

    @property
    def formula(self) -> str:
        """The objective in one formula; a sentence when there is none."""
        return formula(self.objective) if self.objective else "no equivalent: " + "; ".join(
            r.text for r in self.remarks if r.kind == "inexpressible"
        )  # fmt: skip

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        u = self.units
        return {
            "source": self.source,
            "framework": {"name": self.dialect.name, "title": self.dialect.title, "version": self.dialect.version,
                          "files": dict(self.dialect.files)},
            "objective": self.objective.as_dict() if self.objective else None,
            "exact": self.exact,
            "on_policy": self.on_policy,
            "formula": self.formula,
            "statements": [vars(s) for s in self.statements],
            "remarks": [{**vars(r), "keys": list(r.keys)} for r in self.remarks],
            "units": {**{k: x for k, x in vars(u).items() if k != "words"}, "words": list(u.words),
                      "responses": u.responses, "micro_batches": u.micro_batches},
            "unread": dict(self.unread),
            "not_looked_at": list(self.strangers),
            "recipe": recipe(self) if self.objective else None,
        }  # fmt: skip


def audit(parsed: Parsed, dialect: Dialect, source: str = "configuration", processes: int = 1) -> Audit:
    """State the objective that a configuration runs.

    processes: data-parallel ranks, where the file does not say. Rules are applied in order of the table, caveats listed
    as they hold. Nothing is guessed: what has no equivalent is a remark of kind inexpressible, and what the objective
    room refuses is reported in its words. Errors: UsageError for a value that upstream does not accept.
    """
    values = Values(dialect.options, parsed.given, parsed.unread, processes)
    overrides: dict[str, Any] = {}
    statements = []
    for rule in dialect.rules:
        if rule.when(values):
            overrides.update(rule.sets(values) if callable(rule.sets) else rule.sets)
            statements.append(Statement(rule.axis, _said(rule.says, values), rule.where))
    held = [c for c in dialect.caveats if c.kind == "inexpressible" and c.when(values)]
    guessed = [name for name in values.unread if name in values.looked_at]  # the objective rests on these
    held += [c for c in dialect.caveats if c.kind != "inexpressible" and c.when(values)]
    remarks = [Remark(c.kind, _said(c.says, values), c.where, c.keys) for c in held]
    remarks += [
        Remark("unread", f"{name} = {text} is not a literal; its default stands in", source, (name,))
        for name, text in values.unread.items()
    ]
    objective = None if any(c.blocking for c in held) else _objective(overrides, remarks)
    exact = objective is not None and not guessed and not any(r.kind == "inexpressible" for r in remarks)
    return Audit(
        source, dialect, objective, exact, tuple(statements), _ordered(remarks), dialect.units(values),
        dialect.run(values), values.unread, tuple(values.strangers),
    )  # fmt: skip


def _said(says: Words, values: Values) -> str:
    return says(values) if callable(says) else says


def _ordered(remarks: list[Remark]) -> tuple[Remark, ...]:
    order = (*FINDINGS, "condition")
    return tuple(sorted(remarks, key=lambda r: order.index(r.kind)))


# What a field is when a rule does not set it: off, not the default of the preset grpo.
_OFF: dict[str, Any] = {
    "advantage.scale": "none", "advantage.ddof": 0, "advantage.epsilon": 0.0, "surrogate.kind": "none",
    "surrogate.low": 0.0, "surrogate.high": 0.0, "kl.estimator": "none", "kl.coefficient": 0.0,
}  # fmt: skip


def _objective(overrides: Mapping[str, Any], remarks: list[Remark]) -> Objective | None:
    """The objective, with fields that have no effect at their off value; a refusal becomes a remark."""
    objective = override(Objective(), {**_OFF, **overrides})
    silent = {n: _OFF.get(n, _default(n)) for n, (effective, _) in EFFECTS.items() if not effective(objective)}
    objective = override(objective, silent)
    try:
        check(objective)
    except ObjectiveError as error:
        remarks.append(Remark("inexpressible", f"a recipe refuses it: {error}", "objective", ()))
    return objective


def _default(name: str) -> Any:
    axis, _, key = name.partition(".")
    return getattr(getattr(Objective(), axis), key)


def nearest_preset(objective: Objective) -> tuple[str, dict[str, Any]]:
    """The preset from which the fewest fields differ, and those fields as `axis.key` → value."""
    wanted = objective.as_dict()

    def differing(name: str) -> dict[str, Any]:
        have = PRESETS[name].objective.as_dict()
        return {f"{a}.{k}": x for a, fields in wanted.items() for k, x in fields.items() if have[a][k] != x}

    name = min(FAMILIAR, key=lambda n: len(differing(n)))
    return name, differing(name)


def recipe(read: Audit) -> str:
    """A recipe in TOML that runs the same objective; what it leaves out is written at its head.

    Errors: ObjectiveError when there is no equivalent.
    """
    if read.objective is None:
        raise ObjectiveError(f"{read.source}: {read.formula}")
    preset, fields = nearest_preset(read.objective)
    lines = [f"# The objective of {read.source} as {read.dialect.title} {read.dialect.version} runs it."]
    heads = {"inexpressible": "NOT EXPRESSED", "unread": "UNKNOWN"}
    lines += [f"# {heads[r.kind]}: {' '.join(r.text.split())}" for r in read.remarks if r.kind in heads]
    if not _accepted(preset, fields):
        lines.append("# NOT RUNNABLE as it stands: the objective below is refused, see above.")
    u = read.units
    run = {
        "rollout.prompts": _whole(u.prompts), "rollout.group_size": u.group_size, **read.run,
        "train.updates": _whole(u.updates), "train.epochs": u.epochs,
    }  # fmt: skip
    lines += ["", "[data]", 'source = "YOUR-TASKS"  # a file, a data set or the name of a task set']
    if "reward.weights" in run:
        weights = ", ".join(f"{w:g}" for w in run["reward.weights"])
        lines += ["", f"# weight of each [[reward]], in the order of the reward functions: {weights}"]
    for table in ("rollout", "train"):
        lines += ["", f"[{table}]"]
        lines += [f"{k.partition('.')[2]} = {_toml(x)}" for k, x in run.items() if k.startswith(table + ".")]
    lines += ["", "[objective]", f'preset = "{preset}"']
    for axis in ("advantage", "ratio", "surrogate", "kl", "aggregate", "selection", "terms"):
        own = {k.partition(".")[2]: x for k, x in fields.items() if k.startswith(axis + ".")}
        if own:
            lines += ["", f"[objective.{axis}]", *(f"{k} = {_toml(x)}" for k, x in own.items())]
    return "\n".join(lines) + "\n"


def _accepted(preset: str, fields: Mapping[str, Any]) -> bool:
    try:
        resolve(preset, fields)
    except ObjectiveError:
        return False
    return True


def _whole(value: float) -> int:
    return max(round(value), 1)


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return "inf" if value == "inf" else f'"{value}"'
    return repr(value)
