"""What processes say to each other: JSON and arrays, never a pickle. Reading a message runs no code. No torch.

    frame = MAGIC, length of the head (8 bytes), length of the body (8 bytes), head (JSON), body (arrays end to end)

A value is None, a truth value, a number, text, an array, a list, a table with text keys, or one of the dataclasses that
both sides named beforehand. Everything else is refused, on both sides.
"""

from __future__ import annotations

import dataclasses
import json
import math
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gropius.errors import EngineError

MAGIC = b"gropius1"
HEAD = struct.Struct("<8sQQ")
LONGEST_BYTES = 1 << 33
NUMERIC = "biuf"


class Codec:
    """Values to frames and back. types: the dataclasses that may travel."""

    def __init__(self, types: Sequence[type] = ()) -> None:
        self._types = {kind.__name__: kind for kind in types}
        self._fields = {
            name: tuple(f.name for f in dataclasses.fields(kind) if f.init) for name, kind in self._types.items()
        }

    def encode(self, value: Any) -> bytes:
        """One frame. Errors: TypeError for what cannot travel."""
        body = bytearray()
        head = json.dumps(self._out(value, body), allow_nan=False, separators=(",", ":")).encode()
        return HEAD.pack(MAGIC, len(head), len(body)) + head + body

    def decode(self, frame: bytes) -> Any:
        """The value of one frame. Errors: EngineError for bytes that are none."""
        size = sizes(frame[: HEAD.size])
        head, body = frame[HEAD.size : HEAD.size + size[0]], frame[HEAD.size + size[0] :]
        if len(head) != size[0] or len(body) != size[1]:
            raise EngineError("a message between processes is torn")
        try:
            return self._in(json.loads(head), memoryview(body))
        except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:  # a stranger's bytes
            raise EngineError(f"a message between processes cannot be read: {error}") from error

    def _out(self, value: Any, body: bytearray) -> Any:
        if value is None or isinstance(value, bool | str | int):
            return value
        if isinstance(value, float):
            return value if math.isfinite(value) else {"!": "float", "v": str(float(value))}
        if isinstance(value, np.generic):
            return self._out(value.item(), body)
        if isinstance(value, np.ndarray):
            return self._array(value, body)
        if isinstance(value, list | tuple):
            return {"!": type(value).__name__, "v": [self._out(item, body) for item in value]}
        if isinstance(value, dict) and all(isinstance(key, str) for key in value):
            return {"!": "dict", "v": [[key, self._out(item, body)] for key, item in value.items()]}
        name = type(value).__name__
        if self._types.get(name) is type(value):
            return {"!": "data", "t": name, "v": [self._out(getattr(value, f), body) for f in self._fields[name]]}
        raise TypeError(f"a {name} cannot travel between processes")

    def _array(self, value: NDArray[Any], body: bytearray) -> dict[str, Any]:
        if value.dtype.kind not in NUMERIC:
            raise TypeError(f"an array of {value.dtype} cannot travel between processes")
        at = len(body)
        body += value.tobytes()
        return {"!": "array", "d": value.dtype.str, "s": list(value.shape), "at": at}

    def _in(self, value: Any, body: memoryview) -> Any:
        if not isinstance(value, dict):
            return value
        kind = value["!"]
        if kind == "array":
            dtype = np.dtype(value["d"])
            if dtype.kind not in NUMERIC:
                raise ValueError(f"an array of {dtype}")
            count = math.prod(value["s"])
            found = np.frombuffer(body, dtype, count, value["at"]) if count else np.zeros(0, dtype)
            return found.reshape(value["s"]).copy()
        if kind == "float":
            return float(value["v"])
        if kind == "dict":
            return {str(key): self._in(item, body) for key, item in value["v"]}
        items = [self._in(item, body) for item in value["v"]]
        if kind == "data":
            name = value["t"]
            return self._types[name](**dict(zip(self._fields[name], items, strict=True)))
        return {"list": list, "tuple": tuple}[kind](items)


def sizes(start: bytes) -> tuple[int, int]:
    """Lengths of head and body, from a frame's first HEAD.size bytes. Errors: EngineError when they begin no frame."""
    if len(start) != HEAD.size:
        raise EngineError("a message between processes is torn")
    magic, head, body = HEAD.unpack(start)
    if magic != MAGIC or head + body > LONGEST_BYTES:
        raise EngineError("whoever called speaks another protocol")
    return int(head), int(body)
