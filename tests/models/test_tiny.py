"""The built-in model: an ordinary Hugging Face model whose tokenizer loses nothing."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gropius.errors import ModelError
from gropius.models.load import load_model, save_model
from gropius.models.tiny import CHARACTERS, CONTROL_TOKENS, TinyShape, tiny_model, tiny_tokenizer

TOKENIZER = tiny_tokenizer()


@settings(max_examples=50, deadline=None)
@given(st.text(alphabet=CHARACTERS, max_size=40))
def test_decoding_an_encoding_gives_the_text_back_one_token_a_character(text):
    ids = TOKENIZER(text, split_special_tokens=True).input_ids
    assert len(ids) == len(text)
    assert TOKENIZER.decode(ids) == text


def test_every_control_token_is_one_id_of_its_own_and_none_is_a_character():
    ids = [TOKENIZER.convert_tokens_to_ids(token) for token in CONTROL_TOKENS]
    assert ids == list(range(len(CONTROL_TOKENS)))
    assert len(TOKENIZER) == len(CONTROL_TOKENS) + len(CHARACTERS)


def test_the_seed_decides_the_weights_and_the_global_random_state_is_left_alone():
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    first, again, other = (tiny_model(TinyShape(layers=1), seed)[0] for seed in (3, 3, 4))
    assert torch.equal(before, torch.random.get_rng_state())
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))
    assert not torch.equal(first.model.embed_tokens.weight, other.model.embed_tokens.weight)


def test_the_default_has_between_half_and_two_million_parameters_and_a_tied_head():
    model, _ = tiny_model(TinyShape(), 0)
    assert 5e5 < sum(p.numel() for p in model.parameters()) < 2e6
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_a_saved_model_loads_with_the_same_weights_ids_and_template(tmp_path):
    loaded = load_model("tiny", tiny=TinyShape(hidden=32, layers=1, mlp=32))
    save_model(loaded, tmp_path / "model")
    again = load_model(str(tmp_path / "model"))
    assert all(torch.equal(a, b) for a, b in zip(loaded.model.parameters(), again.model.parameters(), strict=True))
    assert again.model.lm_head.weight is again.model.model.embed_tokens.weight
    assert again.stop_token_ids == loaded.stop_token_ids == (TOKENIZER.eos_token_id,)
    assert again.pad_token_id == loaded.pad_token_id
    assert again.context_length == loaded.context_length == 256
    messages = [{"role": "user", "content": "2 + 2 = ?"}]
    assert again.tokenizer.apply_chat_template(messages) == loaded.tokenizer.apply_chat_template(messages)


@pytest.mark.parametrize(
    ("shape", "says"),
    [({"hidden": 30}, "heads"), ({"heads": 4, "kv_heads": 3}, "kv_heads"), ({"layers": 0}, "layers")],
)
def test_a_shape_that_cannot_be_is_refused_and_the_field_named(shape, says):
    with pytest.raises(ModelError, match=says):
        TinyShape(**shape)
