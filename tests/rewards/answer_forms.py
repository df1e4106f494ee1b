"""Right and wrong replies built from gold answers: what the error rates of the verifier are measured on."""

from __future__ import annotations

import json
import os
import re
from fractions import Fraction
from pathlib import Path

DATA = Path(os.environ.get("GROPIUS_DATA", Path(__file__).resolve().parents[2].parent / "shared" / "data"))

MATH_FORMS = 16
GSM_FORMS = 18


def math500_gold() -> list[str]:
    """The 500 gold answers of MATH-500, as LaTeX."""
    with (DATA / "math500" / "test.jsonl").open(encoding="utf-8") as rows:
        return [json.loads(row)["answer"] for row in rows]


def gsm8k_gold(name: str) -> list[str]:
    """The gold solutions of one GSM8K file, `####` line included."""
    with (DATA / "gsm8k" / f"{name}.jsonl").open(encoding="utf-8") as rows:
        return [json.loads(row)["answer"] for row in rows]


def math_replies(gold: str) -> list[str]:
    """Sixteen honest replies that give a LaTeX gold answer, differing in mark, spacing and spelling."""
    wrong = different(gold)
    return [
        rf"So the value is \boxed{{{gold}}}.",
        rf"The answer is ${gold}$.",
        f"We work it out step by step.\n#### {gold}",
        f"<think>Is it {wrong}? Let me see, no.</think>\n\n\\boxed{{{gold}}}",
        f"Answer: {gold}",
        rf"Therefore, the final answer is: $\boxed{{{gold}}}$. I hope it is correct.",
        rf"**Answer:** \({gold}\)",
        f"<think>hm</think><answer>{gold}</answer>",
        rf"\[ \boxed{{{gold.replace(chr(92) + 'frac', chr(92) + 'dfrac')}}} \]",
        rf"\boxed{{ {spaced(gold)} }}",
        rf"\boxed{{{respelled(gold)}}}",
        f"The answer is {unicode_form(gold)}",
        f"${gold}$",
        rf"Hence the final answer is \[{unsized(gold)}\]",
        rf"Then 12 of the 30 cases are left, and so we get \boxed{{{plainer(gold)}}}"
        + "\n\nLet me know if you have questions!",
        r"### Final Answer" + "\n" + rf"$$\boxed{{{reordered(gold)}}}$$",
    ]


def gsm_replies(gold: str) -> list[str]:
    """Eighteen honest replies for an integer gold answer."""
    n = int(gold.replace(",", ""))
    grouped = f"{n:,}"
    wide = str(n).translate(str.maketrans("0123456789-", "０１２３４５６７８９−"))
    return [
        f"First we add, then we double it.\n#### {n}",
        f"#### {grouped}",
        f"The answer is {n}.",
        f"The answer is ${grouped}.",
        rf"\boxed{{{grouped}}}",
        rf"\boxed{{{n!s}.00}}",
        rf"She earns $5 an hour for 3 hours. So the total is $\boxed{{\${n}}}$.",
        f"<think>\nMaybe {n + 1}? No.\n</think>\nFinal answer: **{grouped}**",
        f"So, in total, she makes ${grouped} every day.",
        f"The answer is {grouped} dollars.",
        f"Therefore, she has {n} apples left.",
        f"2 + 3 = 5 bags in all, so the total number of apples is {grouped}.",
        rf"The answer is \({n}\) because each of the 3 boxes holds the same.",
        rf"x = {n}",
        f"{wide}",
        rf"\boxed{{{grouped.replace(',', '{,}')} \text{{ meters}}}}",
        f"After 3 days there are 4 left.\n\n**Answer: {grouped}**",
        f"Altogether the cost is 5 + 2 = 7 for the first, and the final answer is {n} miles per hour.",
    ]


def math_wrong(gold: str) -> list[str]:
    """Replies that must not score for a LaTeX gold answer: wrong values, hedges, negations, answers in thinking."""
    out = [rf"\boxed{{{w}}}" for w in wrong_values(gold)]
    wrong = different(gold)
    out += [
        rf"The answer is ${wrong}$.",
        f"<think>The answer is \\boxed{{{gold}}}.</think> The answer is \\boxed{{{wrong}}}.",
        f"<think>The answer is \\boxed{{{gold}}}.</think>",
        f"<think>The answer is \\boxed{{{gold}}}.",
        rf"\boxed{{{gold}}} \boxed{{{wrong}}}",
        rf"\boxed{{{wrong}}} or \boxed{{{gold}}}",
        rf"The answer is definitely not ${gold}$.",
        rf"We can rule out ${gold}$. The answer is ${wrong}$.",
        rf"The answer could be ${gold}$ or ${wrong}$.",
        rf"One might guess ${gold}$, but the correct answer is ${wrong}$.",
        r"\boxed{}",
        rf"<answer></answer> ${gold}$",
    ]
    return out


