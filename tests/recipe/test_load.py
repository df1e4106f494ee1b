"""Laws of reading a recipe: every fault is refused with its file, line and key, and says what to write instead."""

from __future__ import annotations

from pathlib import Path

import pytest

from gropius.errors import RecipeError
from gropius.recipe.load import find_recipe, from_mapping, key_lines, load, parse_setting

MINIMAL = '[data]\nsource = "arithmetic"\n'


def refusal(folder: Path, text: str, *settings: str) -> str:
    path = folder / "r.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(RecipeError) as caught:
        load(path, settings)
    return str(caught.value)


@pytest.mark.parametrize(
    ("line", "key", "says"),
    [
        ('[train]\nlearning_rate = "1e-6"', "train.learning_rate", "write learning_rate = 1e-6 without quotes"),
        ('[train]\nsteps = "10"', "train.steps", "write steps = 10 without quotes"),
        ("[train]\nsteps = 8.0", "train.steps", "write steps = 8"),
        ("[train]\nsteps = 8.5", "train.steps", "a whole number"),
        ("[train]\nsteps = 0", "train.steps", "at least 1"),
        ("[train]\nsteps = -3", "train.steps", "at least 1"),
        ("[train]\nsteps = true", "train.steps", "expected a whole number, got true"),
        ("[train]\nlearning_rate = 0.0", "train.learning_rate", "more than 0"),
        ("[train]\nlearning_rate = nan", "train.learning_rate", "write a number"),
        ("[train]\nlearning_rate = inf", "train.learning_rate", "write a number"),
        ("[train]\nbeta1 = 1.0", "train.beta1", "less than 1"),
        ('[train]\nschedule = "cosin"', "train.schedule", 'did you mean "cosine"?'),
        ("[train]\nlr = 1e-6", "train.lr", "train.learning_rate"),
        ("[train]\nstepps = 3", "train.stepps", 'did you mean "steps"?'),
        ("[train]\ngroup_size = 3", "train.group_size", "rollout.group_size"),
        ("[rollout]\ngroup_size = 0", "rollout.group_size", "at least 1"),
        ("[rollout]\nprompts = -1", "rollout.prompts", "at least 1"),
        ("[rollout]\nmax_tokens = 0", "rollout.max_tokens", "at least 1"),
        ("[rollout]\ntop_p = 0.0", "rollout.top_p", "more than 0"),
        ("[rollout]\ntop_p = 1.5", "rollout.top_p", "at most 1"),
        ('[rollout]\nstop_strings = "END"', "rollout.stop_strings", 'write stop_strings = ["END"]'),
        ("[rollout]\nnum_generations = 4", "rollout.num_generations", "rollout.group_size"),
        ('[model]\ndevice = "gpu"', "model.device", '"cuda"'),
        ('[model]\ndtype = "bf16"', "model.dtype", "bfloat16"),
        ('[model]\ndtype = "float16"', "model.dtype", 'write "bfloat16" (of the same size)'),
        ("[model]\nsource = 3", "model.source", 'write source = "3"'),
        ('[model]\nsource = ""', "model.source", "is empty"),
        ("[record]\nrollouts = 1", "record.rollouts", "write rollouts = true"),
        ('[record]\nrollouts = "yes"', "record.rollouts", "write rollouts = true"),
        ("[model.tiny]\nhidden = 1.0", "model.tiny.hidden", "write hidden = 1"),
        ("[[reward]]\nweight = 1.0", "reward.0.name", "is missing"),
        ('[reward]\nname = "x"', "reward", "[[reward]]"),
        ('[[reward]]\nname = "x"\noptions = { since = 2026-01-01 }', "reward.0.options", "write it as text in quotes"),
    ],
)
def test_a_fault_names_file_line_and_key_and_says_what_to_write(tmp_path: Path, line: str, key: str, says: str) -> None:
    message = refusal(tmp_path, MINIMAL + "\n" + line + "\n")
    assert "r.toml:" in message and f": {key}: " in message and says in message, message
    number = int(message.split("r.toml:")[1].split(":")[0])
    text = (tmp_path / "r.toml").read_text().splitlines()[number - 1]
    assert key.split(".")[-1] in text or "reward" in text


