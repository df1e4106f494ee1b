"""What travels between processes arrives as it was, and a stranger's bytes are refused without running anything."""

from __future__ import annotations

import dataclasses
import math
import pickle
from dataclasses import dataclass

import numpy as np
import pytest

from gropius.distributed.wire import HEAD, Codec
from gropius.errors import EngineError


@dataclass(frozen=True, eq=False)
class Known:
    """A dataclass that both sides name."""

    name: str
    values: np.ndarray
    pair: tuple[int, ...]


@dataclass(frozen=True)
class Unknown:
    """One that neither names."""

    name: str = ""


CODEC = Codec((Known,))


@pytest.mark.parametrize(
    "value",
    [None, True, 7, -0.25, "ü", [], (), {"a": [1, (2, None)]}, np.float32(0.5), [np.int64(3)], {"": {}}],
    ids=repr,
)
def test_plain_values_arrive_as_they_were(value: object) -> None:
    found = CODEC.decode(CODEC.encode(value))
    assert found == value and type(found) is type(value.item() if isinstance(value, np.generic) else value)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_numbers_that_are_not_finite_arrive_too(value: float) -> None:
    assert str(CODEC.decode(CODEC.encode(value))) == str(value)


def test_arrays_and_dataclasses_arrive_bit_by_bit() -> None:
    arrays = [np.arange(6, dtype=np.int64).reshape(2, 3), np.zeros((0, 4), np.float32), np.array([True]), np.array(1.5)]
    sent = Known("a", np.array([np.nan, -0.0], np.float32), (1, 2))
    found = CODEC.decode(CODEC.encode({"arrays": arrays, "one": sent}))
    for a, b in zip(arrays, found["arrays"], strict=True):
        assert a.dtype == b.dtype and a.tobytes() == b.tobytes()
        assert a.shape == b.shape or a.size == 0
    assert found["one"].values.tobytes() == sent.values.tobytes()
    assert dataclasses.replace(found["one"], values=sent.values) is not sent and found["one"].pair == (1, 2)


@pytest.mark.parametrize("value", [Unknown(), object(), {1: 2}, np.array(["a"]), np.array([None]), {1, 2}], ids=repr)
def test_what_was_not_agreed_on_does_not_travel(value: object) -> None:
    with pytest.raises(TypeError, match="cannot travel"):
        CODEC.encode(value)


class _Trap:
    def __reduce__(self) -> tuple:
        return (pytest.fail, ("a pickle was read",))


def frame(head: bytes, body: bytes = b"") -> bytes:
    return HEAD.pack(b"gropius1", len(head), len(body)) + head + body


@pytest.mark.parametrize(
    "stranger",
    [
        b"",
        b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
        pickle.dumps(_Trap()),
        frame(b"not json"),
        frame(b'{"!": "data", "t": "Unknown", "v": [""]}'),
        frame(b'{"!": "data", "t": "Known", "v": ["too few"]}'),
        frame(b'{"!": "array", "d": "|O", "s": [1], "at": 0}', b"12345678"),
        frame(b'{"!": "array", "d": "<f8", "s": [1000000], "at": 0}', b"12345678"),
        frame(b'{"no": "kind"}'),
        HEAD.pack(b"gropius1", 1 << 62, 0),
        CODEC.encode([1, 2, 3])[:-1],
    ],
)
def test_a_strangers_bytes_are_refused(stranger: bytes) -> None:
    with pytest.raises(EngineError):
        CODEC.decode(stranger)
