"""Values that came over the pipe: decoded into plain Python values, and compared by type and value.

Whatever class a program returned, only plain data arrives here, so no `__eq__` of its own can answer for it.

    int, float     equal as numbers: 3 is 3.0 (as in the data sets' own assertions); NaN equals nothing; −0.0 is 0
    bool           equal to the number it is, 1 and 0 (as there: `assert f(x) == True` holds for 1)
    list, tuple    kept apart, compared in order; set, dict by content
    other classes  (generators, iterators, numbers of NumPy, classes of the program) are not values: type
"""

from __future__ import annotations

from typing import Any

from gropius.sandbox.base import PROTOCOL, TYPE, WRONG
from gropius.sandbox.session import ProgramFailed

MAX_DIGITS = 5000


def decode(tagged: Any) -> Any:
    """The plain value of a tagged answer. Raises ProgramFailed: type for a foreign object, protocol for a forgery.

    >>> decode(["t", [["i", "1"], ["b", True]]])
    (1, True)
    """
    try:
        return _decode(tagged)
    except (ValueError, TypeError, KeyError, IndexError, RecursionError, OverflowError):
        raise ProgramFailed(PROTOCOL, str(tagged)[:200]) from None


def _decode(tagged: Any) -> Any:
    tag = tagged[0]
    if tag == "x":
        raise ProgramFailed(TYPE, f"a value of class {str(tagged[1])[:60]}")
    if tag == "n":
        return None
    if tag == "b":
        return tagged[1] is True
    if tag == "i":
        if len(tagged[1]) > MAX_DIGITS:
            raise ProgramFailed(TYPE, "an integer with too many digits")
        return int(tagged[1])
    if tag == "f":
        return float(tagged[1])
    if tag == "c":
        return complex(float(tagged[1]), float(tagged[2]))
    if tag == "s":
        return str(tagged[1])
    if tag == "y":
        return bytes.fromhex(tagged[1])
    if tag == "d":
        return {_decode(k): _decode(v) for k, v in tagged[1]}
    return {"l": list, "t": tuple, "e": set, "z": frozenset}[tag](_decode(item) for item in tagged[1])


def to_source(value: Any) -> str:
    """A Python literal of a plain value; inf and nan by name.

    >>> to_source([1, (float("inf"),), {2}])
    '[1, (inf,), {2}]'
    """
    if isinstance(value, (list, tuple, set, frozenset)):
        inner = ", ".join(to_source(item) for item in value)
        if isinstance(value, list):
            return f"[{inner}]"
        if isinstance(value, tuple):
            return f"({inner},)" if len(value) == 1 else f"({inner})"
        if isinstance(value, frozenset):
            return f"frozenset([{inner}])"
        return f"{{{inner}}}" if value else "set()"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{to_source(k)}: {to_source(v)}" for k, v in value.items()) + "}"
    return repr(value)


def difference(actual: Any, expected: Any) -> str:
    """ "" when two plain values are equal in type and value, else WRONG or TYPE.

    >>> difference(3, 3.0), difference("1", 1), difference([1], (1,)), difference([1, 2], [1, 3])
    ('', 'type', 'type', 'wrong')
    """
    if isinstance(expected, (int, float, complex)):
        if not isinstance(actual, (int, float, complex)):
            return TYPE
        return "" if actual == expected else WRONG
    if type(actual) is not type(expected):
        return TYPE
    if isinstance(expected, (list, tuple)):
        if len(actual) != len(expected):
            return WRONG
        return next((d for d in map(difference, actual, expected) if d), "")
    if isinstance(expected, dict):
        if actual.keys() != expected.keys():
            return WRONG
        return next((d for d in (difference(actual[k], v) for k, v in expected.items()) if d), "")
    return "" if actual == expected else WRONG


def near(actual: Any, expected: Any, relative: float, absolute: float) -> str:
    """Like `difference`, with a tolerance for real numbers."""
    if isinstance(actual, bool) or not isinstance(actual, (int, float)):
        return TYPE
    if actual == expected:
        return ""
    gap = abs(actual - expected)
    return "" if gap <= max(absolute, relative * max(abs(actual), abs(expected))) else WRONG
