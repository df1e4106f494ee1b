"""Tokenizers with the control tokens and the conversation layout of two model families, one character a token.

The templates are ours; they do what the families' own do to a conversation: where tools are shown, how an answer of a
tool is wrapped, which turns share a header, what is trimmed, and that Qwen leaves out thoughts before the last query.
GROPIUS_TRL_PYTHON names a Python whose TRL carries the templates themselves; then they are taken too.
"""

from __future__ import annotations

import os
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from gropius.models.tiny import CHARACTERS

QWEN = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' + (messages[0].content + '\\n' if messages[0].role == 'system' else '') }}
    {{- 'Functions:' }}{% for tool in tools %}{{- '\\n' + (tool | tojson) }}{% endfor %}{{- '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set last = namespace(query=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set last.query = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
    {%- set before = messages[loop.index0 - 1].role if loop.index0 else '' %}
    {%- if m.role == 'user' or (m.role == 'system' and loop.index0) %}
        {{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
    {%- elif m.role == 'assistant' %}
        {%- set said = m.content if loop.index0 > last.query else m.content.split('</think>')[-1].lstrip('\\n') %}
        {{- '<|im_start|>assistant\\n' + said + '<|im_end|>\\n' }}
    {%- elif m.role == 'tool' %}
        {{- '' if before == 'tool' else '<|im_start|>user' }}
        {{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
        {{- '' if not loop.last and messages[loop.index0 + 1].role == 'tool' else '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""

LLAMA = """\
{%- macro head(role) %}{{- '<|start_header_id|>' + role + '<|end_header_id|>\\n\\n' }}{% endmacro -%}
{{- bos_token + head('system') }}
{%- set system = messages[0].content | trim if messages[0].role == 'system' else '' %}
{%- set rest = messages[1:] if messages[0].role == 'system' else messages %}
{{- ('Environment: ipython\\n' if tools else '') + system + '<|eot_id|>' }}
{%- if tools %}
    {{- head('user') + 'Functions:\\n' }}{% for tool in tools %}{{- (tool | tojson) + '\\n' }}{% endfor %}
    {{- rest[0].content | trim + '<|eot_id|>' }}
    {%- set rest = rest[1:] %}
{%- endif %}
{%- for m in rest %}
    {%- if m.role == 'tool' %}{{- head('ipython') + (m.content | tojson) + '<|eot_id|>' }}
    {%- else %}{{- head(m.role) + m.content | trim + '<|eot_id|>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- head('assistant') }}{% endif %}"""

CONTROL = {
    "qwen": ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    "llama": (
        "<|finetune_right_pad_id|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>",
        "<|eot_id|>", "<|python_tag|>",
    ),
}  # fmt: skip
WORDS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
STOPS = {"qwen": ("<|im_end|>", "<|endoftext|>"), "llama": ("<|eot_id|>", "<|eom_id|>")}
OWN = {"qwen": QWEN, "llama": LLAMA}
THEIRS = {"qwen": ("qwen2_5", "qwen3", "qwen3_instruct_2507"), "llama": ("llama3_1", "llama3_2")}


def templates() -> dict[str, str]:
    """By name, the family's first: our own and, where they lie on this machine, the families'."""
    found = dict(OWN)
    home = Path(os.environ.get("GROPIUS_TRL_PYTHON", "/nowhere/bin/python")).parents[1]
    for folder in home.glob("lib/python3.*/site-packages/trl/chat_templates"):
        for family, names in THEIRS.items():
            found |= {f"{family}/{name}": (folder / f"{name}.jinja").read_text() for name in names}
    return found


def tokenizer_of(name: str) -> PreTrainedTokenizerFast:
    """A tokenizer of the family that a name of `templates` begins with."""
    family = name.partition("/")[0]
    added = [*CONTROL[family], *(WORDS if family == "qwen" else ())]
    vocabulary = {token: index for index, token in enumerate((*added, "<unk>", *CHARACTERS))}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in CONTROL[family]])
    backend.add_tokens([AddedToken(token, normalized=False, special=False) for token in added if token in WORDS])
    bos = {"bos_token": "<|begin_of_text|>"} if family == "llama" else {}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token=added[0], unk_token="<unk>", eos_token=STOPS[family][0],
        model_max_length=4096, clean_up_tokenization_spaces=False, **bos,
    )  # fmt: skip
    tokenizer.chat_template = templates()[name]
    return tokenizer


def stop_ids(name: str, tokenizer: PreTrainedTokenizerFast) -> tuple[int, ...]:
    """The ids that end a turn of the family; the first is the usual one."""
    return tuple(tokenizer.convert_tokens_to_ids(list(STOPS[name.partition("/")[0]])))
