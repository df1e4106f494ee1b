"""From the words of a recipe to a running vLLM engine: which interpreter, where, and what it is told."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gropius.errors import RecipeError
from gropius.models.load import LoadedModel
from gropius.models.lora import NAME as ADAPTER
from gropius.models.lora import Adapter
from gropius.rollout.vllm import program
from gropius.rollout.vllm.engine import Mailbox, VllmEngine, VllmOptions
from gropius.rollout.vllm.place import Place, ProcessPlace, ReachedPlace, ThreadPlace
from gropius.rollout.vllm.wire import Wire
from gropius.rollout.vllm.worker import Server


@dataclass(frozen=True)
class Trainer:
    """What the worker must know: the trainer's format, the probe's bound in nats, seed, CPU threads (0: all)."""

    dtype: str
    bound: float
    seed: int = 0
    threads: int = 0


def open_vllm(loaded: LoadedModel, table: Mapping[str, Any], trainer: Trainer) -> VllmEngine:
    """Start or reach a worker and make an engine of it. table: a recipe's `[rollout.vllm]`, whole.

    mode "colocated" is a thread of this process, or a child where another interpreter is named, and sleeps while the
    trainer works; "server" is a process that never does. Errors: RecipeError where vLLM is not installed and no other
    interpreter is named; EngineError, with the worker's last words, when it does not start.
    """
    options = _options(table, trainer)
    if table["lora"] == "adapter" and loaded.adapter is not None:
        options = dataclasses.replace(options, **apart(loaded.adapter))
    if table["address"]:
        return VllmEngine(loaded, options, lambda: ReachedPlace(table["address"]), bound=trainer.bound)
    if not table["python"] and importlib.util.find_spec("vllm") is None:
        raise RecipeError(
            'rollout.engine = "vllm": vLLM is not installed beside this package; install the extra '
            "(pip install 'gropius[vllm]'), or install vLLM in an environment of its own and write "
            'rollout.vllm.python = "/path/to/that/bin/python" (docs/vllm.md)'
        )
    if table["mode"] == "colocated" and not table["python"]:
        mailbox = Mailbox()
        return VllmEngine(loaded, options, lambda: _thread(mailbox), bound=trainer.bound, mailbox=mailbox)
    environment = {"CUDA_VISIBLE_DEVICES": table["devices"]} if table["devices"] else {}
    if trainer.threads:
        environment["OMP_NUM_THREADS"] = str(trainer.threads)
    python = table["python"] or sys.executable
    place = functools.partial(ProcessPlace, python, Path(program.__file__), environment)
    return VllmEngine(loaded, options, place, bound=trainer.bound)


def _options(table: Mapping[str, Any], trainer: Trainer) -> VllmOptions:
    names = {field.name for field in dataclasses.fields(VllmOptions)} & set(table)
    same = {name: table[name] for name in names} | {"seed": trainer.seed % (1 << 31)}
    dtype = trainer.dtype if table["dtype"] == "auto" else table["dtype"]
    return VllmOptions(**same | {"dtype": dtype, "sleeps": table["mode"] == "colocated"})


def apart(adapter: Adapter) -> dict[str, Any]:
    """Options of an adapter that is handed over alone. Errors: RecipeError where vLLM could not hold all of it."""
    if strange := next((name for name in adapter.trained if ".lora_" not in name), ""):
        raise RecipeError(
            f'rollout.vllm.lora = "adapter": {strange} is trained too, which vLLM takes only whole; write '
            'model.lora.bias = "none", or rollout.vllm.lora = "merged"'
        )
    ranks = [int(layer.r[ADAPTER]) for layer in adapter.layers.values()]  # type: ignore[index]
    modules = sorted({name.rpartition(".")[2] for name in adapter.layers})
    return {"lora_rank": max(ranks), "lora_modules": tuple(modules)}


def _thread(mailbox: Mailbox) -> Place:
    def serve(wire: Wire) -> None:
        Server(wire, mailbox.tensors).serve(program.make_core, lambda: None)

    return ThreadPlace(serve)
