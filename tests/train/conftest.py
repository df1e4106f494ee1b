"""Tiny models: threads only cost, and one thread gives the same bits whatever the machine. `batches` is importable."""

import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.rollout.hosts import InThread

from gropius import build
from gropius.train import engines

sys.path.insert(0, str(Path(__file__).parent))
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def interruptible() -> Iterator[None]:
    """Ctrl-C as a terminal has it: a shell starts its background jobs with SIGINT ignored, and a run keeps that."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> list[InThread]:
    """Engines of runs are threads of this process, each with its own copy of the model. The hosts as they start."""
    hosts: list[InThread] = []

    def open_engines(resolved: Any, loaded: Any, note: Any) -> Any:
        def start(number: int, told: Any) -> InThread:
            hosts.append(InThread(number, loaded, told.secret))
            return hosts[-1]

        return engines.open_engines(resolved, loaded, note, start)

    monkeypatch.setattr(build, "open_engines", open_engines)
    return hosts
