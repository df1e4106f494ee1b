"""Two ways to run the model for an engine: its own decode path over slots, and transformers' own cache.

Both answer the same four calls, so the scheduler does not know which one it drives: a pass over prompts, the start of
rows from what that pass left, one token for every active row, and dropping rows.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from gropius.errors import ModelError
from gropius.rollout.decoder import FusedDecoder, PromptState, width_of
from gropius.rollout.graphs import StepGraphs
from gropius.rollout.past import Past
from gropius.rollout.shadow import Shadow
from gropius.rollout.shared import SHARE_FROM


class State(Protocol):
    """What a pass over one prompt leaves: its logits, and whatever the path needs to start rows from it."""

    @property
    def logits(self) -> Tensor:
        """[_V] after the prompt's last token."""
        ...


class DecodePath(Protocol):
    """The model as the scheduler sees it. Active rows are numbered 0 … _B − 1."""

    stable_order: bool  # True: rows that stay must keep their order when others are dropped

    def refresh(self) -> None:
        """The weights changed."""
        ...

    def prefill(self, prompts: Sequence[tuple[int, ...]]) -> Sequence[State]:
        """One state a prompt."""
        ...

    def extend(self, pasts: Sequence[Past], suffixes: Sequence[tuple[int, ...]]) -> Sequence[State]:
        """One state for each conversation that goes on from a past of this path by a suffix of at least one id."""
        ...

    def past(self, row: int, ids: tuple[int, ...]) -> Past | None:
        """What row `row` holds of the ids that it was fed, apart from its slot; None where the path keeps none."""
        ...

    def past_of(self, state: Any, ids: tuple[int, ...]) -> Past | None:
        """The same of a state that no row was started from."""
        ...

    def start(self, states: Sequence[Any], positions: int, budget: int) -> None:
        """Append one row for each state. positions: what any active row may need; budget: slots × positions at most."""
        ...

    def step(self, ids: NDArray[np.int64], positions: NDArray[np.int64]) -> Tensor:
        """Feed every active row its last token; logits [_B, _V]."""
        ...

    def keep(self, order: NDArray[np.int64], positions: int) -> None:
        """Keep the rows `order`, renumbered in that order; they use at most `positions` positions so far."""
        ...

    def rest(self) -> None:
        """No row is active: give the memory of keys and values back."""
        ...

    @property
    def cache_bytes(self) -> int:
        """Memory of keys and values now."""
        ...


class SlotPath:
    """The engine's own decode path (Llama, Mistral, Qwen2 and Qwen3 architectures)."""

    stable_order = False

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype, cuda_graphs: bool = False) -> None:
        self.decoder = FusedDecoder(Shadow(model, dtype))
        captured = cuda_graphs and self.decoder.shadow.device.type == "cuda"
        self.graphs = StepGraphs(self.decoder) if captured else None
        self._rows = 0

    def refresh(self) -> None:
        """Take the trainer's weights over."""
        self.decoder.shadow.refresh()
        if self.graphs is not None:
            self.graphs.clear()

    def prefill(self, prompts: Sequence[tuple[int, ...]]) -> Sequence[PromptState]:
        """One padded pass."""
        return self.decoder.prefill(prompts)

    def extend(self, pasts: Sequence[Past], suffixes: Sequence[tuple[int, ...]]) -> Sequence[PromptState]:
        """One padded pass over the suffixes."""
        return self.decoder.extend(pasts, suffixes)

    def past(self, row: int, ids: tuple[int, ...]) -> Past:
        """A copy of the slot, behind the row's shared prompt."""
        prompt = self.decoder.shared.prompt(row) if self.decoder.shared else None
        own = len(ids) - (0 if prompt is None else prompt.length)
        keys, values = self.decoder.keys[:, row, :, :own], self.decoder.values[:, row, :, :own]
        if prompt is None:
            return Past(ids, keys.clone(), values.clone())
        return Past(ids, torch.cat([prompt.keys, keys], dim=2), torch.cat([prompt.values, values], dim=2))

    def past_of(self, state: PromptState, ids: tuple[int, ...]) -> Past:
        """A copy of the state, which may share its memory with others."""
        return Past(ids, state.keys.clone(), state.values.clone())

    def start(self, states: Sequence[PromptState], positions: int, budget: int) -> None:
        """Hold each long prompt once beside its siblings' slots; copy a short one once into all of them."""
        siblings: dict[int, tuple[PromptState, list[int]]] = {}
        for slot, state in enumerate(states, start=self._rows):
            siblings.setdefault(id(state), (state, []))[1].append(slot)
        saved = {key: (len(slots) - 1) * state.length for key, (state, slots) in siblings.items()}
        shared = {key for key, positions in saved.items() if positions >= SHARE_FROM and self.graphs is None}
        self.decoder.shared.add([state if id(state) in shared else None for state in states])
        in_slots = positions - int(self.decoder.shared.lengths().min(initial=positions))
        self.decoder.reserve(self._rows + len(states), in_slots, self._rows, budget)
        for key, (state, slots) in siblings.items():
            if key not in shared:
                self.decoder.place(state, slots)
        self._rows += len(states)

    def step(self, ids: NDArray[np.int64], positions: NDArray[np.int64]) -> Tensor:
        """One token a slot."""
        device, step = self.decoder.shadow.device, self.decoder.step if self.graphs is None else self.graphs.step
        own = positions - self.decoder.shared.lengths() if self.decoder.shared else positions
        return step(torch.from_numpy(ids).to(device), torch.from_numpy(positions).to(device), width_of(int(own.max())))

    def keep(self, order: NDArray[np.int64], positions: int) -> None:
        """Move only the rows whose number changes."""
        moved = np.flatnonzero(order != np.arange(len(order)))
        if len(moved):
            self.decoder.move(order[moved].tolist(), moved.tolist(), positions)
        self.decoder.shared.keep(order)
        self._rows = len(order)

    def rest(self) -> None:
        """Give the slots back; captured steps go with them."""
        self.decoder.release()
        if self.graphs is not None:
            self.graphs.clear()

    @property
    def cache_bytes(self) -> int:
        """Memory of the slots and the shared prompts."""
        return self.decoder.cache_bytes


