"""What a critic costs in memory: the states of GRPO and of PPO, counted from parameters. No torch.

policy 16 P (weight, gradient, two moments) + reference 4 P + critic 16 C,  float32
C = P − head where the head is not tied, + width + 1;  width + 1 on a shared trunk
"""

from __future__ import annotations

from dataclasses import dataclass

from gropius.plan.cost import CostReport, ModelShape

MOMENT_BYTES = 8
WEIGHT_BYTES = 4


@dataclass(frozen=True)
class States:
    """Bytes that training holds before any activation. moments: of AdamW, its step counters left out."""

    weights: int
    gradients: int
    moments: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.weights + self.gradients + self.moments


def critic_parameters(shape: ModelShape, *, shared: bool = False) -> int:
    """Numbers of a value model: a trunk without the language head (where that is not the embedding), and w·h + b.

    >>> critic_parameters(ModelShape(1, 4, 2, 2, 2, 8, 10), shared=True)
    5
    """
    head = shape.hidden + 1
    if shared:
        return head
    return shape.parameters - (0 if shape.tied else shape.hidden * shape.vocabulary) + head


def states(parameters: int, *, reference: bool = False, critic: int = 0) -> States:
    """Of a policy of so many parameters, a frozen reference, and a critic that trains `critic` numbers.

    >>> states(1000).total
    16000
    """
    trained = parameters + critic
    held = trained + (parameters if reference else 0)
    return States(WEIGHT_BYTES * held, WEIGHT_BYTES * trained, MOMENT_BYTES * trained)


def kept_share(report: CostReport) -> float:
    """Of the weights, gradients and moments that PPO would hold, the share that stays without its critic."""
    own = report.memory_bytes["states"] + report.memory_bytes["reference"]
    return own / (own + report.critic["memory_bytes"])


def ratio_without_critic(parameters: int, critic: int, *, reference: bool = False) -> float:
    """Bytes of states without a critic over those with one: what dropping it leaves.

    >>> round(ratio_without_critic(1000, 1000), 3), round(ratio_without_critic(1000, 1000, reference=True), 3)
    (0.5, 0.556)
    """
    with_one = states(parameters, reference=reference, critic=critic).total
    return states(parameters, reference=reference).total / with_one
