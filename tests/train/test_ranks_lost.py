"""Ranks as a person starts them: one killed is named and comes back from a checkpoint; a signal ends all."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from small import run_small

from gropius.records.reader import RunReader

pytestmark = pytest.mark.slow
RECIPE = """
name = "small"
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
name = "format"
options = {{pattern = "[^a-z]*[a-z](.|\\\\n)*"}}
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
[cluster]
trainer_ranks = 2
restarts = 1
"""


def children(pid: int) -> dict[int, str]:
    """The processes that one started, and the rank that each is."""
    found = {}
    for thread in Path(f"/proc/{pid}/task").iterdir():
        for child in (thread / "children").read_text().split():
            said = dict(
                part.split("=", 1) for part in Path(f"/proc/{child}/environ").read_text().split("\0") if "=" in part
            )
            found[int(child)] = said.get("RANK", "")
    return found


def started(
    tmp_path: Path, steps: int, act: Callable[[int, dict[int, str]], None], **environment: str
) -> tuple[int, str, list[int]]:
    """Train over two ranks and act once when step 2 is told: exit code, what was said, the ranks at that time."""
    recipe = tmp_path / "small.toml"
    recipe.write_text(RECIPE.format(out=tmp_path / "runs", steps=steps))
    process = subprocess.Popen(
        [sys.executable, "-m", "gropius", "train", str(recipe)],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
    )
    assert process.stderr is not None
    said, ranks = "", {}
    for line in process.stderr:
        said += line
        if line.startswith("step") and f" 2/{steps} " in line and not ranks:
            ranks = children(process.pid)
            act(process.pid, ranks)
    return process.wait(), said, list(ranks)


def gone(pid: int) -> bool:
    """True when no such process runs."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def responses(folder: Path) -> list[list[tuple]]:
    """Step by step, what was drawn."""
    reader = RunReader(folder)
    return [[tuple(row.response_ids) for row in reader.rollouts(step)] for step in reader.steps()]


def test_a_killed_rank_is_named_and_the_run_ends_as_if_nothing_had_happened(tmp_path: Path) -> None:
    killed = []

    def kill(launcher: int, ranks: dict[int, str]) -> None:
        (victim,) = [pid for pid, rank in ranks.items() if rank == "1"]
        killed.append(victim)
        os.kill(victim, signal.SIGKILL)

    code, said, ranks = started(tmp_path, 60, kill)  # far from its end, however long this process takes to act
    assert code == 0, said
    assert f"rank 1 (process {killed[0]}) was ended by SIGKILL; all ranks start again from the last checkpoint" in said
    assert "Traceback" not in said and all(map(gone, ranks))
    straight, _ = run_small(
        tmp_path / "one", "train.steps=60", "eval.before=false", "eval.after=false", "checkpoint.every=1"
    )
    assert responses(tmp_path / "runs" / "small") == responses(straight)


def test_a_signal_finishes_the_step_saves_and_leaves_no_process_behind(tmp_path: Path) -> None:
    code, said, ranks = started(tmp_path, 500, lambda launcher, _: os.kill(launcher, signal.SIGTERM))
    assert code == 128 + signal.SIGTERM, said
    assert "everything is saved" in said and "gropius resume" in said
    assert "Traceback" not in said and len(ranks) == 2 and all(map(gone, ranks))
    folder = tmp_path / "runs" / "small"
    assert RunReader(folder).checkpoints()[-1] == RunReader(folder).steps()[-1]


FULL = """
import os, sys
if os.environ.get("RANK") == os.environ["FULL_RANK"] and "gropius" in " ".join(sys.orig_argv):
    import torch
    from gropius.train.optim import Optimiser
    step, steps = Optimiser.step, []
    def full(self):
        steps.append(1)
        if len(steps) == 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return step(self)
    Optimiser.step = full
"""


@pytest.mark.parametrize("rank", [0, 1])
def test_out_of_memory_on_a_rank_ends_the_run_at_once_and_names_it_and_the_keys(tmp_path: Path, rank: int) -> None:
    """Not after `cluster.deadline_s`, 600 s here: the others are in the middle of an exchange with it."""
    (tmp_path / "sitecustomize.py").write_text(FULL)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    began = time.monotonic()
    code, said, ranks = started(tmp_path, 6, lambda *_: None, PYTHONPATH=path, FULL_RANK=str(rank))
    assert code == 1 and time.monotonic() - began < 300, said
    assert f"rank {rank} ran out of memory (CUDA out of memory. Tried to allocate 2.00 GiB)" in said, said
    assert "train.pack_tokens" in said and "cluster.shard" in said and "start again" not in said
    assert "Traceback" not in said and all(map(gone, ranks))
