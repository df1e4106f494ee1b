"""Whose log is it? One table of readers; each recognises its own files. No torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from gropius.doctor.foreign import openrlhf, trl, verifiers, verl
from gropius.doctor.log import Log
from gropius.doctor.run import RunLog
from gropius.errors import RunFolderError, did_you_mean
from gropius.records.reader import RunReader
from gropius.records.writer import METRICS, RESOLVED, ROLLOUTS


def _ours(path: Path) -> bool:
    return path.is_dir() and ((path / RESOLVED).exists() or ((path / METRICS).exists() and (path / ROLLOUTS).is_dir()))


def read_log(path: str | Path, kind: str = "auto") -> Log:
    """The log in a folder or file. kind: a name in READERS, or "auto": the first that recognises it.

    Errors: RunFolderError when nothing is there, or nobody recognises it (naming what was looked for).
    """
    place = Path(path)
    if not place.exists():
        raise RunFolderError(f"{path}: there is no such file or folder")
    if kind != "auto":
        if kind not in READERS:
            raise RunFolderError(f"--from {kind}: {did_you_mean(kind, READERS)}")
        return READERS[kind][1](place)
    for recognises, read in READERS.values():
        if recognises(place):
            return read(place)
    raise RunFolderError(
        f"{path}: no log that is known. Looked for: a run folder (resolved.json), TRL (trainer_state.json, "
        "completions_*.parquet), verl (N.jsonl with input, output, score), prime-rl and verifiers (traces.jsonl, "
        "results.jsonl), OpenRLHF (JSONL with prompt, output or response, reward). Write --from to name it"
    )


FOREIGN: dict[str, ModuleType] = {"trl": trl, "verifiers": verifiers, "verl": verl, "openrlhf": openrlhf}

READERS: dict[str, tuple[Callable[[Path], bool], Callable[[Path], Log]]] = {
    "gropius": (_ours, lambda path: RunLog(RunReader(path)).read()),
    **{name: (module.recognises, module.read) for name, module in FOREIGN.items()},
}
