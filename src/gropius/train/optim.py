"""AdamW with a schedule and gradient clipping; everything it knows can be written down and put back."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from gropius.errors import RecipeError, did_you_mean
from gropius.recipe.schema import CriticTable, SftTable, TrainTable


@dataclass(frozen=True)
class OptimiserSettings:
    """learning_rate: at the top of the schedule. total_steps: optimiser steps of the whole run, for linear and cosine.

    warmup_steps: linear from learning_rate/warmup_steps at the first step. final_ratio: learning rate at the end over
    learning_rate. weight_decay: on matrices only. grad_clip: bound on the global gradient norm; 0 is off.
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


def settings_of(table: TrainTable | SftTable | CriticTable, per_step: int = 1, steps: int = 0) -> OptimiserSettings:
    """What a table of the recipe says of the optimiser. per_step: optimiser steps in one of its steps; steps: how many
    of these there are, where the table has none of its own.
    """
    own = {field.name for field in dataclasses.fields(OptimiserSettings)} & set(type(table).model_fields)
    same = {name: getattr(table, name) for name in sorted(own - {"warmup_steps"})}
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


class Optimiser:
    """Fused AdamW over a model's trainable parameters. `steps` counts the optimiser steps taken.

    Weight decay falls on parameters of two or more dimensions. Errors: RecipeError for an unknown schedule.
    """

    def __init__(self, model: nn.Module, settings: OptimiserSettings):
        if settings.schedule not in SCHEDULES:
            hint = did_you_mean(settings.schedule, SCHEDULES)
            raise RecipeError(f'train.schedule = "{settings.schedule}" is not a schedule; {hint}')
        self.settings, self.steps = settings, 0
        self.named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        groups = [
            {"params": [p for p in self.named.values() if p.ndim >= 2], "weight_decay": settings.weight_decay},
            {"params": [p for p in self.named.values() if p.ndim < 2], "weight_decay": 0.0},
        ]
        self._adam = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=settings.learning_rate,
            betas=(settings.beta1, settings.beta2),
            eps=settings.adam_epsilon,
            fused=True,
        )

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
        norm = torch.nn.utils.get_total_norm(gradients)
        over_all = norm.full_tensor() if isinstance(norm, DTensor) else norm
        taken = bool(torch.isfinite(over_all))
        if taken:
            if self.settings.grad_clip > 0:
                torch.nn.utils.clip_grads_with_norm_(self.parameters, self.settings.grad_clip, norm)
            for group in self._adam.param_groups:
                group["lr"] = rate
            self._adam.step()
            self.steps += 1
        self.zero()
        return StepInfo(float(over_all), rate, taken)

    def tensors(self) -> dict[str, Tensor]:
        """Every moment by parameter name: `NAME.exp_avg`, `NAME.exp_avg_sq`, `NAME.step`. Empty before a first step."""
        states: dict[Any, dict[str, Tensor]] = self._adam.state
        return {
            f"{name}.{key}": value
            for name, p in self.named.items()
            if p in states
            for key, value in sorted(states[p].items())
        }

    def check(self, tensors: Mapping[str, Tensor]) -> None:
        """Raises ValueError when what `tensors` gave belongs to another model."""
        known = {f"{name}.{key}" for name in self.named for key in ("exp_avg", "exp_avg_sq", "step")}
        if not set(tensors) <= known:
            raise ValueError(f"optimiser state of another model: {sorted(set(tensors) - known)[:3]}")
        for name, p in self.named.items():
            state = [tensors.get(f"{name}.{key}") for key in ("step", "exp_avg", "exp_avg_sq")]
            if all(value is None for value in state):
                continue
            if state[0] is None or any(value is None or value.shape != p.shape for value in state[1:]):
                raise ValueError(f"optimiser state of {name} does not fit a parameter of shape {tuple(p.shape)}")

    def restore(self, tensors: dict[str, Tensor], steps: int) -> None:
        """Put back what `tensors` and `steps` gave. Raises ValueError when they belong to another model."""
        self.check(tensors)
        for name, p in self.named.items():
            state = {key: tensors.get(f"{name}.{key}") for key in ("step", "exp_avg", "exp_avg_sq")}
            if all(value is None for value in state.values()):
                self._adam.state.pop(p, None)
                continue
            step, first, second = state["step"], state["exp_avg"], state["exp_avg_sq"]
            assert step is not None and first is not None and second is not None
            self._adam.state[p] = {
                "step": step.clone().to(p.device),
                "exp_avg": first.clone().to(p.device),
                "exp_avg_sq": second.clone().to(p.device),
            }
        self.steps = steps
