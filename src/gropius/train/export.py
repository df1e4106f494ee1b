"""From a checkpoint to a folder that transformers and vLLM load: weights, tokenizer, and a card that says it all."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from gropius.errors import RunFolderError, UsageError
from gropius.models.load import load_model
from gropius.recipe import from_dict
from gropius.records.reader import RunReader
from gropius.records.writer import CHECKPOINTS, sync_folder
from gropius.train import resume
from gropius.train.card import card
from gropius.train.checkpoint import weight_digest


def export(run: Path, step: int | None, out: Path) -> tuple[str, ...]:
    """Write the model of a run's checkpoint (None: the newest whole one) to `out`, whole or not at all. Notes.

    What was written is loaded again and its weights compared with the run's, bit by bit. Errors: RunFolderError when
    there is no whole checkpoint, or the copy is not the model; UsageError when `out` is taken or cannot be written.
    """
    reader = RunReader(run)
    plan = from_dict(reader.resolved())
    snapshot, notes = resume.read(run, step)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"{out}: is there already; write the name of a new folder")
    aside = out.with_name(f".{out.name}.tmp-{os.getpid()}")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(run / CHECKPOINTS / f"step-{snapshot.step:06d}" / "model", aside)
        (aside / "README.md").write_text(card(reader, plan, snapshot), encoding="utf-8", errors="replace")
        digest = weight_digest(load_model(str(aside), device="cpu").model)
        if digest != snapshot.facts["weights"]:
            raise RunFolderError(f"{out}: what was written is not the model of step {snapshot.step}; check the disk")
        if out.exists():
            out.rmdir()
        aside.rename(out)
        sync_folder(out.parent)
    except OSError as error:
        raise UsageError(f"{out}: cannot be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return (*notes, f"step {snapshot.step} of {run}: weights {digest[:12]}, loaded again and equal")
