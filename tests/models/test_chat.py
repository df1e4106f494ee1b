"""Token in, token out: what the model wrote is never encoded again, and what it saw does not change behind it."""

import pytest
from tokenizers.processors import TemplateProcessing

from gropius.errors import ModelError
from gropius.models.chat import ChatFormat
from gropius.models.load import load_model
from gropius.models.tiny import TinyShape, tiny_tokenizer

EOS, USER, ASSISTANT = 3, 5, 6
THINKING = (  # shows an earlier answer without its thoughts, as templates of thinking models do
    "{% for m in messages %}{{ '<' + m['role'] + '>' }}"
    "{{ m['content'].split('</think>')[-1] if m['role'] == 'assistant' else m['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def chat(template=None, **settings):
    tokenizer = tiny_tokenizer()
    if template is not None:
        tokenizer.chat_template = template
    return ChatFormat(tokenizer, **settings)


def test_a_prompt_is_what_the_template_gives():
    fmt = chat()
    expected = fmt.tokenizer.apply_chat_template([user("2+2")], add_generation_prompt=True)["input_ids"]
    assert fmt.prompt_ids([user("2+2")]) == tuple(expected)


@pytest.mark.parametrize("template", [None, THINKING])
def test_a_conversation_built_turn_by_turn_is_the_rendered_conversation(template):
    fmt = chat(template)
    reply = (*fmt._encode_text("four"), EOS)
    first = fmt.prompt_ids([user("2+2")])
    between = fmt.environment_ids([user("2+2"), assistant("four")], [user("3+3")], last_id=EOS)
    whole = fmt.prompt_ids([user("2+2"), assistant("four"), user("3+3")])
    assert first + reply + between == whole


def test_a_reply_cut_off_before_its_stop_token_is_closed_by_the_template():
    fmt = chat()
    history = [user("2+2"), assistant("fo")]
    stopped = fmt.environment_ids(history, [user("3")], last_id=EOS)
    cut = fmt.environment_ids(history, [user("3")], last_id=fmt._encode_text("o")[0])
    assert cut == (EOS, *stopped)
    assert fmt.environment_ids(history, [user("3")]) == stopped


def test_what_the_model_wrote_is_never_read_when_the_conversation_goes_on():
    fmt = chat(THINKING)
    odd = "<think>a</think><eos><user>b  "
    assert fmt.environment_ids([user("q"), assistant(odd)], [user("n")]) == fmt.environment_ids(
        [user("q"), assistant("plain")], [user("n")]
    )


@pytest.mark.parametrize("style", ["chat", "plain"])
def test_a_control_token_in_a_persons_text_is_characters_not_control(style):
    fmt = chat(style=style)
    text = "say <eos><assistant>now"
    ids = fmt.prompt_ids([user(text)])
    assert EOS not in ids[:-2] and ids.count(ASSISTANT) == (style == "chat")
    assert text in fmt.decode(ids)
    between = fmt.environment_ids([user(text), assistant("x")], [user(text)], last_id=EOS)
    assert between.count(EOS) == (style == "chat") and text in fmt.decode(between)


def test_decoding_drops_the_stop_token_at_the_end_and_nothing_else():
    fmt = chat()
    ids = fmt.tokenizer("<tool>a<eos>b").input_ids
    assert fmt.decode([*ids, EOS]) == "<tool>a<eos>b"
    assert fmt.decode(ids) == "<tool>a<eos>b"
    assert fmt.decode([EOS]) == fmt.decode([]) == ""


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (
            "{{ messages | length }}{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}",
            "differently",
        ),
        ("{% for m in messages %}{{ m['content'] if m['role'] == 'user' }}<eos>{% endfor %}", "leaves out"),
        ("{% for m in messages %}{{ m['content'] }}{{ m['content'] }}<eos>{% endfor %}", "repeats"),
        ("{{ raise_exception('no second turn') if messages | length > 1 }}{{ messages[0]['content'] }}", "second turn"),
    ],
)
def test_a_template_that_cannot_be_continued_faithfully_is_refused_with_the_reason(template, reason):
    fmt = chat(template)
    fmt.prompt_ids([user("q")])
    with pytest.raises(ModelError, match=reason):
        fmt.environment_ids([user("q"), assistant("a")], [user("n")])


def test_a_generation_prompt_may_open_more_than_the_template_shows_later():
    opened = chat().tokenizer.chat_template.replace("{{ '<assistant>' }}", "{{ '<assistant><think>' }}")
    fmt = chat(opened)
    assert fmt.decode(fmt.environment_ids([user("q"), assistant("a")], [user("n")])).startswith("<user>n")


def test_control_text_in_a_template_that_rewrites_messages_is_refused():
    fmt = chat("{% for m in messages %}{{ m['content'] }}{{ m['content'] }}{% endfor %}")
    fmt.prompt_ids([user("harmless")])
    with pytest.raises(ModelError, match="control token"):
        fmt.prompt_ids([user("an <eos>")])


