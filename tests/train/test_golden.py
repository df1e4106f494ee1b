"""Golden runs: ten steps of the tiny model, with all weights and with an adapter trained, against what is written down.

Two processes on one machine give the same bits. On the machine that `golden.json` was made on (the same facts) they are
its bits too; on any other the first steps agree to a relative 1e-4 in every number that a rounding reaches smoothly.
`python tests/train/test_golden.py` writes the file anew; say in LOG.md why.
"""

from __future__ import annotations

import json
import platform
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from killed import killable
from small import RECIPE, run_small

from gropius.records.reader import RunReader
from gropius.train import checkpoint
from gropius.train.sameness import compare

FILE = Path(__file__).with_name("golden.json")
RUNS = {"all weights": [], "an adapter": ["model.lora.rank=4", "train.learning_rate=3e-3"]}
SETTINGS = ["train.steps=10", "eval.before=false", "eval.after=false"]
SMOOTH = ("loss", "grad_norm", "entropy", "kl")
FIRST, RELATIVE, ABSOLUTE = 3, 1e-4, 1e-7


def facts() -> dict[str, str]:
    """What decides the bits of a CPU run."""
    info = Path("/proc/cpuinfo")
    models = [line for line in info.read_text().splitlines() if line.startswith("model name")] if info.exists() else []
    return {
        "torch": torch.__version__,
        "capability": torch.backends.cpu.get_cpu_capability(),
        "processor": models[0].partition(":")[2].strip() if models else platform.processor(),
        "system": platform.system(),
    }


def found(folder: Path) -> dict[str, Any]:
    """The numbers of a run, and the digest of its last weights."""
    rows = list(RunReader(folder).metrics_by_step().values())
    last = checkpoint.load(folder / "checkpoints" / "step-000010")
    return {name: [row[name] for row in rows] for name in SMOOTH} | {"weights": last.facts["weights"]}


@pytest.mark.parametrize("name", RUNS)
def test_two_processes_give_the_same_bits_and_they_are_those_written_down(name: str, tmp_path: Path) -> None:
    folder, _ = run_small(tmp_path / "here", *SETTINGS, *RUNS[name])
    with killable(tmp_path) as server:
        settings = [f'out="{tmp_path / "there"}"', *SETTINGS, *RUNS[name]]
        assert server.run("train", recipe=RECIPE, settings=settings)["code"] == 0
    same = compare(folder, tmp_path / "there" / "small")
    assert same.difference == "" and same.counts["responses"] == 160
    golden, ours = json.loads(FILE.read_text()), found(folder)
    expected = golden["runs"][name]
    if golden["facts"] == facts():
        assert ours == expected
    for key in SMOOTH:
        assert ours[key][:FIRST] == pytest.approx(expected[key][:FIRST], rel=RELATIVE, abs=ABSOLUTE), key


def main() -> None:
    """Write the file anew."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        runs = {
            name: found(run_small(Path(folder) / str(n), *SETTINGS, *more)[0])
            for n, (name, more) in enumerate(RUNS.items())
        }
    FILE.write_text(json.dumps({"facts": facts(), "runs": runs}, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