def gsm_wrong(gold: str) -> list[str]:
    """Replies that must not score for an integer gold answer."""
    n = int(gold.replace(",", ""))
    s = str(abs(n))
    values = {n + 1, n - 1, n * 10, -n if n else 7, n * 100, n + 1000, int(s + "2"), int("1" + s)}
    if len(s) > 1:
        values |= {int(s[::-1]), int(s[1:]), int(s[:-1])}
    values -= {n}
    out = []
    for v in sorted(values):
        out += [rf"\boxed{{{v}}}", f"The answer is {v:,}.", f"#### {v}", f"So she has {v} apples left."]
    m = n + 3
    return [
        *out,
        f"The answer could be {n - 1}, {n} or {m}.",
        "Possible answers: " + ", ".join(str(i) for i in range(n - 2, n + 3)),
        rf"\boxed{{{m}}}\boxed{{{n}}}",
        f"It is not {n}.",
        f"The answer is not {n}.",
        rf"The answer is not \boxed{{{n}}}.",
        f"Either {n} or {m}.",
        f"<think>It is {n}.</think> The answer is {m}.",
        f"<think>It is {n}.</think>",
        f"<think>#### {n}",
        f"We can rule out {n}, so it is {m}.",
        f"{n} is wrong.",
        f"Is it {n}?",
        f"The answer is {n} + 1.",
        f"The answer is {n}/3.",
        f"The answer is {n}.5",
        f"The answer is {m - n} + {n - m + n}.",
        f"#### {n}\n#### {m}",
        f"The answer is {n}. The answer is {m}.",
        f"The answer is between {n - 1} and {n + 1}, maybe {n}.",
        f"The answer is {n}x.",
        f"The answer is {n} thousand." if n else "The answer is 1 thousand.",
        f"The answer is {m} = {n}.",
        f"1{n}" if n >= 0 else "1",
    ]


def different(gold: str) -> str:
    """A wrong answer of the same shape."""
    return wrong_values(gold)[0]


def wrong_values(gold: str) -> list[str]:
    """Answers of another value: each number of the gold answer raised by one or given a digit more, signs turned."""
    out = []
    for match in list(re.finditer(r"(?<![\d_])\d+(?![\d}]*_)", gold))[:4]:
        n = int(match.group())
        for other in (n + 1, n * 10 + 1):
            out.append(gold[: match.start()] + str(other) + gold[match.end() :])
    if (
        not re.search(r"\\pm|=|\\infty", gold)
        and re.search(r"\d|\\pi", gold)
        and gold not in ("0",)
        and not re.match(r"\\text|\$|\\\$", gold)
    ) and (
        not gold.startswith(("(", "\\left", "\\begin", "\\{"))
        and "," not in gold
        and not re.search(r"[+-]", gold[1:])
        and "_" not in gold
    ):
        out.append(gold[1:] if gold.startswith("-") else f"-{gold}")
    interval = re.fullmatch(r"\((.*)\]", gold)
    if interval:
        out += [f"({interval.group(1)})", f"[{interval.group(1)}]"]
    if not out:
        out = ["north", "17"]
    return out


def spaced(gold: str) -> str:
    """Spaces around operators, commas and braces."""
    return (
        re.sub(r"(?<=[\d}])([+*/])(?=[\d\\])", r" \1 ", gold).replace(",", ", ")
        if not re.search(r"\d,(\\!)?\s*\d{3}", gold)
        else gold
    )


def respelled(gold: str) -> str:
    """\\frac{a}{b} of integers as a/b or as an ending decimal; other fractions as \\tfrac."""

    def one(match: re.Match[str]) -> str:
        whole = match.group(0) == gold.lstrip("-")
        x = Fraction(int(match.group(1)), int(match.group(2)))
        rest = x.denominator
        for p in (2, 5):
            while rest % p == 0:
                rest //= p
        return str(float(x)) if whole and rest == 1 and x.denominator < 10**4 else f"{match.group(1)}/{match.group(2)}"

    if re.match(r"\d+\s*\\frac", gold):
        return gold
    return re.sub(r"\\[dt]?frac\{(\d+)\}\{(\d+)\}(?![\\\w(])", one, gold).replace("\\frac", "\\tfrac")


def unicode_form(gold: str) -> str:
    """Roots, π, minus, infinity and degrees as characters."""
    text = re.sub(r"\\sqrt\{(\d+)\}", r"√\1", gold) if not re.search(r"\\sqrt\{\d+\}\s*[\dπ]", gold) else gold
    for tex, char in (
        (r"\pi", "π"),
        (r"\infty", "∞"),
        (r"^\circ", "°"),
        (r"\cup", "∪"),
        (r"\in ", "∈ "),
        (r"\pm", "±"),
    ):
        text = text.replace(tex, char)
    return text.replace("-", "−")


def unsized(gold: str) -> str:
    """Without \\left and \\right, with thin spaces."""
    return gold.replace(r"\left", "").replace(r"\right", "").replace(", ", r",\,")


def plainer(gold: str) -> str:
    """Text commands taken off, units and labels as bare words; points, commas in numbers as {,}."""
    text = re.sub(r"\\(?:text|mbox)\{([^{}]*)\}", r"\1", gold)
    return re.sub(r",\\!\s*", "{,}", text)


def reordered(gold: str) -> str:
    """The same list or set in another order, the same sum with its two terms exchanged; otherwise unchanged."""
    if re.fullmatch(r"-?\d+(,\s*-?\d+)+", gold) and not re.search(r"\d,\d{3}", gold):
        return ", ".join(reversed(re.split(r",\s*", gold)))
    two = re.fullmatch(r"(\d+)\s*\+\s*(\d*\\?[a-z]+(?:\{\d+\})?|\d+\\sqrt\{\d+\})", gold)
    if two:
        return f"{two.group(2)}+{two.group(1)}"
    return gold
