"""Read foreign configurations as text: YAML, JSON, a keyword call, overrides, a command line. Nothing is executed."""

from __future__ import annotations

import ast
import json
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gropius.audit.dialect import Parsed, literal
from gropius.errors import SafetyRefusal, UsageError

LARGEST_BYTES = 4_000_000
MOST_KEYS = 20_000
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle")


def read_text(path: Path) -> str:
    """The text of a configuration file.

    Errors: SafetyRefusal for a pickle (`training_args.bin`), which runs code when it is read; UsageError otherwise.
    """
    if path.suffix.lower() in PICKLES:
        raise SafetyRefusal(
            f"{path}: a pickle runs code when it is read; write the arguments as JSON instead, "
            "e.g. json.dump(training_args.to_dict(), file)"
        )
    try:
        if path.stat().st_size > LARGEST_BYTES:
            raise UsageError(f"{path}: {path.stat().st_size} bytes is no configuration file")
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: this is not text in UTF-8") from error


def structured(text: str, suffix: str) -> dict[str, Any] | None:
    """The table in a JSON or YAML text; None when the suffix says neither. Errors: UsageError with the line."""
    if suffix == ".json":
        try:
            table = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"this is not JSON: {error}") from error
    elif suffix in (".yaml", ".yml"):
        table = _yaml(text)
    else:
        return None
    if not isinstance(table, dict) or not all(isinstance(key, str) for key in table):
        raise UsageError("the file holds no table of options; write key: value")
    return table


def _yaml(text: str) -> Any:
    try:
        import yaml
    except ImportError as error:
        raise UsageError("reading YAML needs PyYAML (pip install pyyaml); a JSON file needs nothing") from error
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError) as error:
        raise UsageError(f"this is not YAML: {str(error).splitlines()[0] if str(error) else error}") from error


def flat(table: Mapping[str, Any]) -> dict[str, Any]:
    """Nested tables as dotted keys; lists stay values.

    Errors: UsageError for more keys than a configuration has (references in YAML can nest without end).

    >>> flat({"algorithm": {"kl_ctrl": {"kl_coef": 0.1}}})
    {'algorithm.kl_ctrl.kl_coef': 0.1}
    """
    out: dict[str, Any] = {}
    pending: list[tuple[str, Any]] = list(table.items())
    seen = 0
    while pending:
        key, value = pending.pop(0)
        seen += 1
        if seen > MOST_KEYS:
            raise UsageError(f"the file holds more than {MOST_KEYS} options; this is no configuration")
        if isinstance(value, Mapping) and value:
            pending += [(f"{key}.{inner}", leaf) for inner, leaf in value.items()]
        else:
            out[key] = value
    return out


def split_interpolations(table: Mapping[str, Any]) -> Parsed:
    """Part literals from texts that refer to something else (`${oc.select:…}`, `$HOME`)."""
    unread = {k: v for k, v in table.items() if isinstance(v, str) and "$" in v}
    return Parsed({k: v for k, v in table.items() if k not in unread}, unread)


def keyword_call(text: str, names: Sequence[str]) -> Parsed:
    """The keywords of the one call to `names` in Python source, by `ast.literal_eval` on each; nothing is executed.

    A keyword that is no literal, and `**anything`, is left unread and reported.
    Errors: UsageError when the text is not Python, or holds no such call, or several.
    """
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise UsageError(f"this is not Python: {error}") from error
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and _called(node.func) in names]
    if len(calls) != 1:
        lines = ", ".join(str(call.lineno) for call in calls)
        found = f"{len(calls)} calls (lines {lines})" if calls else "no call"
        raise UsageError(f"{found} of {' or '.join(names)} in this file; give a file with exactly one")
    given, unread = {}, {}
    if calls[0].args:
        unread["(positional)"] = ast.unparse(calls[0].args[0])
    for keyword in calls[0].keywords:
        try:
            given[keyword.arg or "**"] = ast.literal_eval(keyword.value)
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            unread[keyword.arg or "**"] = ast.unparse(keyword.value)
    return Parsed(given, unread)


def _called(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


_ASSIGNMENT = re.compile(r"^\s*(?:export\s+)?([A-Za-z_]\w*)=(\S*|'[^']*'|\"[^\"]*\")\s*(?:#.*)?$")
_VARIABLE = re.compile(r"\$\{([A-Za-z_]\w*)\}|\$([A-Za-z_]\w*)")


def words(text: str) -> list[str]:
    """The words of a shell command or script: comments and line ends joined, simple `name=value` lines put in.

    A variable is replaced only by a literal that the same text assigns on a line of its own; anything else stays as it
    is written (`$X`, `$((…))`), and its option is reported as unread.
    Errors: UsageError for an open quote.
    """
    assigned: dict[str, str] = {}
    kept = []
    for line in text.replace("\\\r\n", " ").replace("\\\n", " ").splitlines():
        match = _ASSIGNMENT.match(line)
        if match and "." not in match[1]:
            assigned[match[1]] = _substituted(match[2].strip("'\""), assigned)
        else:
            kept.append(line)
    try:
        return [_substituted(word, assigned) for word in shlex.split("\n".join(kept), comments=True)]
    except ValueError as error:
        raise UsageError(f"this is not a command line: {error}") from error


def _substituted(text: str, assigned: Mapping[str, str]) -> str:
    return _VARIABLE.sub(lambda m: assigned.get(m[1] or m[2], m[0]), text)


def overrides(tokens: Sequence[str]) -> Parsed:
    """Hydra's `a.b=c`, `+a.b=c`, `++a.b=c` among the words; `~a.b` removes and is left out. The last one wins."""
    given: dict[str, Any] = {}
    unread: dict[str, str] = {}
    for token in tokens:
        match = re.fullmatch(r"\+{0,2}([A-Za-z_][\w@/-]*(?:\.[\w@/-]+)+)=(.*)", token, re.DOTALL)
        if not match:
            continue
        name, value = match[1], match[2]
        given.pop(name, None)
        unread.pop(name, None)
        if "$" in value:
            unread[name] = value
        else:
            given[name] = literal(value)
    return Parsed(given, unread)


def command_line(tokens: Sequence[str]) -> Parsed:
    """`--a.b value`, `--a.b v1 v2`, `--a.b=value` and bare flags (true) among the words; the last one wins."""
    given: dict[str, Any] = {}
    unread: dict[str, str] = {}
    name, collected = "", list[str]()

    def _close() -> None:
        if not name:
            return
        given.pop(name, None)
        unread.pop(name, None)
        if any("$" in word for word in collected):
            unread[name] = " ".join(collected)
        else:
            found = [literal(word) for word in collected]
            given[name] = True if not found else found[0] if len(found) == 1 else found

    for token in tokens:
        if re.match(r"--[A-Za-z]", token):
            _close()
            name, _, value = token[2:].partition("=")
            collected = [value] if value else []
        elif name:
            collected.append(token)
    _close()
    return Parsed(given, unread)
