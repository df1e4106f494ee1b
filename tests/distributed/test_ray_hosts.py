"""A Ray of two hosts, network namespaces joined by a cable: one is lost, and the run ends as if it had not been."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_machines import ADDRESSES, NAMES, machines, pull, undo
from test_ray import OWN, RECIPE, Ran, responses

pytest.importorskip("ray", reason="Ray is not installed: pip install 'gropius[ray]'")
pytestmark = pytest.mark.slow
PORT, LOST_AFTER_S, STEPS = 6379, 8, 12
CPUS = (8, 3)  # the first host has room for all parts, once the second is gone
PARTS = re.compile(r"gropius\.hosting|gropius\.rewards\.host|gropius train")
TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
__all__ = ["machines"]


def inside(number: int, *words: str) -> list[str]:
    """Words that run on a host, under its own name."""
    named = 'hostname "$0" && exec "$@"'
    return ["ip", "netns", "exec", NAMES[number], "unshare", "--uts", "sh", "-c", named, NAMES[number], *words]


def ray(number: int, *words: str) -> subprocess.CompletedProcess[str]:
    """`ray start` on a host; what it starts lives on."""
    own = [f"--node-ip-address={ADDRESSES[number]}", f"--num-cpus={CPUS[number]}", "--disable-usage-stats",
           "--object-store-memory=80000000"]  # fmt: skip
    program = str(Path(sys.executable).parent / "ray")
    line = inside(number, program, "start", *words, *own)
    return subprocess.run(line, capture_output=True, text=True, check=False, env=os.environ | TOKEN)


@pytest.fixture
def hosts(request: pytest.FixtureRequest) -> Iterator[None]:
    request.getfixturevalue("machines")
    scratch = tempfile.mkdtemp(prefix="gr-", dir="/tmp")  # names of sockets may have 107 bytes
    head = ray(0, "--head", f"--port={PORT}", "--include-dashboard=false", f"--temp-dir={scratch}")
    assert head.returncode == 0, head.stdout + head.stderr
    second = ray(1, f"--address={ADDRESSES[0]}:{PORT}")
    assert second.returncode == 0, second.stdout + second.stderr
    yield
    undo()
    shutil.rmtree(scratch, ignore_errors=True)


def parts(number: int) -> list[str]:
    """Command lines of the run's parts on a host."""
    found = subprocess.run(["ip", "netns", "pids", NAMES[number]], capture_output=True, text=True, check=True)
    lines = []
    for pid in found.stdout.split():
        try:
            lines.append(Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " "))
        except OSError:
            continue
    return [line for line in lines if PARTS.search(line) and "--cluster" not in line]


@pytest.mark.parametrize("how", ["killed", "cable"])
@pytest.mark.usefixtures("hosts")
def test_a_host_that_is_lost_is_named_and_no_group_is_missing_or_drawn_twice(tmp_path: Path, how: str) -> None:
    (tmp_path / "own.py").write_text(OWN)
    recipe = tmp_path / "hosts.toml"
    recipe.write_text(RECIPE.format(name="hosts", out=tmp_path / "runs", steps=STEPS))
    spread = ["cluster.engines=2", "cluster.reward_hosts=2", f"cluster.lost_after_s={LOST_AFTER_S}.0"]
    words = [sys.executable, "-m", "gropius", "train", str(recipe), "--trust-code", "--cluster"]
    words += [f"{ADDRESSES[0]}:{PORT}", *(word for one in spread for word in ("--set", one))]
    run = subprocess.Popen(
        inside(0, *words), stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True,
        env=os.environ | TOKEN | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert run.stderr is not None
    said, there, gone_at, slowest, last = "", list[str](), 0.0, 0.0, time.monotonic()
    for line in run.stderr:
        said += line
        if re.match(r"step +\d+/", line):
            slowest = max(slowest, time.monotonic() - last)
            last = time.monotonic()
        if re.match(r"step +3/", line) and not gone_at:
            there, gone_at = parts(1), time.monotonic()
            pull(how)
    assert run.wait() == 0, said
    assert there and NAMES[1] in said and re.search(rf"\(process \d+ on {NAMES[1]}\) was lost", said), said
    assert "Traceback" not in said, said
    assert not parts(1)  # cut off, they ended by themselves
    straight = Ran(tmp_path, "plain", "--set", "cluster.engines=2", steps=STEPS)
    assert straight.code == 0, straight.said
    found = responses(tmp_path / "runs" / "hosts")
    assert found == responses(straight.folder) and len(found) == STEPS
    assert all(len({row[:2] for row in step}) == len(step) == 16 for step in found)
