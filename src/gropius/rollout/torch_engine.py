"""The engine in this process, on the trainer's own weights: continuous batching without a thread.

One coroutine schedules: it admits waiting requests while slots and budget last (longest first, the prompt of siblings
computed once), takes one decode step for all active rows, hands finished rows to their callers, and gives way to the
event loop, so that rewards run between steps.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from gropius.errors import EngineError, ModelError, did_you_mean
from gropius.models.load import LoadedModel
from gropius.rollout.batch import Batch, Row
from gropius.rollout.engine import check_request, empty_completion
from gropius.rollout.past import Past, Pasts
from gropius.rollout.paths import CachePath, DecodePath, SlotPath, State
from gropius.rollout.sampler import draw
from gropius.rollout.shadow import why_not
from gropius.types import Bound, Completion, Request

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
SMALL_MODEL = 20_000_000  # parameters; below it the conversions cost what bfloat16 products save
PREFILL_TOKENS = 8192
PAST_SHARE = 0.5  # of the token budget, for what is kept between turns
TOKEN_BUDGET = 1 << 15


@dataclass
class EngineStats:
    """What an engine has done since it was made. Seconds are of the model and the draws, not of waiting.

    tokens: drawn. prompt_tokens: of the prompts of all requests; prompt_tokens_computed: of those that were run;
    prompt_tokens_kept: of those that were still there from an earlier turn.
    """

    completions: int = 0
    decode_steps: int = 0
    tokens: int = 0
    decode_s: float = 0.0
    prompt_tokens: int = 0
    prompt_tokens_computed: int = 0
    prompt_tokens_kept: int = 0
    prompt_s: float = 0.0
    peak_rows: int = 0
    peak_cache_bytes: int = 0


class TorchEngine:
    """An `Engine` on a model of this process.

    token_budget: slots × positions that the key-value cache may hold at once; requests beyond it wait. Half as many
    positions again may be kept of responses between their turns.
    dtype: of the rollout's matrix products: "float32", "bfloat16", or "auto" (the model's own below 20 M parameters,
    else bfloat16; bfloat16 differs from the float32 trainer by some hundredths in a log-probability).
    path: "auto", "own" (the decode path of this package, for the Llama family) or "transformers".
    cuda_graphs: capture the steps of the own path on a GPU; without one it changes nothing.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        token_budget: int = TOKEN_BUDGET,
        dtype: str = "auto",
        path: str = "auto",
        cuda_graphs: bool = False,
    ) -> None:
        self.loaded = loaded
        self.token_budget = token_budget
        self.stats = EngineStats()
        self._path, self._description = _choose_path(loaded, dtype, path, cuda_graphs)
        self._vocabulary = int(cast(torch.Tensor, loaded.model.get_input_embeddings().weight).shape[0])
        self._batch = Batch(self._vocabulary, self._decode)
        self._waiting: list[Row] = []
        self._prompts: dict[tuple[int, ...], State] = {}
        self._pasts = Pasts(int(token_budget * PAST_SHARE))
        self._version, self._digest = 0, ""
        self._task: asyncio.Task[None] | None = None
        self._arrivals = 0
        self._some_cancelled = False
        self._bounds: dict[Bound, int] = {}
        self._dead = ""

    @property
    def busy(self) -> int:
        """Responses that are being drawn, or wait to be."""
        return len(self._batch) + len(self._waiting)

    def describe(self) -> str:
        """One line: which decode path is used, in which number format and why, and what its cache may take at most."""
        kept = int(self.token_budget * PAST_SHARE) if isinstance(self._path, SlotPath) else 0
        room = (self.token_budget + kept) * position_bytes(self.loaded.model, self._path)
        between = f", {kept:,} of them between turns" if kept else ""
        anew = "" if kept else "; a later turn reads its conversation from the beginning"
        return (
            f"{self._description}; keys and values of at most {self.token_budget + kept:,} positions{between} "
            f"({room / 1e6:,.0f} MB){anew}"
        )

    async def complete(self, request: Request) -> Completion:
        """Draw one response. See `Engine.complete`; raises DataError for a prompt that cannot be continued."""
        if self._dead:
            raise EngineError(self._dead)
        limit = check_request(request, self.loaded.context_length, self._vocabulary)
        self.stats.prompt_tokens += len(request.prompt_ids)
        if limit == 0 or not request.left:
            return empty_completion("cancelled" if limit else "length", self._version, self._digest)
        row = Row(request, limit, asyncio.get_running_loop().create_future(), self._arrivals)
        row.tighten()
        self._arrivals += 1
        self._waiting.append(row)
        if request.bound is not None:
            self._bounds.setdefault(request.bound, request.bound.limit)
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._run())
            self._task.add_done_callback(self._ended)
        try:
            return await row.future
        except asyncio.CancelledError:
            self._some_cancelled = True
            raise

    def set_policy(self, version: int, digest: str) -> None:
        """The trainer's weights changed: take them over. Raises EngineError while responses are being drawn."""
        if len(self._batch):
            raise EngineError(
                f"the weights were changed while {len(self._batch)} responses were being drawn: their first tokens "
                "would belong to another policy; wait for them or cancel them first"
            )
        self._prompts.clear()
        self._pasts.clear()
        self._path.refresh()
        self._version, self._digest = version, digest

    def rest(self) -> None:
        """What was kept between turns is dropped, and the slots, unless a response is still being drawn in them."""
        self._pasts.clear()
        if not len(self._batch):
            self._path.rest()

    async def close(self) -> None:
        """End all waiting calls with EngineError and refuse later ones."""
        self._dead = self._dead or "the engine was closed"
        if self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.wait([self._task])
        self._fail(EngineError(self._dead))

    async def _run(self) -> None:
        while self._waiting or len(self._batch):
            self._drop_cancelled()
            self._tighten()
            self._admit()
            if len(self._batch):
                self._step()
            await asyncio.sleep(0)
        self._bounds.clear()

    def _tighten(self) -> None:
        """Where a bound was lowered, let the rows under it know."""
        if all(bound.limit == seen for bound, seen in self._bounds.items()):
            return
        self._bounds = {bound: bound.limit for bound in self._bounds}
        for row in self._waiting:
            row.tighten()
        self._batch.tighten()

    def _ended(self, task: asyncio.Task[None]) -> None:
        """The scheduler ended: by itself, by a cancelled loop, or by a fault that every caller must hear of."""
        if task.cancelled():
            self._fail(EngineError(self._dead or "the event loop that the engine ran in was stopped"))
            return
        fault = task.exception()
        if fault is not None:
            self._dead = f"the rollout engine died: {type(fault).__name__}: {fault}"
            self._fail(EngineError(self._dead), fault)

    def _fail(self, error: EngineError, cause: BaseException | None = None) -> None:
        error.__cause__ = cause
        for row in [*self._waiting, *self._batch.rows]:
            if not row.future.done():
                row.future.set_exception(error)
        self._waiting.clear()
        self._prompts.clear()
        self._pasts.clear()
        self._keep(np.zeros(0, np.int64))

    def _drop_cancelled(self) -> None:
        if not self._some_cancelled:
            return
        self._some_cancelled = False
        self._waiting = [row for row in self._waiting if not row.future.done()]
        self._finish(np.array([row.future.done() for row in self._batch.rows], np.bool_))

    def _admit(self) -> None:
        """Let rows in, the longest expected first, while slots × positions stays within the budget."""
        if not self._waiting:
            return
        self._waiting.sort(key=lambda row: (-row.limit, row.order))
        positions = max((row.positions for row in self._batch.rows), default=1)
        rows = len(self._batch)
        taken = 0
        for row in self._waiting:
            positions = max(positions, row.positions)
            if rows + taken and (rows + taken + 1) * positions > self.token_budget:
                break
            taken += 1
        admitted, self._waiting = self._waiting[:taken], self._waiting[taken:]
        if admitted:
            self._start(admitted)

    def _start(self, rows: list[Row]) -> None:
        began = time.perf_counter()
        going_on = self._extend(rows)
        self._prefill(list(dict.fromkeys(row.request.prompt_ids for row in rows if row not in going_on)))
        states = [going_on[row] if row in going_on else self._prompts[row.request.prompt_ids] for row in rows]
        still_wanted = {row.request.prompt_ids for row in self._waiting}
        self._prompts = {prompt: state for prompt, state in self._prompts.items() if prompt in still_wanted}
        now = time.perf_counter()
        self.stats.prompt_s += now - began
        for row in rows:
            row.prompt_time_s, row.decode_started = now - began, now
        first = Batch(self._vocabulary, self._decode)
        first.add(rows)
        done = first.record(draw(torch.stack([state.logits for state in states]), first.rules, first.uniform()))
        for index in np.flatnonzero(done):
            if rows[index].request.goes_on and rows[index].finish_reason == "stop":
                self._keep_past(rows[index], self._path.past_of(states[index], first.fed(int(index))))
        self._hand_over(first, done)
        alive = np.flatnonzero(~done)
        if len(alive):
            positions = max(row.positions for row in [*self._batch.rows, *(rows[i] for i in alive)])
            self._path.start([states[i] for i in alive], positions, self.token_budget)
            self._batch.take(first, alive)
        self.stats.tokens += len(rows)
        self.stats.decode_s += time.perf_counter() - now
        self.stats.peak_rows = max(self.stats.peak_rows, len(self._batch))
        self.stats.peak_cache_bytes = max(self.stats.peak_cache_bytes, self._path.cache_bytes + self._pasts.bytes)

    def _extend(self, rows: Sequence[Row]) -> dict[Row, State]:
        """Run what is new of the rows that go on from a kept past, those of about the same length together."""
        found = [(row, self._pasts.take(row.request.stream, row.request.prompt_ids)) for row in rows]
        left = sorted(((row, past) for row, past in found if past is not None), key=lambda pair: len(pair[1].ids))
        states: dict[Row, State] = {}
        while left:
            taken = 1
            while taken < len(left) and (taken + 1) * len(left[taken][0].request.prompt_ids) <= PREFILL_TOKENS:
                taken += 1
            chunk, left = left[:taken], left[taken:]
            suffixes = [row.request.prompt_ids[len(past.ids) :] for row, past in chunk]
            new = self._path.extend([past for _, past in chunk], suffixes)
            states.update(zip((row for row, _ in chunk), new, strict=True))
            self.stats.prompt_tokens_computed += sum(map(len, suffixes))
            self.stats.prompt_tokens_kept += sum(len(past.ids) for _, past in chunk)
        return states

    def _keep_past(self, row: Row, past: Past | None) -> None:
        if past is not None:
            self._pasts.put(row.request.stream, past)

    def _prefill(self, prompts: Sequence[tuple[int, ...]]) -> None:
        """Run the prompts that are not at hand, those of about the same length together."""
        missing = sorted((prompt for prompt in prompts if prompt not in self._prompts), key=len)
        while missing:
            taken = 1
            while taken < len(missing) and (taken + 1) * len(missing[taken]) <= PREFILL_TOKENS:
                taken += 1
            chunk, missing = missing[:taken], missing[taken:]
            self._prompts.update(zip(chunk, self._path.prefill(chunk), strict=True))
            self.stats.prompt_tokens_computed += sum(map(len, chunk))

    def _step(self) -> None:
        began = time.perf_counter()
        batch = self._batch
        logits = self._path.step(batch.last_ids, batch.positions)
        done = batch.record(draw(logits, batch.rules, batch.uniform()))
        self.stats.decode_steps += 1
        self.stats.tokens += len(batch)
        self._finish(done)
        self.stats.decode_s += time.perf_counter() - began

    def _finish(self, done: NDArray[np.bool_]) -> None:
        if done.any():
            for index in np.flatnonzero(done):
                row = self._batch.rows[index]
                if row.request.goes_on and row.finish_reason == "stop":
                    self._keep_past(row, self._path.past(int(index), self._batch.fed(int(index))))
            self._hand_over(self._batch, done)
            alive = np.flatnonzero(~done)
            if not self._path.stable_order:
                # The last rows fill the holes: fewer rows move.
                kept = len(alive)
                order = np.arange(kept)
                order[done[:kept]] = alive[alive >= kept]
                alive = order
            self._keep(alive)

    def _keep(self, order: NDArray[np.int64]) -> None:
        positions = int(self._batch.positions.max()) + 1 if len(self._batch) else 0
        self._path.keep(order, positions)
        self._batch.keep(order)

    def _hand_over(self, batch: Batch, done: NDArray[np.bool_]) -> None:
        for index in np.flatnonzero(done):
            future = batch.rows[index].future
            if not future.done():
                future.set_result(batch.completion(int(index), self._version, self._digest))
                self.stats.completions += 1

    def _decode(self, ids: Sequence[int]) -> str:
        return cast(str, self.loaded.tokenizer.decode(list(ids), skip_special_tokens=False))


