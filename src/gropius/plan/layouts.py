"""Which layout of a number of devices is fastest, and what holds it back. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gropius.errors import UsageError
from gropius.plan.cluster import Cluster, Job, Layout, Transfer
from gropius.plan.lengths import Constant
from gropius.plan.simulate import Outcome, simulate

PARTS = 8  # the devices are divided between engines and trainer in eighths
PARTIAL = 0.25  # groups begun beyond a batch where unfinished ones are gone on with
LITTLE = 0.03  # share of a step below which nothing is said to hold it back


@dataclass(frozen=True)
class Tried:
    """A layout and what it does. gains: share of a step that would be saved by constant lengths, twice the devices for
    the trainer or for engines, and a hand-over that takes no time; empty where it was not asked.
    """

    layout: Layout
    outcome: Outcome
    gains: tuple[tuple[str, float], ...] = ()

    @property
    def held_back_by(self) -> str:
        """The part whose change would save most; "balance" when none saves much."""
        name, gain = max(self.gains, key=lambda item: item[1], default=("", 0.0))
        return name if gain >= LITTLE else "balance"

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "layout": vars(self.layout),
            "outcome": self.outcome.as_dict(),
            "gains": dict(self.gains),
            "held_back_by": self.held_back_by if self.gains else None,
        }


@dataclass(frozen=True)
class Comparison:
    """rows: the fastest split of each kind of layout. tried: all splits, played for fewer steps."""

    rows: tuple[Tried, ...]
    tried: tuple[Tried, ...]

    @property
    def best(self) -> Tried:
        """The fastest one."""
        return min(self.rows, key=lambda row: row.outcome.step_s)


def layouts(devices: int, engine: int, trainer: int, staleness: Sequence[float], late: str) -> list[list[Layout]]:
    """Each kind of layout with its splits. engine: devices of one engine; trainer: the fewest that hold the trainer.

    Colocated with none and with partial rollouts; synchronous on separate devices; one step off, whose engines finish
    what they have begun; and asynchronous with each bound. Errors: UsageError when nothing fits.
    """
    kinds = []
    if devices >= max(engine, trainer):
        shared = devices // engine * engine
        kinds.append([Layout("colocated", shared, devices, colocated=True)])
        kinds.append([Layout("colocated, partial rollouts", shared, devices, colocated=True, staleness=PARTIAL)])
    eighths = {devices * part // PARTS // engine * engine for part in range(1, PARTS)}
    splits = sorted(n for n in eighths | {devices // 2} if n >= engine and devices - n >= trainer and n % engine == 0)
    if splits:
        kinds.append([Layout("separate, synchronous", n, devices - n) for n in splits])
        kinds.append([Layout("separate, one step off", n, devices - n, staleness=1.0, swap=False) for n in splits])
        kinds += [
            [Layout(f"asynchronous, staleness {s:g}", n, devices - n, staleness=s, late=late) for n in splits]
            for s in staleness
        ]
    if not kinds:
        raise UsageError(
            f"{devices} devices hold neither an engine of {engine} nor a trainer of {trainer}; take more devices, or "
            "an engine of fewer (tensor_parallel)"
        )
    return kinds


def compare(
    cluster: Cluster, job: Job, kinds: Sequence[Sequence[Layout]], told: Callable[[str], None] | None = None
) -> Comparison:
    """Play every split for half of the job's steps, the fastest of each kind for all of them.

    told: hears the name of each kind before it is played.
    """
    rows, tried = [], []
    for kind in kinds:
        if told is not None:
            told(kind[0].name)
        few = replace(job, steps=max(job.steps // 2, min(job.steps, 2)))
        found = [Tried(layout, simulate(cluster, layout, few)) for layout in kind] if len(kind) > 1 else []
        tried += found
        layout = min(found, key=lambda one: one.outcome.step_s).layout if found else kind[0]
        as_it_is = next((one.outcome for one in found if one.layout == layout), None) or simulate(cluster, layout, few)
        gains = tuple(_gains(cluster, layout, few, as_it_is.step_s))
        rows.append(Tried(layout, simulate(cluster, layout, job), gains))
    return Comparison(tuple(rows), tuple(tried))


def _gains(cluster: Cluster, layout: Layout, job: Job, as_it_is: float) -> Iterable[tuple[str, float]]:
    """What one change at a time saves of a step of so many seconds."""
    even = replace(job, lengths=Constant(max(round(job.lengths.mean), 1)))
    free = replace(cluster, transfer=Transfer(recompute=cluster.transfer.recompute))
    yield "long tail", 1 - simulate(cluster, layout, even).step_s / as_it_is
    for name, field in (("trainer", "trainer_devices"), ("engines", "engine_devices")):
        more = replace(layout, **{field: 2 * getattr(layout, field)})
        yield name, 1 - simulate(cluster, more, job).step_s / as_it_is
    yield "hand-over", 1 - simulate(free, layout, job).step_s / as_it_is
