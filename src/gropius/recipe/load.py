"""Read a recipe: TOML from a file or a built-in name, `--set` on top, every refusal with its place. No torch.

Reading a recipe never runs code and never opens anything but the recipe itself.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

import gropius
from gropius.errors import RecipeError, did_you_mean
from gropius.recipe.schema import Recipe
from gropius.recipe.wording import explain_error, show

KeyPath = tuple[str | int, ...]

LARGEST_RECIPE_BYTES = 1_000_000

_KEY = r"""(?:"(?:[^"\\]|\\.)*"|'[^']*'|[A-Za-z0-9_-]+)"""
_KEYS = rf"{_KEY}(?:\s*\.\s*{_KEY})*"
_HEADER = re.compile(rf"^\s*(\[\[?)\s*({_KEYS})\s*\]\]?")
_ASSIGNMENT = re.compile(rf"^\s*({_KEYS})\s*=(.*)$", re.DOTALL)

_SECRET_KEY = re.compile(
    r"(^|_)(api_?key|secret(_key)?|private_key|access_key|passw(or)?d|credentials?|"
    r"(access|auth|api|hf|hub|wandb|bearer)_?token)$|^(token|key)$",
    re.IGNORECASE,
)
_SECRET_VALUE = re.compile(
    r"\b(hf_[A-Za-z0-9]{20,}|sk-[A-Za-z0-9_-]{20,}|gh[pousr]_[A-Za-z0-9]{30,}|github_pat_\w{20,}|AKIA[0-9A-Z]{16}|"
    r"xox[abprs]-[\w-]{10,}|AIza[\w-]{30,}|eyJ[\w-]{15,}\.eyJ[\w-]{15,}\.[\w-]+)|"
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----|[a-z][a-z0-9+.-]*://[^/\s:@]+:[^/\s@]+@"
)


@dataclass(frozen=True)
class Source:
    """Where a recipe came from: a label for messages, the folder its paths start at, and the line of every key.

    lines: path of a key → line number in the file. settings: paths that `--set` wrote.
    """

    label: str
    base_dir: Path
    lines: Mapping[KeyPath, int] = field(default_factory=dict)
    settings: frozenset[KeyPath] = frozenset()

    def where(self, path: KeyPath) -> str:
        """`file:line: ` of a key, of its nearest enclosing table, or `--set a.b: ` when it was set there."""
        for end in range(len(path), 0, -1):
            if path[:end] in self.settings:
                return f"--set {dotted(path[:end])}"
            if path[:end] in self.lines:
                return f"{self.label}:{self.lines[path[:end]]}"
        return self.label


@dataclass(frozen=True)
class LoadedRecipe:
    """A recipe as read: the typed tables, where each key stands, and which keys a person wrote (dotted)."""

    recipe: Recipe
    source: Source
    explicit: frozenset[str]


def load(recipe: str | Path, settings: Sequence[str] = ()) -> LoadedRecipe:
    """Read a recipe from a TOML file or by its built-in name and apply `a.b=value` settings in order.

    Errors: RecipeError naming file, line and key of every fault found, and what to write instead.
    """
    path = find_recipe(recipe)
    text = _read(path)
    label = _label(path)
    try:
        raw = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        line = re.search(r"at line (\d+)", str(error))
        place = f"{label}:{line.group(1)}" if line else label
        raise RecipeError(f"{place}: this is not TOML: {error}") from error
    return from_mapping(raw, settings, Source(label, path.parent.resolve(), key_lines(text)))


def from_mapping(raw: Mapping[str, Any], settings: Sequence[str] = (), source: Source | None = None) -> LoadedRecipe:
    """Check a recipe given as nested tables (as `tomllib` returns them); see `load`.

    Errors: RecipeError, one line for each fault.
    """
    source = source or Source("recipe", Path.cwd())
    tables: dict[str, Any] = json_copy(raw)
    written: set[KeyPath] = set()
    for setting in settings:
        written.add(apply_setting(tables, setting))
    _drop_tiny(tables, written)
    source = Source(source.label, source.base_dir, source.lines, frozenset(written))
    _refuse_secrets(tables, source)
    try:
        recipe = Recipe.model_validate(tables)
    except ValidationError as error:
        faults = [explain_error(fault, source.where) for fault in error.errors(include_url=False)]
        raise RecipeError("\n".join(dict.fromkeys(faults))) from error
    explicit = frozenset(dotted(path) for path, _ in _leaves(tables))
    return LoadedRecipe(recipe, source, explicit)


