"""What the tables of a recipe are made of: strict types with their bounds. No torch."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field


def as_tuple(value: object) -> object:
    """A list as the tuple that a table keeps."""
    return tuple(value) if isinstance(value, list) else value


def known_device(value: str) -> str:
    """A device's name. Errors: ValueError for any other text."""
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?|mps", value):
        raise ValueError(f'"{value}" is not a device; write "auto", "cpu", "cuda", "cuda:0" or "mps"')
    return value


def without_float16(value: Any) -> Any:
    """A number format that training computes in, as it was written. Errors: ValueError for float16."""
    if value == "float16":
        raise ValueError(
            '"float16" needs a loss that is scaled against underflow, which is not done here; write "bfloat16" '
            '(of the same size), or "float32"; vLLM alone may draw in it (rollout.vllm.dtype)'
        )
    return value


def file_name(value: str) -> str:
    """A name that a folder may have. Errors: ValueError."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", value):
        raise ValueError(
            f"{value!r} cannot name a run folder; write up to 100 letters, digits, dots, dashes or underscores, "
            "a letter or digit first"
        )
    return value


def storable(value: dict[str, Any]) -> dict[str, Any]:
    """Options are stored as JSON: text, numbers, true/false, lists and tables of these."""
    pending: list[tuple[str, Any]] = list(value.items())
    while pending:
        name, item = pending.pop()
        if isinstance(item, dict):
            pending += item.items()
        elif isinstance(item, list):
            pending += [(name, inner) for inner in item]
        elif not isinstance(item, str | int | float | bool):
            raise ValueError(
                f"{name} is a {type(item).__name__}, which an option cannot be; write it as text in quotes"
            )
    return value


Options = Annotated[dict[str, Any], AfterValidator(storable)]
Count = Annotated[int, Field(ge=1)]
CountOrZero = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
BelowOne = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Text = Annotated[str, Field(min_length=1)]


class Table(BaseModel):
    """A table of a recipe: strict types, no unknown keys, never changed after reading."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, protected_namespaces=())
