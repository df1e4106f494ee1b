"""Engines of tests: on the imitation, and on vLLM itself where an interpreter that has it is named.

GROPIUS_VLLM_PYTHON=/path/to/python     the interpreter; without it, what needs vLLM is skipped with a message
"""

from __future__ import annotations

import asyncio
import functools
import os
import sys
from pathlib import Path

import pytest
from tests.rollout.vllm.imitation import Imitation

import gropius
from gropius.rollout.vllm import program
from gropius.rollout.vllm.engine import Mailbox, VllmEngine, VllmOptions
from gropius.rollout.vllm.place import ProcessPlace, ThreadPlace
from gropius.rollout.vllm.worker import Server

VARIABLE = "GROPIUS_VLLM_PYTHON"
HERE = Path(__file__).parent
PATHS = {"PYTHONPATH": str(Path(gropius.__file__).parents[1])}


def in_thread(loaded, core=Imitation, bound=1e-3, **options):
    """An engine whose worker is a thread of this process; weights by reference."""
    mailbox = Mailbox()

    def serve(wire):
        Server(wire, mailbox.tensors).serve(core, lambda: None)

    return VllmEngine(loaded, VllmOptions(**options), lambda: ThreadPlace(serve), bound=bound, mailbox=mailbox)


def in_process(loaded, program_file=HERE / "imitation.py", bound=1e-3, **options):
    """An engine whose worker is a process; weights through memory."""
    place = functools.partial(ProcessPlace, sys.executable, program_file, PATHS)
    return VllmEngine(loaded, VllmOptions(**options), place, bound=bound)


def vllm_python() -> str:
    """The interpreter that has vLLM, or a skip."""
    python = os.environ.get(VARIABLE, "")
    if not python:
        pytest.skip(f"vLLM is not installed beside this package; set {VARIABLE} to an interpreter that has it")
    return python


def on_vllm(loaded, program_file=Path(program.__file__), bound=1e-3, **options):
    """An engine on vLLM itself."""
    place = functools.partial(ProcessPlace, vllm_python(), program_file, {"OMP_NUM_THREADS": "1"})
    options = {"enforce_eager": True, "kv_cache_gib": 0.25, **options}
    return VllmEngine(loaded, VllmOptions(**options), place, bound=bound)


def closed(engine):
    """End an engine and its worker."""
    asyncio.run(engine.close())


def draw(engine, *requests):
    """Completions of all requests, drawn together."""

    async def together():
        return await asyncio.gather(*(engine.complete(request) for request in requests))

    return asyncio.run(together())
