"""Which of several processes this one is, by what torchrun says in the environment. No torch."""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Seat:
    """rank of size; local: number on its machine. attempt: times that the ranks were started before."""

    rank: int
    size: int
    local: int
    attempt: int


def seat() -> Seat | None:
    """Where torchrun put this process, or None where nobody did."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return None
    number = {name: int(os.environ.get(name, "0")) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    attempt = int(os.environ.get("GROPIUS_ATTEMPT", os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")))
    return Seat(number["RANK"], number["WORLD_SIZE"], number["LOCAL_RANK"], attempt)
