"""The built-in tiny model: a Llama of 0.5 to 2 million parameters and a character tokenizer. Nothing is downloaded.

Both are ordinary Hugging Face objects: what `save_pretrained` writes, transformers and vLLM load. The tokenizer knows
printable ASCII and the newline, one character a token, so that an answer's digits are what the model works with.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from gropius.errors import ModelError

CONTROL_TOKENS = ("<pad>", "<unk>", "<bos>", "<eos>", "<system>", "<user>", "<assistant>", "<tool>")
CHARACTERS = "\n" + "".join(chr(code) for code in range(32, 127))

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{{ '<' + message['role'] + '>' + message['content'] + eos_token }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)


@dataclass(frozen=True)
class TinyShape:
    """The shape of the built-in model. hidden, mlp: widths; context: tokens. The default has 0.81 M parameters."""

    hidden: int = 128
    layers: int = 4
    heads: int = 4
    kv_heads: int = 4
    mlp: int = 352
    context: int = 256

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise ModelError(f"model.tiny.{name} = {value}: write a whole number of at least 1")
        if self.hidden % self.heads or (self.hidden // self.heads) % 2:
            raise ModelError(
                f"model.tiny: hidden = {self.hidden} must be an even multiple of heads = {self.heads} "
                f"(rotary positions turn pairs); write for example hidden = {2 * self.heads * 16}"
            )
        if self.heads % self.kv_heads:
            raise ModelError(f"model.tiny: heads = {self.heads} must be a multiple of kv_heads = {self.kv_heads}")


def tiny_tokenizer(context: int = 256) -> PreTrainedTokenizerFast:
    """One token a character: newline, printable ASCII, and the control tokens; any other character is `<unk>`.

    context: the longest text in tokens that its model takes. `decode(encode(x)) == x` for every text of its alphabet.
    """
    vocabulary = {token: index for index, token in enumerate((*CONTROL_TOKENS, *CHARACTERS))}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in CONTROL_TOKENS])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        unk_token="<unk>",
        bos_token="<bos>",
        eos_token="<eos>",
        additional_special_tokens=list(CONTROL_TOKENS[4:]),
        model_max_length=context,
        clean_up_tokenization_spaces=False,
        prompt_style="plain",
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def tiny_model(shape: TinyShape, seed: int) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """A randomly initialised model and its tokenizer. The same shape and seed give the same weights.

    The global random state of torch is left as it was.
    """
    tokenizer = tiny_tokenizer(shape.context)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=shape.hidden,
        intermediate_size=shape.mlp,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=shape.context,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    return model, tokenizer