def test_the_line_is_the_keys_own_even_behind_multi_line_values(tmp_path: Path) -> None:
    text = '[data]\nsource = "arithmetic"\nsystem_prompt = """\n[train]\nsteps = 5\n"""\n\n[rollout]\n'
    text += 'stop_strings = [\n  "a",  # ]\n  "b",\n]\ngroup_size = 0\n'
    assert "r.toml:13: rollout.group_size" in refusal(tmp_path, text)


def test_every_fault_is_listed_at_once(tmp_path: Path) -> None:
    message = refusal(tmp_path, MINIMAL + "[train]\nsteps = 0\nupdates = 0\n[rollout]\nprompts = 0\n")
    assert message.count("\n") == 2


def test_a_missing_data_table_says_what_to_write(tmp_path: Path) -> None:
    assert "[data]" in refusal(tmp_path, "seed = 1\n")


def test_broken_toml_names_the_line(tmp_path: Path) -> None:
    assert "r.toml:3" in refusal(tmp_path, MINIMAL + "x = \n")


def test_a_file_that_is_not_utf8_names_the_line(tmp_path: Path) -> None:
    (tmp_path / "r.toml").write_bytes(b"seed = 1\nname = '\xff'\n")
    with pytest.raises(RecipeError, match=r"r\.toml:2: .*UTF-8"):
        load(tmp_path / "r.toml")


def test_a_byte_order_mark_and_crlf_are_read(tmp_path: Path) -> None:
    (tmp_path / "r.toml").write_bytes(b"\xef\xbb\xbf" + MINIMAL.replace("\n", "\r\n").encode())
    assert load(tmp_path / "r.toml").recipe.data.source == "arithmetic"


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="there is no recipe"):
        find_recipe(tmp_path / "none.toml")
    with pytest.raises(RecipeError, match="is a folder"):
        find_recipe(tmp_path)


@pytest.mark.parametrize("name", ["../x", "a/b", ".hidden", "", "a b", "x" * 101])
def test_a_name_that_leaves_the_output_folder_is_refused(tmp_path: Path, name: str) -> None:
    assert ": name: " in refusal(tmp_path, f'name = "{name}"\n' + MINIMAL)


def test_a_refusal_never_prints_control_characters(tmp_path: Path) -> None:
    message = refusal(tmp_path, MINIMAL + '[model]\ndtype = "\\u001b[31m\\u202e"\n')
    assert all(character.isprintable() or character == "\n" for character in message)


class TestSettings:
    @pytest.mark.parametrize(
        ("setting", "path", "value"),
        [
            ("train.learning_rate=1e-6", ("train", "learning_rate"), 1e-6),
            ("train.steps=10", ("train", "steps"), 10),
            ("record.rollouts=false", ("record", "rollouts"), False),
            ("data.source=runs/x.jsonl", ("data", "source"), "runs/x.jsonl"),
            ("data.source=my.module:tasks", ("data", "source"), "my.module:tasks"),
            ('name="x"', ("name",), "x"),
            ("rollout.stop_strings=['a','b']", ("rollout", "stop_strings"), ["a", "b"]),
            ("reward.0.weight=2", ("reward", 0, "weight"), 2),
            ("data.options.since=2026-01-01", ("data", "options", "since"), "2026-01-01"),
            ("data.system_prompt=a=b", ("data", "system_prompt"), "a=b"),
            ("data.system_prompt=1\nseed = 3", ("data", "system_prompt"), "1\nseed = 3"),
            ("data.system_prompt=", ("data", "system_prompt"), ""),
        ],
    )
    def test_a_setting_is_toml_and_a_bare_word_is_text(
        self, setting: str, path: tuple[object, ...], value: object
    ) -> None:
        assert parse_setting(setting) == (path, value)

    def test_a_setting_wins_over_the_file_and_the_last_one_wins(self, tmp_path: Path) -> None:
        (tmp_path / "r.toml").write_text(MINIMAL + "[train]\nsteps = 3\n")
        loaded = load(tmp_path / "r.toml", ["train.steps=4", "train.steps=5"])
        assert loaded.recipe.train.steps == 5 and "train.steps" in loaded.explicit

    def test_a_setting_reaches_into_a_list_and_may_append(self, tmp_path: Path) -> None:
        (tmp_path / "r.toml").write_text(MINIMAL + '[[reward]]\nname = "a"\n')
        recipe = load(tmp_path / "r.toml", ["reward.0.weight=2", "reward.1.name=b"]).recipe
        assert [(part.name, part.weight) for part in recipe.reward] == [("a", 2.0), ("b", 1.0)]

    @pytest.mark.parametrize(
        ("setting", "says"),
        [
            ("train.steps", "write --set a.b=value"),
            ("=3", "write --set a.b=value"),
            ("a b=3", "write --set a.b=value"),
            ("reward.7.name=x", "the next index is 0"),
            ("reward.name=x", "reward"),
            ("data.source.x=1", "data.source is a value"),
            ("train.steps=0", "--set train.steps: 0 is out of range"),
            ("train.stepz=1", '--set train.stepz: unknown key; did you mean "steps"?'),
        ],
    )
    def test_a_wrong_setting_is_named(self, tmp_path: Path, setting: str, says: str) -> None:
        assert says in refusal(tmp_path, MINIMAL, setting)


