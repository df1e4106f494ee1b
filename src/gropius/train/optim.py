"""AdamW with a schedule and gradient clipping; everything it knows can be written down and put back."""

from __future__ import annotations

import dataclasses
import importlib.util
import logging
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gropius.errors import RecipeError, did_you_mean
from gropius.recipe.schema import CriticTable, SftTable, TrainTable
from gropius.train.clip import clip, total_norm


@dataclass(frozen=True)
class OptimiserSettings:
    """learning_rate: at the top of the schedule. total_steps: optimiser steps of the whole run, for linear and cosine.

    warmup_steps: linear from learning_rate/warmup_steps at the first step. final_ratio: learning rate at the end over
    learning_rate. weight_decay: on matrices only. grad_clip: bound on the global gradient norm; 0 is off.
    kind: which of KINDS. offload: the moments lie in the CPU's memory and are paged to the GPU as they are used.
    """

    learning_rate: float = 1e-5
    total_steps: int = 0
    warmup_steps: int = 0
    schedule: str = "constant"
    final_ratio: float = 0.0
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999
    adam_epsilon: float = 1e-8
    grad_clip: float = 1.0
    kind: str = "adamw"
    offload: bool = False


def settings_of(
    table: TrainTable | SftTable | CriticTable, train: TrainTable, per_step: int = 1, steps: int = 0
) -> OptimiserSettings:
    """What a table of the recipe says of the optimiser; moments are kept as `train` says.

    per_step: optimiser steps in one of its steps; steps: how many of these there are, where the table has none of its
    own.
    """
    own = {field.name for field in dataclasses.fields(OptimiserSettings)} & set(type(table).model_fields)
    same = {name: getattr(table, name) for name in sorted(own - {"warmup_steps"})}
    same |= {"kind": train.optimiser, "offload": train.offload}
    total = steps if isinstance(table, CriticTable) else table.steps
    return OptimiserSettings(**same, total_steps=total * per_step, warmup_steps=table.warmup_steps * per_step)


def _constant(progress: float, final_ratio: float) -> float:
    return 1.0


def _linear(progress: float, final_ratio: float) -> float:
    return 1.0 - (1.0 - final_ratio) * progress


def _cosine(progress: float, final_ratio: float) -> float:
    return final_ratio + (1.0 - final_ratio) * 0.5 * (1.0 + math.cos(math.pi * progress))


SCHEDULES: dict[str, Callable[[float, float], float]] = {"constant": _constant, "linear": _linear, "cosine": _cosine}


def learning_rate(settings: OptimiserSettings, step: int) -> float:
    """The learning rate of optimiser step number `step`, counted from 0.

    Warm-up: lr · (step + 1)/warmup_steps. After it, progress runs from 0 at the first step to 1 at the last.

    >>> s = OptimiserSettings(learning_rate=1.0, total_steps=12, warmup_steps=2, schedule="linear", final_ratio=0.1)
    >>> [round(learning_rate(s, n), 3) for n in (0, 1, 2, 11, 99)]
    [0.5, 1.0, 1.0, 0.1, 0.1]
    """
    if step < settings.warmup_steps:
        return settings.learning_rate * (step + 1) / settings.warmup_steps
    span = max(1, settings.total_steps - 1 - settings.warmup_steps)
    progress = min(1.0, (step - settings.warmup_steps) / span)
    return settings.learning_rate * SCHEDULES[settings.schedule](progress, settings.final_ratio)


@dataclass(frozen=True)
class StepInfo:
    """What one optimiser step did. grad_norm: before clipping. taken: False when the norm was not finite."""

    grad_norm: float
    learning_rate: float
    taken: bool


Groups = list[dict[str, Any]]


def _adamw(groups: Groups, settings: OptimiserSettings) -> torch.optim.Optimizer:
    """PyTorch's own, fused: one kernel for all parameters; offloaded, the same update on paged moments."""
    if settings.offload:
        found: torch.optim.Optimizer = _bitsandbytes().PagedAdamW32bit(groups, **_numbers(settings))
        return found
    return torch.optim.AdamW(groups, fused=True, **_numbers(settings))


def _adamw_8bit(groups: Groups, settings: OptimiserSettings) -> torch.optim.Optimizer:
    """The moments in blocks of 256 numbers of 8 bits; parameters of fewer than 4096 numbers keep 32."""
    library = _bitsandbytes()
    make = library.PagedAdamW8bit if settings.offload else library.AdamW8bit
    found: torch.optim.Optimizer = make(groups, **_numbers(settings))
    return found


KINDS: dict[str, Callable[[Groups, OptimiserSettings], torch.optim.Optimizer]] = {
    "adamw": _adamw,
    "adamw_8bit": _adamw_8bit,
}


def _numbers(settings: OptimiserSettings) -> dict[str, Any]:
    return {
        "lr": settings.learning_rate,
        "betas": (settings.beta1, settings.beta2),
        "eps": settings.adam_epsilon,
    }


def _on_a_gpu(parameters: Iterable[nn.Parameter]) -> bool:
    return any(p.is_cuda for p in parameters)


def _bitsandbytes() -> Any:
    if importlib.util.find_spec("bitsandbytes") is None:
        raise RecipeError(
            "train.optimiser: moments in 8 bits or in the CPU's memory need the package bitsandbytes: "
            "pip install 'gropius[optim]'"
        )
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it tells of kernels that are not used here
    import bitsandbytes.optim

    return bitsandbytes.optim


