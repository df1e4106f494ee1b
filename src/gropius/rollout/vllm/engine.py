"""An `Engine` that draws with vLLM: the trainer's side. The worker draws; here is what it is asked, given and believed.

Weights go to the worker after every optimiser step, through memory, and a probe compares its log-probabilities with the
trainer's before a response is drawn from them. The random numbers, the sampling rules and both log-probabilities of a
token are this package's own also in the worker, so that a response is the same as from any other engine, up to the
rounding of the model.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from typing import Any, cast

import numpy as np
import torch

from gropius.errors import DataError, EngineError, ModelError
from gropius.models.load import LoadedModel
from gropius.rollout.engine import check_request, empty_completion
from gropius.rollout.vllm import probe
from gropius.rollout.vllm.link import Link
from gropius.rollout.vllm.place import Place
from gropius.rollout.vllm.weights import DTYPES, Named, SharedWeights, adapter_tensors, policy_tensors
from gropius.rollout.vllm.wire import Message
from gropius.types import Completion, FinishReason, Request


@dataclass(frozen=True)
class VllmOptions:
    """How vLLM is run. dtype: of its weights and products. sleeps: it gives its memory back while the trainer works.

    kv_cache_gib: memory of keys and values, 0 leaves it to gpu_memory_utilization. hang_s: silence while somebody waits
    after which it is given up. lora_rank: of an adapter that is handed over apart from the weights, 0 merges it;
    lora_modules: last parts of the names of the layers that it adapts.
    """

    dtype: str = "float32"
    max_model_len: int = 0
    max_num_seqs: int = 256
    gpu_memory_utilization: float = 0.4
    kv_cache_gib: float = 0.0
    enforce_eager: bool = False
    sleeps: bool = False
    seed: int = 0
    start_timeout_s: float = 600.0
    hang_s: float = 300.0
    lora_rank: int = 0
    lora_modules: tuple[str, ...] = ()


@dataclass
class Mailbox:
    """Weights by reference, for a worker in a thread of this process."""

    tensors: dict[str, list[Named]] = field(default_factory=dict)


class VllmEngine:
    """An `Engine` on a worker. place: makes it. mailbox: given when the worker is a thread of this process.

    bound: nats that the probe allows on a token. An adapter is merged into the weights that are handed over, or goes
    after them by itself and later alone (`VllmOptions.lora_rank`). Raises EngineError, with the worker's last words,
    when it does not start.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        options: VllmOptions,
        place: Callable[[], Place],
        *,
        bound: float,
        mailbox: Mailbox | None = None,
    ) -> None:
        if options.dtype not in DTYPES:
            raise ModelError(
                f'rollout.vllm.dtype = "{options.dtype}": write "auto", "float32", "bfloat16" or "float16"'
            )
        self.loaded = loaded
        self.options = options
        self.last_probe: probe.Probe | None = None
        self.handed_over_s = 0.0
        self._bound = bound
        self._mailbox = mailbox
        self._memory = SharedWeights()
        self._context = min(loaded.context_length, options.max_model_len or loaded.context_length)
        self._vocabulary = int(cast(torch.Tensor, loaded.model.get_input_embeddings().weight).shape[0])
        self._version, self._digest, self._holds = 0, "", False
        self._asleep = False
        self._link = Link(place(), options.hang_s)
        self.facts: dict[str, Any] = {}
        with contextlib.ExitStack() as undone:
            undone.callback(self._link.close)
            self.facts = self._link.start(self._start_message(), options.start_timeout_s)["facts"]
            undone.pop_all()

    def describe(self) -> str:
        """One line: which engine draws, where and in which format."""
        words = ", ".join(f"{name} {value}" for name, value in self.facts.items() if name not in ("name", "can_sleep"))
        return f"responses are drawn by {self.facts.get('name', 'another engine')}: {words}"

    async def complete(self, request: Request) -> Completion:
        """Draw one response. See `Engine.complete`; raises DataError for a prompt that cannot be continued."""
        if self._link.dead:
            raise EngineError(self._link.dead)
        limit = check_request(request, self._context, self._vocabulary)
        if limit == 0:
            return empty_completion("length", self._version, self._digest)
        key, future = self._request(request, limit)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            self._link.drop(key)
            raise

    def set_policy(self, version: int, digest: str) -> None:
        """Hand the trainer's weights over, and compare a few log-probabilities.

        Raises EngineError while responses are being drawn or when the worker fails; MismatchError when the engine does
        not give the trainer's log-probabilities afterwards.
        """
        if self._link.busy:
            raise EngineError(
                f"the weights were changed while {self._link.busy} responses were being drawn: their first tokens "
                "would belong to another policy; wait for them or cancel them first"
            )
        self._hand_over(version, digest)
        self._version, self._digest, self._holds, self._asleep = version, digest, True, False
        asked = probe.probe_requests(self._vocabulary, self._context, version)
        waiting = [self._request(request, request.sampling.max_tokens)[1] for request in asked]
        drawn = [future.result() for future in waiting]
        dtype = DTYPES[self.options.dtype]
        self.last_probe = probe.compare(self.loaded, dtype, asked, drawn)
        probe.require_agreement(self.last_probe, self._bound, str(self.facts.get("name", "the engine")), dtype)

    def rest(self) -> None:
        """Give the engine's memory back until the next hand-over, where it can and was asked to."""
        if self.facts.get("can_sleep") and not self._asleep and not self._link.busy:
            self._link.call("sleep", {})
            self._asleep, self._holds = True, False

    async def close(self) -> None:
        """End the worker and all it started; waiting calls end with EngineError, later ones are refused."""
        await asyncio.to_thread(self._link.close)
        self._memory.close()

    def _start_message(self) -> dict[str, Any]:
        config = self.loaded.model.config.to_dict()
        config["architectures"] = [type(self.loaded.model).__name__]
        options = asdict(self.options) | {"max_model_len": self._context}
        return {"config": _plain(config), "options": options}

    def _hand_over(self, version: int, digest: str) -> None:
        adapter = self.loaded.adapter if self.options.lora_rank else None
        self.handed_over_s, stamp = 0.0, {"version": version, "digest": digest}
        if adapter is None or not self._holds:
            self._give("weights", policy_tensors(self.loaded.model, merged=adapter is None), stamp)
        if adapter is not None:
            self._give("adapter", adapter_tensors(adapter), stamp)

    def _give(self, op: str, tensors: list[Named], stamp: dict[str, Any]) -> None:
        file, fields = None, dict(stamp)
        if self._mailbox is not None:
            self._mailbox.tensors["weights"] = tensors
            fields["mailbox"] = "weights"
        else:
            fields["tensors"], fresh = self._memory.write(tensors, DTYPES[self.options.dtype])
            file = self._memory.file if fresh else None
        self.handed_over_s += float(self._link.call(op, fields, file)["seconds"])

    def _request(self, request: Request, limit: int) -> tuple[int, Future[Completion]]:
        if not self._holds:
            raise EngineError("no weights were handed to vLLM yet (or since it slept): call set_policy first")
        sampling = request.sampling
        response = Response(self._vocabulary, sampling.stop_strings, self._decode)
        fields = {
            "prompt": list(request.prompt_ids),
            "limit": limit,
            "stop": [token for token in sampling.stop_token_ids if 0 <= token < self._vocabulary],
            "rules": [sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p],
            "stream": list(request.stream),
            "offset": request.offset,
            "streams": bool(sampling.stop_strings),
        }
        return self._link.request(fields, response.hear)

    def _decode(self, ids: Sequence[int]) -> str:
        return cast(str, self.loaded.tokenizer.decode(list(ids), skip_special_tokens=False))


