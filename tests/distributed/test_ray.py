"""Runs on a local Ray, as a person starts them: the bits of a run without it, and every kind of part killed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from posted import alive

from gropius.records.reader import RunReader
from gropius.train.checkpoint import load

pytest.importorskip("ray", reason="Ray is not installed: pip install 'gropius[ray]'")
RECIPE = """
name = "{name}"
seed = 3
out = "{out}"
[model]
source = "tiny"
[model.tiny]
hidden = 32
layers = 2
heads = 2
kv_heads = 2
mlp = 64
[data]
source = "arithmetic"
options = {{digits = 1, rows = [60, 8]}}
[[reward]]
name = "own:letters"
[rollout]
prompts = 4
group_size = 4
max_tokens = 4
[train]
steps = {steps}
learning_rate = 1e-3
threads = 1
[eval]
before = false
after = false
[checkpoint]
every = 1
[reward_pool]
workers = 1
[cluster]
trainer_ranks = 2
engines = 1
restarts = 2
"""
OWN = """
def letters(completions, **_):
    return [float(any("a" <= one <= "z" for one in text)) for text in completions]
"""


class Ran:
    """A run as a process. act: told the launcher's number and the steps that are done, after each."""

    own = OWN

    def __init__(
        self, folder: Path, name: str, *words: str, steps: int = 3, act: Callable[[Ran, int], None] | None = None
    ):
        (folder / "own.py").write_text(self.own)
        recipe = folder / f"{name}.toml"
        recipe.write_text(RECIPE.format(name=name, out=folder / "runs", steps=steps))
        self.folder = folder / "runs" / name
        self.follow(["train", str(recipe), "--trust-code", *words], act)

    def follow(self, words: list[str], act: Callable[[Ran, int], None] | None) -> None:
        """Start it and read what it says, to its end."""
        self.said, self.pids = "", set[int]()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "gropius", *words],
            stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.said += line
            if (found := re.match(r"step +(\d+)/", line)) and act is not None:
                # Ray's own two agents look for their raylet now and then, and leave a minute after it
                self.pids |= {pid for pid, line in self.below().items() if not re.match(r"ray::\w+Agent", line)}
                act(self, int(found[1]))
        self.code = self.process.wait()

    def below(self) -> dict[int, str]:
        """Every process under the launcher, Ray's included, with its command line."""
        found, pending = dict[int, str](), [self.process.pid]
        while pending:
            parent = pending.pop()
            for path in Path(f"/proc/{parent}/task").glob("*/children"):
                try:
                    children = [int(word) for word in path.read_text().split()]
                    found |= {
                        child: Path(f"/proc/{child}/cmdline").read_text().replace("\0", " ") for child in children
                    }
                    pending += children
                except OSError:
                    continue
        return found

    def kill(self, words: str, number: str = "") -> int:
        """SIGKILL the first process with these words in its command line (and this rank)."""
        for pid, line in sorted(self.below().items()):
            said = Path(f"/proc/{pid}/environ").read_text().split("\0")
            if words in line and "-c import ctypes" not in line and (not number or f"RANK={number}" in said):
                os.kill(pid, signal.SIGKILL)
                return pid
        raise AssertionError(f"no process of {words}")


def responses(folder: Path) -> list[list[tuple]]:
    """Step by step, what was drawn and what it was worth."""
    reader = RunReader(folder)
    return [
        [(row.group_id, row.member, tuple(row.response_ids), row.reward) for row in reader.rollouts(step)]
        for step in reader.steps()
    ]


def weights(folder: Path, step: int) -> str:
    """The digest of a checkpoint's weights."""
    return str(load(folder / "checkpoints" / f"step-{step:06d}").facts["weights"])


def nothing_left(pids: set[int], patience_s: float = 20.0) -> bool:
    """True once none of these runs."""
    until = time.monotonic() + patience_s
    while any(map(alive, pids)) and time.monotonic() < until:
        time.sleep(0.1)
    return not any(map(alive, pids))


def test_a_run_on_ray_has_the_bits_of_one_without(tmp_path: Path) -> None:
    there = Ran(tmp_path, "ray", "--cluster", "local", "--set", "cluster.reward_hosts=1", steps=2)
    assert there.code == 0, there.said
    here = Ran(tmp_path, "plain", steps=2)
    assert here.code == 0, here.said
    assert responses(there.folder) == responses(here.folder) and len(responses(here.folder)) == 2
    assert weights(there.folder, 2) == weights(here.folder, 2)