class Optimiser:
    """AdamW over a model's trainable parameters. `steps` counts the optimiser steps taken.

    Weight decay falls on parameters of two or more dimensions. Errors: RecipeError for an unknown schedule or kind, a
    package that is not installed, and moments to be offloaded from a model that lies in the CPU's memory itself.
    """

    def __init__(self, model: nn.Module, settings: OptimiserSettings):
        if settings.schedule not in SCHEDULES:
            hint = did_you_mean(settings.schedule, SCHEDULES)
            raise RecipeError(f'train.schedule = "{settings.schedule}" is not a schedule; {hint}')
        self.settings, self.steps = settings, 0
        self.named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._names = {id(p): name for name, p in self.named.items()}
        if settings.kind not in KINDS:
            hint = did_you_mean(settings.kind, KINDS)
            raise RecipeError(f'train.optimiser = "{settings.kind}" is not an optimiser; {hint}')
        if settings.offload and not _on_a_gpu(self.named.values()):
            raise RecipeError(
                "train.offload = true frees a GPU's memory, and this model lies in the CPU's; remove it, or write "
                'model.device = "cuda" on a machine that has one'
            )
        groups = [
            {"params": [p for p in self.named.values() if p.ndim >= 2], "weight_decay": settings.weight_decay},
            {"params": [p for p in self.named.values() if p.ndim < 2], "weight_decay": 0.0},
        ]
        self._adam: Any = KINDS[settings.kind]([group for group in groups if group["params"]], settings)

    @property
    def _ours(self) -> bool:
        """True when the moments are PyTorch's own, not those of a library."""
        return "exp_avg" in MOMENTS[self.settings.kind, self.settings.offload]

    @property
    def parameters(self) -> Iterable[nn.Parameter]:
        """The trainable parameters, in the model's order."""
        return self.named.values()

    def zero(self) -> None:
        """Forget the accumulated gradient."""
        self._adam.zero_grad(set_to_none=True)

    def step(self) -> StepInfo:
        """Clip the accumulated gradient, take one step, forget the gradient.

        A norm that is not finite changes nothing: no weight, no moment, no count.
        """
        rate = learning_rate(self.settings, self.steps)
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        norm = total_norm(gradients)
        taken = math.isfinite(norm)
        if taken:
            if self.settings.grad_clip > 0:
                clip(gradients, self.settings.grad_clip, norm)
            for group in self._adam.param_groups:
                group["lr"] = rate
            self._adam.step()
            self.steps += 1
        self.zero()
        return StepInfo(norm, rate, taken)

    def tensors(self) -> dict[str, Tensor]:
        """Every number of state by parameter name, for AdamW `NAME.exp_avg`, `NAME.exp_avg_sq`, `NAME.step`.

        Empty before a first step.
        """
        states: dict[Any, dict[str, Any]] = self._adam.state
        return {
            f"{name}.{key}": torch.as_tensor(value)
            for name, p in self.named.items()
            if p in states
            for key, value in sorted(states[p].items())
        }

    def check(self, tensors: Mapping[str, Tensor]) -> None:
        """Raises ValueError when what `tensors` gave belongs to another model."""
        keys = MOMENTS[self.settings.kind, self.settings.offload]
        known = {f"{name}.{key}" for name in self.named for key in keys}
        if not set(tensors) <= known:
            raise ValueError(f"optimiser state of another model: {sorted(set(tensors) - known)[:3]}")
        for name, p in self.named.items():
            state = {key: t for key in _ALL_KEYS if (t := tensors.get(f"{name}.{key}")) is not None}
            pair = [state.get(key) for key in (("exp_avg", "exp_avg_sq") if self._ours else ("state1", "state2"))]
            if state and ("step" not in state or any(t is None or t.shape != p.shape for t in pair)):
                raise ValueError(f"optimiser state of {name} does not fit a parameter of shape {tuple(p.shape)}")

    def restore(self, tensors: dict[str, Tensor], steps: int) -> None:
        """Put back what `tensors` and `steps` gave. Raises ValueError when they belong to another model."""
        self.check(tensors)
        self._adam.state.clear()
        for at, group in enumerate(self._adam.param_groups):
            for place, p in enumerate(group["params"]):
                name = self._names[id(p)]
                state = {key: t for key in _ALL_KEYS if (t := tensors.get(f"{name}.{key}")) is not None}
                if state:
                    self._put_back(name, p, state, (group, at, place))
        self.steps = steps

    def _put_back(self, name: str, p: nn.Parameter, state: dict[str, Tensor], where: tuple[Any, int, int]) -> None:
        """The state of one parameter. Paged and 8-bit moments are copied into the buffers that the library makes."""
        group, at, place = where
        if self._ours:
            self._adam.state[p] = {key: value.clone().to(p.device) for key, value in state.items()}
            return
        self._adam.init_state(group, p, at, place)
        made = self._adam.state[p]
        if set(made) != set(state):
            raise ValueError(f"optimiser state of {name}: its numbers are {', '.join(state)}, not {', '.join(made)}")
        for key, value in state.items():
            if key == "step":
                made[key] = int(value)
            elif not key.startswith("qmap"):  # one table for all parameters, always the same
                made[key].copy_(value)


_TORCH, _PAGED = ("step", "exp_avg", "exp_avg_sq"), ("step", "state1", "state2")
_EIGHT_BIT = (*_PAGED, "qmap1", "qmap2", "absmax1", "absmax2")
_ALL_KEYS = (*_TORCH, *_EIGHT_BIT[1:])
# What the library keeps of a parameter, by kind and offload.
MOMENTS = {
    ("adamw", False): _TORCH,
    ("adamw", True): _PAGED,
    ("adamw_8bit", False): _EIGHT_BIT,
    ("adamw_8bit", True): _EIGHT_BIT,
}
