"""What `gropius check RECIPE` and the cost model say, beside what the run then takes: time of a step and peak memory.

    python benchmarks/estimate.py [--models tiny,smollm2] [--repeats 3] [--steps 6] [--threads N] [--clock processor]

Each round: the estimate in a fresh process, then the recipe's first steps in another (no evaluation, no checkpoint).
On a busy machine use `--threads 1 --clock processor`. The bound is 25 %; exit code 1 where a median is outside it.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from pathlib import Path
from typing import Any

from peer import jobs
from peer.measure import head, spread
from peer.report import DISTURBED, disturbed

ROOT = Path(__file__).resolve().parents[1]
RECIPES = {"tiny": "arithmetic.toml", "smollm2": "smollm2-times-table.toml"}
BOUND = 0.25


def main() -> None:
    """Measure, print, and say whether the bound holds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--models", default=",".join(RECIPES))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6, help="steps of a run; the first warms up")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--clock", choices=("wall", "processor"), default="wall")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of the recipe")
    arguments = parser.parse_args()
    head(arguments.threads, DISTURBED)
    held = [compare(name, arguments) for name in arguments.models.split(",")]
    sys.exit(0 if all(held) else 1)


def compare(name: str, arguments: argparse.Namespace) -> bool:
    """Estimates and runs in turn; whether time and memory are within the bound."""
    clock = ("wall", "processor").index(arguments.clock)
    job = {"recipe": str(ROOT / "recipes" / RECIPES[name]), "threads": arguments.threads, "clock": arguments.clock,
           "settings": [f"train.steps={arguments.steps}", *arguments.set], "all_tasks": True}  # fmt: skip
    said, took, samples = [], [], []
    for _ in range(arguments.repeats):
        said.append(jobs.run("gropius", job | {"kind": "estimate"}))
        took.append(jobs.run("gropius", job | {"kind": "steps"}))
        samples += [said[-1], took[-1]]
    print(f"\n== {name}, {arguments.clock} seconds; {disturbed(samples)}")
    print("\n".join(said[-1]["notes"]))
    for phase in said[-1]["phases"]:
        print(f"  {phase['name']:20} {spread([_phase(s, phase['name']) for s in said], '.3f')} s")
    steps = [[step["step"][clock] for step in run["steps"][1:]] for run in took]
    parts = ", ".join(
        f"{part} {spread([statistics.median(s[part][clock] for s in run['steps'][1:]) for run in took], '.3f')}"
        for part in ("sampling", "training")
    )
    measured = [statistics.median(values) for values in steps]
    times = [s["step_s"] / m for s, m in zip(said, measured, strict=True)]
    memory = [s["peak_bytes"] / t["peak_bytes"] for s, t in zip(said, took, strict=True)]
    print(
        f"step: estimate {spread([s['step_s'] for s in said], '.3f')} s, measured {spread(measured, '.3f')} s ({parts})"
    )
    print(f"  estimate over measured {spread(times)}")
    for key, value in said[-1]["memory_bytes"].items():
        print(f"  {key:20} {value / 2**30:.3f} GiB")
    print(f"peak memory: estimate {spread([s['peak_bytes'] / 2**30 for s in said], '.3f')} GiB, "
          f"measured {spread([t['peak_bytes'] / 2**30 for t in took], '.3f')} GiB")  # fmt: skip
    print(
        f"  estimate over measured {spread(memory)}; the estimate took {spread([s['took'][0] for s in said], '.0f')} s"
    )
    return all(abs(statistics.median(ratios) - 1) <= BOUND for ratios in (times, memory))


def _phase(said: dict[str, Any], name: str) -> float:
    return next((float(p["time_s"]) for p in said["phases"] if p["name"] == name), 0.0)


if __name__ == "__main__":
    main()
