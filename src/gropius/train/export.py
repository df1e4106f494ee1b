"""From a checkpoint to a folder that transformers and vLLM load: weights, tokenizer, and a card that says it all."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import torch

from gropius.errors import RunFolderError, UsageError
from gropius.models.load import LoadedModel, load_model, save_model
from gropius.models.lora import CONFIG as ADAPTER_CONFIG
from gropius.models.lora import LoraSettings
from gropius.models.tiny import TinyShape
from gropius.recipe import from_dict
from gropius.recipe.resolve import Resolved
from gropius.records.reader import RunReader
from gropius.records.writer import CHECKPOINTS, sync_folder
from gropius.train import resume
from gropius.train.card import card

MERGE_BOUND = 1e-4  # largest difference of a logit, adapter beside the base against merged, over the largest logit
PROBE_TOKENS = 32


def export(run: Path, step: int | None, out: Path, *, merged: bool = False) -> tuple[str, ...]:
    """Write the model of a run's checkpoint (None: the newest whole one) to `out`, whole or not at all. Notes.

    A run with an adapter gives the adapter in peft's layout, or with `merged` a whole model. What was written is loaded
    again and its weights compared with the run's, bit by bit; a merged model's with those that were merged, and its
    logits with the adapter's. Errors: RunFolderError when there is no whole checkpoint, when the copy is not the model,
    or the base is not the one that was trained on; UsageError when `out` is taken or cannot be written, or nothing is
    there to merge.
    """
    reader = RunReader(run)
    plan = from_dict(reader.resolved())
    snapshot, notes = resume.read(run, step)
    saved = run / CHECKPOINTS / f"step-{snapshot.step:06d}" / "model"
    adapted = (saved / ADAPTER_CONFIG).is_file()
    if merged and not adapted:
        raise UsageError(f"{run}: all weights were trained and there is no adapter to merge; leave --merged out")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"{out}: is there already; write the name of a new folder")
    aside = out.with_name(f".{out.name}.tmp-{os.getpid()}")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        if merged:
            said = _write_merged(plan, saved, aside, snapshot.facts["weights"])
        else:
            shutil.copytree(saved, aside)
            _require_equal(_load(plan, aside), snapshot.facts["weights"], f"the model of step {snapshot.step}", out)
            said = f"weights {snapshot.facts['weights'][:12]}, loaded again and equal"
        if adapted and not merged:
            said = f"an adapter of {plan.model.source}: {said}"
        text = card(reader, plan, snapshot, adapter=adapted and not merged)
        (aside / "README.md").write_text(text, encoding="utf-8", errors="replace")
        if out.exists():
            out.rmdir()
        aside.rename(out)
        sync_folder(out.parent)
    except OSError as error:
        raise UsageError(f"{out}: cannot be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return (*notes, f"step {snapshot.step} of {run}: {said}")


def _load(plan: Resolved, folder: Path) -> LoadedModel:
    """The model of a folder on the CPU, or the recipe's base with the folder's adapter in it."""
    if not (folder / ADAPTER_CONFIG).is_file():
        return load_model(str(folder), device="cpu")
    source = plan.model.source
    tiny = TinyShape(**plan.model.tiny.model_dump()) if source == "tiny" else None
    return load_model(source, device="cpu", seed=plan.seed, tiny=tiny, lora=LoraSettings(adapter=str(folder)))


def _require_equal(loaded: LoadedModel, weights: str, what: str, out: Path) -> None:
    if loaded.digest() != weights:
        raise RunFolderError(f"{out}: what was written is not {what}; check the disk, and the base's folder")


def _write_merged(plan: Resolved, saved: Path, aside: Path, weights: str) -> str:
    """Merge in float32, write, read again: the same bits as merged, the same logits as before. What was found."""
    loaded = _load(plan, saved)
    _require_equal(loaded, weights, "the policy of the checkpoint", saved)
    assert loaded.adapter is not None
    apart = _logits(loaded)
    loaded.adapter.wrapped.merge_and_unload()
    whole = LoadedModel(
        loaded.model, loaded.tokenizer, str(aside), loaded.context_length, loaded.stop_token_ids, loaded.pad_token_id
    )
    save_model(whole, aside)
    again = load_model(str(aside), device="cpu")
    _require_equal(again, whole.digest(), "the merged model", aside)
    scale = float(apart.abs().max())
    found = float((_logits(again) - apart).abs().max()) / max(scale, 1e-30)
    if not found <= MERGE_BOUND:
        raise RunFolderError(
            f"{aside}: the logits of the merged model differ by {found:.1e} of the largest, more than {MERGE_BOUND:g}"
        )
    return f"merged; its logits equal those of base and adapter to {found:.1e} of the largest (bound {MERGE_BOUND:g})"


@torch.no_grad()
def _logits(loaded: LoadedModel) -> torch.Tensor:
    """[2, _T, _V] of two rows of drawn tokens, always the same ones."""
    size = min(PROBE_TOKENS, loaded.context_length)
    stream = torch.Generator().manual_seed(0)
    rows = torch.randint(len(loaded.tokenizer), (2, size), generator=stream)
    logits: torch.Tensor = loaded.model(input_ids=rows, use_cache=False).logits
    return logits.double()
