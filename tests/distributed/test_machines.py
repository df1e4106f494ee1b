"""Two machines as network namespaces joined by a cable: one dies or is cut off, and the other says so in time."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_ray import OWN, RECIPE

from gropius.records.reader import RunReader

pytestmark = pytest.mark.slow
NAMES, ADDRESSES = ("gropius-a", "gropius-b"), ("10.211.7.1", "10.211.7.2")
DEADLINE_S = 10


def ip(*words: str) -> None:
    """One `ip` command."""
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture
def machines() -> Iterator[None]:
    try:
        for name in NAMES:
            ip("netns", "add", name)
        ip("link", "add", "gr-a", "netns", NAMES[0], "type", "veth", "peer", "name", "gr-b", "netns", NAMES[1])
        for name, device, address in zip(NAMES, ("gr-a", "gr-b"), ADDRESSES, strict=True):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", device)
            ip("-n", name, "link", "set", device, "up")
            ip("-n", name, "link", "set", "lo", "up")
    except (OSError, subprocess.CalledProcessError) as error:
        undo()
        pytest.skip(f"network namespaces are not permitted here: {error}")
    yield
    undo()


def undo() -> None:
    """No namespace is left, nor what runs in it."""
    for name in NAMES:
        found = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=False)
        for pid in found.stdout.split():
            os.kill(int(pid), signal.SIGKILL)
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def machine(number: int, recipe: Path) -> subprocess.Popen[str]:
    """One machine's torchrun, with one rank."""
    words = [
        "ip", "netns", "exec", NAMES[number], sys.executable, "-m", "torch.distributed.run", "--nnodes=2",
        f"--node-rank={number}", "--nproc-per-node=1", "--max-restarts=0", f"--local-addr={ADDRESSES[number]}",
        f"--master-addr={ADDRESSES[0]}", "--master-port=29411",
        "-m", "gropius", "train", str(recipe), "--trust-code", "--set", "cluster.engines=0",
        "--set", f'cluster.bind="{ADDRESSES[number]}"', "--set", f"cluster.deadline_s={DEADLINE_S}.0",
    ]  # fmt: skip
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GROPIUS_SECRET": "s"}
    return subprocess.Popen(words, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env=environment)


def pull(how: str) -> None:
    """The second machine is gone."""
    if how == "cable":
        ip("-n", NAMES[1], "link", "set", "gr-b", "down")
        return
    found = subprocess.run(["ip", "netns", "pids", NAMES[1]], capture_output=True, text=True, check=True)
    for pid in found.stdout.split():
        os.kill(int(pid), signal.SIGKILL)


@pytest.mark.parametrize("how", ["killed", "cable"])
@pytest.mark.usefixtures("machines")
def test_a_machine_that_is_gone_ends_the_run_in_time_with_its_name_and_it_is_resumed(tmp_path: Path, how: str) -> None:
    (tmp_path / "own.py").write_text(OWN)
    recipe = tmp_path / "small.toml"
    recipe.write_text(RECIPE.format(name="small", out=tmp_path / "runs", steps=500))
    first, second = machine(0, recipe), machine(1, recipe)
    assert first.stderr is not None
    said, gone_at = "", 0.0
    for line in first.stderr:
        said += line
        if re.match(r"step +3/", line) and not gone_at:
            gone_at = time.monotonic()
            pull(how)
    assert first.wait() != 0 and gone_at, said
    assert time.monotonic() - gone_at < 3 * DEADLINE_S + 30
    assert re.search(r"lost sight of another rank", said), said
    undo()
    second.wait()
    folder = tmp_path / "runs" / "small"
    done = RunReader(folder).checkpoints()[-1]
    assert done >= 2
    words = [
        "resume",
        str(folder),
        "--trust-code",
        "--set",
        f"train.steps={done + 1}",
        "--set",
        "cluster.trainer_ranks=1",
    ]
    again = subprocess.run(
        [sys.executable, "-m", "gropius", *words, "--set", "cluster.engines=0"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert again.returncode == 0, again.stderr
