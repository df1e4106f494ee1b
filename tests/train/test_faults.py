"""Killed anywhere, continued to the same bits: at every named point of saving, logging and publishing."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from killed import Killable, killable
from small import RECIPE

import gropius
from gropius.errors import UsageError
from gropius.records import faults
from gropius.records.reader import RunReader
from gropius.train import checkpoint
from gropius.train.sameness import compare

STEPS = 7
BASE = [
    f"train.steps={STEPS}",
    "checkpoint.every=1",
    "checkpoint.keep_last=2",
    "eval.every=3",
    "train.learning_rate=3e-3",
]
# Points of a run that begins; then the others in an order that a run can be led through, the end last.
FIRST = ["run.locked", "file.written", "file.renamed", "run.described"]
LAST = ["run.trained", "run.measured"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Killable]:
    with killable(tmp_path_factory.mktemp("server")) as process:
        yield process


@pytest.fixture(scope="module")
def straight(server: Killable, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that nobody disturbed."""
    out = tmp_path_factory.mktemp("straight")
    assert server.run("train", recipe=RECIPE, settings=[f'out="{out}"', *BASE])["code"] == 0
    return out / "small"


def test_every_point_is_passed_somewhere_and_every_passed_point_is_known() -> None:
    sources = Path(gropius.__file__).parent.rglob("*.py")
    passed = {name for path in sources for name in re.findall(r'reached\(\s*"([\w.]+)"', path.read_text())}
    assert passed == set(faults.POINTS)


