"""The simulator beside the real thing on this machine: seconds a step of one to four processes.

    python benchmarks/simulator.py [--prompts 48] [--tokens 48] [--steps 8] [--only NAME …]

Measured are pieces, on batches of 1/2, 3/4 and 5/4 of the size (a row of a larger batch costs more): an engine that
draws, in the trainer's process and in one of its own; an update; a hand-over of weights, with two prompts also from two
ranks; what a step costs besides, by one and two ranks; and what an update of two ranks takes beyond half of the tokens.
From these alone the simulator predicts each layout, and each layout is run: the median of the seconds between two steps
as a person sees them, the first two left out. The built-in model, one thread a process. Processes share the cores of
this machine: n that are busy at once get min(1, cores / n) of one each, and that share is what the simulator is told.
Run it on an idle machine; what others used of it meanwhile, in cores, is printed. Exit code 1 where a prediction is off
by more than 15 %.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

from peer.measure import Neighbours

from gropius import build
from gropius.plan.cluster import Cluster, Engine, Job, Layout, Trainer, Transfer
from gropius.plan.lengths import Recorded
from gropius.plan.simulate import simulate
from gropius.recipe import resolve
from gropius.records.reader import RunReader
from gropius.train import loop
from gropius.train.progress import Silent

BOUND = 0.15
SIBLINGS = 8


@dataclass(frozen=True)
class Case:
    """A layout of processes. ahead: batches drawn ahead, so that engines and trainer work at once."""

    name: str
    ranks: int
    engines: int
    ahead: int = 0

    @property
    def settings(self) -> list[str]:
        """Of the recipe."""
        return [f"cluster.trainer_ranks={self.ranks}", f"cluster.engines={self.engines}",
                f"train.max_staleness={self.ahead}"]  # fmt: skip


CASES = (
    Case("1 process", 1, 0),
    Case("2 ranks", 2, 0),
    Case("1 rank, 1 engine, in turn", 1, 1),
    Case("1 rank, 1 engine, at once", 1, 1, 1),
    Case("1 rank, 2 engines, in turn", 1, 2),
    Case("1 rank, 2 engines, at once", 1, 2, 1),
    Case("2 ranks, 2 engines, in turn", 2, 2),
    Case("2 ranks, 2 engines, at once", 2, 2, 1),
)


@dataclass(frozen=True)
class Line:
    """fixed + slope · x, through two points."""

    fixed: float
    slope: float

    def __call__(self, x: float) -> float:
        return self.fixed + self.slope * x


@dataclass(frozen=True)
class Curve:
    """Straight from each point to the next; points of rising x."""

    points: tuple[tuple[float, float], ...]

    def at(self, place: float) -> Line:
        """A line with this curve's value at a place: the piece there, or the nearest; its fixed part is not below 0."""
        pieces = list(pairwise(self.points))
        (x, y), (u, v) = next((piece for piece in pieces if place <= piece[1][0]), pieces[-1])
        slope = (v - y) / (u - x)
        fixed = y - slope * x
        return Line(fixed, slope) if fixed >= 0.0 or place <= 0.0 else Line(0.0, (fixed + slope * place) / place)

    def __call__(self, x: float) -> float:
        return self.at(x)(x)


@dataclass(frozen=True)
class Piece:
    """Medians of a small run of one rank. turns: processor seconds of the trainer's process while an engine draws."""

    responses: int
    tokens: float
    sampling: float
    turns: float
    update: float
    hand_over: float
    besides: float
    lengths: tuple[int, ...]


class Stamps(Silent):
    """When each step was over."""

    def __init__(self) -> None:
        super().__init__()
        self.at: list[float] = []

    def step(self, step: int, steps: int, metrics: Any) -> None:
        """See `Progress.step`."""
        super().step(step, steps, metrics)
        self.at.append(time.perf_counter())


def settings(given: argparse.Namespace, out: Path, name: str, prompts: int) -> list[str]:
    """The recipe `arithmetic` without what is no step, and without learning, so that lengths stay as they are; a KL, so
    that all rows are trained though the cold model solves nothing.
    """
    return [
        f'out="{out}"', f'name="{name}"', "train.threads=1", "sft.steps=0", "train.updates=1",
        "train.learning_rate=1e-9", f"rollout.prompts={prompts}", f"rollout.group_size={SIBLINGS}",
        f"rollout.max_tokens={given.tokens}", 'objective.selection.dead="keep"', "eval.every=0", "eval.before=false",
        "eval.after=false", "doctor.every=0", "record.rollouts=false", "checkpoint.final=false",
        'objective.kl.estimator="k3"', "objective.kl.coefficient=0.01", "rollout.token_budget=200000",
        f"train.steps={given.steps}",
    ]  # fmt: skip


