"""How a recipe's model is spoken with."""

from __future__ import annotations

from gropius.models.chat import ChatFormat
from gropius.models.load import LoadedModel
from gropius.recipe.resolve import Resolved
from gropius.tasks.base import TaskSet


def conversation(resolved: Resolved, found: TaskSet, loaded: LoadedModel) -> ChatFormat:
    """The chat format of a recipe. Raises ModelError for a template that several turns cannot be taken with."""
    system = resolved.data.system_prompt if resolved.data.system_prompt is not None else found.system_prompt
    chat = ChatFormat.for_model(loaded, "auto", system, resolved.data.template, found.tools)
    if resolved.rollout.max_turns > 1 and not resolved.data.keep_thoughts:
        chat.refuse_dropped_thoughts(resolved.rollout.tools.results if found.tools else "user")
    return chat
