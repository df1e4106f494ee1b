"""How many honest programs a second the sandbox grades, at every tier this machine offers.

Usage: python benchmarks/sandbox.py [--programs 120] [--runs 5] [--slots 0] [--json]

One program is one fresh isolated process: start, compile, three questions, death. Prints the facts of the machine,
every run, the median and the spread. The machine should be idle.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from pathlib import Path

from gropius.sandbox.grade import FunctionTests, grade_all
from gropius.sandbox.tiers import Sandbox, probe

PROGRAM = """
from collections import Counter

def most_common(words):
    counts = Counter(words)
    best = max(counts.values())
    return sorted(w for w, c in counts.items() if c == best)
"""
TESTS = FunctionTests(
    "most_common",
    (
        "assert most_common(['a', 'b', 'a']) == ['a']",
        "assert most_common(['b', 'a']) == ['a', 'b']",
        "assert most_common(['x']) == ['x']",
    ),
)


def machine() -> dict[str, object]:
    """What the numbers were measured on."""
    model = platform.processor()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [
            line.partition(":")[2].strip() for line in info.read_text().splitlines() if line.startswith("model name")
        ]
        model = names[0] if names else model
    return {
        "processor": model,
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load_before": os.getloadavg()[0],
    }


def measure(tier: str, programs: int, runs: int, slots: int) -> dict[str, object]:
    """Programs a second of each run, and the processor seconds of one program."""
    sandbox = Sandbox(tier, slots=slots)  # type: ignore[arg-type]
    grade_all(sandbox, [(PROGRAM, TESTS)] * sandbox.slots)  # once, unmeasured
    rates = []
    before = os.times()
    for _ in range(runs):
        began = time.perf_counter()
        results = grade_all(sandbox, [(PROGRAM, TESTS)] * programs)
        rates.append(programs / (time.perf_counter() - began))
        wrong = [r for r in results if r.status != "passed"]
        if wrong:
            raise SystemExit(f"{len(wrong)} honest programs did not pass, the first: {wrong[0]}")
    after = os.times()
    spent = sum(after[:4]) - sum(before[:4])
    return {
        "tier": tier,
        "slots": sandbox.slots,
        "programs_per_s": [round(rate, 1) for rate in rates],
        "median": round(statistics.median(rates), 1),
        "spread": round(max(rates) - min(rates), 1),
        "cpu_ms_seen_per_program": round(1000 * spent / (runs * programs), 1),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=120)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--slots", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    facts = machine()
    rows = []
    for tier in ("bubblewrap", "landlock"):
        problem = probe(tier)  # type: ignore[arg-type]
        rows.append(
            {"tier": tier, "problem": problem}
            if problem
            else measure(tier, options.programs, options.runs, options.slots)
        )
    if options.json:
        print(json.dumps({"machine": facts, "tiers": rows}, allow_nan=False, indent=2))
        return
    print("machine: " + ", ".join(f"{name} {value}" for name, value in facts.items()))
    for row in rows:
        print(", ".join(f"{name} {value}" for name, value in row.items()))


if __name__ == "__main__":
    main()
