"""Python functions as tools: what a model is told of them, how its calls are read, checked and answered. No torch.

A function's type hints and docstring become a JSON schema; a call is read out of the model's text as JSON, never
evaluated, and its arguments are checked against the schema before the function sees them.
"""

from __future__ import annotations

import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Union

from gropius.errors import DataError

MOST_CHARACTERS = 20_000  # of one call
SCALARS: dict[Any, str] = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}
_CHECKS: dict[str, Callable[[Any], bool]] = {
    "string": lambda v: isinstance(v, str),
    "integer": lambda v: isinstance(v, int) and not isinstance(v, bool),
    "number": lambda v: isinstance(v, int | float) and not isinstance(v, bool),
    "boolean": lambda v: isinstance(v, bool),
    "null": lambda v: v is None,
    "array": lambda v: isinstance(v, list),
    "object": lambda v: isinstance(v, dict),
}
_PARAMETER = re.compile(r"^\s*(?::param\s+)?(\w+)\s*(?:\([^)]*\))?\s*:\s+(\S.*)$")


@dataclass(frozen=True)
class Call:
    """A call as the model wrote it; arguments: None where they could not be read, with the fault in words."""

    name: str
    arguments: Mapping[str, Any] | None
    fault: str = ""


@dataclass(frozen=True)
class FunctionTool:
    """A function with the schema that its model is shown: {"type": "function", "function": {name, description, …}}."""

    function: Callable[..., Any]
    schema: dict[str, Any]

    @property
    def name(self) -> str:
        """What the model calls it."""
        return str(self.schema["function"]["name"])

    def run(self, arguments: Mapping[str, Any]) -> str:
        """What the function returns, as text (JSON unless it is text), or its fault as text for the model."""
        fault = fault_of(arguments, self.schema["function"]["parameters"])
        if fault:
            return f"error: {fault}"
        try:
            found = self.function(**arguments)
            return found if isinstance(found, str) else json.dumps(found, ensure_ascii=False, default=str)
        except Exception as fault_of_function:  # the boundary: a person's function, called with what a model chose
            return f"error: {type(fault_of_function).__name__}: {fault_of_function}"


def tool_of(function: Callable[..., Any]) -> FunctionTool:
    """A function as a tool. The first paragraph of its docstring describes it; lines `name: text` its parameters.

    Types: str, int, float, bool, list[…], dict[str, …], Literal[…], and unions of these; every parameter has one.
    Raises DataError naming the function and the parameter that is not described so.
    """
    name = getattr(function, "__name__", "")
    text = inspect.getdoc(function) or ""
    if not name.isidentifier() or not text:
        raise DataError(f"tool {name or function!r}: needs a name and a docstring that says what it does")
    try:
        hints = typing.get_type_hints(function)
    except (NameError, TypeError) as fault:
        raise DataError(f"tool {name}: its type hints cannot be read: {fault}") from fault
    described = {m[1]: m[2] for line in text.splitlines() if (m := _PARAMETER.match(line)) is not None}
    properties, required = {}, []
    for key, parameter in inspect.signature(function).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise DataError(f"tool {name}: {parameter} cannot be passed by name; write named parameters")
        if key not in hints:
            raise DataError(f"tool {name}: parameter {key} has no type; write for example {key}: str")
        properties[key] = _schema(hints[key], f"tool {name}: parameter {key}")
        if key in described:
            properties[key]["description"] = described[key].strip()
        if parameter.default is parameter.empty:
            required.append(key)
    parameters = {"type": "object", "properties": properties, "required": required}
    description = " ".join(text.split("\n\n")[0].split())
    return FunctionTool(
        function, {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}
    )


def _schema(hint: Any, where: str) -> dict[str, Any]:
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if hint in SCALARS:
        return {"type": SCALARS[hint]}
    if origin is Literal:
        return {"enum": list(inner)}
    if origin in (Union, types.UnionType):
        return {"anyOf": [_schema(one, where) for one in inner]}
    if hint is list or origin is list:
        return {"type": "array", **({"items": _schema(inner[0], where)} if inner else {})}
    if hint is dict or (origin is dict and inner[0] is str):
        return {"type": "object", **({"additionalProperties": _schema(inner[1], where)} if inner else {})}
    raise DataError(
        f"{where} has the type {hint}; write str, int, float, bool, list[…], dict[str, …], Literal[…] or a union"
    )


