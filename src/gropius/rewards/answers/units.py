"""Units at the end of an answer, currency before it, and number words: split off before the grammar reads the rest."""

from __future__ import annotations

import re
from fractions import Fraction

from gropius.rewards.answers.text import CURRENCY

_ALIASES = {
    "dollar": "dollar dollars usd bucks",
    "cent": "cent cents",
    "%": "percent percents",
    "degree": "degree degrees deg",
    "radian": "radian radians rad",
    "meter": "meter meters metre metres",
    "centimeter": "centimeter centimeters centimetre centimetres cm",
    "millimeter": "millimeter millimeters millimetre millimetres mm",
    "kilometer": "kilometer kilometers kilometre kilometres km",
    "inch": "inch inches",
    "foot": "foot feet ft",
    "yard": "yard yards yd",
    "mile": "mile miles mi",
    "second": "second seconds sec secs",
    "minute": "minute minutes min mins",
    "hour": "hour hours hr hrs",
    "day": "day days",
    "week": "week weeks",
    "month": "month months",
    "year": "year years yr yrs",
    "gram": "gram grams",
    "kilogram": "kilogram kilograms kg kgs",
    "pound": "pound pounds lb lbs",
    "ounce": "ounce ounces oz",
    "liter": "liter liters litre litres",
    "milliliter": "milliliter milliliters ml",
    "gallon": "gallon gallons gal",
    "mph": "mph",
    "unit": "unit units",
}
KNOWN = {alias: name for name, aliases in _ALIASES.items() for alias in aliases.split()}
_MULTIPLIERS = {"hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12}
_SMALL_WORDS = {"of", "per", "in", "a", "an", "the", "at", "on", "each", "every", "to", "for"}
_NOT_UNITS = frozenset(
    word
    for line in (
        "is are was be not no nor or and but than plus minus times over by wrong incorrect false true if unless",
        "except maybe perhaps possibly either modulo mod squared cubed half third quarter quarters thirds factorial",
        "choose hundredths tenths pi sqrt sin cos tan cot sec csc log ln exp infinity inf nan cup union pm base",
        "divided multiplied because since so then hence therefore also",
    )
    for word in line.split()
)
MAX_UNIT_WORDS = 8


def split_unit(text: str) -> tuple[str, str, Fraction]:
    """(the rest, the unit's name or "", a factor from a number word).

    A known unit has one name whatever its spelling; other words after a number are kept as "free: …".

    >>> split_unit("5.4 cents")[:2], split_unit("¤36")[:2], split_unit("15 cm ^2")[:2]
    (('5.4', 'cent'), ('36', 'dollar'), ('15', 'centimeter^2'))
    >>> split_unit("2 million people")
    ('2', 'free: people', Fraction(1000000, 1))
    """
    currency = CURRENCY in text
    if currency:
        text = re.sub(rf"{CURRENCY}\s*", "", text, count=1) if text.count(CURRENCY) == 1 else text.replace(CURRENCY, "")
        text = re.sub(r"\s*\b(?:USD|usd|dollars?)\s*$", "", text)
    text = text.strip()
    if text.endswith("%"):
        return text[:-1].strip(), "%", Fraction(1)
    body, words, exponent = _tail(text)
    if not words:
        return text, "dollar" if currency else "", Fraction(1)
    factor = Fraction(1)
    while words and words[0].lower() in _MULTIPLIERS:
        factor *= _MULTIPLIERS[words.pop(0).lower()]
    if words and words[0].lower() == "of":
        words.pop(0)
    if not words:
        return body, "dollar" if currency else "", factor
    unit = _name(words, exponent)
    return (body, "dollar" if currency else unit, factor) if unit else (text, "dollar" if currency else "", Fraction(1))


def _tail(text: str) -> tuple[str, list[str], str]:
    """Cut trailing words off a text that ends with them: ("5", ["apples"], ""). No words when there are none to cut."""
    end = len(text)
    match = re.search(r"\s*\^\s*\{?\s*([23])\s*\}?\s*$", text)
    exponent = ""
    if match and re.search(r"[A-Za-z]{2}\s*$", text[: match.start()]):
        exponent, end = match.group(1), match.start()
    start = end
    while start > 0 and ((text[start - 1].isalpha() and text[start - 1].isascii()) or text[start - 1] in " '-./"):
        start -= 1
    while start < end and not text[start].isalpha():
        start += 1
    if start == 0 or start >= end or text[start - 1] == "\\" or not re.search(r"[\d}\)\]!]\s*[-.]?\s*$", text[:start]):
        return text, [], ""
    words = [w for w in re.split(r"[\s]+", text[start:end].strip(" .")) if w]
    glued = text[start - 1] not in " -"
    if glued and words and words[0].lower() not in KNOWN:
        return text, [], ""
    return text[:start].rstrip(" -"), words, exponent


def _name(words: list[str], exponent: str) -> str:
    """The unit's one name, "" when these words are not a unit."""
    lowered = [w.lower().strip("'.-") for w in words]
    if len(words) > MAX_UNIT_WORDS or any(w in _NOT_UNITS for w in lowered):
        return ""
    power = exponent
    if lowered[0] in ("square", "sq", "cubic", "cu") and len(lowered) > 1:
        power = "2" if lowered[0].startswith("sq") else "3"
        lowered = lowered[1:]
    if lowered[0] in KNOWN:
        rest = lowered[1:]
        if rest[:1] == ["per"] and len(rest) > 1 and rest[1] in KNOWN:
            return f"{KNOWN[lowered[0]]}/{KNOWN[rest[1]]}".replace("mile/hour", "mph")
        return KNOWN[lowered[0]] + (f"^{power}" if power else "")
    if exponent or any(len(w) < 3 and w not in _SMALL_WORDS for w in lowered) or lowered[-1] in _SMALL_WORDS - {"each"}:
        return ""
    return "free: " + " ".join(lowered)
