"""An adapter beside frozen weights: the base bit for bit at first, in peft's layout, merged without gathering error."""

from __future__ import annotations

import importlib.util
import json
import warnings
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, GPT2Config, GPT2LMHeadModel, Qwen2Config, Qwen2ForCausalLM

from gropius.errors import ModelError
from gropius.models import lora
from gropius.models.digest import weight_digest
from gropius.models.load import LoadedModel, load_model, save_model
from gropius.models.lora import LoraSettings, attach, effective_weight
from gropius.models.tiny import TinyShape
from gropius.rollout.shadow import Shadow
from gropius.rollout.vllm.weights import policy_tensors

TINY = TinyShape(hidden=32, layers=2, heads=2, kv_heads=2, mlp=48, context=64)
SMALL = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
MODELS = {
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SMALL, num_key_value_heads=2)),
    "gemma3": lambda: Gemma3ForCausalLM(Gemma3TextConfig(**SMALL, num_key_value_heads=2, head_dim=16)),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(vocab_size=61, n_embd=32, n_layer=2, n_head=2, n_positions=64)),
}
IDS = torch.arange(3, 23)[None]


def tiny(**settings: object) -> LoadedModel:
    return load_model("tiny", device="cpu", tiny=TINY, lora=LoraSettings(**({"rank": 4} | settings)))  # type: ignore[arg-type]