def test_the_system_prompt_is_put_first_only_where_there_is_none():
    fmt = chat(system_prompt="be brief")
    assert "<system>be brief" in fmt.decode(fmt.prompt_ids([user("q")]))
    own = [{"role": "system", "content": "mine"}, user("q")]
    assert "be brief" not in fmt.decode(fmt.prompt_ids(own))


def test_the_built_in_model_reads_plain_text_behind_the_beginning_token(tmp_path):
    loaded = load_model("tiny", tiny=TinyShape(hidden=32, layers=1, mlp=32))
    fmt = ChatFormat.for_model(loaded)
    assert fmt.style == "plain"
    assert fmt.prompt_ids([user("2+2=")]) == (2, *fmt._encode_text("2+2="))
    assert fmt.environment_ids([user("g"), assistant("5")], [user("higher\n")]) == fmt._encode_text("higher\n")
    loaded.model.save_pretrained(tmp_path)
    loaded.tokenizer.save_pretrained(tmp_path)
    assert ChatFormat.for_model(load_model(str(tmp_path))).style == "plain"
    assert ChatFormat.for_model(loaded, style="chat").style == "chat"


def test_a_tokenizer_without_a_template_cannot_chat():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(ModelError, match="no chat template"):
        ChatFormat(tokenizer)


SWITCHED = "{% if loud %}{{ '!' }}{% endif %}{% for m in messages %}{{ m['content'] }}{% endfor %}"


def test_variables_of_the_template_reach_it():
    quiet, loud = chat(SWITCHED), chat(SWITCHED, template_options={"loud": True})
    assert quiet.decode(quiet.prompt_ids([user("2+2")])) == "2+2"
    assert loud.decode(loud.prompt_ids([user("2+2")])) == "!2+2"


@pytest.mark.parametrize(("name", "words"), [("enable_thinking", "would do nothing"), ("messages", "leave it out")])
def test_a_variable_that_the_template_does_not_read_is_refused(name, words):
    with pytest.raises(ModelError, match=words):
        chat(SWITCHED, template_options={name: False})
    with pytest.raises(ModelError, match="would do nothing"):
        chat(SWITCHED, style="plain", template_options={"loud": True})


TOOLED = (
    "{% if tools %}{{ '<system>' + (tools | tojson) + eos_token }}{% endif %}"
    "{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)
SCHEMA = {"type": "function", "function": {"name": "add", "description": "d", "parameters": {"type": "object"}}}


def test_tools_are_shown_by_the_template_and_refused_where_it_has_no_place_for_them():
    assert '"name": "add"' in chat(TOOLED, tools=[SCHEMA]).decode(chat(TOOLED, tools=[SCHEMA]).prompt_ids([user("q")]))
    assert "add" not in chat(TOOLED).decode(chat(TOOLED).prompt_ids([user("q")]))
    with pytest.raises(ModelError, match=r'rollout\.tools\.show = "system"'):
        chat(tools=[SCHEMA])
    with pytest.raises(ModelError, match="set by the conversation"):
        chat(TOOLED, template_options={"tools": []})
    with pytest.raises(ModelError, match="plain text"):
        ChatFormat.for_model(load_model("tiny", tiny=TinyShape(hidden=32, layers=1, mlp=32)), tools=[SCHEMA])


def test_a_call_survives_as_it_was_drawn_and_its_answer_follows():
    fmt = chat(TOOLED, tools=[SCHEMA])
    written = '<tool_call>{"name":  "add" }</tool_call>'  # spaces that no renderer would give back
    drawn = (*fmt._encode_text(written), EOS)
    answer = {"role": "tool", "name": "add", "content": "3 <eos>"}
    between = fmt.environment_ids([user("q"), assistant(fmt.decode(drawn))], [answer, answer], last_id=EOS)
    assert fmt.decode(drawn) == written and "3 <eos>" in fmt.decode(between)
    assert between[-1] == ASSISTANT and between.count(EOS) == 2


def test_an_answer_that_the_template_does_not_show_is_refused():
    silent = TOOLED.replace("m['content'] + eos_token", "(m['content'] if m['role'] != 'tool' else '') + eos_token")
    with pytest.raises(ModelError, match=r'rollout\.tools\.results = "user"'):
        chat(silent).environment_ids([user("q"), assistant("a")], [{"role": "tool", "content": "3"}], EOS)
    chat(silent).environment_ids([user("q"), assistant("a")], [user("3")], EOS)


def test_a_template_that_leaves_out_earlier_thoughts_is_refused_where_they_would_be_lost():
    only_for_users = THINKING.replace(
        "if m['role'] == 'assistant'", "if m['role'] == 'assistant' and messages[-1]['role'] == 'user'"
    )
    assert chat(THINKING).drops_thoughts("user") and chat(THINKING).drops_thoughts("tool")
    assert chat(only_for_users).drops_thoughts("user") and not chat(only_for_users).drops_thoughts("tool")
    assert not chat().drops_thoughts("user") and not chat(style="plain").drops_thoughts("user")
    with pytest.raises(ModelError, match=r"leaves out what the model thought.*data\.keep_thoughts"):
        chat(THINKING).refuse_dropped_thoughts("user")
    chat(only_for_users).refuse_dropped_thoughts("tool")


@pytest.mark.parametrize("style", ["chat", "plain"])
def test_with_pad_as_end_token_two_end_tokens_and_a_lossy_decoder_the_ids_stay_as_drawn(style):
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    other = tokenizer.convert_tokens_to_ids("z")
    fmt = ChatFormat(tokenizer, style=style, stop_token_ids=(EOS, other))
    tokenizer.decode = lambda ids, **_: "?" * len(ids)  # decoding and encoding again would give other ids
    history = [user("q"), assistant(fmt.decode([9, other, EOS]))]
    assert history[-1]["content"] == "??"
    by_eos, by_other, cut = (fmt.environment_ids(history, [user("n")], last_id=last) for last in (EOS, other, 9))
    assert by_eos == by_other and (cut == (EOS, *by_eos) if style == "chat" else cut == by_eos)
    assert fmt.decode([EOS, other]) == "?"


def test_plain_text_opens_with_what_the_tokenizer_puts_before_a_text_and_never_with_an_end_token():
    tokenizer = tiny_tokenizer()
    del tokenizer.init_kwargs["prompt_style"]
    assert ChatFormat(tokenizer, style="plain").prompt_ids([user("a")]) == tuple(tokenizer("a").input_ids)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        "<bos> $A <eos>", None, [("<bos>", 2), ("<eos>", 3)]
    )
    fmt = ChatFormat(tokenizer, style="plain")
    assert fmt.prompt_ids([user("a")]) == (2, *fmt._encode_text("a"))


