"""What staleness costs in learning, and what it buys in time, on the built-in model.

    python benchmarks/staleness.py learning [--staleness 0 1 2 4 8] [--seeds 3] [--steps 40] [--prompts 32]
                                             [--stream between_tokens|between_responses] [--stale wait|drop]
    python benchmarks/staleness.py time [--steps 12] [--prompts 64] [--tokens 32]

learning: `arithmetic` from one warm start, with `train.max_staleness` at each value, without and with the correction
(truncated importance weights, at most 2): the held-out mean of the last weights, its mean over seeds, the 95 % interval
of that (Student's t), and the difference to the synchronous run of the same seed. Every arm draws the same number of
samples. Finished runs under --out are reused. Written there: staleness.csv, the held-out mean after each eighth of the
samples, and staleness.svg, its mean over seeds with the interval. With --stream groups are drawn across the steps by an
engine on the trainer's weights, and no token is older than the staleness, most are younger.

time: seconds of a step, median of all but the first two, and what trainer and engine idled: one process; a trainer and
an engine that take turns; a trainer and an engine at the same time (`max_staleness = 1`). One thread a process.
"""

from __future__ import annotations

import argparse
import csv
import math
import re
import statistics
from pathlib import Path
from typing import NamedTuple

from gropius import build
from gropius.compare.verdict import quantile
from gropius.recipe import resolve
from gropius.records.reader import RunReader
from gropius.train.progress import Silent

CORRECTION = ('objective.ratio.correction="truncate"', "objective.ratio.correction_high=2.0")
ARMS = {
    "one process": (),
    "1 + 1, in turn": ("cluster.engines=1",),
    "1 + 1, at once": ("cluster.engines=1", "train.max_staleness=1"),
}


SIBLINGS = 8


class Point(NamedTuple):
    """Of a curve of learning."""

    staleness: int
    corrected: bool
    seed: int
    samples: int
    held_out: float


def main() -> None:
    """One of the two measurements."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("learning", "time"))
    parser.add_argument("--out", type=Path, default=Path("staleness-runs"))
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 2, 4, 8])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--stream", choices=("off", "between_tokens", "between_responses"), default="off")
    parser.add_argument("--stale", choices=("wait", "drop"), default="wait")
    parser.add_argument("--tokens", type=int, default=32, help="of a response in `time`")
    given = parser.parse_args()
    (learning if given.what == "learning" else timing)(given)


def warm(out: Path) -> Path:
    """The folder of a model that got the recipe's warm start, made once."""
    folder = out / "warm" / "model"
    if not folder.is_dir():
        plan = resolve("arithmetic", [f'out="{out}"', 'name="warm"', "train.threads=1", "eval.before=false"])
        build.sft(plan, Silent())
    return folder


def finished(settings: list[str], folder: Path) -> RunReader:
    """A run, trained unless it is there."""
    if not folder.is_dir():
        named = [f'out="{folder.parent}"', f'name="{folder.name}"', "train.threads=1", *settings]
        build.train(resolve("arithmetic", named), Silent())
    return RunReader(folder)