def piece(given: argparse.Namespace, out: Path, prompts: int, engines: int) -> Piece:
    """A run in this process, taken apart."""
    drawn: list[Any] = []
    turns: list[float] = []
    handed: list[float] = []
    sample, hand_over = loop.sample, loop.hand_over_weights

    async def sampled(*arguments: Any) -> Any:
        began = time.process_time()
        drawn.append(await sample(*arguments))
        turns.append(time.process_time() - began)
        return drawn[-1]

    def handed_over(run: Any) -> None:
        began = time.perf_counter()
        hand_over(run)
        handed.append(time.perf_counter() - began)

    words = settings(given, out, f"piece-{prompts}-{engines}", prompts)
    words += [f"cluster.engines={engines}", f"train.steps={given.piece_steps}"]
    progress = Stamps()
    with mock.patch.object(loop, "sample", sampled), mock.patch.object(loop, "hand_over_weights", handed_over):
        build.train(resolve("arithmetic", words), progress)
    rows = progress.steps[2:]
    walls = [b - a for a, b in pairwise(progress.at[1:])]
    besides = [wall - row["step_time"] for wall, row in zip(walls, rows, strict=True)]
    moved = handed[3:]  # the first is before the first step
    update = [row["training_time_s"] - one for row, one in zip(rows, moved, strict=True)]
    episodes = [e for batch in drawn[2:] for group in batch.groups for e in group.episodes]
    lengths = tuple(sum(len(turn.token_ids) for turn in e.turns) for e in episodes)
    asked = [len(group.episodes[0].prompt_ids) for batch in drawn[2:] for group in batch.groups]
    middle = statistics.median
    return Piece(
        prompts * SIBLINGS, (sum(lengths) + sum(asked)) / len(rows), middle(row["sampling_time_s"] for row in rows),
        middle(turns[2:]), middle(update), middle(moved), middle(besides), lengths,
    )  # fmt: skip


def ran(given: argparse.Namespace, out: Path, case: Case, prompts: int) -> tuple[float, dict[str, float]]:
    """Median seconds between two steps of `gropius train`, and what the run itself says of its phases."""
    name = re.sub(r"\W+", "-", case.name) + f"-{prompts}"
    words = [*settings(given, out, name, prompts), *case.settings]
    command = [sys.executable, "-m", "gropius", "train", "arithmetic", *(w for s in words for w in ("--set", s))]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    assert process.stderr is not None
    at, said = [], ""
    for line in process.stderr:
        said += line
        if re.match(r"step +\d+/", line):
            at.append(time.perf_counter())
    if process.wait():
        raise SystemExit(f"{case.name}: {said}")
    last = -1 if case.ahead else None  # nothing is drawn ahead of the last step
    rows = RunReader(out / name).metrics()[2:last]
    phases = {
        key: statistics.median(row.get(key) or 0.0 for row in rows)
        for key in ("sampling_time_s", "training_time_s", "weights/time_s")
    }
    return statistics.median([b - a for a, b in pairwise(at[1:])][:last]), phases


def ends(work: list[float], cores: int) -> list[float]:
    """When each of these is over that begin together, when n busy ones get min(1, cores / n) of a core each.

    >>> ends([1.0, 1.0, 1.0], 2), ends([1.0, 3.0], 2)
    ([1.5, 1.5, 1.5], [1.0, 3.0])
    """
    over, now, done = [0.0] * len(work), 0.0, 0.0
    order = sorted(range(len(work)), key=work.__getitem__)
    for n, which in enumerate(order):
        busy = len(work) - n
        now += (work[which] - done) / min(1.0, cores / busy)
        done, over[which] = work[which], now
    return over


@dataclass(frozen=True)
class Known:
    """What the pieces say, as curves over responses. own, apart: seconds of an engine that draws, without what the
    trainer's process does for each response (turn). update: over tokens. exchange: of an update of two ranks besides.
    hand_over: to no, one and two engines; joint: to two engines from two ranks, what is more. besides: by one and two.
    """

    own: Curve
    apart: Curve
    turn: float
    update: Curve
    exchange: Curve
    hand_over: tuple[Curve, ...]
    joint: float
    besides: tuple[Curve, Curve]
    tokens: Curve
    lengths: tuple[int, ...]

    @property
    def mean(self) -> float:
        """Tokens of a response."""
        return statistics.fmean(self.lengths)


