"""`gropius plan --cluster` from the command line."""

from __future__ import annotations

import json

import pytest

from gropius.cli.main import main

CONFIG = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128,
          "vocab_size": 100, "tie_word_embeddings": True}  # fmt: skip
SMALL = ("--set", "prompts=4", "--set", "steps=4", "--set", "response_tokens=20", "--set", "staleness=1")


@pytest.fixture
def run(tmp_path, capsys):
    config = tmp_path / "config.json"
    config.write_text(json.dumps(CONFIG))

    def call(*words, model=True):
        with pytest.raises(SystemExit) as caught:
            main(["plan", "--cluster", *(("--model", str(config)) if model else ()), *words])
        out = capsys.readouterr()
        return caught.value.code, out.out, out.err

    return call


def test_a_table_of_layouts_with_the_fastest_marked(run):
    code, out, _ = run("--machine", "4xh100", *SMALL)
    assert not code
    assert out.startswith("4 devices, 4 prompts x 8 a step") and out.count(" <") == 1
    assert "asynchronous, staleness 1" in out and "fastest: " in out and "assumed: h100" in out


def test_json_is_strict_and_says_the_same_again(run):
    first, second = (run("--machine", "4xh100", "--json", *SMALL)[1] for _ in range(2))
    report = json.loads(first, parse_constant=lambda name: pytest.fail(name))["cluster"]
    assert first == second
    assert report["best"]["outcome"]["step_s"] == min(row["outcome"]["step_s"] for row in report["rows"])
    assert all(row["held_back_by"] for row in report["rows"])


def test_a_recipe_gives_its_sizes_and_a_device_may_be_figures(run):
    figures = ("tflops=100", "bandwidth_gb_s=1000", "memory_gb=40", "devices=2", "steps=2", "prompts=3")
    words = [word for figure in figures for word in ("--set", figure)]
    code, out, _ = run("arithmetic", *words)
    assert not code and out.startswith("2 devices, 3 prompts x 8 a step") and "as given: 100 TFLOP/s" in out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--machine", "4xh101"), "h101"),
        (("--machine", "h100", "--set", "devices=0.5"), "devices"),
        (("--machine", "h100", "--set", "late=never"), '"wait" nor "drop"'),
        (("--machine", "h100", "--set", "tensor=2"), "tensor_parallel"),
        (("--machine", "h100", "--budget", "64"), "leave --probe and --budget out"),
        (("--machine", "run"), "takes its speed from a run folder"),
    ],
)
def test_a_mistake_is_told_and_leaves_no_traceback(run, words, says):
    code, _, err = run(*words)
    assert code and says in err and "Traceback" not in err


def test_without_a_model_it_says_what_to_give(run):
    code, _, err = run("--machine", "h100", model=False)
    assert code and "--model FOLDER" in err