def learning(given: argparse.Namespace) -> None:
    """Held-out after the same number of samples."""
    model = warm(given.out)
    common = [
        f'model.source="{model}"', "model.tiny.layers=4", "sft.steps=0", f"rollout.prompts={given.prompts}",
        f"rollout.group_size={SIBLINGS}", f"train.steps={given.steps}", f"eval.every={max(1, given.steps // 8)}",
        "eval.samples=8", "record.rollouts=false", "checkpoint.final=false", "doctor.every=0",
    ]  # fmt: skip
    base: list[float] = []
    points: list[Point] = []
    print(f"{given.steps} steps of {given.prompts} × 8, {given.seeds} seeds\nstaleness  correction  held-out")
    for corrected in (False, True):
        for staleness in given.staleness:
            ends = []
            for seed in range(given.seeds):
                settings = [*common, f"train.max_staleness={staleness}", f"seed={seed}"]
                settings += CORRECTION if corrected else ()
                name = f"s{staleness}-{'is' if corrected else 'no'}-{seed}"
                if given.stream != "off" and staleness:
                    settings += [f"train.stream={given.stream}", f"train.stale={given.stale}"]
                    name += f"-{given.stream}-{given.stale}"
                reader = finished(settings, given.out / name)
                curve = {row["step"]: row["held_out/mean"] for row in reader.metrics() if "held_out/mean" in row}
                drawn = given.prompts * SIBLINGS
                points += [Point(staleness, corrected, seed, step * drawn, mean) for step, mean in curve.items()]
                ends.append(curve[max(curve)])
            base = base or ends
            gaps = [end - first for end, first in zip(ends, base, strict=True)]
            word = "truncate" if corrected else "none"
            print(f"{staleness:9d}  {word:10s}  {interval(ends)}   against synchronous {interval(gaps)}", flush=True)
    write(given.out, points)
    plot(given.out, points)


def write(out: Path, points: list[Point]) -> None:
    """All points of all curves."""
    with (out / "staleness.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(Point._fields)
        writer.writerows(points)


def plot(out: Path, points: list[Point]) -> None:
    """Held-out mean over samples, a line for each staleness, with the 95 % interval over seeds."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "gropius"
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, figsize=(10, 4), sharey=True)
    for axes, corrected in zip(panels, (False, True), strict=True):
        for staleness in sorted({point.staleness for point in points}):
            own = [point for point in points if (point.staleness, point.corrected) == (staleness, corrected)]
            at = sorted({point.samples for point in own})
            found = [spread([point.held_out for point in own if point.samples == x]) for x in at]
            (line,) = axes.plot(at, [mean for mean, _ in found], marker=".", label=f"staleness {staleness}")
            low, high = [mean - half for mean, half in found], [mean + half for mean, half in found]
            axes.fill_between(at, low, high, color=line.get_color(), alpha=0.1, linewidth=0)
        axes.set_title("truncated importance weights, at most 2" if corrected else "no correction")
        axes.set_xlabel("samples")
    panels[0].set_ylabel("held-out mean@8 on 200 unseen sums")
    panels[1].legend(loc="lower right")
    figure.tight_layout()
    figure.savefig(out / "staleness.svg", metadata={"Date": None})


def spread(values: list[float]) -> tuple[float, float]:
    """Mean, and half of its 95 % interval over seeds."""
    half = quantile(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    return statistics.fmean(values), half


def interval(values: list[float]) -> str:
    """Mean and 95 % interval over seeds."""
    mean, half = spread(values)
    return f"{mean:+.3f} [{mean - half:+.3f}, {mean + half:+.3f}]"


def timing(given: argparse.Namespace) -> None:
    """Seconds of a step by layout."""
    common = [
        "sft.steps=0", f"rollout.prompts={given.prompts}", f"rollout.max_tokens={given.tokens}", "train.updates=1",
        f"train.steps={given.steps}", "eval.every=0", "eval.before=false", "eval.after=false", "doctor.every=0",
        "record.rollouts=false", "checkpoint.final=false", 'objective.selection.dead="keep"',
        "train.learning_rate=1e-9", 'objective.kl.estimator="k3"', "objective.kl.coefficient=0.01",  # all rows train
    ]  # fmt: skip
    for name, arm in ARMS.items():
        folder = given.out / f"time-{re.sub('[^a-z0-9]+', '-', name)}"
        rows = [row for row in finished([*common, *arm], folder).metrics() if "loss" in row][2:-1]
        medians = {
            key: statistics.median([row[key] for row in rows if row.get(key) is not None] or [math.nan])
            for key in ("step_time", "sampling_time_s", "training_time_s", "idle/trainer_s", "idle/engine_s")
        }
        print(f"{name:16s} " + "  ".join(f"{key} {value:.3f}" for key, value in medians.items()), flush=True)


if __name__ == "__main__":
    main()
