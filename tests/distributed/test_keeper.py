"""A keeper: what its process prints arrives once and whole, what it is told and given, and that nothing outlives it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from posted import alive

from gropius.distributed.keeper import PIECE_BYTES, Keeper


@pytest.fixture
def keeper() -> Iterator[Keeper]:
    made = Keeper(60.0)
    yield made
    made.end()


def heard(keeper: Keeper, enough: int = 0) -> str:
    """What the process printed, to its end or until there are so many characters."""
    said, until = "", time.monotonic() + 30
    while time.monotonic() < until:
        seen = keeper.look()
        said += seen["out"]
        if (enough and len(said) >= enough) or (seen["code"] is not None and not seen["out"]):
            return said
        time.sleep(0.01)
    raise AssertionError(said)


def test_what_is_printed_arrives_once_in_pieces_and_no_character_is_cut(keeper: Keeper) -> None:
    text = "aü€" * PIECE_BYTES  # six bytes: no piece ends where a character does, every time
    keeper.start(["-c", "import sys; sys.stdout.buffer.write(('aü€' * int(sys.argv[1])).encode())", str(PIECE_BYTES)],
                 {"PYTHONUTF8": "1"}, ".")  # fmt: skip
    assert heard(keeper) == text
    assert keeper.look()["code"] == 0 and keeper.look()["out"] == ""


def test_a_process_has_the_folder_the_environment_and_what_it_is_told_and_nothing_of_ray(
    keeper: Keeper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_OF_ANOTHER", "1")
    program = (
        "import json, os, sys\n"
        "told = json.loads(sys.stdin.readline())\n"
        "json.dump({'port': told['port']}, open(sys.argv[1], 'w'))\n"
        "print(os.getcwd(), os.environ['MINE'], 'RAY_OF_ANOTHER' in os.environ)\n"
    )
    keeper.start(["-c", program], {"MINE": "7"}, str(tmp_path), {"port": 5})
    assert heard(keeper) == f"{tmp_path.resolve()} 7 False\n"
    assert keeper.look()["report"] == {"port": 5}


def test_a_folder_that_is_not_there_is_no_obstacle(keeper: Keeper) -> None:
    keeper.start(["-c", "print('here')"], {}, "/no/such/folder")
    assert heard(keeper) == "here\n"


def test_a_signal_waits_until_the_process_is_ready_for_one(keeper: Keeper) -> None:
    program = (
        "import os, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: (print('asked', flush=True), os._exit(3)))\n"
        "sys.stdin.readline()\n"
        "open(os.environ['GROPIUS_LEADER'], 'w').write('x')\n"
        "print('ready', flush=True)\n"
        "time.sleep(60)\n"
    )
    assert not keeper.signal(signal.SIGTERM)
    keeper.start(["-c", program], {}, ".", {})
    heard(keeper, len("ready"))
    assert keeper.signal(signal.SIGTERM)
    assert "asked" in heard(keeper) and keeper.look()["code"] == 3


def test_a_process_that_has_not_said_that_it_is_ready_gets_no_signal(keeper: Keeper) -> None:
    keeper.start(["-c", "import time; print('up', flush=True); time.sleep(60)"], {}, ".")
    heard(keeper, len("up"))
    assert not keeper.signal(signal.SIGTERM) and keeper.look()["code"] is None


def test_the_end_takes_the_children_of_the_process_and_its_files_along() -> None:
    keeper = Keeper(60.0)
    program = (
        "import subprocess, sys, time\n"
        "print(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']).pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    pid = keeper.start(["-c", program], {}, ".")
    child = int(heard(keeper, 3).split()[0])
    assert alive(pid) and alive(child) and os.getpgid(pid) == pid
    keeper.end()
    until = time.monotonic() + 20
    while alive(child) and time.monotonic() < until:
        time.sleep(0.01)
    assert not alive(pid) and not alive(child) and not keeper._scratch.exists()