def position_bytes(model: PreTrainedModel, path: DecodePath) -> int:
    """Memory of the keys and values of one position, over all layers."""
    config = model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    held = path.decoder.cache_dtype if isinstance(path, SlotPath) else next(model.parameters()).dtype
    return int(2 * config.num_hidden_layers * heads * width * held.itemsize)


def _choose_path(loaded: LoadedModel, dtype: str, path: str, cuda_graphs: bool) -> tuple[DecodePath, str]:
    if path not in ("auto", "own", "transformers"):
        raise ModelError(f'engine path "{path}": choose from auto, own, transformers')
    if dtype != "auto" and dtype not in DTYPES:
        raise ModelError(f'engine dtype "{dtype}": {did_you_mean(dtype, [*DTYPES, "auto"])}')
    model = loaded.model
    own = next(model.parameters()).dtype
    reason = "asked for" if path == "transformers" else why_not(model)
    if reason:
        if path == "own":
            raise ModelError(f"the engine's own decode path does not fit this model: {reason}")
        if dtype != "auto" and DTYPES[dtype] != own:
            raise ModelError(f"engine dtype {dtype}: the transformers path runs the model's own tensors ({own})")
        return CachePath(model), f"decode path: transformers' own cache, {str(own)[6:]} ({reason})"
    size = sum(parameter.numel() for parameter in model.parameters())
    chosen = DTYPES[dtype] if dtype != "auto" else (own if size < SMALL_MODEL else torch.bfloat16)
    slots = SlotPath(model, chosen, cuda_graphs)
    graphs = ", steps captured as CUDA graphs" if slots.graphs is not None else ""
    return slots, f"decode path: own, {str(chosen)[6:]}{graphs} ({type(model).__name__}, {size:,} parameters)"