def known(given: argparse.Namespace, out: Path) -> Known:
    """Measure the pieces."""
    few, sizes = 2, [given.prompts * quarters // 4 for quarters in (2, 3, 5)]
    own, apart = ([piece(given, out, size, engines) for size in sizes] for engines in (0, 1))
    two = piece(given, out, few, 2)
    ranks = [(size * SIBLINGS, *ran(given, out, Case("ranks", 2, 0), size)) for size in sizes]
    small = [ran(given, out, Case(f"joint {engines}", 2, engines), few)[1]["training_time_s"] for engines in (0, 2)]

    def over(pieces: list[Piece], what: str) -> Curve:
        return Curve(tuple((p.responses, getattr(p, what)) for p in pieces))

    turn = apart[-1].turns / apart[-1].responses
    inner = [Curve(tuple((p.responses, p.sampling - turn * p.responses) for p in pieces)) for pieces in (own, apart)]
    update, tokens = Curve(tuple((p.tokens, p.update) for p in own)), over(own, "tokens")
    hand_over = [over(own, "hand_over"), over(apart, "hand_over"), Curve(((0, two.hand_over), (1, two.hand_over)))]
    exchange = Curve(tuple((n, ph["training_time_s"] - update(tokens(n) / 2) - hand_over[0](n)) for n, _, ph in ranks))
    besides = Curve(tuple((n, s - ph["sampling_time_s"] - ph["training_time_s"]) for n, s, ph in ranks))
    joint = small[1] - small[0] - two.hand_over + hand_over[0](few * SIBLINGS)
    return Known(
        *inner,
        turn,
        update,
        exchange,
        tuple(hand_over),
        joint,
        (over(own, "besides"), besides),
        tokens,
        own[-1].lengths,
    )


def predicted(case: Case, found: Known, given: argparse.Namespace, cores: int) -> float:
    """Seconds of a step, by the simulator."""
    count = given.prompts * SIBLINGS
    devices = case.engines or case.ranks
    line, turn = (found.apart if case.engines else found.own).at(count / devices), found.turn
    longest, update = max(found.lengths), found.update.at(found.tokens(count) / case.ranks)
    draws = line(count / devices) + turn * count
    fixed = update.fixed + (found.exchange(count) if case.ranks > 1 else 0.0)
    fixed += turn * count if case.ahead else 0.0  # one interpreter trains and takes up what engines drew
    trains = fixed + update.slope * found.tokens(count) / case.ranks
    shares = (1.0, 1.0)
    if case.ahead:
        over = ends([draws] * devices + [trains] * case.ranks, cores)
        shares = draws / over[0], trains / over[-1]
    elif max(devices, case.ranks) > cores:
        shares = cores / devices, cores / case.ranks
    engine = Engine(
        1 << 20, row_s=line.slope / found.mean / shares[0], step_s=line.fixed / longest / shares[0],
        response_s=turn * devices / shares[0],
    )  # fmt: skip
    trainer = Trainer(update.slope / shares[1], update_s=fixed / shares[1], shards=case.ranks)
    moved = found.hand_over[case.engines](count) + found.besides[case.ranks - 1](count)
    moved += found.joint if case.ranks > 1 and case.engines > 1 else 0.0
    made = Cluster(engine, trainer, Transfer(fixed_s=moved, colocated_s=moved))
    prompt = (found.tokens(count) - count * found.mean) / given.prompts
    job = Job(given.prompts, SIBLINGS, Recorded(found.lengths), prompt, steps=12)
    layout = Layout(case.name, devices, case.ranks, not case.engines, float(case.ahead), swap=False)
    return simulate(made, layout, job).step_s


def told(found: Known, count: int) -> str:
    """The pieces at the size that is predicted."""
    seconds = {
        "drawn": found.own(count) + found.turn * count, "apart": found.apart(count) + found.turn * count,
        "turns of these": found.turn * count, "update": found.update(found.tokens(count)),
        "exchange": found.exchange(count),
        "besides": found.besides[0](count), "by two ranks": found.besides[1](count), "joint": found.joint,
    }  # fmt: skip
    seconds |= {f"hand-over to {n}": line(count) for n, line in enumerate(found.hand_over)}
    return f"{count} responses of {found.mean:.1f} tokens: " + ", ".join(f"{k} {v:.3f} s" for k, v in seconds.items())


def main() -> None:
    """Measure the pieces, then every layout; print both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=48)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--piece-steps", type=int, default=8)
    parser.add_argument("--only", nargs="+", default=[case.name for case in CASES])
    given = parser.parse_args()
    build.torch.set_num_threads(1)
    cores, began, missed = os.cpu_count() or 1, time.monotonic(), []
    with tempfile.TemporaryDirectory(prefix="gropius-simulator-") as scratch:
        with Neighbours() as neighbours:
            found = known(given, Path(scratch))
        print(f"others used {neighbours.cores:.2f} cores while the pieces were measured")
        print(told(found, given.prompts * SIBLINGS))
        print(f"{'layout':30} {'predicted':>10} {'measured':>10} {'difference':>10}", flush=True)
        for case in CASES:
            if case.name not in given.only:
                continue
            says = predicted(case, found, given, cores)
            with Neighbours() as neighbours:
                took, phases = ran(given, Path(scratch), case, given.prompts)
            off = says / took - 1
            missed += [case.name] if abs(off) > BOUND else []
            said = f"others {neighbours.cores:.2f} cores  "
            said += "  ".join(f"{name} {seconds:.3f}" for name, seconds in phases.items())
            print(f"{case.name:30} {says:10.3f} {took:10.3f} {off:+10.1%}  {said}", flush=True)
    print(
        f"{time.monotonic() - began:.0f} s; " + (f"beyond {BOUND:.0%}: {', '.join(missed)}" if missed else "all within")
    )
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
