"""The policy's forward pass over packs: hidden states at the tokens that matter, then their log-probabilities.

Linear layers run on unique tokens. The head runs on loss positions only and in chunks. The temperature is applied there
and nowhere else. An architecture that cannot be packed runs padded rows: slower, the same numbers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel

from gropius.errors import ModelError
from gropius.models.logprobs import Head, backbone, token_logprobs
from gropius.train.attention import layout, packed_attention
from gropius.train.pack import Pack, pack
from gropius.train.sequences import TrainSequence
from gropius.train.sharded import Sharded
from gropius.train.shares import nothing
from gropius.train.tree import Layout
from gropius.train.varlen import HALF, KERNELS, choose

Array32 = NDArray[np.float32]
T = TypeVar("T")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, eq=False)
class Scores:
    """Per sequence, in the order packed: log-probabilities [_T] and entropies [_T] (nats), 0 at masked tokens.

    None for a sequence that was not run.
    """

    logprobs: list[Array32 | None]
    entropies: list[Array32 | None]


@dataclass(frozen=True, eq=False)
class Forward:
    """A model made ready to be run over packs. Make one with `Forward.of`; it holds no copy of any weight.

    packed: False where the architecture runs padded rows. note: one line for a person, "" when packed.
    compute_dtype: "bfloat16" runs matrix products under autocast while the weights stay what they are.
    recompute: activations of each layer are computed again in the backward pass instead of kept. kernel: what computes
    packed attention, one of `varlen.KERNELS`; why: why it is not flash attention, where that could be wanted. sharded:
    the way over weights that are divided over ranks. within: while it lasts the model is the one to score with, where
    that is not the one that is trained (an adapter off).
    """

    model: PreTrainedModel
    body: nn.Module
    head: Head
    packed: bool
    note: str = ""
    compute_dtype: str = "float32"
    float32_head: bool = False
    recompute: bool = False
    kernel: str = "blocks"
    why: str = ""
    sharded: Sharded | None = None
    within: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext

    @classmethod
    def of(
        cls,
        model: PreTrainedModel,
        *,
        compute_dtype: str = "float32",
        float32_head: bool = False,
        packed: bool = True,
        recompute: bool = False,
    ) -> Forward:
        """Check once, on a few tokens, that packed and plain rows give the same numbers; fall back to plain rows.

        packed = False asks for plain rows. Errors: ModelError for a head that is not known, or a compute dtype.
        """
        if compute_dtype not in DTYPES:
            raise ModelError(f'compute dtype "{compute_dtype}": write "float32" or "bfloat16"')
        if recompute:
            _recompute(model)
        head = Head.of(model)
        chosen, why = choose(head.weight.device, _attention_dtype(head, compute_dtype))
        made = cls(model, backbone(model), head, packed, "", compute_dtype, float32_head, recompute, chosen, why)
        if not packed:
            return made
        fault = _fault(made)
        if fault and chosen == "flash":
            made = dataclasses.replace(made, kernel="sdpa", why=f"flash attention does not fit: {fault}")
            fault = _fault(made)
        if fault:
            note = f"{type(model).__name__} runs padded rows, one prompt a response: {fault}"
            return dataclasses.replace(made, packed=False, note=note)
        return made

    def describe(self) -> str:
        """One line: how sequences are laid out, and what computes their attention."""
        if not self.packed:
            return self.note or "training runs padded rows, as asked"
        return f"training runs packs, attention by {KERNELS[self.kernel]}{f' ({self.why})' if self.why else ''}"

    def logprobs(self, pack: Pack, *, temperature: float = 1.0, entropy: bool = False) -> tuple[Tensor, Tensor | None]:
        """[_S] the log-probability of every loss token of the pack, differentiable, and the entropies when asked."""
        return self.on_weights(lambda way: way.compute(pack, temperature, entropy))

    def hidden(self, pack: Pack) -> Tensor:
        """[_S, d] the hidden states that predict the loss tokens, differentiable: what a value head reads."""
        return self.on_weights(lambda way: way.states(pack))

    def on_weights(self, work: Callable[[Forward], T]) -> T:
        """What `work` makes of this way over whole weights. Where ranks divide them, all call it together."""
        if self.sharded is None:
            return work(self)
        made: T = self.sharded(work)
        return made

    def compute(self, pack: Pack, temperature: float, entropy: bool) -> tuple[Tensor, Tensor | None]:
        """`logprobs` on the weights at hand."""
        device = self.head.weight.device
        with self.running(), self._autocast():
            hidden = self._hidden(pack) if self.packed else self._padded_hidden(pack)
            return token_logprobs(
                hidden,
                self.head,
                torch.from_numpy(pack.targets).to(device),
                temperature=temperature,
                entropy=entropy,
                float32_head=self.float32_head,
            )

    def states(self, pack: Pack) -> Tensor:
        """`hidden` on the weights at hand."""
        with self.running(), self._autocast():
            return self._hidden(pack) if self.packed else self._padded_hidden(pack)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """The model set up for packs. With `recompute`, the backward pass must happen inside; may be nested."""
        was_training = self.model.training
        with packed_attention(self.model) if self.packed else contextlib.nullcontext():
            if self.recompute and not was_training:
                self.model.train()  # what the library asks of a model that recomputes; no dropout is left in it
            try:
                yield
            finally:
                if self.recompute and not was_training:
                    self.model.train(False)

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self.compute_dtype == "float32" or self.head.weight.dtype == torch.bfloat16:
            return contextlib.nullcontext()
        return torch.autocast(self.head.weight.device.type, dtype=DTYPES[self.compute_dtype])

    def _hidden(self, pack: Pack) -> Tensor:
        """[_S, d] hidden states that predict the loss tokens."""
        device = self.head.weight.device
        all_states = self._run(pack, layout(pack, device, kernel=self.kernel))
        return all_states[0].index_select(0, torch.from_numpy(pack.source).to(device))

    def _run(self, pack: Pack, where: Layout) -> Tensor:
        device = self.head.weight.device
        out = self.body(
            input_ids=torch.from_numpy(pack.ids)[None].to(device),
            position_ids=torch.from_numpy(pack.positions)[None].to(device),
            attention_mask=None,
            use_cache=False,
            pack_layout=where,
        )
        hidden: Tensor = out.last_hidden_state
        return hidden

    def _padded_hidden(self, pack: Pack) -> Tensor:
        """The same hidden states from padded rows: every sequence in full, right-padded to the longest."""
        device = self.head.weight.device
        rows = [sequence.run_ids for sequence in pack.sequences]
        width = max(len(row) for row in rows)
        ids, real = np.zeros((len(rows), width), np.int64), np.zeros((len(rows), width), np.int64)
        flat = []
        for n, (row, sequence) in enumerate(zip(rows, pack.sequences, strict=True)):
            ids[n, : len(row)], real[n, : len(row)] = row, 1
            flat.append(n * width + len(sequence.prompt_ids) + sequence.loss_positions - 1)
        out = self.body(
            input_ids=torch.from_numpy(ids).to(device),
            attention_mask=torch.from_numpy(real).to(device),
            use_cache=False,
        )
        hidden: Tensor = out.last_hidden_state
        return hidden.flatten(0, 1).index_select(0, torch.from_numpy(np.concatenate(flat)).to(device))


def _attention_dtype(head: Head, compute_dtype: str) -> torch.dtype:
    """What attention computes in: the weights' own 16 bits, or what autocast makes of 32."""
    return head.weight.dtype if head.weight.dtype in HALF else DTYPES[compute_dtype]


