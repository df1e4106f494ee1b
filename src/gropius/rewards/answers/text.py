"""One plain spelling for the many ways an answer is written: Unicode, LaTeX and Markdown layout removed.

４２ → 42    −5 → -5    ½ → (1/2)    x² → x^{2}    \\dfrac → \\frac    1{,}000 → 1,000    $5$ → 5    \\$5 → ¤5
"""

from __future__ import annotations

import re
import unicodedata

CURRENCY = "¤"  # the mark that every currency sign becomes

_SYMBOLS = str.maketrans(
    {
        "−": "-", "–": "-", "—": "-", "﹣": "-", "‐": "-", "‑": "-",
        "×": "*", "⋅": "*", "·": "*", "∙": "*", "∗": "*", "÷": "/", "⁄": "/", "∕": "/",
        "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "≈": r"\approx ", "∈": r"\in ", "∪": r"\cup ", "±": r"\pm ",
        "∓": r"\mp ", "∞": r"\infty ", "π": r"\pi ", "√": r"\sqrt ", "∛": r"\sqrt[3]", "°": r"^\circ ", "∘": r"^\circ ",
        "“": '"', "”": '"', "‘": "'", "’": "'", "…": "...",
        "€": CURRENCY, "£": CURRENCY, "￥": CURRENCY, "¥": CURRENCY, "₹": CURRENCY,
        "\u200b": "", "\u200c": "", "\u200d": "", "\u2060": "", "\ufeff": "", "\u200e": "", "\u200f": "",
    }
)  # fmt: skip
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻", "0123456789+-")
_SUBSCRIPTS = str.maketrans("₀₁₂₃₄₅₆₇₈₉", "0123456789")
_FORMAT_WORDS = r"\\(?:text|textbf|textit|textrm|mbox|mathrm|mathbf|mathit|mathsf|operatorname|textnormal|bold|mathbb)"
_GROUP_OF_DIGITS = re.compile(r"(?<![\d.,])(\d{1,3}(?:[  ]\d{3})+)(?![\d/])")
_DROPPED = re.compile(
    r"\\(?:left|right|big|Big|bigg|Bigg|bigl|bigr|Bigl|Bigr|displaystyle|textstyle|limits|quad|qquad|rm|bf|strut"
    r"|phantom\s*\{[^{}]*\})(?![A-Za-z])"
)
_UNIT_WORDS = {"m": "meters", "g": "grams", "s": "seconds", "h": "hours", "L": "liters"}
_UNIT_LETTER = re.compile(r"(?<=[\d} ])\\(?:text|mathrm|mbox|textrm)\s*\{\s*([mgshL])\s*\}")


def plain(text: str) -> str:
    """The plain spelling of an answer. Work is linear in the length; nothing is evaluated.

    >>> plain("\\\\dfrac{1}{2}"), plain("４２"), plain("x²"), plain("1{,}000")
    ('\\\\frac{1}{2}', '42', 'x^{2}', '1,000')
    """
    text = _unicode(text)
    text = _markdown(text)
    text = re.sub(r"\\\$", CURRENCY, text)
    text = _dollars(text)
    text = re.sub(r"\\[()\[\]]", " ", text)
    text = re.sub(r"\{,\}|,\s*\\!\s*", ",", text)
    text = re.sub(r"(?<=\d)(?:\\[,;: ]|~|\\thinspace(?![A-Za-z]))(?=\d{3}(?!\d))", ",", text)
    text = re.sub(r"(?<!\\)\\[!,;:> ]|~", " ", text)
    text = _DROPPED.sub(" ", text)
    text = re.sub(r"\\[dtc]frac(?![A-Za-z])", r"\\frac", text)
    text = re.sub(r"\\([%&#_])", r"\1", text)
    text = _UNIT_LETTER.sub(lambda m: f" {_UNIT_WORDS[m.group(1)]} ", text)
    for _ in range(3):
        text = re.sub(_FORMAT_WORDS + r"\s*\{([^{}]*)\}", r" \1 ", text)
    text = _GROUP_OF_DIGITS.sub(lambda m: re.sub(r"\s", ",", m.group(1)), text)
    text = re.sub(r"\^\s*\{\s*\\circ\s*\}|\^\s*\\circ|\\degree(?![A-Za-z])", " degrees ", text)
    return re.sub(r"[ \t\n\r\f\v]+", " ", text).strip()


def _unicode(text: str) -> str:
    out = []
    for i, char in enumerate(text):
        if char in "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻":
            follows = i > 0 and text[i - 1] in "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻"
            out.append(("" if follows else "^{") + char.translate(_SUPERSCRIPTS))
            if i + 1 == len(text) or text[i + 1] not in "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻":
                out.append("}")
        elif char in "₀₁₂₃₄₅₆₇₈₉":
            follows = i > 0 and text[i - 1] in "₀₁₂₃₄₅₆₇₈₉"
            out.append(("" if follows else "_{") + char.translate(_SUBSCRIPTS))
            if i + 1 == len(text) or text[i + 1] not in "₀₁₂₃₄₅₆₇₈₉":
                out.append("}")
        elif unicodedata.category(char) == "No" and "\u2044" in unicodedata.normalize("NFKC", char):
            mixed = bool(out) and out[-1].isdigit()
            fraction = unicodedata.normalize("NFKC", char).replace("\u2044", "/")
            out.append(f" {fraction}" if mixed else f"({fraction})")
        elif unicodedata.category(char) == "Nd":
            out.append(str(unicodedata.decimal(char)))
        else:
            out.append(char)
    text = "".join(out).translate(_SYMBOLS)
    return unicodedata.normalize("NFKC", text).translate(_SYMBOLS)


def _markdown(text: str) -> str:
    text = re.sub(r"^\s*(?:[*_`#]+|•\s)\s*|(?<!\\)[*_`]+\s*$", "", text)
    return re.sub(r"(?<![\w)}\]])\*\*|\*\*(?![\w({\\-])|`", " ", text)


def _dollars(text: str) -> str:
    """Paired dollars are delimiters of mathematics, a lone one before a digit is a currency."""
    text = text.replace("$$", "$")
    if text.count("$") % 2 == 0:
        return text.replace("$", " ")
    return re.sub(r"\$", CURRENCY, re.sub(r"\$(?!\s*-?\.?\d)", " ", text))