def test_killed_at_every_point_the_run_goes_on_to_the_same_bits(
    server: Killable, straight: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "small"
    begin = {"recipe": RECIPE, "settings": [f'out="{tmp_path}"', *BASE]}
    for point in FIRST:
        ended = server.run("train", **begin, arm=[point, 1])
        assert ended["killed"] == 9, (point, ended)
        if (
            folder / "resolved.json"
        ).exists():  # from here on it can be resumed; the other beginnings still are to come
            shutil.rmtree(folder)
    assert server.run("train", **begin, arm=["step.sampled", 1])["killed"] == 9
    assert RunReader(folder).checkpoints() == []
    middle = [point for point in faults.POINTS if point not in (*FIRST, *LAST, "checkpoint.aside")]
    for point in ["checkpoint.published", "checkpoint.retained", *middle, *LAST]:
        times = 2 if point in ("step.sampled", "checkpoint.tensors") else 1
        ended = server.run("resume", folder=str(folder), arm=[point, times])
        assert ended["killed"] == 9, (point, ended)
        newest = checkpoint.newest(folder / "checkpoints")
        assert not newest.notes, (point, newest.notes)
        for path in folder.rglob("*"):  # a clock that jumped back
            os.utime(path, (1, 1))
        if point == "checkpoint.published" and RunReader(folder).checkpoints()[-1] == 3:
            again = server.run("resume", folder=str(folder), step=2, arm=["checkpoint.aside", 1])
            assert again["killed"] == 9, again
    ended = server.run("resume", folder=str(folder))
    assert ended["code"] == 2 and f"all {STEPS} steps are done" in ended["error"]
    found = compare(straight, folder)
    assert found.difference == "" and found.counts["responses"] == 16 * STEPS, found


def test_killed_while_the_same_step_is_written_again_the_earlier_checkpoint_comes_back(
    server: Killable, straight: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "small"
    shutil.copytree(straight, folder)
    ended = server.run("resume", folder=str(folder), step=STEPS - 1, arm=["checkpoint.aside", 1])
    assert ended["killed"] == 9, ended
    assert RunReader(folder).checkpoints() == [STEPS - 1]
    assert server.run("resume", folder=str(folder))["code"] == 0
    assert compare(straight, folder).difference == ""


VARIANTS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "tiny": ({}, []),
    "several turns": (
        {
            "data": {"source": "guess_number", "options": {"between": [1, 7], "budget": 3, "strategy": "random"}},
            "reward": [],
            "rollout": {"prompts": 4, "group_size": 4, "max_tokens": 3, "max_turns": 3},
        },
        ["sft.steps=3", "sft.batch=8"],
    ),
    "several updates and epochs": ({}, ["train.updates=2", "train.epochs=2", "train.schedule=cosine"]),
    "dynamic sampling": (
        {"objective": {"preset": "dapo"}},
        ['objective.selection.dead="refill"', "rollout.refill_attempts=2", "rollout.group_size=3"],
    ),
    "cut and gone on with": (
        {"objective": {"preset": "dapo"}},
        ['objective.selection.dead="refill"', "rollout.oversample=1.5", 'rollout.cut="resume"', "rollout.max_tokens=8"],
    ),
    "groups by what was measured": (
        {
            "rollout": {
                "prompts": 4,
                "group_size": 4,
                "max_tokens": 4,
                "group_schedule": {"sizes": [4, 2, 8], "dead_share": [0.4, 0.9], "window": 1},
            }
        },
        [],
    ),
    "a reference that moves": ({}, ["train.reference_refresh=2"]),
    "an adapter": ({}, ["model.lora.rank=4"]),
    "an adapter from a warm start": ({}, ["model.lora.rank=4", "sft.steps=3", "sft.batch=8", "train.updates=2"]),
    "in the background": ({}, ["checkpoint.background=true"]),
    "drawn ahead": (
        {},
        ["train.max_staleness=2", "objective.ratio.correction=truncate", "objective.ratio.correction_high=2.0"],
    ),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_straight_equals_killed_and_resumed(name: str, server: Killable, tmp_path: Path) -> None:
    changes, settings = VARIANTS[name]
    recipe = {key: value for key, value in {**RECIPE, **changes}.items() if value != []}
    common = [*settings, "train.steps=4", "checkpoint.every=2", "eval.before=false", "train.learning_rate=3e-3"]
    a, b = tmp_path / "a", tmp_path / "b"
    ended = server.run("train", recipe=recipe, settings=[f'out="{a}"', *common])
    assert ended["code"] == 0, ended
    point = "step.updated" if name == "in the background" else "rollouts.written"
    ended = server.run("train", recipe=recipe, settings=[f'out="{b}"', *common], arm=[point, 4])
    assert ended["killed"] == 9, ended
    ended = server.run("resume", folder=str(b / "small"))
    assert ended["code"] == 0, ended
    found = compare(a / "small", b / "small")
    assert found.difference == "" and found.counts["weights"], found


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    made = os.geteuid() == 0 and subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(disk)], capture_output=True, check=False
    ).returncode == 0  # fmt: skip
    if not made:
        pytest.skip("a small disk is mounted by root only")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_disk_that_fills_up_at_any_point_halts_the_run_whole_and_it_goes_on_to_the_same_bits(
    server: Killable, straight: Path, small_disk: Path
) -> None:
    folder = small_disk / "small"
    begin = {"recipe": RECIPE, "settings": [f'out="{small_disk}"', *BASE]}
    points = ["step.sampled", "rollouts.written", "step.recorded", "checkpoint.begun", "checkpoint.model"]
    points += ["checkpoint.tensors", "checkpoint.state", "checkpoint.flushed"]
    for number, point in enumerate(points):
        arm = [point, 1, str(small_disk)]
        ended = server.run("train", **begin, arm=arm) if number == 0 else server.run(
            "resume", folder=str(folder), arm=arm
        )  # fmt: skip
        assert ended["code"] == 1 and "cannot be written" in ended["error"], (point, ended)
        assert str(folder) in ended["error"] and not list(folder.rglob(".writing*")), (point, ended)
        assert not checkpoint.newest(folder / "checkpoints").notes
        (small_disk / "filler").unlink()
    assert server.run("resume", folder=str(folder))["code"] == 0
    assert compare(straight, folder).difference == ""


def test_a_point_does_nothing_until_it_is_armed_and_only_known_ones_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    passed: list[str] = []
    faults.reached("step.sampled")
    faults.arm("step.sampled", 2, lambda: passed.append("now"))
    try:
        for _ in range(3):
            faults.reached("step.sampled", lambda: passed.append("before"))
            faults.reached("step.updated")
        assert passed == ["before", "now"]
    finally:
        faults.disarm()
    for value in ("nowhere", "step.sampled:x", "step.sampled:0"):
        monkeypatch.setenv(faults.VARIABLE, value)
        with pytest.raises(UsageError, match=faults.VARIABLE):
            faults.arm_from_environment()
