"""What a simulated cluster is made of: engines, trainer, hand-over of weights, faults, a layout, and the job. No torch.

Speeds are plain seconds, so that they can come from a recorded run, from a machine's figures (`speeds`), or by hand.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from gropius.errors import UsageError
from gropius.plan.cost import ModelShape, Workload, cost
from gropius.plan.lengths import Lengths
from gropius.plan.machines import Machine

MEMORY_SHARE = 0.9  # of an engine's memory that weights and cache may take
STATE_BYTES = 16  # of a trained parameter: weight, gradient, two moments


@dataclass(frozen=True)
class Engine:
    """One engine: a copy of the model over `devices` devices.

    A decode step of b rows that hold C positions in the cache takes step_s + max(weights_s + position_s · C, row_s · b)
    seconds and gives each row a token: bound by memory while few rows run, by arithmetic beyond. prefill_s: a prompt
    token. response_s: outside the model, a response (turn-taking, scoring). slots: rows at most.
    """

    slots: int
    row_s: float = 0.0
    step_s: float = 0.0
    weights_s: float = 0.0
    position_s: float = 0.0
    prefill_s: float = 0.0
    response_s: float = 0.0
    devices: int = 1

    def pace(self, rows: int, cached: float) -> float:
        """Seconds of one decode step.

        >>> Engine(64, row_s=0.002, step_s=0.01).pace(5, 1000.0)
        0.02
        """
        return self.step_s + max(self.weights_s + self.position_s * cached, self.row_s * rows)


@dataclass(frozen=True)
class Trainer:
    """token_s: device-seconds of a trained token, scoring passes included. update_s, state_s / n, exchange_s · (n-1)/n:
    of one update on n devices (fixed; the optimiser's traffic; gradients over the link). step_s: of one step besides.
    doubling: share of the speed kept at each doubling of devices. shards: devices that divide one row.
    """

    token_s: float
    update_s: float = 0.0
    state_s: float = 0.0
    exchange_s: float = 0.0
    step_s: float = 0.0
    doubling: float = 1.0
    shards: int = 1

    def seconds(self, tokens: float, longest: float, devices: int) -> float:
        """One update over `tokens`: the mean share of a device, but no less than its longest row takes.

        >>> Trainer(0.001).seconds(1000.0, 100.0, 4), Trainer(0.001).seconds(1000.0, 400.0, 4)
        (0.25, 0.4)
        """
        share = max(tokens / devices, longest / min(self.shards, devices))
        fixed = self.update_s + self.state_s / devices + self.exchange_s * (devices - 1) / devices
        reached = math.pow(self.doubling, math.log2(devices))
        return share * self.token_s / reached + fixed


@dataclass(frozen=True)
class Transfer:
    """Weights from trainer to engines: all take part and stand still meanwhile. colocated_s: the switch between
    sampling and training where both share their devices, both ways together. Cached positions of responses that are
    under way are computed anew when `recompute` is on, and always after a colocated switch.
    """

    bytes: float = 0.0
    bandwidth: float = math.inf
    fixed_s: float = 0.0
    colocated_s: float = 0.0
    recompute: bool = False

    @property
    def seconds(self) -> float:
        """Between separate devices."""
        return self.fixed_s + self.bytes / self.bandwidth


@dataclass(frozen=True)
class Faults:
    """mtbf_s: mean seconds between failures of one device (exponential; inf: none). restart_s: until an engine draws
    again, or the trainer stands at its last checkpoint, written every `checkpoint_every` steps in `checkpoint_s`.
    """

    mtbf_s: float = math.inf
    restart_s: float = 0.0
    checkpoint_every: int = 10
    checkpoint_s: float = 0.0


@dataclass(frozen=True)
class Layout:
    """Who runs where, and how far sampling may run ahead.

    staleness: s; at most (1 + s) batches of groups are begun and not yet trained on, and no group is trained on more
    than ceil(s) versions after the one that began it; may be a fraction (0.25 over-samples by a quarter). 0 is
    synchronous. swap: engines take new weights between two tokens; else they finish what they have begun first. late:
    a group that would become too old is waited for or dropped. chunks: the trainer takes a batch in this many parts,
    each as soon as that many groups are complete. queue: groups begun and not yet taken by the trainer at most; 0: only
    `staleness` bounds them. colocated: engines and trainer take turns on the same devices.
    """

    name: str
    engine_devices: int
    trainer_devices: int
    colocated: bool = False
    staleness: float = 0.0
    swap: bool = True
    late: str = "wait"
    chunks: int = 1
    queue: int = 0

    @property
    def devices(self) -> int:
        """All of them together."""
        return self.engine_devices if self.colocated else self.engine_devices + self.trainer_devices

    @property
    def bound(self) -> int:
        """Versions that a group may be old."""
        return math.ceil(self.staleness)


@dataclass(frozen=True)
class Job:
    """A step: `prompts` groups of `group_size`. live_share: share of the groups that is trained, dead ones are skipped.
    shared_prompt: a prompt is trained once a group; an engine reads it once a group too.
    """

    prompts: int
    group_size: int
    lengths: Lengths
    prompt_tokens: float = 0.0
    steps: int = 20
    live_share: float = 1.0
    shared_prompt: bool = True
    seed: int = 0


@dataclass(frozen=True)
class Cluster:
    """Everything that is simulated but the layout and the job."""

    engine: Engine
    trainer: Trainer
    transfer: Transfer = field(default_factory=Transfer)
    faults: Faults = field(default_factory=Faults)


def require_possible(cluster: Cluster, layout: Layout, job: Job) -> None:
    """Errors: UsageError for a layout that cannot run."""
    if layout.engine_devices < cluster.engine.devices or layout.trainer_devices < 1:
        raise UsageError(
            f"{layout.name}: {layout.engine_devices} devices for engines of {cluster.engine.devices} and "
            f"{layout.trainer_devices} for the trainer; both need at least one"
        )
    if layout.late not in ("wait", "drop"):
        raise UsageError(f'late is "{layout.late}"; write "wait" or "drop"')
    if not 0 <= layout.staleness < 1000 or layout.chunks < 1 or job.prompts < layout.chunks or job.steps < 1:
        raise UsageError(
            f"{layout.name}: staleness {layout.staleness:g}, {layout.chunks} chunks of {job.prompts} prompts and "
            f"{job.steps} steps; staleness is at least 0, and a chunk holds at least one prompt"
        )
    taken = math.ceil(job.prompts / layout.chunks)
    if 0 < layout.queue < taken:
        raise UsageError(
            f"{layout.name}: a queue of {layout.queue} groups never holds the {taken} that the trainer takes at once; "
            "write at least so many, or 0"
        )
    if cluster.engine.slots < 1 or job.group_size < 1:
        raise UsageError("an engine needs at least one slot and a group at least one response")


def speeds(
    shape: ModelShape, load: Workload, machine: Machine, tensor_parallel: int = 1, slots: int = 0, shards: int = 1
) -> Cluster:
    """The cluster that this model makes of these devices; `machine.count` does not matter.

    Decode reads weights and cache at the reached bandwidth, or multiplies at the reached speed; an engine's slots are
    the rows of mean length whose cache fits beside the weights (at most `slots`, when given). Training is that of
    `cost`. shards: devices that divide one row in training (tensor, context or pipeline parallel).
    Errors: UsageError when the weights do not fit an engine.
    """
    one = replace(machine, count=1)
    tp = tensor_parallel
    weights = load.rollout_bytes * shape.matmul_parameters
    position = load.rollout_bytes * shape.kv_elements
    reach = one.bandwidth * one.bandwidth_efficiency * tp
    room = MEMORY_SHARE * one.memory_bytes * tp - load.rollout_bytes * shape.parameters
    rows = math.inf if math.isinf(room) else room // (position * (load.prompt_tokens + load.response_tokens))
    if rows < 1:
        raise UsageError(
            f"{tp} x {machine.name} cannot hold the model and one response; raise tensor_parallel, devices of an engine"
        )
    flops = one.flops * tp
    context = load.prompt_tokens + load.response_tokens / 2
    attention = 4 * shape.layers * shape.heads * shape.head_size * context
    engine = Engine(
        slots=int(min(rows, slots or rows, 1 << 20)),
        row_s=(2 * shape.matmul_parameters + attention) / (flops * one.decode_efficiency),
        step_s=one.step_overhead_s, weights_s=weights / reach, position_s=position / reach,
        prefill_s=2 * shape.block_parameters / (flops * one.training_efficiency), response_s=one.response_s, devices=tp,
    )  # fmt: skip
    report = cost(shape, replace(load, live_share=1.0), one)
    passes = sum(p.time_s for p in report.phases if p.name in ("training", "anchor log-probs", "reference log-probs"))
    trainer = Trainer(
        token_s=passes / load.unique_tokens, update_s=one.update_s * load.epochs * load.updates,
        state_s=28 * shape.parameters * load.epochs * load.updates / (one.bandwidth * one.bandwidth_efficiency),
        exchange_s=2 * 4 * shape.parameters * load.epochs * load.updates / one.link, step_s=one.fixed_s, shards=shards,
    )  # fmt: skip
    transfer = Transfer(load.rollout_bytes * shape.parameters, one.link, colocated_s=weights / reach)
    return Cluster(engine, trainer, transfer)


def least_trainer(shape: ModelShape, machine: Machine) -> int:
    """Devices over which weights, gradients and moments of AdamW must be divided to fit."""
    return max(1, math.ceil(STATE_BYTES * shape.parameters / (MEMORY_SHARE * machine.memory_bytes)))
