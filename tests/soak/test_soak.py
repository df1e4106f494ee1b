"""Two thousand steps with kills at random: the same bits as undisturbed, and nothing grows. Part of `make test-all`."""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "train"))

from killed import killable
from small import RECIPE

from gropius.records import faults
from gropius.records.reader import RunReader
from gropius.train import checkpoint
from gropius.train.sameness import compare

STEPS = int(os.environ.get("GROPIUS_SOAK_STEPS", "2000"))
SETTINGS = [
    f"train.steps={STEPS}", "checkpoint.every=10", "checkpoint.keep_last=2", "eval.before=false", "eval.after=false",
    "train.learning_rate=1e-4", "rollout.prompts=2", "rollout.group_size=2", "record.token_logprobs=false",
]  # fmt: skip


def somewhere(chance: random.Random) -> list[Any]:
    """A point, and how often it is passed before the kill: up to a twentieth of the run away."""
    points = [point for point in faults.POINTS if not point.startswith("run.") and point != "checkpoint.aside"]
    point = chance.choice(points)
    steps = chance.randint(1, max(1, STEPS // 20))
    return [point, {"checkpoint": 1 + steps // 10, "rewind": 1}.get(point.partition(".")[0], steps)]


def flat(rows: list[dict[str, Any]], name: str, allowed: float) -> bool:
    """True when the last fifth is no larger than the second fifth, but for `allowed` of it."""
    fifth = max(1, len(rows) // 5)
    early = statistics.median(row[name] for row in rows[fifth : 2 * fifth])
    late = statistics.median(row[name] for row in rows[-fifth:])
    return late <= early * (1 + allowed)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="open files and memory are read in /proc")
def test_thousands_of_steps_with_random_kills_end_in_the_same_bits_and_nothing_grows(tmp_path: Path) -> None:
    straight, broken = tmp_path / "straight" / "small", tmp_path / "broken" / "small"
    usage = tmp_path / "usage.jsonl"
    chance = random.Random(6)
    with killable(tmp_path) as server:
        ended = server.run("train", recipe=RECIPE, settings=[f'out="{straight.parent}"', *SETTINGS], usage=str(usage))
        assert ended["code"] == 0, ended
        job: dict[str, Any] = {"recipe": RECIPE, "settings": [f'out="{broken.parent}"', *SETTINGS]}
        ended = server.run("train", **job, arm=["step.recorded", 25])
        kills = 0
        while ended["killed"] == 9:
            kills += 1
            assert not checkpoint.newest(broken / "checkpoints").notes
            ended = server.run("resume", folder=str(broken), arm=somewhere(chance))
        assert ended["code"] == 0 or f"all {STEPS} steps are done" in ended["error"], ended
    found = compare(straight, broken)
    assert found.difference == "" and found.counts["responses"] == 4 * STEPS, found
    assert kills >= 3, kills
    rows = [json.loads(line) for line in usage.read_text().splitlines()]
    assert flat(rows, "memory", 0.05) and flat(rows, "files", 0) and flat(rows, "threads", 0), (rows[0], rows[-1])
    for folder in (straight, broken):
        assert RunReader(folder).checkpoints() == [STEPS - 10, STEPS]
        left = {path.name for path in folder.iterdir()} | {path.name for path in (folder / "checkpoints").iterdir()}
        assert not [name for name in left if name.startswith(".")]
    print(f"{kills} kills; first and last use: {rows[0]} {rows[-1]}")
