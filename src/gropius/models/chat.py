"""Between messages and token ids: token in, token out. What the model wrote is never encoded again.

A prompt is encoded once. Every later stretch of environment text is encoded on its own and appended to the ids that
were drawn, so the row that is trained is the row that was sampled.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, cast

import jinja2
from transformers import PreTrainedTokenizerBase

from gropius.errors import ModelError
from gropius.models.load import LoadedModel
from gropius.types import Message

Style = Literal["chat", "plain"]
STYLES = ("auto", "chat", "plain")

_OWN_VARIABLES = ("messages", "tools", "tokenize", "add_generation_prompt", "continue_final_message", "return_dict")
# Private-use characters: no template tests for them, no tokenizer merges them with their neighbours before we look.
_OPEN, _CLOSE = "\ue0f0", "\ue0f1"


class ChatFormat:
    """How messages become ids for one tokenizer.

    style "chat": the tokenizer's chat template. style "plain": the contents one after another behind the
    beginning-of-text token, no roles; what a model that was never instructed (the built-in one) is given.
    system_prompt: put first where a conversation has no system message of its own.
    stop_token_ids: ids that end a model turn; the tokenizer's end token where none are given.
    template_options: variables of the chat template beside the conversation, such as enable_thinking.
    tools: schemas of functions, which the template shows the model.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        system_prompt: str | None = None,
        *,
        style: Style = "chat",
        stop_token_ids: Iterable[int] = (),
        template_options: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        if style == "chat" and tokenizer.chat_template is None:
            raise ModelError('the tokenizer has no chat template; use the style "plain"')
        self.tokenizer = tokenizer
        self.system_prompt = system_prompt
        self.style = style
        stops = set(stop_token_ids) or ({tokenizer.eos_token_id} - {None})
        self.stop_token_ids = frozenset(int(token) for token in stops)
        self.template_options = dict(template_options or {})
        self.tools = [dict(tool) for tool in tools]
        self._refuse_idle_options()
        self._control = tuple(str(token) for token in tokenizer.added_tokens_decoder.values() if token.special)
        self._opening = self._plain_opening()

    @classmethod
    def for_model(
        cls,
        loaded: LoadedModel,
        style: str = "auto",
        system_prompt: str | None = None,
        template_options: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> ChatFormat:
        """The format of a model. "auto": plain for the built-in model or where there is no template, else chat."""
        if style not in STYLES:
            raise ModelError(f'prompt style "{style}": choose from {", ".join(STYLES)}')
        if style == "auto":
            plain = loaded.tokenizer.chat_template is None or _asks_for_plain(loaded.tokenizer)
            style = "plain" if plain else "chat"
        if tools and style == "plain":
            raise ModelError(
                "this model reads plain text, so its prompt has no place for tools; write rollout.tools.show = "
                '"system" and rollout.tools.results = "user"'
            )
        return cls(
            loaded.tokenizer,
            system_prompt,
            style=cast(Style, style),
            stop_token_ids=loaded.stop_token_ids,
            template_options=template_options,
            tools=tools,
        )

    def prompt_ids(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """The ids that the model continues: the conversation so far and, in chat style, the opening of its turn.

        Control tokens written inside a message's text are encoded as plain characters, never as control tokens.
        Raises ModelError when the template refuses the conversation.
        """
        messages = self._with_system(messages)
        if self.style == "plain":
            return self._opening + self._encode_text("".join(message["content"] for message in messages))
        return self._encode_conversation(messages)

    def environment_ids(
        self, history: Sequence[Message], new_messages: Sequence[Message], last_id: int | None = None
    ) -> tuple[int, ...]:
        """The ids between two model turns: the close of the last one, the new messages, the opening of the next.

        history: the conversation up to and including the model's last message. last_id: the last id that the model
        drew; where it is a stop token (assumed when None) it stands for the template's own close of the turn, which is
        then not written twice. Nothing that the model wrote is read, so nothing of it can be encoded anew.

        Raises ModelError when the template cannot be continued faithfully: it changes what the model saw before its
        last turn, or it does not show that turn exactly once.
        """
        if not history or history[-1]["role"] != "assistant":
            raise ValueError("environment_ids: the history must end with the model's own message")
        if self.style == "plain":
            return self._encode_text("".join(message["content"] for message in new_messages))
        head = [_with_content(m, "-") if m["role"] == "assistant" else m for m in self._with_system(history)[:-1]]
        mark = f"{_OPEN}reply{_CLOSE}"
        conversation = [*head, _with_content(history[-1], mark), *new_messages]
        self._check_continuation(self._render(head), self._render(conversation), mark)
        if any(message["role"] == "tool" for message in new_messages):
            self._check_results([*head, _with_content(history[-1], "-")], new_messages)
        ids = self._encode_conversation(conversation, after=mark)
        stopped = last_id is None or last_id in self.stop_token_ids
        return ids[1:] if stopped and ids and ids[0] in self.stop_token_ids else ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of a model turn, without the stop token at its end. Other special tokens stay visible."""
        kept = [int(token) for token in ids]
        if kept and kept[-1] in self.stop_token_ids:
            kept.pop()
        return cast(
            str,
            self.tokenizer.decode(kept, skip_special_tokens=False, clean_up_tokenization_spaces=False),
        )

    def _refuse_idle_options(self) -> None:
        """Refuse a variable that the template never reads, or that belongs to the conversation itself."""
        template = self.tokenizer.chat_template if self.style == "chat" else ""
        text = template if isinstance(template, str) else " ".join(map(str, (template or {}).values()))
        if self.tools and not re.search(r"\btools\b", text):
            raise ModelError(
                "the chat template has no place for tools, so the model would not hear of them; write "
                'rollout.tools.show = "system"'
            )
        for name in self.template_options:
            if name in _OWN_VARIABLES or not re.search(rf"\b{re.escape(name)}\b", text):
                raise ModelError(
                    f"data.template.{name}: would do nothing: the chat template has no such variable"
                    if name not in _OWN_VARIABLES
                    else f"data.template.{name}: is set by the conversation; leave it out"
                )

    def _with_system(self, messages: Sequence[Message]) -> list[Message]:
        if self.system_prompt is None or any(message["role"] == "system" for message in messages):
            return list(messages)
        return [{"role": "system", "content": self.system_prompt}, *messages]

    def _plain_opening(self) -> tuple[int, ...]:
        stops = self.stop_token_ids
        if _asks_for_plain(self.tokenizer) and self.tokenizer.bos_token_id is not None:
            return (int(self.tokenizer.bos_token_id),)
        return tuple(int(token) for token in self.tokenizer("").input_ids if token not in stops)

    def _render(self, messages: Sequence[Message]) -> str:
        conversation = cast("list[dict[str, str]]", list(messages))
        try:
            text = self.tokenizer.apply_chat_template(
                conversation,
                tools=cast("list[Any]", self.tools) or None,
                tokenize=False,
                add_generation_prompt=True,
                **self.template_options,
            )
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            roles = ", ".join(message["role"] for message in messages)
            raise ModelError(f"the chat template refuses a conversation of the roles ({roles}): {error}") from error
        return cast(str, text)

    def _check_continuation(self, before: str, text: str, mark: str) -> None:
        if text.count(mark) != 1:
            raise ModelError(
                "this chat template cannot be continued faithfully: it leaves out or repeats the model's earlier turn; "
                "use one turn, or a template that keeps turns as they are"
            )
        shown = text[: text.index(mark)]
        if not before.startswith(shown):
            at = next((i for i, (a, b) in enumerate(zip(before, shown, strict=False)) if a != b), len(before))
            raise ModelError(
                "this chat template cannot be continued faithfully: once an answer follows, it shows the earlier "
                f"conversation differently: {shown[at : at + 40]!r} where the model had read {before[at : at + 40]!r}"
            )

    def _check_results(self, history: Sequence[Message], results: Sequence[Message]) -> None:
        marks = [f"{_OPEN}{index}{_CLOSE}" for index in range(len(results))]
        text = self._render([*history, *map(_with_content, results, marks)])
        if any(text.count(mark) != 1 for mark in marks):
            raise ModelError(
                'this chat template does not show what a tool answered; write rollout.tools.results = "user"'
            )

    def drops_thoughts(self, role: str) -> bool:
        """True when the template leaves out what the model thought in an earlier turn once a message of `role` follows.

        The thoughts stay in the ids, as they were drawn; a conversation that is rendered anew would lack them.
        """
        if self.style == "plain":
            return False
        thought = f"{_OPEN}thought{_CLOSE}"
        reply: Message = {"role": "assistant", "content": f"<think>\n{thought}\n</think>\n\nanswer"}
        try:
            text = self._render([{"role": "user", "content": "q"}, reply, {"role": role, "content": "n"}])
        except ModelError:  # it takes no second turn at all, which is refused where one is taken
            return False
        return thought not in text and "answer" in text

    def refuse_dropped_thoughts(self, role: str) -> None:
        """Refuse a template that `drops_thoughts`: what is trained would be no conversation that it ever renders."""
        if self.drops_thoughts(role):
            raise ModelError(
                "this chat template cannot be continued faithfully: it leaves out what the model thought in earlier "
                "turns, and the ids of an episode keep it; use one turn, or a template that keeps thoughts, or write "
                "data.keep_thoughts = true if the model does not think aloud, or is to see its thoughts again"
            )

    def _encode_conversation(self, messages: Sequence[Message], after: str = "") -> tuple[int, ...]:
        """Encode the rendered conversation, or what follows `after` in it.

        Contents that spell a control token are held out while the template is rendered and encoded as characters.
        """
        held = {
            f"{_OPEN}{index}{_CLOSE}": message["content"]
            for index, message in enumerate(messages)
            if any(token in message["content"] for token in self._control)
        }
        marked = [
            _with_content(message, mark) if (mark := f"{_OPEN}{index}{_CLOSE}") in held else message
            for index, message in enumerate(messages)
        ]
        text = self._render(marked)
        for mark, content in held.items():
            if text.count(mark) != 1:
                raise ModelError(
                    f"a message spells a control token ({content[:40]!r}) and the chat template does not show the "
                    "message exactly once, so its text cannot be kept apart from the control tokens; take it out"
                )
        rest = text[text.index(after) + len(after) :]
        ids: list[int] = []
        for piece in re.split(f"({_OPEN}[0-9]+{_CLOSE})", rest):
            ids.extend(self._encode_text(held[piece]) if piece in held else self._encode_template(piece))
        return tuple(ids)

    def _encode_template(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer(text, add_special_tokens=False).input_ids)

    def _encode_text(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids)


def _with_content(message: Message, content: str) -> Message:
    return cast(Message, {**message, "content": content})


def _asks_for_plain(tokenizer: PreTrainedTokenizerBase) -> bool:
    settings: dict[str, Any] = tokenizer.init_kwargs
    return settings.get("prompt_style") == "plain"
