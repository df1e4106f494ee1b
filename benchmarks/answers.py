"""How often the mathematical verifier is wrong: false accepts and false rejects on answers whose truth is known.

Usage: python benchmarks/answers.py [--gsm8k test] [--every 1] [--json]

Honest and wrong replies are built from the gold answers of MATH-500 (sixteen surface forms each) and of GSM8K (eighteen
each) by tests/rewards/answer_forms.py, which reads the folder GROPIUS_DATA. The corpus of the package reward-doctor is
an outside judge; math-verify, by its defaults, is measured on it as well. Nothing is timed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.rewards import answer_forms as forms

from gropius.rewards.math import verify

Case = tuple[str, str, bool]  # reply, gold, right


def accepts(reply: str, gold: str) -> bool:
    """Ours."""
    return verify(reply, gold).value == 1.0


def math_verify_accepts(reply: str, gold: str) -> bool:
    """The library, by its defaults, in this process: these replies are ours."""
    import math_verify

    return bool(math_verify.verify(math_verify.parse(gold), math_verify.parse(reply)))


def rates(cases: Iterable[Case], judge: Callable[[str, str], bool]) -> dict[str, object]:
    """False accepts among wrong replies, false rejects among right ones."""
    counts = {True: [0, 0], False: [0, 0]}
    for reply, gold, right in cases:
        counts[right][0] += 1
        counts[right][1] += judge(reply, gold) != right
    return {
        "right": counts[True][0],
        "false_rejects": counts[True][1],
        "wrong": counts[False][0],
        "false_accepts": counts[False][1],
    }


def math500(every: int) -> Iterable[Case]:
    """MATH-500."""
    for gold in forms.math500_gold()[::every]:
        yield from ((reply, gold, True) for reply in forms.math_replies(gold))
        yield from ((reply, gold, False) for reply in forms.math_wrong(gold))


def gsm8k(name: str, every: int) -> Iterable[Case]:
    """One file of GSM8K."""
    for gold in forms.gsm8k_gold(name)[::every]:
        short = gold.split("####")[-1].strip()
        yield from ((reply, gold, True) for reply in forms.gsm_replies(short))
        yield from ((reply, gold, False) for reply in forms.gsm_wrong(short))


def outside() -> list[Case]:
    """The corpus of reward-doctor."""
    from reward_doctor import corpus

    return [(case.completion, case.reference, bool(case.expect)) for case in corpus.load()]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gsm8k", default="test", help="train or test")
    parser.add_argument("--every", type=int, default=1, help="every n-th gold answer")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = {"reward-doctor": rates(outside(), accepts)}
    try:
        found["reward-doctor, math-verify"] = rates(outside(), math_verify_accepts)
    except ModuleNotFoundError:
        print("math-verify is not installed", file=sys.stderr)
    if forms.DATA.exists():
        found["MATH-500"] = rates(math500(options.every), accepts)
        found[f"GSM8K {options.gsm8k}"] = rates(gsm8k(options.gsm8k, options.every), accepts)
    else:
        print("set GROPIUS_DATA to the folder of the data sets", file=sys.stderr)
    if options.json:
        print(json.dumps(found, indent=2))
        return
    for name, row in found.items():
        print(f"{name}: " + ", ".join(f"{key} {value}" for key, value in row.items()))


if __name__ == "__main__":
    main()