class TestSecrets:
    @pytest.mark.parametrize(
        "text",
        [
            '[data.options]\napi_key = "abcd1234"',
            '[data.options]\nhf_token = "abcd1234"',
            '[data.options]\npassword = "abcd1234"',
            '[[reward]]\nname = "judge"\noptions = { openai_api_key = "abcd1234" }',
            'name = "hf_abcd1234abcd1234abcd1234"',
            '[model]\nsource = "https://me:abcd1234@host/x"',
            '[data]\nsource = "sk-abcd1234abcd1234abcd1234"',
            "unknown = 'AKIAABCD1234ABCD1234'",
        ],
    )
    def test_what_looks_like_a_secret_is_refused_and_never_repeated(self, tmp_path: Path, text: str) -> None:
        text = text if "[data]" in text else (text + "\n" + MINIMAL if "=" in text.split("\n")[0] else MINIMAL + text)
        message = refusal(tmp_path, text)
        assert "looks like a secret" in message and "1234" not in message and "r.toml:" in message

    def test_ordinary_words_are_no_secrets(self, tmp_path: Path) -> None:
        text = MINIMAL + '[data.columns]\nanswer = "token"\n[rollout]\ntoken_budget = 4096\nmax_tokens = 8\n'
        (tmp_path / "r.toml").write_text(text + "[data.options]\nstop_token = '<|im_end|>'\nmonkey = 'a'\n")
        load(tmp_path / "r.toml")


def test_key_lines_follow_headers_arrays_quotes_and_inline_tables() -> None:
    text = 'a.b = 1\n"c d" = 2 # x = 3\n[t]\nx = { y = 1, z = [1, 2] }\n'
    text += "[[r]]\nn = 1\n[r.o]\nk = 1\n[[r]]\nn = 2\nm = [\n  1,\n]\n"
    lines = key_lines(text)
    assert lines[("a", "b")] == 1 and lines[("c d",)] == 2 and lines[("t",)] == 3
    assert lines[("t", "x", "y")] == 4 and lines[("t", "x", "z")] == 4
    assert lines[("r", 0, "n")] == 6 and lines[("r", 0, "o", "k")] == 8 and lines[("r", 1, "n")] == 10
    assert lines[("r", 1, "m")] == 11


def test_a_setting_that_names_another_model_takes_the_shape_of_the_built_in_one_with_it() -> None:
    raw = {"model": {"source": "tiny", "tiny": {"layers": 2}}, "data": {"source": "arithmetic"}}
    assert from_mapping(raw, ['model.source="some/folder"']).recipe.model.source == "some/folder"
    kept = from_mapping(raw, ['model.source="some/folder"', "model.tiny.layers=3"])
    assert kept.recipe.model.tiny.layers == 3  # written by hand: refused when the recipe is resolved