def _recompute(model: PreTrainedModel) -> None:
    """Switch recomputation on by the name that every transformers 5 knows; later ones warn that it will be renamed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        model.gradient_checkpointing_enable({"use_reentrant": False})


@torch.no_grad()
def score(
    forward: Forward, packs: Sequence[Pack | None], *, count: int, temperature: float, entropy: bool = False
) -> Scores:
    """Log-probabilities (and entropies) of every packed sequence, without gradients; lists of `count` entries.

    A pack that is None is run for the sake of the other ranks, and nothing comes of it.
    """
    logprobs: list[Array32 | None] = [None] * count
    entropies: list[Array32 | None] = [None] * count
    with forward.within():
        for one in packs:
            values, spread = forward.logprobs(one or nothing(), temperature=temperature, entropy=entropy)
            if one is None:
                continue
            scatter(one, values, logprobs)
            if spread is not None:
                scatter(one, spread, entropies)
    return Scores(logprobs, entropies)


def scatter(pack: Pack, values: Tensor, into: list[Any]) -> None:
    """Write [_S] numbers of a pack as one [_T] array a sequence, 0 at masked tokens."""
    flat = values.detach().to("cpu", torch.float64 if values.dtype == torch.float64 else torch.float32).numpy()
    start = 0
    for sequence, i in zip(pack.sequences, pack.index, strict=True):
        own = sequence.loss_positions
        row = np.zeros(len(sequence.mask), flat.dtype)
        row[own] = flat[start : start + len(own)]
        into[i] = row
        start += len(own)


def _probe(vocabulary: int) -> list[TrainSequence]:
    """Two prompts, five answers, one of them ending another's: every kind of sharing in 40 tokens."""
    stream = np.random.default_rng(7)

    def draw(size: int) -> NDArray[np.int64]:
        return stream.integers(0, vocabulary, size)

    first, second, start = draw(5), draw(3), draw(2)
    rows = [
        (first, draw(4)),
        (first, np.concatenate([start, draw(3)])),
        (first, np.concatenate([start, draw(1)])),
        (second, draw(6)),
        (second, draw(2)),
    ]
    return [
        TrainSequence(
            group_id=str(len(prompt)),
            member=n,
            episode=n,
            prompt_ids=prompt,
            response_ids=response,
            mask=np.ones(len(response), np.bool_),
            sampler_logprobs=np.zeros(len(response), np.float32),
            advantage=np.zeros(len(response)),
            weight=np.zeros(len(response)),
            keep=np.ones(len(response), np.bool_),
        )
        for n, (prompt, response) in enumerate(rows)
    ]


