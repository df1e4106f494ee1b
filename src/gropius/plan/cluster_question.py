"""What a simulation is asked, as one flat table of keys that `--set` writes, and how it becomes a cluster. No torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from gropius.errors import UsageError
from gropius.plan.cluster import Cluster, Faults, Job, Transfer, speeds
from gropius.plan.cost import ModelShape, Workload
from gropius.plan.lengths import Lengths, lognormal
from gropius.plan.machines import Machine


@dataclass(frozen=True)
class ClusterQuestion:
    """0 = as SOURCE says, else the figure in brackets.

    devices: [of --machine]. prompts [64], group_size [8]: of a step. response_tokens: mean [256]; spread: of the
    logarithm of a length; max_tokens: its limit [8 means]. tensor_parallel: devices of an engine; shards: devices that
    divide one row in training. slots: rows of an engine at most. staleness: bounds to try. late: "wait" or "drop".
    link_gb_s: weights from trainer to engines [the machine's link]; switch_s: of a colocated layout, besides. tflops,
    bandwidth_gb_s, memory_gb: of a device that has no name; ...efficiency: share of the peak reached. mtbf_hours: of
    one device [no faults]. steps: played.
    """

    devices: int = 0
    prompts: int = 0
    group_size: int = 0
    prompt_tokens: float = 128.0
    response_tokens: float = 0.0
    max_tokens: int = 0
    spread: float = 1.0
    live_share: float = 1.0
    staleness: tuple[float, ...] = (0.5, 1.0, 4.0)
    late: str = "wait"
    tensor_parallel: int = 1
    shards: int = 1
    slots: int = 0
    anchor_pass: bool = False
    reference: bool = False
    recompute: bool = False
    link_gb_s: float = 0.0
    switch_s: float = 0.0
    tflops: float = 0.0
    bandwidth_gb_s: float = 0.0
    memory_gb: float = 0.0
    training_efficiency: float = 0.0
    decode_efficiency: float = 0.0
    bandwidth_efficiency: float = 0.0
    mtbf_hours: float = 0.0
    restart_s: float = 300.0
    checkpoint_every: int = 10
    checkpoint_s: float = 0.0
    steps: int = 16
    seed: int = 0


@dataclass(frozen=True)
class Known:
    """What SOURCE says: groups, siblings, the limit of a response, lengths as recorded; 0 or None where it does not."""

    prompts: int = 0
    group_size: int = 0
    max_tokens: int = 0
    lengths: Lengths | None = None


def job(asked: ClusterQuestion, known: Known) -> Job:
    """The step that is played: what was asked first, then what SOURCE says. Errors: UsageError for what cannot be."""
    if not 0 < asked.live_share <= 1:
        raise UsageError(f"live_share={asked.live_share:g}: write the share of groups that is trained, up to 1")
    lengths = known.lengths
    if lengths is None or asked.response_tokens:
        cap = asked.max_tokens or known.max_tokens
        mean = asked.response_tokens or (min(256.0, cap / 2) if cap else 256.0)
        lengths = lognormal(mean, asked.spread, cap or round(8 * mean))
    return Job(
        asked.prompts or known.prompts or 64, asked.group_size or known.group_size or 8, lengths, asked.prompt_tokens,
        max(asked.steps, 2), asked.live_share, seed=asked.seed,
    )  # fmt: skip


def workload(asked: ClusterQuestion, step: Job) -> Workload:
    """The same step for the arithmetic of `cost`."""
    return Workload(
        step.prompts, step.group_size, step.prompt_tokens, step.lengths.mean, anchor_pass=asked.anchor_pass,
        reference=asked.reference, recompute=asked.recompute,
    )  # fmt: skip


def device(asked: ClusterQuestion, named: Machine | None) -> Machine:
    """One device: the named one with what was asked, or one by figures. Errors: UsageError when figures lack."""
    if named is None:
        if not (asked.tflops and asked.bandwidth_gb_s and asked.memory_gb):
            raise UsageError(
                "a device by figures needs all of --set tflops=…, bandwidth_gb_s=… and memory_gb=…; or name one with "
                "--machine"
            )
        named = Machine("as given", 1.0, 1.0, 1.0, source="figures given")
    changes: dict[str, Any] = {
        "flops": asked.tflops * 1e12, "bandwidth": asked.bandwidth_gb_s * 1e9, "memory_bytes": asked.memory_gb * 1e9,
        "link": asked.link_gb_s * 1e9, "training_efficiency": asked.training_efficiency,
        "decode_efficiency": asked.decode_efficiency, "bandwidth_efficiency": asked.bandwidth_efficiency,
    }  # fmt: skip
    return replace(named, count=1, **{name: value for name, value in changes.items() if value})


def cluster(asked: ClusterQuestion, shape: ModelShape, load: Workload, machine: Machine) -> Cluster:
    """Speeds of this model on these devices, with the faults that were asked."""
    made = speeds(shape, load, machine, max(asked.tensor_parallel, 1), asked.slots, max(asked.shards, 1))
    faults = Faults(
        asked.mtbf_hours * 3600 or math.inf, asked.restart_s, max(asked.checkpoint_every, 1), asked.checkpoint_s
    )
    switch = made.transfer.colocated_s + asked.switch_s
    return replace(made, faults=faults, transfer=replace(made.transfer, colocated_s=switch))


def said(machine: Machine, made: Cluster, transfer: Transfer) -> tuple[str, ...]:
    """The speeds in words."""
    e = made.engine
    full = e.pace(e.slots, 0.0)
    return (
        f"{machine.name}: {machine.flops / 1e12:g} TFLOP/s, {machine.bandwidth / 1e9:g} GB/s, {machine.source}; share "
        f"reached: training {machine.training_efficiency:.3g}, decode {machine.decode_efficiency:.3g}, bandwidth "
        f"{machine.bandwidth_efficiency:.3g}",
        f"engine of {e.devices}: {e.slots} rows at most, {1 / e.pace(1, 0.0):,.0f} tokens/s for one row, "
        f"{e.slots / full:,.0f} for all before the cache counts; trainer {1 / made.trainer.token_s:,.0f} tokens/s a "
        f"device; weights {transfer.bytes / 1e9:,.3g} GB in {transfer.seconds:,.3g} s",
    )
