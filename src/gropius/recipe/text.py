"""A resolved recipe as TOML text that is itself a recipe with the same hash. No torch."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from gropius.objective.formula import formula
from gropius.objective.validate import EFFECTS as OBJECTIVE_EFFECTS
from gropius.recipe.resolve import Resolved
from gropius.recipe.rules import EFFECTS, Draft
from gropius.recipe.schema import TABLES, Recipe


def as_toml(resolved: Resolved) -> str:
    """Every key with its value, the formula and the derived numbers as comments.

    Keys that have no effect in this recipe are comments too, as a recipe must not write them.
    """
    tables = resolved.tables()
    lines = [f"# sha256 {resolved.sha256}", *(f"# note: {note}" for note in resolved.notes), ""]
    scalars = {key: value for key, value in tables.items() if not isinstance(value, dict | list)}
    lines += [_line(key, value, "") for key, value in scalars.items()]
    idle = idle_keys(resolved)
    for name, table in tables.items():
        if name == "objective":
            lines += _objective(resolved)
        elif name == "reward":
            lines += _rewards(table)
        elif isinstance(table, dict):
            lines += _table(name, table, idle)
    lines += ["", "# derived"]
    lines += [f"# {key} = {_toml(value)}" for key, value in resolved.as_dict()["derived"].items()]
    return "\n".join(lines) + "\n"


def idle_keys(resolved: Resolved) -> set[str]:
    """Dotted keys (of tables with a final dot: prefixes) that do nothing in this recipe."""
    tables = {key: value for key, value in resolved.tables().items() if key != "objective"}
    draft = Draft(Recipe.model_validate(_present(tables)), resolved.objective, frozenset({"sft.steps"}))
    idle = {effect.key for effect in EFFECTS if not effect.effective(draft)}
    return idle | {f"objective.{key}" for key, (works, _) in OBJECTIVE_EFFECTS.items() if not works(resolved.objective)}


def _table(name: str, table: Mapping[str, Any], idle: set[str]) -> Iterator[str]:
    yield from ("", f"[{name}]")
    inner = {key: value for key, value in table.items() if (name, key) in TABLES}
    for key, value in table.items():
        if key not in inner:
            yield _line(key, value, "no effect here" if f"{name}.{key}" in idle else "")
    for key, value in inner.items():
        silent = f"{name}.{key}." in idle
        yield from ("", f"# [{name}.{key}]" if silent else f"[{name}.{key}]")
        yield from (_line(k, v, "no effect here" if silent else "") for k, v in value.items())


def _objective(resolved: Resolved) -> Iterator[str]:
    idle = idle_keys(resolved)
    yield from ("", "[objective]", f"preset = {_toml(resolved.preset)}")
    yield from (f"# {line}" for line in formula(resolved.objective).splitlines())
    for axis, fields in resolved.objective.as_dict().items():
        yield f"[objective.{axis}]"
        for key, value in fields.items():
            shown = math.inf if value == "inf" else value
            yield _line(key, shown, "no effect here" if f"objective.{axis}.{key}" in idle else "")


def _rewards(parts: list[dict[str, Any]]) -> Iterator[str]:
    if not parts:
        yield from ("", "# [[reward]]: the task set's own")
    for part in parts:
        yield from ("", "[[reward]]")
        yield from (_line(key, value, "") for key, value in part.items())


def _line(key: str, value: Any, silent: str) -> str:
    if value is None:
        return f"# {key}: the task set's own"
    return f"# {key} = {_toml(value)}    # {silent}" if silent else f"{key} = {_toml(value)}"


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_key(key)} = {_toml(item)}" for key, item in value.items()) + " }" if value else "{}"
    return _text(str(value))


def _key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _text(key)


def _text(text: str) -> str:
    quoted = json.dumps(text, ensure_ascii=False)
    return "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in quoted)


def _present(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _present(inner) for key, inner in value.items() if inner is not None}
    return [_present(inner) for inner in value] if isinstance(value, list) else value
