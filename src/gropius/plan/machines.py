"""How fast named accelerators are: their published peaks and the share of them that a run reaches. No torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

from gropius.errors import UsageError, did_you_mean


@dataclass(frozen=True)
class Machine:
    """One device's peaks, how many there are, and the share of the peak that a run reaches.

    flops: operations a second at the training type (dense). bandwidth: bytes a second of the device's memory. link:
    bytes a second between devices. step_overhead_s: fixed time of a decode step. response_s: of one response outside
    the model (turn-taking, scoring, records); update_s: of one optimiser step besides its tokens and its memory
    traffic; fixed_s: of one step (weights handed to the sampler). source: where the peaks come from.
    """

    name: str
    flops: float
    bandwidth: float
    memory_bytes: float
    count: int = 1
    training_efficiency: float = 0.35
    decode_efficiency: float = 0.35
    bandwidth_efficiency: float = 0.6
    step_overhead_s: float = 0.0
    response_s: float = 0.0
    update_s: float = 0.0
    fixed_s: float = 0.0
    link: float = 50e9
    source: str = "published peak"

    def compute_s(self, flops: float) -> float:
        """Seconds of forward-only matrix work, spread over all devices."""
        return flops / (self.flops * self.training_efficiency * self.count)

    def training_s(self, flops: float) -> float:
        """Seconds of forward and backward work, spread over all devices."""
        return flops / (self.flops * self.training_efficiency * self.count)


_GB, _T = 1e9, 1e12

# Dense bfloat16 (float16 where there is none) and memory bandwidth as the vendors print them, one device.
MACHINES: dict[str, Machine] = {
    m.name: m
    for m in (
        Machine("v100-32gb", 125 * _T, 900 * _GB, 32 * _GB, link=150 * _GB, source="vendor data sheet, float16"),
        Machine("a10g", 125 * _T, 600 * _GB, 24 * _GB, link=25 * _GB, source="vendor data sheet"),
        Machine("l4", 121 * _T, 300 * _GB, 24 * _GB, link=25 * _GB, source="vendor data sheet"),
        Machine("l40s", 362 * _T, 864 * _GB, 48 * _GB, link=25 * _GB, source="vendor data sheet"),
        Machine("rtx4090", 165 * _T, 1008 * _GB, 24 * _GB, link=25 * _GB, source="vendor data sheet"),
        Machine("a100-40gb", 312 * _T, 1555 * _GB, 40 * _GB, link=300 * _GB, source="vendor data sheet"),
        Machine("a100-80gb", 312 * _T, 2039 * _GB, 80 * _GB, link=300 * _GB, source="vendor data sheet"),
        Machine("h100", 989 * _T, 3350 * _GB, 80 * _GB, link=450 * _GB, source="vendor data sheet"),
        Machine("h200", 989 * _T, 4800 * _GB, 141 * _GB, link=450 * _GB, source="vendor data sheet"),
        Machine("b200", 2250 * _T, 8000 * _GB, 180 * _GB, link=900 * _GB, source="vendor data sheet"),
        Machine("mi300x", 1307 * _T, 5300 * _GB, 192 * _GB, link=448 * _GB, source="vendor data sheet"),
    )
}


def machine(name: str, count: int = 1) -> Machine:
    """A named accelerator, `count` of them. Errors: UsageError for an unknown name or a count below 1.

    >>> machine("h200").memory_bytes
    141000000000.0
    """
    if name not in MACHINES:
        raise UsageError(f'machine "{name}" is unknown; {did_you_mean(name, [*MACHINES, "probe"])}')
    if count < 1:
        raise UsageError(f"{count} devices cannot run anything; write 1 or more")
    return replace(MACHINES[name], count=count)
