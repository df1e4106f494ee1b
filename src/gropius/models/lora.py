"""LoRA through peft: small trained matrices beside frozen ones, y = W x + s · B (A x), s = alpha / rank.

A fresh adapter has B = 0: the policy is the base model, bit for bit. The layers are put into the model in place, so
that it stays the class it was; peft's layout is written and read, so that `peft.PeftModel.from_pretrained` takes it.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from gropius.errors import ModelError, did_you_mean
from gropius.models.digest import weight_digest

NAME = "default"  # what peft calls the only adapter of a model
CONFIG, WEIGHTS, BASE = "adapter_config.json", "adapter_model.safetensors", "base.json"
INITS: dict[str, bool | str] = {"kaiming": True, "gaussian": "gaussian"}
STREAM = 0x10AA  # added to the seed: the adapter's numbers are not those of the built-in model's weights
# Keys of a given adapter's config that are understood; every other one must have peft's default.
UNDERSTOOD = {
    "task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode",
    "r", "lora_alpha", "lora_dropout", "target_modules", "exclude_modules", "fan_in_fan_out", "bias", "use_rslora",
    "layers_to_transform", "layers_pattern", "rank_pattern", "alpha_pattern", "megatron_core", "init_lora_weights",
    "runtime_config", "ensure_weight_tying",
}  # fmt: skip
KEEPS_THE_BASE = (True, False, "gaussian", "orthogonal", "eva")  # ways to begin that leave the base's weights alone


@dataclass(frozen=True)
class LoraSettings:
    """What a fresh adapter is, or which folder a trained one lies in (then the rest is what that folder says).

    target_modules: last parts of the names of linear layers; empty = all but the output head. bias: which biases of the
    model are trained too. init: how A begins; B begins at 0.
    """

    rank: int = 0
    alpha: float = 32.0
    target_modules: tuple[str, ...] = ()
    bias: str = "none"
    init: str = "kaiming"
    adapter: str = ""


@dataclass(frozen=True, eq=False)
class Adapter:
    """An adapter in a model. wrapped: peft's view of the model. base_digest: of the weights that were there before.

    layers: the adapted ones by name. source: what the base was loaded from. kept: a copy of the state that is saved
    instead of the live one. notes: what was assumed, for a person.
    """

    wrapped: Any
    layers: Mapping[str, nn.Module]
    base_digest: str
    source: str
    notes: tuple[str, ...] = ()
    kept: Mapping[str, Tensor] | None = None

    def state(self) -> Mapping[str, Tensor]:
        """What is saved, under peft's names."""
        if self.kept is not None:
            return self.kept
        from peft import get_peft_model_state_dict

        found: dict[str, Tensor] = get_peft_model_state_dict(self.wrapped, adapter_name=NAME)
        return {name: tensor.detach() for name, tensor in found.items()}

    @property
    def trained(self) -> dict[str, nn.Parameter]:
        """The parameters that training moves, by the model's own names, as they lie now."""
        return {name: p for name, p in self.wrapped.get_base_model().named_parameters() if p.requires_grad}

    def preamble(self) -> str:
        """What decides beside everything that is trained: the base's digest, and the scale of every layer."""
        scales = {name: layer.scaling[NAME] for name, layer in self.layers.items()}  # type: ignore[index]
        return f"{self.base_digest} {json.dumps(scales, sort_keys=True)}\n"

    def save(self, folder: str | Path) -> None:
        """Write peft's layout, and `base.json` with the digest of the base that the adapter belongs to."""
        folder = Path(folder)
        self.save_config(folder)
        save_file({name: t.detach().cpu().contiguous() for name, t in self.state().items()}, folder / WEIGHTS)

    def save_config(self, folder: Path) -> None:
        """What `save` writes, but the tensors."""
        folder.mkdir(parents=True, exist_ok=True)
        config = self.wrapped.peft_config[NAME].to_dict() | {
            "inference_mode": True,
            "base_model_name_or_path": self.source,
        }
        _write_json(folder / CONFIG, {key: _plain(value) for key, value in config.items()})
        _write_json(folder / BASE, {"source": self.source, "weights": self.base_digest})

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Within the block the model is its base (where no bias is trained)."""
        with switched_off(self.layers):
            yield

    def describe(self) -> str:
        """One line: what is trained."""
        trained = sum(p.numel() for p in self.trained.values())
        total = sum(p.numel() for p in self.wrapped.get_base_model().parameters())
        config = self.wrapped.peft_config[NAME]
        return (
            f"LoRA of rank {config.r} on {len(self.layers)} linear layers: {trained:,} parameters are trained, "
            f"{total - trained:,} stay what they are"
        )


def adapted(model: nn.Module) -> dict[str, nn.Module]:
    """The layers of a model that have an adapter, by name."""
    return {name: m for name, m in model.named_modules() if hasattr(m, "base_layer") and hasattr(m, "lora_A")}


@contextmanager
def switched_off(layers: Mapping[str, nn.Module]) -> Iterator[None]:
    """Within the block these layers are their base's.

    peft stops training what it switches off; that is taken back at once, because weights that are divided over ranks
    and gathered within the block would go on so.
    """
    switches: list[Any] = list(layers.values())
    trained = [p for layer in switches for p in layer.parameters() if p.requires_grad]
    for layer in switches:
        layer.enable_adapters(False)
    for parameter in trained:
        parameter.requires_grad_(True)
    try:
        yield
    finally:
        for layer in switches:
            layer.enable_adapters(True)


def effective_weight(layer: nn.Module) -> Tensor:
    """W of a linear layer, and W + s · B A of one with an adapter: made anew from the two, never added in place."""
    base = getattr(layer, "base_layer", None)
    if base is None:
        return layer.weight.detach()  # type: ignore[operator]
    with torch.no_grad():
        return base.weight.detach() + layer.get_delta_weight(NAME)  # type: ignore[operator,no-any-return]


def attach(model: PreTrainedModel, settings: LoraSettings, seed: int, source: str) -> Adapter:
    """Put an adapter into `model` in place: a fresh one (one seed, one set of numbers) or a folder's trained one.

    The base's parameters stop being trained. The global random state of torch is left as it was. Errors: ModelError
    when peft is not installed, for a layer that is not there or cannot be adapted, and for a folder that is no adapter
    of this model.
    """
    if importlib.util.find_spec("peft") is None:
        raise ModelError("[model.lora] needs the package peft: pip install 'gropius[lora]'")
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # peft imports it where it is, and it tells of kernels
    import peft

    digest = weight_digest(model)
    notes: tuple[str, ...] = ()
    if not settings.adapter:
        config: Any = peft.LoraConfig(
            r=settings.rank,
            lora_alpha=settings.alpha,  # type: ignore[arg-type]
            target_modules=_targets(model, settings.target_modules),
            bias=settings.bias,  # type: ignore[arg-type]
            init_lora_weights=INITS[settings.init],  # type: ignore[arg-type]
            task_type="CAUSAL_LM",
        )
    else:
        config, notes = _given_config(Path(settings.adapter).expanduser(), digest)
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed((seed + STREAM) % 2**63)
        try:
            wrapped = peft.get_peft_model(model, config, adapter_name=NAME)
        except (ValueError, TypeError) as error:  # a given adapter of another architecture
            raise ModelError(f'model.lora: "{source}" cannot take this adapter: {_first_line(error)}') from error
    if settings.adapter:
        _put_in(wrapped, Path(settings.adapter).expanduser())
    return Adapter(wrapped, adapted(model), digest, source, notes)


def _targets(model: PreTrainedModel, wanted: tuple[str, ...]) -> list[str]:
    """Last parts of the names of the layers to adapt. Errors: ModelError for one that is no linear layer."""
    head = model.get_output_embeddings()
    linear = [n for n, m in model.named_modules() if isinstance(m, nn.Linear | Conv1D) and m is not head]
    known = sorted({name.rpartition(".")[2] for name in linear})
    for name in wanted:
        if name not in known:
            raise ModelError(
                f'model.lora.target_modules: "{name}" is no linear layer of {type(model).__name__} below its head; '
                f"{did_you_mean(name, known)}"
            )
    return sorted(set(wanted)) or known


def _given_config(folder: Path, base: str) -> tuple[Any, tuple[str, ...]]:
    """The config of a trained adapter, ready to be trained on, and notes. Errors: ModelError, with the reason."""
    import peft

    key = f'model.lora.adapter = "{folder}"'
    if not (folder / CONFIG).is_file():
        raise ModelError(f"{key}: there is no {CONFIG} in it; name a folder that peft's save_pretrained wrote")
    if not (folder / WEIGHTS).is_file():
        raise ModelError(f"{key}: there is no {WEIGHTS} in it (a pickled adapter_model.bin is not read)")
    try:
        config = peft.PeftConfig.from_pretrained(str(folder))
        belongs = json.loads((folder / BASE).read_text(encoding="utf-8")) if (folder / BASE).is_file() else {}
    except (ValueError, TypeError, OSError, KeyError) as error:
        raise ModelError(f"{key}: {CONFIG} cannot be read: {_first_line(error)}") from error
    if not isinstance(config, peft.LoraConfig):
        raise ModelError(f"{key}: is an adapter of the kind {config.peft_type}, and only LoRA is trained here")
    written: Any = config
    usual: dict[str, Any] = vars(peft.LoraConfig())
    strange = [n for n, v in vars(written).items() if n not in UNDERSTOOD and (v or None) != (usual.get(n) or None)]
    if config.init_lora_weights not in KEEPS_THE_BASE:
        strange.append("init_lora_weights")
    if strange:
        raise ModelError(f"{key}: it uses {', '.join(sorted(strange))}, which is not trained here; plain LoRA is")
    if belongs.get("weights", base) != base:
        raise ModelError(
            f"the adapter in {folder} was trained on other weights ({belongs['weights'][:12]} of "
            f"{belongs.get('source')}) than model.source gives now ({base[:12]}); restore or name that base"
        )
    notes: tuple[str, ...] = ()
    if config.lora_dropout:
        notes = (f"the adapter's dropout of {config.lora_dropout:g} is off: what is dropped is not what was sampled",)
    config.lora_dropout, config.inference_mode, config.task_type = 0.0, False, "CAUSAL_LM"
    return config, notes


def _put_in(wrapped: Any, folder: Path) -> None:
    """The tensors of a folder into the adapter just made. Errors: ModelError when they are not exactly its own."""
    from peft import get_peft_model_state_dict, set_peft_model_state_dict

    key = f'model.lora.adapter = "{folder}"'
    try:
        tensors = load_file(folder / WEIGHTS)
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{key}: {WEIGHTS} cannot be read: {_first_line(error)}") from error
    wanted = get_peft_model_state_dict(wrapped, adapter_name=NAME)
    if differing := sorted(set(tensors) ^ set(wanted)):
        side = "has no place in this model" if differing[0] in tensors else "is missing"
        raise ModelError(f"{key}: {differing[0]} {side}; the adapter is of another model")
    for name, tensor in tensors.items():
        if tensor.shape != wanted[name].shape:
            raise ModelError(f"{key}: {name} is {tuple(tensor.shape)} and must be {tuple(wanted[name].shape)}")
    set_peft_model_state_dict(wrapped, tensors, adapter_name=NAME)


def _plain(value: Any) -> Any:
    return sorted(value) if isinstance(value, set | frozenset) else value


def _write_json(path: Path, document: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(document, indent=2, sort_keys=True, default=str) + "\n", encoding="utf-8")


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
