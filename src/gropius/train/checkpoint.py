"""Checkpoints: a Hugging Face folder, and beside it what a run needs to go on. Safetensors and JSON, never pickle.

    checkpoints/step-000010/  model/ (config, weights, tokenizer)  NAME.safetensors ...  state.json  COMPLETE

A checkpoint is written under a temporary name, flushed to the disk, and renamed when it is whole. `COMPLETE` is written
last and holds the size and the sha256 of every other file: whatever does not agree with it is not used.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from gropius.errors import RunFolderError, RunHalted
from gropius.models.digest import weight_digest as weight_digest
from gropius.models.load import LoadedModel, save_config, save_model
from gropius.records.faults import reached
from gropius.train.gathered import local, parts_of, write
from gropius.train.retention import Kept, Retention, superfluous

MARKER = "COMPLETE"
NAME = re.compile(r"step-(\d{6,})")
PICKLED = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")
SLACK_BYTES = 1 << 20  # config, tokenizer, headers


@dataclass(frozen=True, eq=False)
class Snapshot:
    """What a run needs besides its weights.

    step: steps done. facts: numbers and text that JSON holds (counters, data position, schedule). tensors: one file a
    name, e.g. {"optimiser": {...}, "reference": {...}}. weights: those of the model, where they do not lie in it whole.
    """

    step: int
    facts: Mapping[str, Any]
    tensors: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)
    weights: Mapping[str, Tensor] | None = None


@dataclass(frozen=True)
class Newest:
    """The newest usable checkpoint of a run, or None, and one line for each newer one that had to be passed over."""

    folder: Path | None
    notes: tuple[str, ...] = ()


def save(root: str | Path, snapshot: Snapshot, loaded: LoadedModel, retention: Retention | None = None) -> Path:
    """Write `root/step-N` whole or not at all, then delete older ones as `retention` says (None: none). The folder.

    An interrupt at any point leaves the earlier checkpoints as they were. Errors: RunHalted, naming the file, when the
    disk is full or refuses; nothing half-written is left then. ValueError for facts that JSON cannot hold (a number
    that is not finite among them).
    """
    facts = json.dumps({"step": snapshot.step, "facts": dict(snapshot.facts)}, allow_nan=False, indent=1)
    root = Path(root)
    final, aside = root / f"step-{snapshot.step:06d}", root / f".writing-step-{snapshot.step:06d}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        recover(root)
        _require_space(root, snapshot, loaded)
        aside.mkdir()
        reached("checkpoint.begun")
        _write(aside, snapshot, loaded, facts)
        _seal(aside)
        reached("checkpoint.sealed")
        if final.exists():
            final.rename(root / f".replaced-step-{snapshot.step:06d}")
            reached("checkpoint.aside")
        aside.rename(final)
        reached("checkpoint.published")
        _flush(root)
        recover(root)
        _retain(root, snapshot.step, retention or Retention())
        reached("checkpoint.retained")
    except (OSError, SafetensorError) as error:
        shutil.rmtree(aside, ignore_errors=True)
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error).splitlines()[0]
        raise RunHalted(
            f"{final}: cannot be written: {reason}. The checkpoints before it are as they were; make room (or raise "
            "checkpoint.every, lower checkpoint.keep_last), then resume the run"
        ) from error
    return final


def _write(aside: Path, snapshot: Snapshot, loaded: LoadedModel, facts: str) -> None:
    if snapshot.weights is None:
        save_model(loaded, aside / "model")
    else:
        write(snapshot.weights, save_config(loaded, aside / "model"))
    reached("checkpoint.model")
    for name, tensors in snapshot.tensors.items():
        write(tensors, _file(aside, name))
        reached("checkpoint.tensors")
    (aside / "state.json").write_text(facts, encoding="utf-8")
    reached("checkpoint.state")


def needed_bytes(snapshot: Snapshot, loaded: LoadedModel) -> int:
    """What a checkpoint takes on the disk, shared tensors once."""
    every: Iterable[Tensor] = (
        *loaded.saved().values(),
        *(tensor for tensors in snapshot.tensors.values() for tensor in parts_of(tensors).values()),
    )
    unique = {(local(tensor).data_ptr(), tensor.nbytes): tensor.nbytes for tensor in every}
    return sum(unique.values()) + SLACK_BYTES


def _require_space(root: Path, snapshot: Snapshot, loaded: LoadedModel) -> None:
    """Ask before writing: a disk that fills up half-way stops other programs too."""
    needed, free = needed_bytes(snapshot, loaded), shutil.disk_usage(root).free
    if free < needed:
        raise OSError(28, f"it needs {needed / 1e6:,.0f} MB and {free / 1e6:,.0f} MB are free on the disk")


def load(folder: str | Path) -> Snapshot:
    """Read the state of one checkpoint after checking every file against its marker.

    The weights are read by `load_model(str(folder / "model"))`. Errors: RunFolderError naming the file that is missing,
    changed or unreadable.
    """
    folder = Path(folder)
    fault = damage(folder)
    if fault:
        raise RunFolderError(f"{folder}: {fault}; use an earlier checkpoint")
    try:
        state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        tensors = {path.stem: load_file(path) for path in sorted(folder.glob("*.safetensors"))}
        return Snapshot(int(state["step"]), dict(state["facts"]), tensors)
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:  # another program's checkpoint
        raise RunFolderError(f"{folder}: is no checkpoint of a run: {error}") from error


def newest(root: str | Path) -> Newest:
    """The newest complete checkpoint under `root`; newer ones that are incomplete or damaged are named in the notes."""
    notes: list[str] = []
    for folder in sorted(_folders(Path(root)), key=_step, reverse=True):
        fault = damage(folder)
        if not fault:
            return Newest(folder, tuple(notes))
        notes.append(f"{folder.name} is passed over: {fault}")
    return Newest(None, tuple(notes))


def damage(folder: Path) -> str:
    """What is wrong with a checkpoint, in words, or "". Reads every file once."""
    marker = folder / MARKER
    if not marker.is_file():
        return f"it has no {MARKER} marker, so its writing was interrupted"
    try:
        promised = json.loads(marker.read_text(encoding="utf-8"))["files"]
        entries = {name: (int(entry["bytes"]), str(entry["sha256"])) for name, entry in promised.items()}
    except (ValueError, KeyError, TypeError, AttributeError):  # the marker itself may be torn
        return f"its {MARKER} marker cannot be read"
    for name, (size, digest) in entries.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes instead of {size}"
        if _sha256(path) != digest:
            return f"{name} does not have the content that was written"
    if "state.json" not in entries or not {"model/config.json", "model/adapter_config.json"} & set(entries):
        return f"its {MARKER} marker names no state.json or no model, so it is no checkpoint of a run"
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if name not in entries and path.suffix in PICKLED:
            return f"{name} is a pickle, which no run writes and which may run code when it is read"
    return ""


def recover(root: Path) -> None:
    """Remove what an interrupted save left, and put a checkpoint back that it had only moved aside."""
    for path in root.glob(".replaced-step-*"):
        original = root / path.name.removeprefix(".replaced-")
        if original.exists():
            shutil.rmtree(path)
        else:
            path.rename(original)
    for pattern in (".writing-step-*", ".dropped-step-*"):
        for path in root.glob(pattern):
            shutil.rmtree(path)


def _file(folder: Path, name: str) -> Path:
    return folder / f"{name}.safetensors"


def _folders(root: Path) -> list[Path]:
    return [path for path in root.iterdir() if path.is_dir() and NAME.fullmatch(path.name)] if root.is_dir() else []


def _step(folder: Path) -> int:
    return int(folder.name.rpartition("-")[2])


def _seal(folder: Path) -> None:
    """Flush every file and write the marker over them."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    for path in files:
        _flush(path)
    entries = {
        path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": _sha256(path)} for path in files
    }
    reached("checkpoint.flushed")
    (folder / MARKER).write_text(json.dumps({"files": entries}, indent=1), encoding="utf-8")
    _flush(folder / MARKER)
    for inner in (*(path for path in folder.rglob("*") if path.is_dir()), folder):
        _flush(inner)


def _flush(path: Path) -> None:
    """Force a file or a folder's entries to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _retain(root: Path, step: int, retention: Retention) -> None:
    """Delete older checkpoints than the one of `step`. Newer ones (a run that went back) are not ours to judge."""
    older = [Kept(_step(folder), _held_out(folder)) for folder in _folders(root) if _step(folder) <= step]
    for gone in superfluous(older, retention):
        dropped = root / f".dropped-step-{gone:06d}"
        (root / f"step-{gone:06d}").rename(dropped)
        reached("checkpoint.dropped")
        shutil.rmtree(dropped)


def _held_out(folder: Path) -> float | None:
    """The held-out mean that was measured on a checkpoint's weights, where it was."""
    try:
        value = json.loads((folder / "state.json").read_text(encoding="utf-8"))["facts"].get("held_out")
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # damaged: it is judged as unmeasured
        return None
    return value if isinstance(value, float) else None


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
