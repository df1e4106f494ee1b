"""Laws of the verbs that only read: exact numbers, strict JSON, refusals that say what to write."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from gropius import explain, explain_rewards
from gropius.cli.main import main
from gropius.objective.presets import PRESETS
from gropius.recipe import resolve
from gropius.recipe.text import as_toml


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as caught:
        main(words)
    out = capsys.readouterr()
    return caught.value.code if isinstance(caught.value.code, int) else 0, out.out, out.err


def strict(text: str) -> Any:
    return json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


BATCH = {
    "groups": [
        {
            "id": "q\u001b[31m1",
            "responses": [
                {
                    "reward": 1.0,
                    "policy": [-1.1, -0.2],
                    "anchor": [-1.2, -0.5],
                    "reference": [-1.0, -0.3],
                    "mask": [1, 0],
                },
                {"reward": 0.0, "policy": [-1.0], "anchor": [-1.2], "reference": [-1.0]},
            ],
        }
    ]
}


class TestExplain:
    def test_a_group_is_replayed_with_the_definition_of_each_step(self, capsys: pytest.CaptureFixture[str]) -> None:
        code, out, _ = run(capsys, "explain", "--rewards", "1,1,0,0")
        assert code == 0 and "population std" in out
        last = next(line for line in out.splitlines() if line.startswith("advantage"))
        assert last.split()[-4:] == ["1", "1", "-1", "-1"]

    def test_json_is_what_python_returns(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        code, out, _ = run(capsys, "explain", "--rewards", "1,0,0", "--objective", "dr_grpo", "--json")
        assert code == 0 and strict(out) == explain_rewards([1, 0, 0], "dr_grpo")
        path = tmp_path / "batch.json"
        path.write_text(json.dumps(BATCH))
        words = ("explain", str(path), "--set", "objective.surrogate.high=0.28", "--json")
        code, out, _ = run(capsys, *words)
        assert code == 0 and strict(out) == explain(BATCH, "grpo", {"surrogate.high": 0.28})

    def test_a_batch_is_printed_token_by_token_and_inert(
        self, capsys: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        path = tmp_path / "batch.json"
        path.write_text(json.dumps(BATCH))
        code, out, _ = run(capsys, "explain", str(path))
        assert code == 0 and "\x1b" not in out and "masked" in out and "loss " in out

    @pytest.mark.parametrize(
        ("words", "says"),
        [
            ((), "give either --rewards"),
            (("--rewards", "1", "batch.json"), "give either --rewards"),
            (("--rewards", ""), "at least one reward"),
            (("--rewards", "1,x"), "number 2 is 'x'"),
            (("--rewards", "1,nan"), "nan"),
            (("--rewards", "1,0", "--objective", "grop"), 'did you mean "grpo"?'),
            (("--rewards", "1,0", "--set", "train.steps=3"), "write --set objective."),
            (("--rewards", "1,0", "--set", "objective.advantage.ddov=1"), 'did you mean "ddof"?'),
            (("none.json",), "none.json: cannot be read"),
            (("text.json",), "text.json:2: this is not JSON"),
            (("nan.json",), "finite"),
            (("binary.json",), "not JSON text in UTF-8"),
        ],
    )
    def test_a_refusal_says_what_to_write(
        self, words: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: Any
    ) -> None:
        monkeypatch.chdir(tmp_path)
        Path("text.json").write_text("{\nx}")
        Path("nan.json").write_text('{"groups": [{"responses": [{"reward": NaN, "length": 1}]}]}')
        Path("binary.json").write_bytes(b"\xff\xfe")
        code, out, err = run(capsys, "explain", *words)
        assert code == 2 and out == "" and says in err


class TestPresets:
    def test_the_list_has_every_preset(self, capsys: pytest.CaptureFixture[str]) -> None:
        _, out, _ = run(capsys, "presets")
        assert all(any(line.startswith(name + " ") for line in out.splitlines()) for name in PRESETS)
        assert strict(run(capsys, "presets", "--json")[1]).keys() == PRESETS.keys()

    @pytest.mark.parametrize("name", sorted(PRESETS))
    def test_one_preset_prints_every_field_formula_and_difference(
        self, name: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        _, out, _ = run(capsys, "presets", name)
        report = strict(run(capsys, "presets", name, "--json")[1])
        preset = PRESETS[name]
        assert preset.citation in out and preset.print_difference in out and report["formula"].splitlines()[0] in out
        assert report["fields"] == preset.objective.as_dict()
        for axis, fields in report["fields"].items():
            assert f"[objective.{axis}]" in out and all(f"\n{key} = " in out for key in fields)
        assert all(f"{framework}: " in out for framework in preset.elsewhere)

    def test_an_unknown_name_suggests_the_nearest(self, capsys: pytest.CaptureFixture[str]) -> None:
        code, _, err = run(capsys, "presets", "dapoo")
        assert code == 2 and 'did you mean "dapo"?' in err


class TestResolve:
    RECIPE = (
        '[data]\nsource = "x.jsonl"\noptions = { limit = 3, "a b" = ["\\u001b", 1.5] }\n'
        'system_prompt = "say \\"hi\\"\\n\\u007f"\n'
    )

    def test_it_prints_formula_derived_numbers_and_hash(
        self, capsys: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        path = tmp_path / "r.toml"
        path.write_text(self.RECIPE)
        _, out, _ = run(capsys, "resolve", str(path), "--set", "train.steps=3")
        resolved = resolve(path, ["train.steps=3"])
        assert resolved.sha256 in out and "# loss = " in out and "# optimiser_steps = 3" in out and "\x1b" not in out
        report = strict(run(capsys, "resolve", str(path), "--set", "train.steps=3", "--json")[1])
        assert {key: report[key] for key in resolved.as_dict()} == json.loads(json.dumps(resolved.as_dict()))

    @pytest.mark.parametrize("preset", sorted(set(PRESETS) - {"ppo"}))
    def test_what_it_prints_is_a_recipe_with_the_same_hash(self, preset: str, tmp_path: Path) -> None:
        recipe = tomllib.loads(self.RECIPE) | {"reward": [{"name": "a:b", "weight": 0.5, "options": {"k": {"z": 1}}}]}
        for settings in (
            [],
            [
                "model.source=m",
                "rollout.max_turns=2",
                "checkpoint.every=3",
                "checkpoint.keep_last=5",
                "train.schedule=cosine",
            ],
            ["sft.steps=3", "sft.batch=5", "eval.samples=4", "name=n"],
        ):
            resolved = resolve(recipe, [f"objective.preset={preset}", *settings])
            path = tmp_path / "full.toml"
            path.write_text(as_toml(resolved), encoding="utf-8")
            again = resolve(path)
            assert again.sha256 == resolved.sha256 and as_toml(again) == as_toml(resolved)

    def test_code_that_a_recipe_names_is_not_run(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        (tmp_path / "evil.py").write_text("raise SystemExit('ran')\n")
        path = tmp_path / "r.toml"
        path.write_text('[data]\nsource = "evil:tasks"\n')
        code, out, _ = run(capsys, "resolve", str(path))
        assert code == 0 and "evil:tasks" in out
        for verb in ("train", "eval", "play", "sft"):
            code, out, err = run(capsys, verb, str(path), "--set", "sft.steps=1")
            assert code == 3 and "--trust-code" in err and "evil:tasks" in err


class TestResolveCheck:
    def checked(self, capsys: pytest.CaptureFixture[str], folder: Path, *words: str) -> tuple[int, str, str]:
        (folder / "r.toml").write_text('[data]\nsource = "rows.jsonl"\nheld_out = 1\n[[reward]]\nname = "math"\n')
        return run(capsys, "resolve", str(folder / "r.toml"), "--check", *words)

    def rows(self, folder: Path, *answers: str) -> None:
        lines = [json.dumps({"prompt": f"Question {n}?", "answer": answer}) for n, answer in enumerate(answers)]
        (folder / "rows.jsonl").write_text("\n".join(lines) + "\n")

    def test_a_sound_recipe_passes_and_is_printed(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        self.rows(tmp_path, "1", "2", "3")
        code, out, told = self.checked(capsys, tmp_path, "--json")
        assert code == 0 and strict(out)["findings"] == [] and "nothing was found" in told

    def test_missing_data_an_unknown_reward_and_unusable_gold_are_named(
        self, capsys: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        code, _, told = self.checked(capsys, tmp_path)
        assert code == 2 and "rows.jsonl: no such file" in told
        self.rows(tmp_path, "1", "2", "nan", "9^{9^{9^9}}")
        code, _, told = self.checked(capsys, tmp_path, "--set", 'reward=[{name="maths"}]')
        assert code == 2 and 'did you mean "math"' in told
        code, out, told = self.checked(capsys, tmp_path, "--json")
        assert code == 1 and "2 of 4 rows have gold answers that the reward math cannot use" in told
        assert strict(out)["findings"][0]["rows"] and "rows.jsonl:3" in told
        rows = [{"prompt": "f adds one", "test_list": [test]} for test in ("assert f(1) == 2", "def helper(x): pass")]
        (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
        code, _, told = self.checked(capsys, tmp_path, "--set", 'reward=[{name="code",options={minimum="none"}}]')
        assert code == 1 and "1 of 2 rows have tests" in told and "rows.jsonl:2" in told

    def test_prompts_without_room_for_a_reply_are_found_with_the_model(
        self, capsys: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        self.rows(tmp_path, "1", "2", "3")
        lines = (tmp_path / "rows.jsonl").read_text() + json.dumps({"prompt": "x" * 200, "answer": "4"}) + "\n"
        (tmp_path / "rows.jsonl").write_text(lines)
        code, _, told = self.checked(capsys, tmp_path, "--model")
        assert code == 1 and "1 of 4 prompts leave fewer than 64 tokens of 256" in told and "rows.jsonl:4" in told
        code, _, told = run(capsys, "resolve", str(tmp_path / "r.toml"), "--model")
        assert code == 2 and "--check" in told