@dataclass
class Response:
    """One response as it arrives, in one message or token by token.

    A stop string ends it at the token that completes the string; what the worker drew beyond is thrown away.
    """

    vocabulary: int
    stop_strings: tuple[str, ...]
    decode: Callable[[Sequence[int]], str]
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    drawn: list[float] = field(default_factory=list)

    def hear(self, message: Message) -> Completion | None:
        """Take a message; the completion when the response is over. Raises DataError when it was refused."""
        if message["op"] == "refused":
            raise DataError(f"vLLM refuses the request: {message['error']}")
        had = len(self.ids)
        self.ids += [int(token) for token in message["ids"]]
        self.logprobs += map(float, message["logprobs"])
        self.drawn += map(float, message["drawn"])
        if not len(self.ids) == len(self.logprobs) == len(self.drawn):
            raise ValueError("ids and log-probabilities of different lengths")
        if any(not 0 <= token < self.vocabulary for token in self.ids[had:]):
            raise ValueError(f"an id outside the vocabulary of {self.vocabulary}")
        reason = str(message["reason"])
        if reason not in ("", "stop", "length"):
            raise ValueError(f"finish reason {reason!r}")
        end = self._end(had)
        if end is None and not reason:
            return None
        length = len(self.ids) if end is None else end
        return Completion(
            token_ids=np.array(self.ids[:length], np.int64),
            logprobs=np.array(self.logprobs[:length], np.float32),
            drawn_logprobs=np.array(self.drawn[:length], np.float32),
            finish_reason=cast(FinishReason, "stop" if end is not None else reason),
            policy_version=int(message["version"]),
            weight_digest=str(message["digest"]),
            prompt_time_s=float(message["prompt_s"]),
            decode_time_s=float(message["decode_s"]),
        )

    def _end(self, had: int) -> int | None:
        """The length at which a stop string is complete, looking at the tokens from `had` on."""
        if not self.stop_strings:
            return None
        for length in range(had + 1, len(self.ids) + 1):
            text = self.decode(self.ids[:length])
            if any(stop in text for stop in self.stop_strings):
                return length
        return None


def _plain(value: Any) -> Any:
    """A configuration as JSON holds it: types of torch by their name, what is not finite as text."""
    if isinstance(value, dict):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, torch.dtype):
        return str(value)[6:]
    if isinstance(value, float) and not np.isfinite(value):
        return str(value)
    return value if isinstance(value, str | int | float | bool) or value is None else str(value)
