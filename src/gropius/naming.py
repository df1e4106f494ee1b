"""From what a recipe writes (a name, a mapping of options) to a callable and its checked arguments. No torch.

User code is named `module:function` or `path/to/file.py:function`; both are looked up relative to the recipe's folder
first. Naming a function in a recipe is trust: it runs in this process.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
import sys
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from gropius.errors import GropiusError, UsageError, did_you_mean

_NAMED = re.compile(r"[^:]+(?::[\\/][^:]*)?:[A-Za-z_]\w*\Z")
_SIMPLE: dict[Any, tuple[type, ...]] = {int: (int,), float: (int, float), str: (str,), bool: (bool,)}


def names_a_function(text: str) -> bool:
    """True for `module:function` and `path/to/file.py:function`.

    >>> names_a_function("my.rewards:score"), names_a_function("gsm8k"), names_a_function("data/rows.jsonl")
    (True, False, False)
    """
    return _NAMED.match(text) is not None


def load_function(name: str, base_dir: Path, error: type[GropiusError] = UsageError) -> Callable[..., Any]:
    """The callable that `name` stands for.

    name: `module:function` or `path/to/file.py:function`. base_dir: the recipe's folder; a module file lying there wins
    over an installed module of the same name. Raises `error` (a class of `gropius.errors`) naming what was looked for.
    """
    place, _, attribute = name.rpartition(":")
    module = _module(place, base_dir, name, error)
    try:
        function = getattr(module, attribute)
    except AttributeError:
        public = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise error(f'{name}: {place} has no "{attribute}"; {did_you_mean(attribute, public)}') from None
    if not callable(function):
        raise error(f"{name}: {attribute} is a {type(function).__name__}, not a function")
    return typing.cast("Callable[..., Any]", function)


def _module(place: str, base_dir: Path, name: str, error: type[GropiusError]) -> ModuleType:
    if place.endswith(".py"):
        file = base_dir / place
        if not file.is_file():
            raise error(f"{name}: no file {file}")
        return _module_from_file(file, name, error)
    beside = base_dir / (place.replace(".", "/") + ".py")
    if beside.is_file():
        return _module_from_file(beside, name, error)
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as missing:
        if missing.name is None or not (place + ".").startswith(missing.name + "."):
            raise error(f"{name}: importing {place} failed: {missing}") from missing
        raise error(
            f"{name}: no module {place}: neither {beside} nor an installed module; "
            "write module:function or path/to/file.py:function"
        ) from None
    except (Exception, SystemExit) as fault:  # the boundary: user code runs while it is imported
        raise error(f"{name}: importing {place} failed: {type(fault).__name__}: {fault}") from fault


def _module_from_file(file: Path, name: str, error: type[GropiusError]) -> ModuleType:
    file = file.resolve()
    label = "gropius_user_" + re.sub(r"\W", "_", str(file))
    if label in sys.modules:
        return sys.modules[label]
    spec = importlib.util.spec_from_file_location(label, file)
    if spec is None or spec.loader is None:
        raise error(f"{name}: {file} cannot be imported as Python")
    module = importlib.util.module_from_spec(spec)
    sys.modules[label] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as fault:  # the boundary: user code runs while it is imported
        del sys.modules[label]
        raise error(f"{name}: importing {file} failed: {type(fault).__name__}: {fault}") from fault
    return module


def check_options(
    where: str, factory: Callable[..., Any], options: Mapping[str, Any], error: type[GropiusError] = UsageError
) -> dict[str, Any]:
    """The options as keyword arguments of `factory`, after comparing names and simple types with its signature.

    where: what the message calls it (`task arithmetic`). A parameter typed int, float, str or bool refuses another type
    (a bool is no int); other annotations are the factory's own business. A factory taking `**options` takes any name.
    Raises `error` for an unknown or missing option and for a wrong type, saying what to write instead.
    """
    signature = inspect.signature(factory).parameters
    open_ended = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in signature.values())
    named = {n: p for n, p in signature.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    hints = typing.get_type_hints(factory) if inspect.isfunction(factory) else {}
    for key, value in options.items():
        if key not in named:
            if open_ended:
                continue
            raise error(f'{where}: unknown option "{key}"; {did_you_mean(key, named)}')
        allowed = _SIMPLE.get(hints.get(key))
        if allowed and (not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed)):
            got, wanted = type(value).__name__, hints[key].__name__
            raise error(f"{where}: option {key} = {value!r} is a {got}; write a value of type {wanted}")
    missing = [n for n, p in named.items() if p.default is inspect.Parameter.empty and n not in options]
    if missing:
        raise error(f"{where}: option {', '.join(missing)} is missing")
    return dict(options)