def _drop_tiny(tables: dict[str, Any], written: set[KeyPath]) -> None:
    """A setting that names another model takes the file's shape of the built-in one away: it belonged to that one."""
    model = tables.get("model")
    shaped = any(path[:2] == ("model", "tiny") for path in written)
    if isinstance(model, dict) and ("model", "source") in written and model["source"] != "tiny" and not shaped:
        model.pop("tiny", None)


def json_copy(value: Any) -> Any:
    """Copy nested tables and lists, so that settings never write into the caller's own."""
    if isinstance(value, Mapping):
        return {key: json_copy(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [json_copy(inner) for inner in value]
    return value


def dotted(path: KeyPath) -> str:
    """The dotted form of a path: `reward.0.weight`."""
    return ".".join(str(part) for part in path)


# --- where the file is


def built_in_recipes() -> dict[str, Path]:
    """The recipes that come with the package, by name."""
    package = Path(gropius.__file__).resolve().parent
    for folder in (package / "recipes", package.parents[1] / "recipes"):
        if folder.is_dir():
            return {path.stem: path for path in sorted(folder.glob("*.toml"))}
    return {}


def find_recipe(recipe: str | Path) -> Path:
    """The file of a recipe: a path, or the name of a built-in one (a path wins).

    Errors: RecipeError when there is neither, with the nearest built-in name.
    """
    path = Path(recipe)
    if path.is_file():
        return path
    built_in = built_in_recipes()
    name = str(recipe).removeprefix("recipes/").removesuffix(".toml")
    if name in built_in:
        return built_in[name]
    if path.is_dir():
        raise RecipeError(f"{path} is a folder; write the path of a recipe, a TOML file")
    hint = f"; of the built-in recipes: {did_you_mean(name, built_in)}" if built_in else ""
    raise RecipeError(f"there is no recipe {show(str(recipe))}: no such file{hint}")


def _label(path: Path) -> str:
    try:
        return str(path.resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def _read(path: Path) -> str:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise RecipeError(f"{path}: cannot be read: {error.strerror}") from error
    if len(data) > LARGEST_RECIPE_BYTES:
        raise RecipeError(
            f"{path}: {len(data)} bytes is no recipe; put data in a file of its own and name it in data.source"
        )
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise RecipeError(
            f"{path}:{line}: a recipe is UTF-8 text, and this line is not; save the file as UTF-8"
        ) from error


# --- which line a key is on


def key_lines(text: str) -> dict[KeyPath, int]:
    """The line of every table and key of a valid TOML text, counted from 1; an inline table's keys share its line.

    >>> key_lines("seed = 1\\n[[reward]]\\nname = 'exact'\\n")
    {('seed',): 1, ('reward', 0): 2, ('reward', 0, 'name'): 3}
    """
    rows = text.splitlines()
    lines: dict[KeyPath, int] = {}
    counts: dict[KeyPath, int] = {}
    table: KeyPath = ()
    number = 0
    while number < len(rows):
        first = number
        number += 1
        if header := _HEADER.match(rows[first]):
            table = _table_path(_split(header.group(2)), counts, is_array=header.group(1) == "[[")
            lines.setdefault(table, first + 1)
        elif assignment := _ASSIGNMENT.match(rows[first]):
            value = assignment.group(2)
            while (parsed := _value(value)) is None and number < len(rows):
                value += "\n" + rows[number]
                number += 1
            path = table + _split(assignment.group(1))
            lines[path] = first + 1
            lines.update({path + inner: first + 1 for inner, _ in _leaves(parsed)})
    return lines


def _split(keys: str) -> tuple[str, ...]:
    parsed: Any = tomllib.loads(f"{keys} = 0")
    path: list[str] = []
    while isinstance(parsed, dict):
        key, parsed = next(iter(parsed.items()))
        path.append(key)
    return tuple(path)


def _table_path(keys: tuple[str, ...], counts: dict[KeyPath, int], *, is_array: bool) -> KeyPath:
    path: KeyPath = ()
    for depth, key in enumerate(keys):
        path = (*path, key)
        if is_array and depth == len(keys) - 1:
            counts[path] = counts.get(path, 0) + 1
        if path in counts:
            path = (*path, counts[path] - 1)
    return path


def _value(text: str) -> Any:
    try:
        return tomllib.loads("v = " + text)["v"]
    except ValueError:  # not TOML, or a number of more digits than Python reads
        return None


def _leaves(value: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _leaves(inner, (*path, key))
    elif isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
        for index, item in enumerate(value):
            yield from _leaves(item, (*path, index))
    elif path:
        yield path, value


# --- `--set a.b=value`


def parse_setting(setting: str) -> tuple[KeyPath, Any]:
    """Split `a.b=value`: TOML on the right, a bare word is text; a number in the path is an index of [[reward]].

    >>> parse_setting("train.learning_rate=1e-6")
    (('train', 'learning_rate'), 1e-06)
    >>> parse_setting("reward.0.name=exact_match")
    (('reward', 0, 'name'), 'exact_match')
    """
    keys, equals, text = setting.partition("=")
    if not equals or not re.fullmatch(rf"\s*{_KEYS}\s*", keys):
        raise RecipeError(f"--set {show(setting)}: write --set a.b=value, for example --set train.steps=10")
    path = tuple(int(key) if key.isdecimal() else key for key in _split(keys.strip()))
    value: Any = text
    if "\n" not in text:
        parsed = _value(text)
        if isinstance(parsed, bool | int | float | str | list | dict):
            value = parsed
    return path, value


def apply_setting(tables: dict[str, Any], setting: str) -> KeyPath:
    """Write one setting into nested tables and return its path.

    Errors: RecipeError when the path runs through a value that is no table, or past the end of a list.
    """
    path, value = parse_setting(setting)
    here: Any = tables
    for depth, key in enumerate(path[:-1]):
        if isinstance(here, list):
            here = _item(here, key, path)
        else:
            here = here.setdefault(key, [] if isinstance(path[depth + 1], int) else {})
        if not isinstance(here, dict | list):
            raise RecipeError(f"--set {dotted(path)}: {dotted(path[: depth + 1])} is a value, not a table")
    last = path[-1]
    if isinstance(here, list):
        _item(here, last, path)
    here[last] = value
    return path


def _item(items: list[Any], index: str | int, path: KeyPath) -> Any:
    if not isinstance(index, int):
        raise RecipeError(
            f"--set {dotted(path)}: this is a list; write its index, for example {path[0]}.0.{path[-1]}=…"
        )
    if index == len(items):
        items.append({})
    if index > len(items):
        raise RecipeError(f"--set {dotted(path)}: there are {len(items)} entries; the next index is {len(items)}")
    return items[index]


# --- secrets


def _refuse_secrets(tables: Mapping[str, Any], source: Source) -> None:
    """A recipe is stored in the run folder and shared: refuse what looks like a credential, and never repeat it."""
    for path, value in _every_text(tables):
        named = path[0] != "objective" and "columns" not in path and _SECRET_KEY.search(str(path[-1]))
        if isinstance(value, str) and ((named and value) or _SECRET_VALUE.search(value)):
            raise RecipeError(
                f"{source.where(path)}: {dotted(path)} looks like a secret, and a recipe is stored with every run; "
                "remove it here (revoke it if the file was shared) and give it by an environment variable (HF_TOKEN)"
            )


def _every_text(value: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _every_text(inner, (*path, key))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _every_text(inner, (*path, index))
    elif path:
        yield path, value