def train_a_little(loaded: LoadedModel, seed: int = 5) -> LoadedModel:
    """Another adapter than a fresh one: every trained number moved."""
    assert loaded.adapter is not None
    stream = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in loaded.adapter.trained.values():
            parameter += 0.1 * torch.randn(parameter.shape, generator=stream)
    return loaded


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("init", ["kaiming", "gaussian"])
def test_a_fresh_adapter_is_the_base_bit_for_bit_and_alone_is_trained(name: str, init: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    before, digest, state = logits(model), weight_digest(model), torch.random.get_rng_state()
    adapter = attach(model, LoraSettings(rank=4, init=init), 0, "base")
    assert torch.equal(logits(model), before)
    assert adapter.base_digest == digest and torch.equal(torch.random.get_rng_state(), state)
    assert set(adapter.trained) == {n for n, p in model.named_parameters() if p.requires_grad}
    assert all(".lora_" in n and p.dtype == torch.float32 for n, p in adapter.trained.items())
    assert "lm_head" not in " ".join(adapter.layers)


def test_the_same_seed_gives_the_same_adapter_and_another_seed_another() -> None:
    assert tiny().digest() == tiny().digest()
    lora_of = {seed: load_model("tiny", tiny=TINY, seed=seed, lora=LoraSettings(rank=4)) for seed in (0, 1)}
    first = [next(iter(lora_of[seed].adapter.trained.values())) for seed in (0, 1)]  # type: ignore[union-attr]
    assert not torch.equal(first[0], first[1])


def test_the_digest_is_of_base_scale_and_every_trained_number() -> None:
    loaded = tiny()
    assert loaded.adapter is not None
    digests = {loaded.digest(), tiny(alpha=7.0).digest()}
    first, *_, last = loaded.adapter.trained.values()
    for parameter in (first, last):
        with torch.no_grad():
            parameter.flatten()[-1] += 1e-6
        digests.add(loaded.digest())
    assert len(digests) == 4
    other = load_model("tiny", tiny=TINY, seed=1, lora=LoraSettings(rank=4))
    assert other.adapter is not None
    with torch.no_grad():
        for mine, theirs in zip(loaded.adapter.trained.values(), other.adapter.trained.values(), strict=True):
            mine.copy_(theirs)
    assert loaded.digest() != other.digest()


@pytest.mark.parametrize("bias", ["none", "all"])
def test_peft_loads_what_is_saved_to_the_same_logits(bias: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = MODELS["qwen2"]().eval()
    model.save_pretrained(tmp_path / "base")
    adapter = attach(model, LoraSettings(rank=4, bias=bias), 0, "base")
    assert any(n.endswith("bias") for n in adapter.trained) is (bias == "all")
    with torch.no_grad():
        for parameter in adapter.trained.values():
            parameter += 0.1 * torch.randn(parameter.shape)
    adapter.save(tmp_path / "adapter")
    base = Qwen2ForCausalLM.from_pretrained(tmp_path / "base").eval()
    theirs = peft.PeftModel.from_pretrained(base, str(tmp_path / "adapter")).eval()
    assert torch.equal(logits(theirs), logits(model))
    assert (tmp_path / "adapter" / "adapter_model.safetensors").stat().st_size < 60_000


def test_what_peft_saved_is_a_start_and_its_dropout_is_off_and_said(tmp_path: Path) -> None:
    base = load_model("tiny", tiny=TINY).model
    config = peft.LoraConfig(r=3, lora_alpha=5, lora_dropout=0.1, target_modules=["q_proj", "v_proj"], use_rslora=True)
    wrapped = peft.get_peft_model(base, config)
    with torch.no_grad():
        for parameter in wrapped.parameters():
            if parameter.requires_grad:
                parameter += 0.1
    wrapped.save_pretrained(tmp_path)
    loaded = tiny(adapter=str(tmp_path))
    assert torch.equal(logits(loaded.model), logits(wrapped.eval()))
    assert any("dropout of 0.1 is off" in note for note in loaded.notes)
    assert torch.equal(logits(loaded.model.train()), logits(wrapped.eval()))
    assert loaded.adapter is not None and len(loaded.adapter.layers) == 4


def test_saved_and_loaded_it_has_the_same_digest(tmp_path: Path) -> None:
    loaded = train_a_little(tiny())
    save_model(loaded, tmp_path)
    assert not (tmp_path / "model.safetensors").exists() and (tmp_path / "tokenizer.json").exists()
    assert tiny(adapter=str(tmp_path)).digest() == loaded.digest() != tiny().digest()


@pytest.mark.parametrize("name", MODELS)
def test_what_an_outside_engine_is_handed_is_what_peft_merges_under_the_names_of_the_base(name: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    names = [n for n, _ in policy_tensors(model)]
    adapter = attach(model, LoraSettings(rank=4), 0, name)
    loaded = train_a_little(LoadedModel(model, None, name, 64, (1,), 0, (), adapter))  # type: ignore[arg-type]
    apart, digest = logits(model), loaded.digest()
    merged = {n: w.clone() for n, w in policy_tensors(model)}
    assert list(merged) == names and loaded.digest() == digest and torch.equal(logits(model), apart)
    whole = adapter.wrapped.merge_and_unload()
    assert all(torch.equal(merged[n], p) for n, p in whole.named_parameters())
    torch.testing.assert_close(logits(whole), apart, rtol=1e-5, atol=1e-5)


def test_an_engines_copy_is_made_anew_from_base_and_adapter_however_often() -> None:
    loaded = train_a_little(tiny())
    shadow = Shadow(loaded.model, torch.float32)
    first = [(w.qkv.weight.clone(), w.output.weight.clone(), w.down.weight.clone()) for w in shadow.layers]
    base = loaded.model.model.layers[0].self_attn.o_proj.base_layer.weight.clone()
    for _ in range(5):
        shadow.refresh()
    for before, layer in zip(first, shadow.layers, strict=True):
        assert all(
            torch.equal(a, b)
            for a, b in zip(before, (layer.qkv.weight, layer.output.weight, layer.down.weight), strict=True)
        )
    projection = loaded.model.model.layers[0].self_attn.o_proj
    assert torch.equal(projection.base_layer.weight, base)
    assert torch.equal(shadow.layers[0].output.weight, effective_weight(projection))
    assert not torch.equal(shadow.layers[0].output.weight, base)


def test_off_it_is_the_base_and_on_again_it_is_trained() -> None:
    loaded = train_a_little(tiny())
    assert loaded.adapter is not None
    own = logits(loaded.model)
    with loaded.adapter.disabled():
        assert torch.equal(logits(loaded.model), logits(load_model("tiny", tiny=TINY).model))
    assert torch.equal(logits(loaded.model), own)
    assert all(p.requires_grad for p in loaded.adapter.trained.values())


def adapter_folder(folder: Path, **changes: object) -> Path:
    save_model(train_a_little(tiny()), folder)
    config = json.loads((folder / lora.CONFIG).read_text()) | changes
    (folder / lora.CONFIG).write_text(json.dumps(config))
    return folder


def spoil(folder: Path, harm: str) -> None:
    weights = load_file(folder / lora.WEIGHTS)
    name = sorted(weights)[0]
    if harm == "missing":
        del weights[name]
    elif harm == "unknown":
        weights["base_model.model.other.lora_A.weight"] = weights[name].clone()
    else:
        weights[name] = weights[name][:2].clone()
    save_file(weights, folder / lora.WEIGHTS)


@pytest.mark.parametrize("harm", ["missing", "unknown", "cut"])
def test_tensors_that_are_not_exactly_the_adapters_are_refused(harm: str, tmp_path: Path) -> None:
    spoil(adapter_folder(tmp_path), harm)
    words = {"missing": "is missing", "unknown": "has no place", "cut": "must be"}[harm]
    with pytest.raises(ModelError, match=words):
        tiny(adapter=str(tmp_path))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights"),
        ({"peft_type": "IA3"}, "only LoRA"),
        ({"r": 8}, "must be"),
    ],
)
def test_an_adapter_of_another_kind_is_refused_with_what_is_strange(
    changes: dict[str, object], words: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=words), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tiny(adapter=str(adapter_folder(tmp_path, **changes)))


def test_an_adapter_of_another_base_is_refused_by_name(tmp_path: Path) -> None:
    adapter_folder(tmp_path)
    with pytest.raises(ModelError, match="trained on other weights"):
        load_model("tiny", tiny=TINY, seed=1, lora=LoraSettings(adapter=str(tmp_path)))


def test_what_is_no_adapter_or_no_layer_is_refused_with_what_to_write(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="save_pretrained"):
        tiny(adapter=str(tmp_path / "nothing"))
    adapter_folder(tmp_path)
    (tmp_path / lora.WEIGHTS).rename(tmp_path / "adapter_model.bin")
    with pytest.raises(ModelError, match="pickled"):
        tiny(adapter=str(tmp_path))
    with pytest.raises(ModelError, match=r'"q_pro" is no linear layer.*did you mean "?q_proj'):
        tiny(target_modules=("q_pro",))
    with pytest.raises(ModelError, match="below its head"):
        tiny(target_modules=("lm_head",))
    with pytest.raises(ModelError, match=r"model\.lora\.adapter"):
        load_model(str(tmp_path))


def test_without_peft_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "peft" else found(name, *a))
    with pytest.raises(ModelError, match=r"pip install 'gropius\[lora\]'"):
        tiny()
