"""Seconds until a policy is good: the times table by SmolLM2 to 0.75 held-out, TRL beside Gropius.

    GROPIUS_TRL_PYTHON=/path/to/python-with-trl python benchmarks/time_to_quality.py
        [--seeds 0,1,2] [--steps 20] [--every 2] [--target 0.75] [--threads N] [--sides gropius,trl] [--stop]

Same model, tasks, learning rate, batch of 8 x 8, limit, objective (what `gropius audit` reads out of TRL's options) and
number format (bf16 autocast); sides in turn, seed by seed, in fresh processes. Both policies are measured by one
evaluation on the same 30 unseen tasks with the same random numbers, and the clock stands still meanwhile. The time to
the target is that of the first measurement at or above it. Written: time-to-quality.csv and .svg in --out; points of a
run that is cut off are in the CSV too. --stop ends a run at the target.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from peer import jobs
from peer.measure import head, spread
from peer.report import DISTURBED, disturbed
from step_vs_trl import SETTINGS, source

FIELDS = ("side", "seed", "step", "wall_s", "cpu_s", "held_out", "low", "high")


def main() -> None:
    """Train, measure, write the curves, print the ratios."""
    arguments = parsed()
    sides = [side for side in arguments.sides.split(",") if side != "trl" or jobs.trl_python()]
    if "trl" in arguments.sides and "trl" not in sides:
        print(f"{jobs.VARIABLE} names no Python with TRL: only our side is run", file=sys.stderr)
    head(arguments.threads, DISTURBED)
    out = Path(arguments.out)
    rows: list[dict[str, Any]] = known(out / "time-to-quality.csv") if arguments.more else []
    answers = []
    with tempfile.TemporaryDirectory(prefix="gropius-quality-") as folder:
        model = source(SETTINGS[arguments.setting], Path(folder), arguments.threads)
        for seed in map(int, arguments.seeds.split(",")):
            for side in sides:
                trace = Path(folder, f"{side}-{seed}.jsonl")
                try:
                    answers.append(jobs.run(side, job_of(side, model, seed, str(trace), arguments)))
                except RuntimeError as error:
                    print(error, file=sys.stderr)
                points = [json.loads(line) for line in trace.read_text(encoding="utf-8").splitlines()]
                rows += [{"side": side, "seed": seed, **point} for point in points]
                write(out, rows)
                last = points[-1]
                print(f"{side} seed {seed}: {points[0]['held_out']:.3f} -> {last['held_out']:.3f} after {last['step']} "
                      f"steps, {last['wall_s']:.0f} s wall, {last['cpu_s']:.0f} s processor", flush=True)  # fmt: skip
    print(disturbed(answers))
    report(rows, arguments.target)
    plot(rows, arguments.target, out)


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seeds", "--repeats", default="0,1,2")
    parser.add_argument("--setting", default="a", help="a, or c (the built-in model) for a trial of minutes")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--every", type=int, default=2)
    parser.add_argument("--target", type=float, default=0.75)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--out", default=str(Path(__file__).resolve().parents[1] / "docs" / "img"))
    parser.add_argument("--sides", default="gropius,trl")
    parser.add_argument("--stop", action="store_true")
    parser.add_argument("--more", action="store_true", help="add to the points that are already written")
    return parser.parse_args()


def job_of(side: str, model: str, seed: int, trace: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """What a worker is told."""
    setting = SETTINGS[arguments.setting]
    job = setting.job("learn", model, arguments.threads, bf16=setting.model != "tiny", steps=arguments.steps)
    job["config"] |= {"seed": seed}
    job["settings"] = [*job["settings"], "eval.samples=8"]
    if side == "gropius":
        job["config"].pop("seed")
        job["training"] = [f"seed={seed}"]
    enough = arguments.target if arguments.stop else 2.0
    return job | {"every": arguments.every, "enough": enough, "trace": trace}


def known(path: Path) -> list[dict[str, Any]]:
    """Points written before."""
    if not path.exists():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        rows: list[dict[str, Any]] = list(csv.DictReader(file))
    return [row | {name: float(row[name]) for name in FIELDS[3:]} | {"step": int(row["step"]), "seed": int(row["seed"])}
            for row in rows]  # fmt: skip


def write(out: Path, rows: list[dict[str, Any]]) -> None:
    """All points so far."""
    out.mkdir(parents=True, exist_ok=True)
    with (out / "time-to-quality.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, FIELDS)
        writer.writeheader()
        for row in rows:
            writer.writerow({k: f"{v:.4g}" if isinstance(v, float) else v for k, v in row.items()})


def reached(rows: list[dict[str, Any]], side: str, seed: int, target: float, clock: str) -> float | None:
    """Seconds to the first measurement at or above the target; None when there is none."""
    own = [row for row in rows if row["side"] == side and row["seed"] == seed and row["held_out"] >= target]
    return min((row[clock] for row in own), default=None)


def report(rows: list[dict[str, Any]], target: float) -> None:
    """Seconds to the target of each side, and the ratio seed by seed."""
    seeds = sorted({row["seed"] for row in rows})
    for clock, label in (("wall_s", "wall"), ("cpu_s", "processor")):
        found = {side: [reached(rows, side, seed, target, clock) for seed in seeds] for side in ("gropius", "trl")}
        for side, values in found.items():
            done = [value for value in values if value is not None]
            print(f"{side} to {target:g}, {label} seconds: {spread(done, '.0f')}; {len(done)} of {len(seeds)} seeds")
        pairs = [b / a for a, b in zip(found["gropius"], found["trl"], strict=True) if a and b]
        if pairs:
            print(f"  TRL over Gropius: {spread(pairs)}x, mean {statistics.mean(pairs):.2f}x")


def plot(rows: list[dict[str, Any]], target: float, out: Path) -> None:
    """Held-out quality over seconds of the wall clock, one line a seed."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "gropius"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for side, colour in (("gropius", "tab:blue"), ("trl", "tab:orange")):
        for n, seed in enumerate(sorted({row["seed"] for row in rows if row["side"] == side})):
            own = [row for row in rows if row["side"] == side and row["seed"] == seed]
            x, y = [row["wall_s"] for row in own], [row["held_out"] for row in own]
            axes.plot(x, y, color=colour, marker=".", label=side if n == 0 else None)
    axes.axhline(target, color="grey", linewidth=0.8, linestyle="--")
    axes.set_xlabel("seconds of training, evaluations not counted")
    axes.set_ylabel("held-out mean@8 on 30 unseen tasks")
    axes.legend(loc="lower right")
    figure.tight_layout()
    figure.savefig(out / "time-to-quality.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
