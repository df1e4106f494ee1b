"""A person's functions as tools of a task set: `[rollout.tools]` of a recipe. No torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gropius.envs.calling import Calling, FunctionCalls
from gropius.envs.functions import FORMATS, SHAPES, FunctionTool, pattern_calls, tool_of
from gropius.errors import DataError, RecipeError
from gropius.naming import load_function
from gropius.tasks.base import TaskSet


@dataclass(frozen=True)
class ToolSettings:
    """functions: `module:function` names. format: how calls are written; pattern: of the format "pattern".

    show: "template" or "system". results: the role of the answers, "tool" or "user". calls_per_turn, calls: at most.
    """

    functions: Sequence[str]
    format: str = "hermes"
    pattern: str = ""
    show: str = "template"
    results: str = "tool"
    calls_per_turn: int = 1
    calls: int = 4


def require_partner(found: TaskSet, max_turns: int) -> None:
    """Raises RecipeError for several turns where nobody answers the model."""
    if max_turns > 1 and found.environment is None:
        raise RecipeError(
            f"rollout.max_turns = {max_turns} would do nothing: {found.name} has no environment that answers the model"
            "; remove the key, or write rollout.tools.functions"
        )


def with_tools(found: TaskSet, settings: ToolSettings, base_dir: Path) -> TaskSet:
    """The task set, its tasks played with the functions at hand. Without functions it is left as it is.

    Raises DataError for tasks that have an environment of their own, and for a function that is no tool.
    """
    if not settings.functions:
        return found
    if found.environment is not None:
        raise DataError(
            f"rollout.tools.functions: {found.name} has an environment of its own; leave [rollout.tools] out"
        )
    tools: dict[str, FunctionTool] = {}
    for name in settings.functions:
        tool = tool_of(load_function(name, base_dir, DataError))
        if tool.name in tools:
            raise DataError(f"rollout.tools.functions: two functions are called {tool.name}; rename one")
        tools[tool.name] = tool
    in_words = settings.show == "system"
    calling = Calling(
        tools=tools,
        read=pattern_calls(settings.pattern) if settings.format == "pattern" else FORMATS[settings.format],
        calls_per_turn=settings.calls_per_turn,
        calls=settings.calls,
        shape=SHAPES.get(settings.format, settings.pattern) if in_words else "",
        role=settings.results,
    )
    return dataclasses.replace(
        found,
        environment=lambda task: FunctionCalls(calling, task.messages()),
        judges_text=True,
        blocking=True,
        tools=() if in_words else tuple(tool.schema for tool in tools.values()),
        notes=(*found.notes, f"tools: {', '.join(tools)}; {settings.calls} calls an episode at most"),
    )
