"""After a hand-over: does the engine give a token the log-probability that the trainer gives it?

The engine draws a few tokens after prompts that change with every version; the trainer runs the same ids in full. A
weight that did not arrive, or whose packed copy is an old one, shows in them. An engine starts with weights of noise,
so the first hand-over shows whether *every* tensor that matters is replaced.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gropius.errors import MismatchError
from gropius.models.load import LoadedModel
from gropius.types import Completion, Request, Sampling

PROMPTS, PROMPT_TOKENS, DRAWN_TOKENS = 4, 12, 8
FLOAT32_NOISE, HALF_NOISE = 1e-3, 0.5  # nats that rounding explains on a token
MEAN_SHARE = 0.1  # of the bound: as for the tokens that are trained on


@dataclass(frozen=True)
class Probe:
    """|log π_trainer − log π_engine| over the probe's tokens, in nats."""

    mean: float
    largest: float
    tokens: int


def probe_requests(vocabulary: int, context: int, version: int) -> list[Request]:
    """Requests with random prompts, other ones for every version."""
    length = max(1, min(PROMPT_TOKENS, context // 2))
    limit = max(1, min(DRAWN_TOKENS, context - length))
    ids = np.random.default_rng([version, vocabulary]).integers(0, vocabulary, (PROMPTS, length))
    stream = (version, -1)  # no response of a run has a negative step
    return [Request(tuple(row), Sampling(limit), (*stream, n)) for n, row in enumerate(ids.tolist())]


def compare(loaded: LoadedModel, dtype: torch.dtype, asked: Sequence[Request], drawn: Sequence[Completion]) -> Probe:
    """The engine's numbers against the trainer's full forward pass, computed in `dtype`."""
    pairs = zip(asked, drawn, strict=True)
    return differences([trainer_logprobs(loaded, dtype, request, found) for request, found in pairs], drawn)


def differences(ours: Sequence[NDArray[Any]], drawn: Sequence[Completion]) -> Probe:
    """The trainer's numbers, [_T] each, against the engine's. A difference that is no number is infinite."""
    gaps = [np.abs(mine - completion.logprobs) for mine, completion in zip(ours, drawn, strict=True)]
    every = np.concatenate(gaps)
    every[~np.isfinite(every)] = np.inf
    return Probe(float(every.mean()), float(every.max()), len(every))


def require_agreement(found: Probe, bound: float, engine: str, dtype: torch.dtype) -> None:
    """Raise MismatchError when the largest difference is beyond the bound, or the mean beyond a tenth of it.

    dtype: what both sides compute in; it says how far rounding can go.
    """
    if found.largest <= bound and found.mean <= MEAN_SHARE * bound:
        return
    raise MismatchError(
        f"{engine} does not hold the policy's weights: right after they were handed over, its log-probabilities of "
        f"{found.tokens} tokens differ from the trainer's by {found.mean:.3g} nats on average and {found.largest:.3g} "
        f"at most (train.mismatch_bound = {bound:g}, a tenth of it for the mean). Likely cause: "
        + (
            "rounding; compute in the same format on both sides (rollout.vllm.dtype, model.dtype), or raise the bound "
            "and declare a correction (objective.ratio.correction)"
            if found.largest <= (FLOAT32_NOISE if dtype == torch.float32 else HALF_NOISE)
            else "a tensor that this engine or version does not take over (a packed copy of a tied head is one), or "
            "an architecture that it computes in another way; nothing was trained on its tokens"
        )
    )


@torch.no_grad()
def trainer_logprobs(
    loaded: LoadedModel, dtype: torch.dtype, request: Request, drawn: Completion
) -> NDArray[np.float32]:
    """[_T] of the tokens that were drawn, by a full forward pass computed in `dtype`."""
    model = loaded.model
    ids = torch.tensor([[*request.prompt_ids, *drawn.token_ids.tolist()]], device=model.device)
    half = dtype in (torch.bfloat16, torch.float16) and next(model.parameters()).dtype == torch.float32
    training = model.training
    model.eval()
    with torch.autocast(model.device.type, dtype=dtype) if half else contextlib.nullcontext():
        logits = model(input_ids=ids, use_cache=False).logits[0].float()
    model.train(training)
    start = len(request.prompt_ids)
    whole = torch.log_softmax(logits[start - 1 : -1], dim=-1)
    return whole.gather(1, ids[0, start:, None])[:, 0].cpu().numpy()
