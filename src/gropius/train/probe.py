"""How fast this machine runs this model: real decode steps and real updates, timed, as a `Machine` of the cost model.

Responses of two lengths at two widths give the fixed and the per-row time of a decode step; updates of two sizes give
the rate of training and the fixed time of an update. The kernels are those of a run, Python between them included; the
ids are random, for time does not depend on them. Weights are not moved.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gropius.models.load import LoadedModel, load_model, untrained
from gropius.models.logprobs import CHUNK_NUMBERS
from gropius.objective.presets import resolve
from gropius.plan.cost import Footprint, Workload, cost, shape_of
from gropius.plan.machines import Machine
from gropius.rollout.torch_engine import TorchEngine
from gropius.train.checkpoint import weight_digest
from gropius.train.forward import Forward
from gropius.train.optim import Optimiser, OptimiserSettings
from gropius.train.pack import pack
from gropius.train.sequences import TrainSequence
from gropius.train.step import Learner, LearnerSettings
from gropius.types import Request, Sampling

Clock = Callable[[], float]
LENGTHS = (3, 11)  # tokens of the timed responses
MOST_TOKENS = 48  # of a response in a timed update; longer ones are scaled by their operations
OBJECTIVE = resolve("grpo", {"kl.estimator": "none", "kl.coefficient": 0.0})
STREAM = 2**31 - 3  # of the probe's random numbers; no run draws with it


@dataclass(frozen=True)
class Settings:
    """dtype: of the training's products. rollout_dtype: of the sampler's. pack_tokens, token_budget: as in a recipe.

    seconds: what the probe may take, roughly; every measurement is made at least once. clock: seconds of what.
    """

    dtype: str = "float32"
    rollout_dtype: str = "auto"
    pack_tokens: int = 8192
    token_budget: int = 65536
    seconds: float = 10.0
    clock: Clock = time.perf_counter


class Probe:
    """Measures one model. `load` says how long prompts and responses are and how many are drawn at once."""

    def __init__(self, loaded: LoadedModel, load: Workload, settings: Settings):
        self.loaded, self.load, self.settings = loaded, load, settings
        self.shape = shape_of(loaded.model.config.get_text_config().to_dict())
        self.engine = TorchEngine(loaded, token_budget=settings.token_budget, dtype=settings.rollout_dtype)
        self.forward = Forward.of(loaded.model, compute_dtype=settings.dtype)
        self._random = np.random.default_rng(0)

    def machine(self) -> Machine:
        """The machine whose cost of this load is what was measured. Rates are shares of the training's, which is 1."""
        fixed = self._hand_over()
        rate, update = self._training()
        streaming = self._streaming()
        traffic = 28 * self.shape.parameters / streaming
        plain = Machine("this machine", rate, streaming, device_bytes(self.forward.head.weight), 1, 1.0, 1.0, 1.0,
                        update_s=max(update - traffic, 0.0), fixed_s=fixed)  # fmt: skip
        per_step, per_row, per_response = self._decoding(plain)
        operations = cost(self.shape, replace(self.load, prompts=1, group_size=1, response_tokens=LENGTHS[1]), plain)
        decode = next(phase for phase in operations.phases if phase.name == "decode")
        efficiency = decode.flops / LENGTHS[1] / max(per_row, 1e-12) / rate
        threads = torch.get_num_threads()
        return replace(
            plain, bandwidth=streaming, decode_efficiency=efficiency, step_overhead_s=per_step, response_s=per_response,
            source=f"this model's own decode steps and updates, timed; {threads} threads",
        )  # fmt: skip

    def footprint(self, base_bytes: float) -> Footprint:
        """Bytes that the backward pass keeps, counted on two packs; the head's buffers as the code makes them."""
        small, large = (self._kept(groups) for groups in (1, 2))
        slope = (large[1] - small[1]) / max(large[0] - small[0], 1)
        vocabulary, head = self.shape.vocabulary, self.forward.head.weight.numel()
        tokens = min(self.load.pack_tokens, self.load.unique_tokens)
        chunk = min(CHUNK_NUMBERS, tokens * vocabulary)
        cast = 2 * head if self.settings.dtype != "float32" else 0
        on_cpu = self.forward.head.weight.device.type == "cpu"
        return Footprint(
            base_bytes=base_bytes, activation_bytes=slope, cast_bytes=max(small[1] - slope * small[0], 0.0),
            logits_bytes=16.0 * chunk + 4.0 * head + cast, cache_bytes=4 if on_cpu else 0,
            trained=sum(p.numel() for p in self.loaded.model.parameters() if p.requires_grad),
        )  # fmt: skip

    def _hand_over(self) -> float:
        began = self.settings.clock()
        self.engine.set_policy(0, weight_digest(self.loaded.model))
        return self.settings.clock() - began

    def _decoding(self, machine: Machine) -> tuple[float, float, float]:
        """Seconds of a decode step, of a row in it, and of a response besides (its share of the prompt taken off)."""
        most = self.settings.token_budget // max(1, int(self.load.prompt_tokens) + LENGTHS[1])
        wide = max(2, min(self.load.rows or self.load.responses, self.load.responses, most))
        narrow = max(1, wide // 4)
        cases = [(rows, tokens) for rows in (wide, narrow) for tokens in LENGTHS]
        taken = dict.fromkeys(cases, float("inf"))
        self._draw(narrow, LENGTHS[0])
        end = time.perf_counter() + self.settings.seconds / 2
        while taken[cases[0]] == float("inf") or time.perf_counter() < end:
            for case in cases:
                taken[case] = min(taken[case], self._draw(*case))
        steps = LENGTHS[1] - LENGTHS[0]
        slope = {rows: max(taken[rows, LENGTHS[1]] - taken[rows, LENGTHS[0]], 1e-9) / steps for rows in (wide, narrow)}
        per_row = max((slope[wide] - slope[narrow]) / (wide - narrow), 0.05 * slope[wide] / wide)
        per_step = max(slope[wide] - per_row * wide, 0.0)
        start = taken[wide, LENGTHS[0]] - LENGTHS[0] * slope[wide]
        prompts = replace(self.load, prompts=-(-wide // self.load.group_size))
        prefill = cost(self.shape, prompts, machine).phases[0].time_s
        return per_step, per_row, max(start - prefill, 0.0) / wide

    def _draw(self, rows: int, tokens: int) -> float:
        """Seconds for `rows` responses of exactly `tokens` tokens, siblings on one prompt."""
        length = max(1, int(self.load.prompt_tokens))
        groups = -(-rows // self.load.group_size)
        prompts = [tuple(self._ids(length).tolist()) for _ in range(groups)]
        sampling = Sampling(tokens)

        async def all_of_them() -> None:
            requests = (
                Request(prompts[n // self.load.group_size], sampling, (0, STREAM, n, tokens)) for n in range(rows)
            )
            await asyncio.gather(*map(self.engine.complete, requests))

        began = self.settings.clock()
        asyncio.run(all_of_them())
        return self.settings.clock() - began

    def _training(self) -> tuple[float, float]:
        """Operations a second of forward and backward, and the seconds of an update besides."""
        optimiser = Optimiser(self.loaded.model, OptimiserSettings(learning_rate=0.0))
        settings = LearnerSettings(pack_tokens=self.settings.pack_tokens, entropy=True)
        learner = Learner(self.forward, OBJECTIVE, optimiser, settings)
        few = max(1, self.load.prompts // 16)
        self._update(learner, few)  # moments are made, kernels are chosen
        small = self._update(learner, few)
        left = self.settings.seconds / 2 / max(small[0], 1e-6)
        many = max(few + 1, min(int(few * left / 2), max(self.load.prompts, few + 1), few * 16))
        large = self._update(learner, many)
        if large[0] > small[0]:
            rate = (large[1] - small[1]) / (large[0] - small[0])
        else:
            rate = large[1] / large[0]
        return rate, max(small[0] - small[1] / rate, 0.0)

    def _update(self, learner: Learner, groups: int) -> tuple[float, float]:
        """Seconds and operations of an update on so many groups of the load's lengths."""
        rows, load = self._rows(groups), self._timed_load(groups)
        began = self.settings.clock()
        learner.update(rows)
        seconds = self.settings.clock() - began
        unit = Machine("", 1.0, 1.0, 0.0, 1, 1.0, 1.0, 1.0)
        return seconds, next(p.flops for p in cost(self.shape, load, unit).phases if p.name == "training")

    def _timed_load(self, groups: int) -> Workload:
        tokens = max(1, min(MOST_TOKENS, round(self.load.response_tokens)))
        return replace(self.load, prompts=groups, response_tokens=tokens, epochs=1, live_share=1.0)

    def _rows(self, groups: int) -> list[TrainSequence]:
        load = self._timed_load(groups)
        made: list[TrainSequence] = []
        for group in range(groups):
            prompt = self._ids(max(1, int(load.prompt_tokens)))
            for member in range(load.group_size):
                size = int(load.response_tokens)
                weight = np.full(size, 1.0 / (load.responses * size))
                made.append(
                    TrainSequence(
                        group_id=str(group), member=member, episode=len(made), prompt_ids=prompt,
                        response_ids=self._ids(size), mask=np.ones(size, np.bool_),
                        sampler_logprobs=np.zeros(size, np.float32), advantage=np.full(size, 1.0 - 2.0 * (member % 2)),
                        weight=weight, keep=np.ones(size, np.bool_),
                    )
                )  # fmt: skip
        return made

    def _kept(self, groups: int) -> tuple[int, int]:
        """Tokens of a pack and bytes that its forward pass keeps, every piece of memory once, parameters left out."""
        (one,) = pack(self._rows(groups), budget_tokens=1 << 30)
        own = {p.untyped_storage().data_ptr() for p in self.loaded.model.parameters()}
        kept: dict[int, int] = {}

        def note(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            held = self.forward.logprobs(one, entropy=True)
        del held
        return one.run_tokens, sum(kept.values())

    def _ids(self, size: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        return self._random.integers(0, self.shape.vocabulary, size)

    def _streaming(self) -> float:
        """Bytes a second that an optimiser step moves, measured on one as large as the model, at most 2**25 numbers."""
        size = min(self.shape.parameters, 1 << 25)
        numbers = torch.nn.Parameter(torch.zeros(size, device=self.forward.head.weight.device))
        numbers.grad = torch.zeros_like(numbers)
        adam = torch.optim.AdamW([numbers], lr=0.0, fused=True)
        adam.step()
        best = float("inf")
        for _ in range(3):
            began = self.settings.clock()
            adam.step()
            best = min(best, self.settings.clock() - began)
        return 28 * size / max(best, 1e-9)


def measured(model: Path, load: Workload) -> Machine:
    """This machine's speed at a model and a load, in float32.

    model: a folder of weights; a config.json, or a folder with nothing else, is measured with random weights.
    """
    config = model / "config.json" if model.is_dir() else model
    loaded = load_model(str(model)) if any(model.glob("*.safetensors*")) else untrained(config)
    return Probe(loaded, load, Settings()).machine()


def device_bytes(like: Tensor) -> float:
    """Memory of the device that a tensor lies on."""
    if like.device.type == "cuda":
        return float(torch.cuda.get_device_properties(like.device).total_memory)
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def resident_bytes() -> float:
    """What this process holds now; 0 where the system does not say."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return float(int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE"))
    except OSError:
        return 0.0