def fault_of(value: Any, schema: Mapping[str, Any], where: str = "") -> str:
    """What is wrong with a value under a schema, or "".

    >>> fault_of({"n": "3"}, {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]})
    'n is "3", not an integer'
    """
    shown = json.dumps(value, default=str)[:60]
    if "enum" in schema:
        same = any(value == one and type(value) is type(one) for one in schema["enum"])
        return "" if same else f"{where} is {shown}, not one of {', '.join(map(json.dumps, schema['enum']))}"
    if "anyOf" in schema:
        faults = [fault_of(value, one, where) for one in schema["anyOf"]]
        return "" if "" in faults else " and ".join(dict.fromkeys(faults))
    kind = schema["type"]
    if not _CHECKS[kind](value):
        article = "an" if kind[0] in "aio" else "a"
        return f"{where or 'arguments'} is {shown}, not {article} {kind}"
    pairs: list[tuple[str, Any, Mapping[str, Any]]] = []
    if kind == "array" and "items" in schema:
        pairs = [(f"{where}[{i}]", item, schema["items"]) for i, item in enumerate(value)]
    elif kind == "object" and "properties" in schema:
        known = schema["properties"]
        if missing := [name for name in schema["required"] if name not in value]:
            return f"{', '.join(missing)} is missing"
        if strange := [name for name in value if name not in known]:
            return f"there is no parameter {strange[0][:60]!r}; there are {', '.join(known) or 'none'}"
        pairs = [(name, item, known[name]) for name, item in value.items()]
    elif kind == "object" and "additionalProperties" in schema:
        pairs = [(f"{where}.{name}", item, schema["additionalProperties"]) for name, item in value.items()]
    return next((fault for name, item, inner in pairs if (fault := fault_of(item, inner, name))), "")


def without_thoughts(reply: str) -> str:
    """What follows the last `</think>`; nothing of a reply that ends while it is thinking (again).

    >>> without_thoughts("<think>maybe</think>yes"), without_thoughts("<think>a</think>yes<think>may")
    ('yes', '')
    """
    said = reply.rpartition("</think>")[2]
    return "" if "<think>" in said else said


def hermes_calls(reply: str) -> list[Call]:
    """`<tool_call>{"name": …, "arguments": {…}}</tool_call>`, as Hermes and Qwen models write it; any number."""
    calls = [_read(m.group(1), "arguments") for m in re.finditer(r"<tool_call>(.*?)</tool_call>", reply, re.S)]
    opened = reply.count("<tool_call>") - len(calls)
    return calls + [Call("", None, "<tool_call> is not closed")] * (opened > 0)


def llama_calls(reply: str) -> list[Call]:
    """`{"name": …, "parameters": {…}}` as the whole reply, as Llama 3 models write it.

    Several stand with a semicolon between them.
    """
    text = reply.replace("<|python_tag|>", "").strip()
    if not (text.startswith("{") and '"name"' in text):
        return []
    return [_read(part, "parameters") for part in (text.split("; ") if text.count('"name"') > 1 else [text])]


def pattern_calls(pattern: str) -> Callable[[str], list[Call]]:
    """Calls by a regular expression with the groups `name` and `arguments` (JSON). Raises DataError for one without."""
    try:
        compiled = re.compile(pattern, re.S)
    except re.error as fault:
        raise DataError(f"rollout.tools.pattern is no regular expression: {fault}") from fault
    if not {"name", "arguments"} <= set(compiled.groupindex):
        raise DataError("rollout.tools.pattern needs the groups (?P<name>…) and (?P<arguments>…)")

    def calls(reply: str) -> list[Call]:
        """The calls that match, from left to right."""
        return [_checked(m["name"], _json(m["arguments"])) for m in compiled.finditer(reply)]

    return calls


FORMATS: dict[str, Callable[[str], list[Call]]] = {"hermes": hermes_calls, "llama": llama_calls}


def _json(text: str | None) -> Any:
    def constant(name: str) -> Any:
        raise ValueError(f"{name} is no JSON")

    if text is None or len(text) > MOST_CHARACTERS:
        return ValueError(f"it is longer than {MOST_CHARACTERS} characters" if text else "it has no arguments")
    try:
        return json.loads(text, parse_constant=constant)
    except (ValueError, RecursionError) as fault:
        return ValueError(f"it is no JSON: {fault}")


def _read(text: str, key: str) -> Call:
    found = _json(text)
    if isinstance(found, ValueError):
        return Call("", None, str(found))
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        return Call("", None, f'it is no object with "name" and "{key}"')
    other = {"arguments": "parameters", "parameters": "arguments"}[key]
    return _checked(found["name"], found.get(key, found.get(other, {})))


def _checked(name: str, arguments: Any) -> Call:
    if isinstance(arguments, ValueError):
        return Call(name, None, str(arguments))
    return Call(name, arguments) if isinstance(arguments, dict) else Call(name, None, "its arguments are no object")


def told(tools: Sequence[FunctionTool], shape: str) -> str:
    """The tools in words, for a model whose chat template has no place for them."""
    schemas = "\n".join(json.dumps(tool.schema["function"], ensure_ascii=False) for tool in tools)
    return f"You may call these functions:\n{schemas}\nTo call one, write\n{shape}\nand nothing else."


SHAPES = {
    "hermes": '<tool_call>\n{"name": "NAME", "arguments": {…}}\n</tool_call>',
    "llama": '{"name": "NAME", "parameters": {…}}',
}
