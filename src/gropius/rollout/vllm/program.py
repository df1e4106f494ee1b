"""The worker's program, run by the interpreter that vLLM is installed for; this package need not be installed there.

python program.py --socket FD --parent PID      started by the trainer, ends with it
python program.py --listen ADDRESS              a server: serves one trainer after another at a Unix socket
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def expose_package() -> None:
    """Make `gropius` importable from where this file lies, and nothing else of that environment."""
    home = Path(__file__).resolve().parents[2]
    if "gropius" in sys.modules:
        return
    found = importlib.util.spec_from_file_location(
        "gropius", home / "__init__.py", submodule_search_locations=[str(home)]
    )
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules["gropius"] = module
    found.loader.exec_module(module)


expose_package()  # also in processes that vLLM spawns, which import this file again


def end_all() -> None:
    """End this process and all of its session: the trainer is gone."""
    os.killpg(0, signal.SIGKILL)


def serve(make_core: Any) -> None:
    """Do what the command line says with a maker of cores."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--socket", type=int, help="an open socket, handed over by the trainer")
    parser.add_argument("--parent", type=int, help="the trainer's process")
    parser.add_argument("--listen", help="path of a Unix socket to serve at")
    arguments = parser.parse_args()
    if arguments.socket is not None:
        _die_with(arguments.parent)
        from gropius.rollout.vllm.wire import Wire
        from gropius.rollout.vllm.worker import Server

        Server(Wire(socket.socket(fileno=arguments.socket))).serve(make_core, end_all)
        return
    if not arguments.listen:
        parser.error("write --listen ADDRESS")
    _serve_many(arguments.listen, make_core)


def _serve_many(address: str, make_core: Any) -> None:
    """One trainer after another, with one core: the first trainer's model and options are those of all."""
    from gropius.rollout.vllm.wire import Wire
    from gropius.rollout.vllm.worker import Server

    kept: dict[str, Any] = {}

    def once(start: Mapping[str, Any]) -> Any:
        """The core of the first trainer, for every trainer that asks for the same."""
        if not kept:
            kept.update(start=start, core=make_core(start))
        if kept["start"] != start:
            raise ValueError("this server holds another model or other options; stop it and start it again")
        return kept["core"]

    with _listening(address) as server:
        print(f"serving at {address}", flush=True)
        while True:
            end, _ = server.accept()
            whole = Server(Wire(end)).serve(once, lambda: None, keep_core=True)
            if not whole and kept:
                os.unlink(address)
                sys.exit(1)


def make_core(start: Mapping[str, Any]) -> Any:
    """vLLM itself, imported here: by now the trainer listens, and hears of what fails."""
    from gropius.rollout.vllm.core import VllmCore

    return VllmCore(start)


def _listening(address: str) -> socket.socket:
    if os.path.exists(address):
        sys.exit(f"{address} is there already; remove it if no server uses it")
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    old = os.umask(0o177)  # for this user alone
    try:
        server.bind(address)
    finally:
        os.umask(old)
    server.listen(1)
    return server


def _die_with(parent: int | None) -> None:
    """Ask the kernel to end this process with the trainer, however that dies (Linux)."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
        if parent is not None and os.getppid() != parent:
            end_all()


if __name__ == "__main__":
    serve(make_core)
