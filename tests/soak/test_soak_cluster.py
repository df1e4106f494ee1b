"""A local Ray whose parts are killed at random by a seeded schedule: the run ends as undisturbed. `make test-all`."""

from __future__ import annotations

import os
import random
import signal
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "distributed"))

from test_ray import OWN, Ran, nothing_left, responses, weights

from gropius.records.reader import RunReader

pytest.importorskip("ray", reason="Ray is not installed: pip install 'gropius[ray]'")
STEPS = int(os.environ.get("GROPIUS_SOAK_CLUSTER_STEPS", "30"))
WORDS = {"engine": "gropius.hosting", "reward host": "gropius.rewards.host", "rank 0": "gropius train",
         "rank 1": "gropius train"}  # fmt: skip
SETTINGS = ["cluster.reward_hosts=2", "cluster.engines=2", "cluster.restarts=20"]
SET = [word for one in SETTINGS for word in ("--set", one)]


class Slow(Ran):
    """A run of slow rewards: what its controller leaves behind ends before the run does."""

    own = OWN.replace("def letters", "import time\n\ndef letters").replace(
        "    return", "    time.sleep(0.2)\n    return"
    )


@dataclass
class Schedule:
    """Kills every third step on average, each kind about as often; the controller at two thirds of the run."""

    chance: random.Random
    killed: list[str] = field(default_factory=list)
    controller: bool = True

    def act(self, run: Ran, step: int) -> None:
        """After a step: kill something, or nothing."""
        if self.controller and step >= 2 * STEPS // 3:
            self.controller = False
            self.killed.append("controller")
            os.kill(run.process.pid, signal.SIGKILL)
        elif self.chance.random() < 1 / 3:
            what = self.chance.choice(list(WORDS))
            try:
                run.kill(WORDS[what], what.rpartition(" ")[2] if what.startswith("rank") else "")
            except AssertionError:
                return  # it is just being started again
            self.killed.append(what)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1])
def test_a_run_whose_parts_are_killed_at_random_ends_as_undisturbed(tmp_path: Path, seed: int) -> None:
    schedule = Schedule(random.Random(seed))
    run = Slow(tmp_path, "ray", "--cluster", "local", *SET, steps=STEPS, act=schedule.act)
    said, pids = run.said, run.pids
    assert run.code == -signal.SIGKILL, said  # the controller's turn
    assert nothing_left(pids, patience_s=90.0)
    again = Resumed(run, schedule)
    assert again.code == 0, again.said
    assert nothing_left(again.pids)
    assert "Traceback" not in said + again.said, said + again.said
    straight = Slow(tmp_path, "plain", steps=STEPS)
    assert straight.code == 0, straight.said
    assert responses(run.folder) == responses(straight.folder) and RunReader(run.folder).steps()[-1] == STEPS
    assert weights(run.folder, STEPS) == weights(straight.folder, STEPS)
    assert len(set(schedule.killed)) == 5, schedule.killed
    print(f"killed: {', '.join(schedule.killed)}")


class Resumed(Slow):
    """The same run, gone on with."""

    def __init__(self, before: Ran, schedule: Schedule) -> None:
        self.folder = before.folder
        self.follow(["resume", str(before.folder), "--trust-code", "--cluster", "local"], schedule.act)
