"""vLLM as a `Core`. The only file that imports vllm; it is imported in the worker, after the trainer listens.

The engine core runs in the worker's own process, so that weights are handed over by reference. vLLM decides which rows
are computed together and runs the model; the token is drawn by this package's own sampler, which vLLM calls as a logits
processor: every logit but the drawn one becomes −∞. So temperature, top-k, top-p and min-p mean the same as everywhere,
the random number belongs to the response, and no generation config has a say.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, get_args

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"  # the second runner draws on the device, without logits processors
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ["VLLM_NO_USAGE_STATS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"  # the model is described by what the trainer sent

import numpy as np
import torch
import vllm
from vllm import EngineArgs, SamplingParams
from vllm.config.lora import MaxLoRARanks
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.request import LoRARequest
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, MoveDirectionality

from gropius.rollout.sampler import Rules, draw
from gropius.rollout.streams import stream_key, uniforms
from gropius.rollout.vllm.weights import Named
from gropius.rollout.vllm.worker import Tokens
from gropius.types import Sampling

CPU_BLOCK = 32  # positions of a cache block; its own default of 128 is longer than most prompts, and shares none
CPU_CACHE_GIB = 1.0
KEY = "gropius"
ADAPTER = LoRARequest("policy", 1, "in memory")  # vLLM asks for a path, and reads it where the adapter is not there


class OwnDraw(LogitsProcessor):  # type: ignore[misc]
    """Draws for all rows of a batch and leaves vLLM no choice.

    requests: by key, as they were asked. drawn: by key, the last draw: position, id, and its two log-probabilities.
    """

    drawn: ClassVar[dict[int, tuple[int, int, float, float]]] = {}
    requests: ClassVar[dict[int, Mapping[str, Any]]] = {}

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._rows: dict[int, tuple[int, list[int]]] = {}
        self._keys: list[int] = []
        self._rules = Rules.of([])
        self._streams = np.zeros((0, 4), np.uint64)
        self._offsets = np.zeros(0, np.int64)

    def is_argmax_invariant(self) -> bool:
        """It decides the argmax."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Which request sits in which row now."""
        if batch_update is None:
            return
        rows = self._rows
        for index in batch_update.removed:
            rows.pop(index, None)
        for index, params, _, output in batch_update.added:
            rows[index] = (int((params.extra_args or {})[KEY]), output)
        for a, b, direction in batch_update.moved:
            one, other = rows.pop(a, None), rows.pop(b, None)
            if one is not None:
                rows[b] = one
            if other is not None and direction == MoveDirectionality.SWAP:
                rows[a] = other
        self._keys = [rows[index][0] for index in range(batch_update.batch_size)]
        asked = [self.requests[key] for key in self._keys]
        self._rules = Rules.of([Sampling(r["limit"], *r["rules"]) for r in asked])
        self._streams = np.array([stream_key(r["stream"]) for r in asked], np.uint64).reshape(-1, 4)
        self._offsets = np.array([r["offset"] for r in asked], np.int64)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Draw one token a row [_B, _V]."""
        counts = [len(self._rows[index][1]) for index in range(len(self._keys))]
        if len(counts) != len(logits):
            raise RuntimeError(f"vLLM gives logits of {len(logits)} rows for {len(counts)} requests")
        found = draw(logits, self._rules, uniforms(self._streams, self._offsets + np.array(counts, np.int64)))
        values = zip(found.ids.tolist(), found.logprobs.tolist(), found.drawn_logprobs.tolist(), strict=True)
        for key, count, value in zip(self._keys, counts, values, strict=True):
            self.drawn[key] = (count, *value)
        logits.fill_(-torch.inf)
        return logits.scatter_(1, torch.as_tensor(found.ids, device=logits.device)[:, None], 0.0)


class VllmCore:
    """One vLLM engine with weights of noise, until it is given others. start: configuration and options as sent."""

    def __init__(self, start: Mapping[str, Any]) -> None:
        options = start["options"]
        self._folder = Path(tempfile.mkdtemp(prefix="gropius-vllm-"))
        (self._folder / "config.json").write_text(json.dumps(start["config"]))
        self._sleeps = bool(options["sleeps"]) and not current_platform.is_cpu()
        self._asleep = False
        self._rank = int(options["lora_rank"])
        self._counts: dict[int, int] = {}
        OwnDraw.drawn, OwnDraw.requests = {}, {}
        try:
            self._engine = LLMEngine.from_engine_args(EngineArgs(**_arguments(options, self._folder, self._sleeps)))
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)
        cache = self._engine.vllm_config.cache_config
        self.facts: dict[str, Any] = {
            "name": "vLLM",
            "version": vllm.__version__,
            "device": current_platform.device_name,
            "dtype": options["dtype"],
            "cache_tokens": int(cache.num_gpu_blocks or 0) * int(cache.block_size or 0),
            "can_sleep": self._sleeps,
        }

    def add(self, key: int, request: Mapping[str, Any]) -> None:
        """Begin a request; vLLM's own reason where it refuses."""
        params = SamplingParams(
            temperature=0.0,  # the one logit that is left
            max_tokens=request["limit"],
            stop_token_ids=list(request["stop"]),
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            extra_args={KEY: key},
        )
        OwnDraw.requests[key] = request
        try:
            self._engine.add_request(
                str(key),
                {"prompt_token_ids": list(request["prompt"])},
                params,
                lora_request=ADAPTER if self._rank else None,
            )
        except ValueError:
            del OwnDraw.requests[key]
            raise
        self._counts[key] = 0

    def drop(self, keys: Sequence[int]) -> None:
        """Abort requests."""
        known = [key for key in keys if key in self._counts]
        self._engine.abort_request([str(key) for key in known])
        self._forget(known)

    def step(self) -> list[Tokens]:
        """One step of the scheduler, the model and the sampler."""
        news = []
        for output in self._engine.step():
            key, (part,) = int(output.request_id), output.outputs
            tokens = Tokens(key)
            for token in part.token_ids:
                count, drawn, logprob, drawn_logprob = OwnDraw.drawn[key]
                if (count, drawn) != (self._counts[key], token):
                    raise RuntimeError(f"vLLM returns token {token}, and {drawn} was drawn (position {count})")
                self._counts[key] += 1
                tokens.add(Tokens(key, [drawn], [logprob], [drawn_logprob]))
            if output.finished:
                tokens.reason = str(part.finish_reason)
                self._forget([key])
            news.append(tokens)
        return news

    def load(self, tensors: Iterator[Named]) -> None:
        """Replace every weight in place, then what vLLM made of them, then the cached prefixes."""
        if self._asleep:
            self._engine.wake_up(["weights"])
        arguments = {"weights_iterator": tensors, "is_checkpoint_format": True}
        self._engine.collective_rpc("reload_weights", kwargs=arguments)
        self.refresh_tied_heads()
        if self._asleep:
            self._engine.wake_up(["kv_cache"])
            self._asleep = False
        self.drop_prefixes()

    def adapt(self, tensors: Iterator[Named]) -> None:
        """Replace the adapter by vLLM's own way, but from memory, then drop the cached prefixes."""
        named = {name: tensor.clone() for name, tensor in tensors}
        self._engine.collective_rpc(lambda worker: put_adapter(worker.model_runner.lora_manager, named, self._rank))
        self.drop_prefixes()

    def drop_prefixes(self) -> None:
        """Forget the keys and values of the old policy."""
        if not self._engine.reset_prefix_cache():
            raise RuntimeError("the cached prefixes of the old weights could not be dropped: requests still run")

    def refresh_tied_heads(self) -> None:
        """A head tied to the embedding is skipped by vLLM's reload and would go on with its old packed copy."""
        (model,) = self._engine.collective_rpc(lambda worker: worker.get_model())
        embeddings = [module for module in model.modules() if isinstance(module, VocabParallelEmbedding)]
        pointers = [module.weight.data_ptr() for module in embeddings]
        for module in embeddings:
            if pointers.count(module.weight.data_ptr()) > 1:
                module.quant_method.process_weights_after_loading(module)

    def sleep(self) -> None:
        """Give weights and cache back; both come anew with the next weights."""
        if self._sleeps:
            self._engine.sleep(level=2)
            self._asleep = True

    def close(self) -> None:
        """End the engine."""
        self._engine.engine_core.shutdown()

    def _forget(self, keys: Sequence[int]) -> None:
        for key in keys:
            self._counts.pop(key, None)
            OwnDraw.drawn.pop(key, None)
            OwnDraw.requests.pop(key, None)


