"""Numbers in running text, read exactly. No torch.

Read: digits of any script, thousands separated by commas (`1,000`, LaTeX `1{,}000`), decimals (`3.50`, `.5`), a sign
(also U+2212 and the full-width one) that stands at the number and not behind a digit, letter or bracket, so `10-5`
holds 10 and 5. Not read: exponents, fractions, percent signs (`50%` is 50).
"""

from __future__ import annotations

import re
from fractions import Fraction

_SIGN = r"(?:(?<![\w)\]])[-+][$€£]?)?"
_NUMBER = re.compile(rf"{_SIGN}(?:\d{{1,3}}(?:,\d{{3}})+(?!\d)|\d+)(?:\.\d+)?|{_SIGN}(?<![\d.])\.\d+")
_SPELLINGS = str.maketrans({"−": "-", "﹣": "-", "－": "-", "＋": "+"})
_MOST_CHARACTERS = 1000


class NumberTooLong(ValueError):
    """A number of more than 1000 characters: no answer, and slow to convert."""


def last_number_in(text: str) -> Fraction | None:
    """The last number of a text, exactly; None when it holds none. Linear in the length of the text.

    Raises NumberTooLong when the last number has more than 1000 characters.

    >>> last_number_in("6 times 7 is 42."), last_number_in("about −1,250.5 euros"), last_number_in("none")
    (Fraction(42, 1), Fraction(-2501, 2), None)
    """
    found = None
    for found in _NUMBER.finditer(_plain(text)):  # noqa: B007 (the last match is what is wanted)
        pass
    return None if found is None else _value(found.group())


def whole_text_number(text: str) -> Fraction | None:
    """The number that a text is, surrounding blanks aside; None when it is anything else.

    >>> whole_text_number(" 1,000 "), whole_text_number("42 apples")
    (Fraction(1000, 1), None)
    """
    found = _NUMBER.fullmatch(_plain(text.strip()))
    return None if found is None else _value(found.group())


def _plain(text: str) -> str:
    return text.translate(_SPELLINGS).replace("{,}", ",")


def _value(digits: str) -> Fraction:
    if len(digits) > _MOST_CHARACTERS:
        raise NumberTooLong(f"a number of {len(digits)} characters")
    return Fraction(re.sub(r"[,$€£]", "", digits))
