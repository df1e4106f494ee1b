"""Start one worker in a fresh process and read its answer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from peer.measure import Moment, Neighbours

HERE = Path(__file__).resolve().parents[1]
SIDES = {"gropius": "peer.ours", "trl": "peer.theirs"}
VARIABLE = "GROPIUS_TRL_PYTHON"


def trl_python() -> str:
    """The Python that has TRL, "" when none is named."""
    return os.environ.get(VARIABLE, "")


def run(side: str, job: dict[str, Any]) -> dict[str, Any]:
    """Run a job of one side to its end. Raises RuntimeError with the worker's last words when it fails.

    The answer has `neighbours` (cores that others used meanwhile) and `whole` (wall and processor seconds) added.
    """
    python = trl_python() if side == "trl" else sys.executable
    paths = [str(HERE), str(HERE.parent / "src")]
    threads = str(job.get("threads", 1))
    environment = {
        **os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads,
        "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error",
    }  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="gropius-peer-") as folder:
        asked, answered = Path(folder, "job.json"), Path(folder, "answer.json")
        asked.write_text(json.dumps(job | {"folder": folder}), encoding="utf-8")
        began = Moment.now()
        with Neighbours() as neighbours:
            done = subprocess.run(
                [python, "-m", SIDES[side], str(asked), str(answered)],
                env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
                check=False,
            )  # fmt: skip
        if done.returncode or not answered.exists():
            words = [line for line in done.stderr.splitlines() if line.strip()]
            raise RuntimeError(f"{side} {job['kind']} ended with {done.returncode}:\n" + "\n".join(words[-25:]))
        answer: dict[str, Any] = json.loads(answered.read_text(encoding="utf-8"))
    return answer | {"neighbours": neighbours.cores, "whole": (Moment.now() - began).as_list()}