@pytest.mark.slow
def test_every_part_is_killed_once_and_the_run_ends_as_if_nothing_had_happened(tmp_path: Path) -> None:
    killed = {}

    def act(run: Ran, step: int) -> None:
        match step:
            case 1:
                killed.setdefault("engine", run.kill("gropius.hosting"))
            case 2:
                killed.setdefault("reward host", run.kill("gropius.rewards.host"))
            case 3 if "rank" not in killed:
                killed["rank"] = run.kill("gropius train", "1")

    run = Ran(tmp_path, "ray", "--cluster", "local", "--set", "cluster.reward_hosts=1", steps=5, act=act)
    assert run.code == 0, run.said
    assert f"engine 0 (process {killed['engine']} on " in run.said
    assert f"reward host 0 (process {killed['reward host']} on " in run.said
    assert f"rank 1 (process {killed['rank']} on " in run.said and run.said.count("was ended by SIGKILL") == 3
    assert "Traceback" not in run.said and nothing_left(run.pids)
    straight = Ran(tmp_path, "plain", steps=5)
    assert responses(run.folder) == responses(straight.folder) and len(responses(straight.folder)) == 5


STREAM = ["train.stream=between_tokens", "train.max_staleness=2", "rollout.max_tokens=16"]


def sets(*settings: str) -> list[str]:
    """Words of a command line."""
    return [word for setting in settings for word in ("--set", setting)]


@pytest.mark.slow
def test_a_stream_on_ray_draws_what_a_run_without_draws_while_the_weights_stay(tmp_path: Path) -> None:
    still = "train.learning_rate=1e-30"
    there = Ran(tmp_path, "ray", "--cluster", "local", *sets("cluster.engines=2", *STREAM, still), steps=4)
    assert there.code == 0, there.said
    here = Ran(tmp_path, "plain", *sets("rollout.max_tokens=16", still), steps=4)
    assert responses(there.folder) == responses(here.folder) and len(responses(here.folder)) == 4


@pytest.mark.slow
def test_in_a_stream_every_part_is_killed_once_and_every_group_is_trained_once_in_its_step(tmp_path: Path) -> None:
    killed = {}

    def act(run: Ran, step: int) -> None:
        match step:
            case 2:
                killed.setdefault("engine", run.kill("gropius.hosting"))
            case 4:
                killed.setdefault("reward host", run.kill("gropius.rewards.host"))
            case 6 if "rank" not in killed:
                killed["rank"] = run.kill("gropius train", "1")

    words = sets("cluster.reward_hosts=1", "cluster.engines=2", *STREAM)
    run = Ran(tmp_path, "ray", "--cluster", "local", *words, steps=12, act=act)
    assert run.code == 0, run.said
    assert f"reward host 0 (process {killed['reward host']} on " in run.said
    assert f"rank 1 (process {killed['rank']} on " in run.said and run.said.count("was ended by SIGKILL") == 3
    assert "Traceback" not in run.said and nothing_left(run.pids)
    found = [[row[:2] for row in step] for step in responses(run.folder)]
    assert found == [[(f"{n:06d}-{i:04d}", m) for i in range(4) for m in range(4)] for n in range(1, 13)]
    assert all(row["staleness/max"] <= 2 for row in RunReader(run.folder).metrics() if "step_time" in row)


@pytest.mark.slow
def test_a_controller_that_is_killed_leaves_no_process_and_the_run_goes_on_by_resume(tmp_path: Path) -> None:
    def act(run: Ran, step: int) -> None:
        if step == 3:
            run.process.kill()

    run = Ran(tmp_path, "ray", "--cluster", "local", steps=100_000, act=act)
    assert run.code == -signal.SIGKILL and len(run.pids) > 5
    assert nothing_left(run.pids, patience_s=60.0)
    done = RunReader(run.folder).checkpoints()[-1]
    words = [sys.executable, "-m", "gropius", "resume", str(run.folder), "--trust-code", "--cluster", "local"]
    again = subprocess.run([*words, "--set", f"train.steps={done + 1}"], capture_output=True, text=True, check=False)
    assert again.returncode == 0, again.stderr
    assert RunReader(run.folder).steps()[-1] == done + 1


@pytest.mark.slow
def test_a_signal_finishes_the_step_saves_and_leaves_no_process(tmp_path: Path) -> None:
    def act(run: Ran, step: int) -> None:
        if step == 1:
            run.process.send_signal(signal.SIGINT)

    run = Ran(tmp_path, "ray", "--cluster", "local", steps=100_000, act=act)
    assert run.code == 130, run.said
    assert "everything is saved" in run.said and "gropius resume" in run.said
    assert nothing_left(run.pids)
    assert RunReader(run.folder).checkpoints()[-1] == RunReader(run.folder).steps()[-1]


def test_where_no_ray_answers_one_line_says_so() -> None:
    words = [sys.executable, "-m", "gropius", "train", "arithmetic", "--cluster", "127.0.0.1:9", "--name", "none"]
    tried = subprocess.run(words, capture_output=True, text=True, check=False)
    assert tried.returncode == 2 and "--cluster 127.0.0.1:9: no Ray answers there" in tried.stderr
    assert "Traceback" not in tried.stderr
