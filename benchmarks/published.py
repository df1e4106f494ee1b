"""What others have published of steps, with their settings, and what the simulator says of them.

Each case names what was fitted, and on which row; every other row is predicted. A source states phases of a step and
settings, never the lengths of its responses: where a fit needs them, the mean is fitted too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from gropius.plan.cluster import Cluster, Engine, Job, Layout, Trainer, Transfer, speeds
from gropius.plan.cost import ModelShape, Workload
from gropius.plan.lengths import Constant, lognormal
from gropius.plan.machines import Machine
from gropius.plan.simulate import simulate

QWEN_7B = ModelShape(28, 3584, 28, 4, 128, 18944, 152064, tied=False)
H20 = Machine("h20", 148e12, 4000e9, 96e9, link=450e9, source="vendor data sheet")
VERL_ASYNC = "verl, docs/advance/fully_async.md, at commit b178a3c (29 January 2026)"
VERL_OFF = "verl, docs/advance/one_step_off.md, at commit b178a3c (17 July 2025)"
TRL = "TRL, huggingface/blog asyncgrpo-lora-hfjobs.md, at commit 081e91b"
NEMO = "NeMo RL, docs/about/performance-summary.md, at commit 7ea279a (release 0.6)"
SPREAD = 1.0  # of the logarithm of a length, where a source gives none


@dataclass(frozen=True)
class Compared:
    """A row of a table, published and predicted: seconds of a step, unless the row says what. fitted: used to fit."""

    source: str
    row: str
    published: float
    predicted: float
    fitted: bool

    @property
    def error(self) -> float:
        """Relative."""
        return self.predicted / self.published - 1


def solve(reached: Callable[[float], float], wanted: float, low: float, high: float) -> float:
    """x at which a rising function is `wanted`, by bisection of the logarithm."""
    for _ in range(12):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if reached(middle) < wanted else (low, middle)
    return (low * high) ** 0.5


def sampling(cluster: Cluster, devices: int, job: Job) -> float:
    """Seconds of the sampling of a synchronous step on all devices."""
    alone = replace(cluster, trainer=Trainer(0.0), transfer=Transfer())
    return simulate(alone, Layout("sampling", devices, devices, colocated=True), job).step_s


def fitted(sizes: tuple[int, int], cap: int, few: tuple[int, float], many: tuple[int, float]) -> tuple[Cluster, Job]:
    """Sampling of Qwen2.5-Math-7B on H20: 512 prompts, `sizes` = siblings and devices of an engine.

    few, many: devices and published sampling seconds. The fixed time of a decode step is fitted on the one with many
    devices, where the longest responses decide, the mean length on the one with few; peaks and the share of the
    bandwidth are not touched.
    """
    siblings, tp = sizes
    mean, step_s = 0.1 * cap, 0.003

    def at(mean: float, step_s: float) -> tuple[Cluster, Job]:
        load = Workload(512, siblings, 200.0, mean, shared_prompt=False)
        made = speeds(QWEN_7B, load, replace(H20, step_overhead_s=step_s), tp, slots=1024)
        return made, Job(512, siblings, lognormal(mean, SPREAD, cap), 200.0, steps=1, shared_prompt=False)

    for _ in range(4):
        step_s = solve(lambda x: _seconds(at(mean, x), many[0]), many[1], 1e-5, 0.1)  # noqa: B023
        mean = solve(lambda x: _seconds(at(x, step_s), few[0]), few[1], 100.0, 0.6 * cap)  # noqa: B023
    return at(mean, step_s)


def _seconds(made: tuple[Cluster, Job], devices: int) -> float:
    return sampling(made[0], devices, made[1])


def trained_in(made: Cluster, seconds: float) -> Cluster:
    """The cluster whose training of a whole batch takes these seconds, as a row says."""
    return replace(made, trainer=Trainer(0.0, step_s=seconds))


# Seconds of a step of the same setting (64:64, staleness 0.5, four parts) in two tables of the same page; and device
# seconds of the update of 8,192 responses by row: were the responses the same, so would these be.
VERL_TWICE = (150.63, 124.64)
VERL_UPDATES = {
    "colocated, 32": 269.80 * 32, "colocated, 64": 133.41 * 64, "colocated, 128": 113.81 * 128,
    "asynchronous, 16:16": 313.81 * 16, "asynchronous, 32:32": 156.98 * 32, "asynchronous, 64:64": 113.16 * 64,
}  # fmt: skip


def verl_async() -> list[Compared]:
    """28 k tokens, 16 siblings. Sampling fitted on the colocated rows of 32 and 128; the training seconds of a row are
    its own (old_log_prob and update_actor); predicted are colocated 64, and every asynchronous step. It fails: see
    VERL_TWICE and VERL_UPDATES for why.
    """
    made, job = fitted((16, 4), 28 * 1024, (32, 357.41), (128, 177.85))
    job, rows = replace(job, steps=6), []
    for devices, step, train in ((32, 790.10, 377.51), (64, 365.28, 203.67), (128, 356.30, 167.73)):
        layout = Layout("colocated", devices, devices, colocated=True)
        found = simulate(trained_in(made, train), layout, job).step_s
        rows.append(Compared(VERL_ASYNC, f"colocated, {devices}", step, found, devices != 64))
    for half, bound, step, train in (
        (16, 0.5, 294.77, 313.81), (32, 0.5, 189.26, 156.98), (64, 0.5, 150.63, 113.16),
        (64, 0.0, 231.34, 98.77), (64, 0.1, 171.30, 109.12), (64, 0.3, 146.11, 103.22),
    ):  # fmt: skip
        # a part of the batch is trained as soon as it is there: a quarter of the seconds each
        parts = replace(made, trainer=Trainer(0.0, update_s=train / 4))
        layout = Layout("async", half, half, staleness=bound, chunks=4)
        found = simulate(parts, layout, job).step_s
        rows.append(Compared(VERL_ASYNC, f"asynchronous, staleness {bound:g}, {half}:{half}", step, found, False))
    return rows


def verl_one_step_off() -> list[Compared]:
    """12 siblings (its scripts). Sampling fitted on generate_sequences of both rows (16 and 4 devices); what the
    colocated row's gen has beyond it is its switch; training seconds are each row's own. Predicted is the overlap.
    """
    rows = []
    for name, cap, sampled, others, steps in (
        ("FSDP2, 20 k", 20480, (247.0, 458.0), (321.0, 88.0 + 286.0, 108.0 + 337.0), (749.0, 520.0)),
        ("Megatron, 8 k", 8192, (162.0, 501.0), (207.0, 119.0 + 344.0, 120.0 + 347.0), (699.0, 566.0)),
    ):
        made, job = fitted((12, 2), cap, (4, sampled[1]), (16, sampled[0]))
        job = replace(job, steps=6)
        switch = replace(trained_in(made, others[1]), transfer=Transfer(colocated_s=others[0] - sampled[0]))
        found = simulate(switch, Layout("colocated", 16, 16, colocated=True), job).step_s
        rows.append(Compared(VERL_OFF, f"{name}, colocated, 16", steps[0], found, True))
        layout = Layout("off", 4, 12, staleness=1.0, swap=False)
        found = simulate(trained_in(made, others[2]), layout, job).step_s
        rows.append(Compared(VERL_OFF, f"{name}, one step off, 4:12", steps[1], found, False))
    return rows


@dataclass(frozen=True)
class Nemo:
    """A model of NeMo RL's table. synchronous: (GPUs, seconds) of the two on-policy rows that are fitted; off: (engine
    GPUs, trainer GPUs, engine's GPUs, staleness, seconds) of those predicted.
    """

    name: str
    tokens: float
    prompts: int
    siblings: int
    engine: int
    synchronous: tuple[tuple[int, float], tuple[int, float]]
    off: tuple[int, int, int, float, float]


NEMO_ROWS = (
    Nemo("DeepSeek-V3, H100", 701, 32, 16, 32, ((256, 134.0), (512, 111.0)), (256, 256, 32, 1.0, 64.1)),
    Nemo("Qwen3-235B, H100", 5698, 16, 32, 16, ((128, 395.0), (256, 312.0)), (128, 128, 8, 1.0, 231.0)),
    Nemo("DeepSeek-V3, GB200", 711, 32, 16, 32, ((128, 108.0), (256, 98.7)), (128, 128, 16, 1.0, 61.7)),
)


def nemo() -> list[Compared]:
    """Two on-policy rows give what shrinks with the devices (training) and what does not (sampling, hand-over): step =
    fixed + work / devices. One step off with half of the devices each is then predicted.
    """
    rows = []
    for one in NEMO_ROWS:
        (few, slow), (many, fast) = one.synchronous
        work = (slow - fast) / (1 / few - 1 / many)
        fixed = slow - work / few
        tokens = one.prompts * one.siblings * one.tokens
        job = Job(one.prompts, one.siblings, Constant(round(one.tokens)), steps=12)
        engine = Cluster(_fixed(fixed, one), Trainer(work / tokens, shards=many))
        for devices, seconds in one.synchronous:
            layout = Layout("colocated", devices, devices, colocated=True)
            rows.append(Compared(NEMO, f"{one.name}, on policy, {devices}", seconds,
                                 simulate(engine, layout, job).step_s, True))  # fmt: skip
        engines, trainers, _, staleness, seconds = one.off
        layout = Layout("off", engines, trainers, staleness=staleness)
        rows.append(Compared(NEMO, f"{one.name}, one step off, {engines}:{trainers}", seconds,
                             simulate(engine, layout, job).step_s, False))  # fmt: skip
    return rows


def _fixed(seconds: float, one: Nemo) -> Engine:
    """An engine whose rows do not slow each other: a batch takes these seconds on any number of them."""
    return Engine(1 << 20, step_s=seconds / round(one.tokens), devices=one.engine)


@dataclass(frozen=True)
class Hosted:
    """A run of TRL's post. engines: of one H200. flight: responses under way over all of them. held: that may wait for
    the trainer. samples: of an optimiser step. trained: seconds of its forward and backward, of what else a step
    takes, and of the hand-over after every fourth. step_s: wall clock over steps; age: mean versions; 0: not told.
    """

    name: str
    engines: int
    flight: int
    held: int
    samples: int
    trained: tuple[float, float, float]
    step_s: float
    age: float
    tokens_s: float


HOSTED = (
    Hosted("2 engines, 128 under way, slow trainer", 2, 128, 512, 128, (21.9, 1.0, 8.5), 3.45 * 3600 / 500, 1.5, 0.0),
    Hosted("2 engines, 128 under way, fast trainer", 2, 128, 512, 152, (4.6, 0.2, 7.6), 7.6 / 4 / 0.25, 0.0, 25e3),
    Hosted("3 engines, 128 under way", 3, 128, 512, 152, (4.6, 0.2, 5.8), 0.0, 0.0, 26e3),
    Hosted("3 engines, 384 under way", 3, 384, 768, 168, (4.6, 0.2, 6.2), 53 * 60 / 500, 2.0, 0.0),
)
FOURTH, TURN, PAUSE_S = 4, 1090, 0.3  # optimiser steps of a version; tokens of a response; engines stand still


def trl() -> list[Compared]:
    """Qwen2.5-Math-1.5B, 8 siblings. A row of 16,384 tokens, 95 % full, holds 12.7 samples of about 135 prompt tokens:
    responses of 1,090. Fitted: the time of a decode step, on the tokens a second of 128 rows over two engines, which
    more rows do not slow (as the post says). Seconds of the trainer are each run's own. Predicted: what a step takes
    when both sides wait for each other, how old what is trained on is, and what a third engine draws.
    """
    rows = []
    for one in HOSTED:
        groups = FOURTH * one.samples // 8
        engine = Engine(one.flight // one.engines, step_s=128 / 25e3)
        update, besides, moved = one.trained
        made = Cluster(
            engine, Trainer(0.0, update_s=update + besides, step_s=moved - PAUSE_S), Transfer(fixed_s=PAUSE_S)
        )
        job = Job(groups, 8, lognormal(TURN, 0.6, 3000), 135.0, steps=40)
        layout = Layout(one.name, one.engines, 1, staleness=4.0, late="drop", chunks=FOURTH,
                        queue=(one.held + one.flight) // 8)  # fmt: skip
        found = simulate(made, layout, job)
        if one.step_s:
            rows.append(Compared(TRL, one.name, one.step_s, found.step_s / FOURTH, False))
        if one.age:
            age = sum(versions * share for versions, share in found.staleness.items())
            rows.append(Compared(TRL, f"{one.name}: age", one.age, age, False))
        if one.tokens_s:
            rows.append(Compared(TRL, f"{one.name}: tokens/s", one.tokens_s, found.tokens_s, one.engines == 2))
    return rows


TABLES = (verl_async, verl_one_step_off, nemo, trl)


def all_rows() -> list[Compared]:
    """Every table."""
    return [row for table in TABLES for row in table()]


def main() -> None:
    """Print them."""
    for row in all_rows():
        mark = "fitted" if row.fitted else f"{row.error:+.0%}"
        print(f"{row.row:44} {row.published:8.1f} {row.predicted:8.1f}  {mark}")


if __name__ == "__main__":
    main()