@dataclass(eq=False)
class CacheState:
    """One prompt in a cache that the prompts of one pass share. mask [_L]: 0 on the padding before the prompt."""

    logits: Tensor
    cache: Any
    row: int
    mask: Tensor


@dataclass(eq=False)
class Cohort:
    """Rows that started together: one cache of transformers, padded before the prompts, one mask."""

    cache: Any
    mask: Tensor
    size: int


class CachePath:
    """Any other decoder, through transformers' own cache and positions: correct for what transformers runs.

    Rows that started together step together; later ones form a cohort of their own and take their turn.
    """

    stable_order = True

    def __init__(self, model: PreTrainedModel) -> None:
        self.model: Any = model
        self.device: torch.device = next(model.parameters()).device
        self._cohorts: list[Cohort] = []
        # The argument and the field of the answer were called past_key_values before transformers called them cache.
        self._cache = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"

    def refresh(self) -> None:
        """Nothing to do: the trainer's own tensors are used."""

    @torch.inference_mode()
    def prefill(self, prompts: Sequence[tuple[int, ...]]) -> Sequence[CacheState]:
        """One pass, padded before the prompts so that all end in the last column."""
        longest = max(len(prompt) for prompt in prompts)
        ids = torch.zeros(len(prompts), longest, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, longest - len(prompt) :] = torch.tensor(prompt)
            mask[row, longest - len(prompt) :] = 1
        mask = mask.to(self.device)
        output = self._forward(ids.to(self.device), mask, None)
        cache = output.get(self._cache)
        if not hasattr(cache, "batch_select_indices"):
            raise ModelError(
                f"{type(self.model).__name__} keeps its past in a {type(cache).__name__}, whose rows cannot be told "
                "apart; it cannot be sampled from in batches"
            )
        logits = output.logits[:, -1].float()
        return [CacheState(logits[row], cache, row, mask[row]) for row in range(len(prompts))]

    def extend(self, pasts: Sequence[Past], suffixes: Sequence[tuple[int, ...]]) -> Sequence[CacheState]:
        """Never asked: nothing is kept."""
        raise NotImplementedError("transformers' caches are not kept between turns")

    def past(self, row: int, ids: tuple[int, ...]) -> None:
        """Nothing is kept: a later turn is read from its beginning."""

    def past_of(self, state: CacheState, ids: tuple[int, ...]) -> None:
        """Nothing is kept."""

    @torch.inference_mode()
    def start(self, states: Sequence[CacheState], positions: int, budget: int) -> None:
        """A cohort for every pass that the states come from; siblings get copies of their prompt's rows."""
        start = 0
        while start < len(states):
            end = start
            while end < len(states) and states[end].cache is states[start].cache:
                end += 1
            same = states[start:end]
            rows = torch.tensor([state.row for state in same], device=self.device)
            mask = torch.stack([state.mask for state in same])
            self._cohorts.append(Cohort(_rows_of(same[0].cache, rows), mask, len(same)))
            start = end

    @torch.inference_mode()
    def step(self, ids: NDArray[np.int64], positions: NDArray[np.int64]) -> Tensor:
        """One pass for every cohort."""
        logits, start = [], 0
        for cohort in self._cohorts:
            column = torch.from_numpy(ids[start : start + cohort.size, None]).to(self.device)
            cohort.mask = torch.nn.functional.pad(cohort.mask, (0, 1), value=1)
            output = self._forward(column, cohort.mask, cohort.cache)
            cohort.cache = output.get(self._cache)
            logits.append(output.logits[:, -1].float())
            start += cohort.size
        return torch.cat(logits)

    @torch.inference_mode()
    def keep(self, order: NDArray[np.int64], positions: int) -> None:
        """Drop rows from the caches of their cohorts."""
        start, cohorts = 0, []
        for cohort in self._cohorts:
            mine = order[(order >= start) & (order < start + cohort.size)] - start
            start += cohort.size
            if len(mine) == cohort.size:
                cohorts.append(cohort)
            elif len(mine):
                rows = torch.from_numpy(mine).to(self.device)
                cohorts.append(Cohort(_rows_of(cohort.cache, rows), cohort.mask[rows], len(mine)))
        self._cohorts = cohorts

    def rest(self) -> None:
        """Nothing to do: a cache goes with its last row."""

    @property
    def cache_bytes(self) -> int:
        """Memory of every cohort's keys and values."""
        layers = [layer for cohort in self._cohorts for layer in cohort.cache.layers]
        held = [t for layer in layers for t in (getattr(layer, "keys", None), getattr(layer, "values", None))]
        return sum(t.numel() * t.element_size() for t in held if isinstance(t, Tensor))

    def _forward(self, ids: Tensor, mask: Tensor, cache: Any) -> Any:
        positions = (mask.cumsum(-1) - 1).clamp_(min=0)[:, -ids.shape[1] :]
        training = self.model.training
        if training:
            self.model.eval()
        output = self.model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            use_cache=True,
            logits_to_keep=1,
            **{self._cache: cache},
        )
        if training:
            self.model.train()
        return output


def _rows_of(cache: Any, rows: Tensor) -> Any:
    """Some rows of a cache, as a cache of their own; the given one is left as it is."""
    taken = copy.copy(cache)
    taken.layers = [copy.copy(layer) for layer in cache.layers]
    taken.batch_select_indices(rows)
    return taken