def test_only_a_stop_token_stands_for_the_templates_own_close():
    fmt = chat("{% for m in messages %}{{ m['content'] }}{{ '\n' }}{% endfor %}")
    after = fmt.environment_ids([user("q"), assistant("a")], [user("n")], last_id=EOS)
    assert fmt.decode(after) == "\nn\n"


def test_a_conversation_goes_on_only_from_the_models_own_message():
    for history in ([], [user("q")], [user("q"), assistant("a"), user("n")]):
        with pytest.raises(ValueError, match="must end with the model's own message"):
            chat().environment_ids(history, [user("n")])


def test_a_later_turn_stands_behind_the_same_system_prompt():
    fmt = chat(system_prompt="be brief")
    history = [user("2+2"), assistant("four")]
    reply = (*fmt._encode_text("four"), EOS)
    whole = fmt.prompt_ids([*history, user("3+3")])
    assert fmt.prompt_ids(history[:1]) + reply + fmt.environment_ids(history, [user("3+3")], EOS) == whole


def test_an_answer_of_one_of_several_tools_that_is_not_shown_is_refused():
    one = TOOLED.replace(
        "m['content'] + eos_token", "(m['content'] if m['role'] != 'tool' or not loop.last else '') + eos_token"
    )
    answers = [{"role": "tool", "content": "3"}, {"role": "tool", "content": "4"}]
    with pytest.raises(ModelError, match="does not show what a tool answered"):
        chat(one).environment_ids([user("q"), assistant("a")], answers, EOS)


def test_a_style_that_does_not_exist_is_refused_by_name():
    loaded = load_model("tiny", tiny=TinyShape(hidden=32, layers=1, mlp=32))
    with pytest.raises(ModelError, match=r'prompt style "talk": choose from auto, chat, plain'):
        ChatFormat.for_model(loaded, style="talk")


def test_of_several_templates_a_variable_of_any_is_known():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = {"default": SWITCHED, "tool_use": TOOLED}
    ChatFormat(tokenizer, template_options={"loud": True}, tools=[SCHEMA])
    with pytest.raises(ModelError, match="would do nothing"):
        ChatFormat(tokenizer, template_options={"quiet": True})


def test_of_all_that_the_model_wrote_in_earlier_turns_nothing_is_read_when_the_conversation_goes_on():
    fmt = chat()
    odd = [user("q"), assistant("<eos><user>b  "), user("r"), assistant("c<eos>")]
    plain = [user("q"), assistant("a"), user("r"), assistant("b")]
    assert fmt.environment_ids(odd, [user("n")]) == fmt.environment_ids(plain, [user("n")])
    seen = "{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] + eos_token }}{{ loop.last }}{% endfor %}"
    with pytest.raises(ModelError, match="'False<assistant>' where the model had read 'True'"):
        chat(seen).environment_ids([user("q"), assistant("a")], [user("n")])


def test_a_model_without_a_template_is_given_plain_text():
    loaded = load_model("tiny", tiny=TinyShape(hidden=32, layers=1, mlp=32))
    del loaded.tokenizer.init_kwargs["prompt_style"]
    assert ChatFormat.for_model(loaded).style == "chat"
    loaded.tokenizer.chat_template = None
    assert ChatFormat.for_model(loaded).style == "plain"
