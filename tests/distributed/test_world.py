"""What ranks say to each other arrives whole, who is missing is named, and each finds its place."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gropius.distributed import launch, world
from gropius.distributed.seat import Seat, seat
from gropius.errors import RecipeError


@dataclass
class Failure:
    """As torchrun's agent tells of one."""

    exitcode: int
    timestamp: int
    pid: int = 7
    extra: dict[str, Any] = field(default_factory=dict)


@pytest.mark.parametrize(
    ("failures", "says"),
    [
        ({0: Failure(launch.LOST, 1), 1: Failure(-signal.SIGKILL, 2)}, "rank 1 (process 7) was ended by SIGKILL"),
        ({0: Failure(launch.LOST, 2), 2: Failure(launch.LOST, 1)}, "rank 2 (process 7) lost sight of another"),
        (
            {1: Failure(3, 5), 2: Failure(-signal.SIGTERM, 1), 0: Failure(4, 6)},
            "rank 1 (process 7) ended with exit code 3",
        ),
        ({3: Failure(1, 5), 2: Failure(1, 5)}, "rank 2 (process 7) ended with exit code 1"),
    ],
)
def test_who_was_lost_first_is_named_and_not_who_only_noticed(failures: dict[int, Failure], says: str) -> None:
    assert launch._who(failures) == says


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (RuntimeError("[/pytorch/third_party/gloo/pair.cc] Connection closed by peer"), True),
        (RuntimeError("Ranks 1 failed to pass monitoredBarrier in 10 ms"), True),
        (RuntimeError("NCCL communicator was aborted"), True),
        (type("DistStoreError", (RuntimeError,), {})("wait timeout"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (RuntimeError("out of memory"), False),
    ],
    ids=str,
)
def test_a_lost_rank_is_told_from_a_fault_of_the_program(error: RuntimeError, lost: bool) -> None:
    assert launch.lost_sight(error) is lost


def test_the_secret_is_the_runs_own_else_torchruns_and_new_ones_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (launch.SECRET, "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    assert launch.secret() == "none"
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "of torchrun")
    assert launch.secret() == "of torchrun"
    monkeypatch.setenv(launch.SECRET, "own")
    assert launch.secret() == "own"
    assert launch.new_secret() != launch.new_secret() and len(launch.new_secret()) == 32


def test_a_seat_is_what_torchrun_says_and_nothing_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", launch.ATTEMPT, "TORCHELASTIC_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    assert seat() is None
    monkeypatch.setenv("RANK", "5")
    assert seat() is None
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert seat() == Seat(5, 8, 0, 0)
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    assert seat() == Seat(5, 8, 1, 2)
    monkeypatch.setenv(launch.ATTEMPT, "3")
    assert seat() == Seat(5, 8, 1, 3)


def test_a_rank_takes_the_gpu_of_its_number_and_more_ranks_than_gpus_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    third = Seat(6, 8, 2, 0)
    assert world.device_of("cpu", third) == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert world.device_of("auto", third) == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert world.device_of("auto", third) == world.device_of("cuda", third) == torch.device("cuda", 2)
    assert world.device_of("cpu", third) == torch.device("cpu")
    with pytest.raises(RecipeError, match=r'"cuda:1" names one device.*write "cuda"'):
        world.device_of("cuda:1", third)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(RecipeError, match="rank 6 is number 2 on its machine, which has 2 GPUs"):
        world.device_of("auto", third)


def test_the_interface_of_an_address_is_found_and_of_a_strange_one_none() -> None:
    assert world.interface_of("127.0.0.1") == "lo"
    assert world.interface_of("203.0.113.77") == ""


def _engines(**cluster: Any) -> Any:
    given = {"engine_devices": (), "trainer_ranks": 1, "engines": 2} | cluster
    table = SimpleNamespace(**{k: v for k, v in given.items() if k not in ("device", "threads", "max_staleness")})
    train = SimpleNamespace(threads=given.get("threads", 0), max_staleness=given.get("max_staleness", 0))
    return SimpleNamespace(cluster=table, train=train, model=SimpleNamespace(device=given.get("device", "auto")))


@pytest.mark.parametrize(
    ("cluster", "gpus", "devices"),
    [
        ({}, 0, ["", "", ""]),
        ({"trainer_ranks": 2}, 4, ["cuda:2", "cuda:3", "cuda:2"]),
        ({"trainer_ranks": 2}, 3, ["cuda:2", "cuda:2", "cuda:2"]),
        ({"trainer_ranks": 2}, 2, ["cuda:0", "cuda:1", "cuda:0"]),
        ({"device": "cpu"}, 4, ["", "", ""]),
        ({"device": "cuda"}, 2, ["cuda:1", "cuda:1", "cuda:1"]),
        ({"engine_devices": ("cuda:3", "cpu")}, 4, ["cuda:3", "cpu", "cuda:3"]),
    ],
)
def test_engines_take_the_gpus_that_the_ranks_leave(cluster: dict[str, Any], gpus: int, devices: list[str]) -> None:
    from gropius.train import engines

    assert [engines.device_of(_engines(**cluster), n, gpus) for n in range(3)] == devices


def test_engines_share_the_cores_with_a_trainer_that_trains_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    from gropius.train import engines

    monkeypatch.setattr(engines.os, "cpu_count", lambda: 12)
    assert engines.threads_of(_engines(engines=3)) == 4
    assert engines.threads_of(_engines(engines=3, max_staleness=1)) == 3
    assert engines.threads_of(_engines(engines=3, threads=5)) == 5
    assert engines.threads_of(_engines(engines=40)) == 1
