"""Memory and disk by arithmetic: a run that cannot fit is refused before it starts. Pure functions, no torch."""

from __future__ import annotations

from dataclasses import dataclass

from gropius.errors import RecipeError
from gropius.recipe.resolve import Resolved
from gropius.recipe.schema import TinyTable

BYTES_PER_VALUE = 4  # master weights, gradients and moments are float32, whatever model.dtype computes in


@dataclass(frozen=True)
class Machine:
    """What there is: memory that the model may use (of the device it runs on), and free disk where `out` lies."""

    memory_bytes: int
    disk_free_bytes: int


def tiny_parameters(shape: TinyTable, vocabulary: int) -> int:
    """Parameters of the built-in Llama with tied embeddings: V h + layers (2 h² + 2 h k + 3 h m + 2 h) + h.

    h hidden, k width of the key/value heads, m mlp, V vocabulary.

    >>> tiny_parameters(TinyTable(hidden=4, layers=1, heads=2, kv_heads=1, mlp=8, context=16), vocabulary=10)
    196
    """
    hidden, kv_width = shape.hidden, shape.hidden // shape.heads * shape.kv_heads
    layer = 2 * hidden**2 + 2 * hidden * kv_width + 3 * hidden * shape.mlp + 2 * hidden
    return vocabulary * hidden + shape.layers * layer + hidden


def training_bytes(
    parameters: int,
    *,
    reference: bool,
    critic: bool = False,
    trained: int | None = None,
    moments: int = 2 * BYTES_PER_VALUE,
) -> int:
    """The least that training holds: weights, gradients, both AdamW moments, and the reference if there is one.

    critic: on a trunk of its own, which has all of these too. trained: parameters of an adapter beside frozen ones
    (None: all are trained); of frozen ones the weights alone are held, and the reference is a copy of the adapter.
    moments: bytes of both, a parameter. Activations come on top; they depend on `train.pack_tokens`.

    >>> training_bytes(1_000, reference=False)
    16000
    >>> training_bytes(1_000, reference=True, trained=10)
    4160
    """
    trained = parameters if trained is None else trained
    own = BYTES_PER_VALUE * parameters + trained * (BYTES_PER_VALUE * (2 if reference else 1) + moments)
    return own + (parameters * (2 * BYTES_PER_VALUE + moments) if critic else 0)


def checkpoint_bytes(parameters: int, *, reference: bool, critic: int = 0) -> int:
    """One checkpoint: what is trained, both AdamW moments, the reference and a critic's own trunk, if there is one.

    parameters: those that are trained. critic: parameters of the critic's own trunk.
    """
    return BYTES_PER_VALUE * (parameters * (4 if reference else 3) + 3 * critic)


def own_critic(resolved: Resolved) -> bool:
    """True when a critic is trained on a trunk of its own."""
    return resolved.objective.needs_critic and resolved.critic.trunk == "own"


def refuse_what_cannot_fit(
    resolved: Resolved, parameters: int, machine: Machine, *, trained: int | None = None
) -> None:
    """Refuse a run whose weights, gradients and moments exceed the memory, or whose kept checkpoints exceed the disk.

    trained: parameters of an adapter (None: all). One checkpoint more than is kept lies on the disk while the oldest is
    not yet deleted. Errors: RecipeError with the estimate and what to write instead.
    """
    train = resolved.train
    reference, critic = resolved.derived.needs_reference, own_critic(resolved)
    needed = training_bytes(
        parameters,
        reference=reference,
        critic=critic,
        trained=trained,
        moments=0 if train.offload else 2 if train.optimiser == "adamw_8bit" else 2 * BYTES_PER_VALUE,
    )
    if needed > machine.memory_bytes:
        raise RecipeError(
            f"model.source: {parameters:,} parameters need at least {_size(needed)} to train "
            f"(weights, gradients, two moments{', reference' if reference else ''}"
            f"{', a critic of its own' if critic else ''}), and there "
            f"are {_size(machine.memory_bytes)}; choose a smaller model"
        )
    kept = resolved.checkpoint.keep_last + 1 if resolved.checkpoint.every else int(resolved.checkpoint.final)
    saved = parameters if trained is None else trained
    needed = kept * checkpoint_bytes(saved, reference=reference, critic=parameters if critic else 0)
    if needed > machine.disk_free_bytes:
        raise RecipeError(
            f"checkpoint.keep_last: {kept} checkpoints of {saved:,} parameters need {_size(needed)}, and "
            f"{resolved.out} has {_size(machine.disk_free_bytes)} free; keep fewer, or write another out"
        )


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"