def put_adapter(manager: Any, tensors: dict[str, torch.Tensor], rank: int) -> None:
    """Make the one adapter of a worker from tensors and activate it. manager: the worker's `WorkerLoRAManager`.

    Raises RuntimeError for a layer that this vLLM does not adapt: it would be left out in silence.
    """
    held = manager._adapter_manager
    mapper = getattr(held.model, "hf_to_vllm_mapper", None)
    lora = LoRAModel.from_lora_tensors(
        ADAPTER.lora_int_id,
        tensors,
        PEFTHelper(r=rank, lora_alpha=rank, target_modules=[]),  # the scale is in B
        device=str(manager.device),
        dtype=manager.lora_config.lora_dtype,
        weights_mapper=None if mapper is None else mapper.get_rename_mapper(),
    )
    known = {*held.modules, *(part for parts in held.packed_modules.values() for part in parts)}
    if strange := sorted(set(lora.loras) - known):
        raise RuntimeError(f'vLLM does not adapt {strange[0]}; write rollout.vllm.lora = "merged"')
    held.remove_adapter(lora.id)
    held.add_adapter(lora)
    held.activate_adapter(lora.id)


def _arguments(options: Mapping[str, Any], folder: Path, sleeps: bool) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "model": str(folder),
        "skip_tokenizer_init": True,
        "load_format": "dummy",
        "generation_config": "vllm",
        "dtype": options["dtype"],
        "max_model_len": options["max_model_len"],
        "max_num_seqs": options["max_num_seqs"],
        "gpu_memory_utilization": options["gpu_memory_utilization"],
        "enforce_eager": options["enforce_eager"],
        "enable_prefix_caching": True,
        "enable_sleep_mode": sleeps,
        "async_scheduling": False,
        "disable_log_stats": True,
        "logits_processors": [OwnDraw],
        "seed": options["seed"],
    }
    if options["lora_rank"]:
        ranks = [rank for rank in get_args(MaxLoRARanks) if rank >= options["lora_rank"]]
        arguments |= {
            "enable_lora": True,
            "max_loras": 1,
            "max_lora_rank": ranks[0] if ranks else options["lora_rank"],
            "lora_target_modules": list(options["lora_modules"]),
        }
    cache_gib = options["kv_cache_gib"] or (CPU_CACHE_GIB if current_platform.is_cpu() else 0.0)
    if cache_gib:
        arguments["kv_cache_memory_bytes"] = int(cache_gib * (1 << 30))
    if current_platform.is_cpu():
        arguments["block_size"] = CPU_BLOCK
    return arguments