@torch.no_grad()
def _fault(forward: Forward) -> str:
    """Why this model cannot be packed, or "". Compares packed with plain hidden states and the windows asked for."""
    model = forward.model
    (one,) = pack(_probe(forward.head.weight.shape[0]), budget_tokens=1 << 20)
    where = layout(one, forward.head.weight.device, block_tokens=8, kernel=forward.kernel)
    half = forward.kernel == "flash"  # which computes in no other format, so that both rows are compared in it
    context = forward._autocast if half else contextlib.nullcontext
    was_training = model.training
    model.train(False)
    try:
        with packed_attention(model), context():
            packed = forward._run(one, where)[0]
            packed = packed.index_select(0, torch.from_numpy(one.source).to(packed.device))
        with context():
            plain = forward._padded_hidden(one)
    except (ModelError, TypeError, ValueError, LookupError, RuntimeError) as error:  # an architecture we do not know
        return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    finally:
        model.train(was_training)
    wanted = _windows(model)
    if wanted is None or where.windows != wanted:
        return "its layers do not say which tokens they attend to"
    scale = float(plain.float().abs().max())
    bound = 5e-2 if half else {torch.float64: 1e-9, torch.float32: 1e-4}.get(packed.dtype, 5e-2)
    difference = float((packed - plain).float().abs().max())
    if not difference <= bound * max(scale, 1e-6):
        return f"packed and plain rows differ by {difference:.2g}"
    return ""


def _windows(model: PreTrainedModel) -> list[int | None] | None:
    """The sliding window of each layer as the config declares it; None for layers that are not plain attention."""
    config = model.config.get_text_config()
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        return [window] * config.num_hidden_layers
    known = {"full_attention": None, "sliding_attention": window}
    if not set(kinds) <= set(known):
        return None
    return [known[kind] for kind in kinds]
