"""`gropius audit` and `gropius plan` as verbs: what is printed, as what, and with which exit code."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

from gropius.cli import audit as audit_verb
from gropius.cli import plan as plan_verb
from gropius.errors import UsageError


@pytest.fixture
def run():
    app = typer.Typer(rich_markup_mode=None, add_completion=False)
    app.command("audit")(audit_verb.command)
    app.command("plan")(plan_verb.command)
    runner = CliRunner()

    def call(*arguments):
        result = runner.invoke(app, [str(a) for a in arguments])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return call


@pytest.fixture
def clean(tmp_path):
    path = tmp_path / "clean.yaml"
    path.write_text("loss_type: grpo\nbeta: 0.04\nnum_iterations: 2\n")
    return path


@pytest.fixture
def counts(tmp_path):
    path = tmp_path / "counts.json"
    path.write_text(json.dumps({"solved": [0, 1, 2, 4, 8, 0, 3, 5] * 10, "sampled": 8}))
    return path


def test_a_clean_configuration_exits_0_and_one_with_a_finding_exits_1(run, clean, tmp_path):
    assert run("audit", clean, "--from", "trl").exit_code == 0
    other = tmp_path / "o.yaml"
    other.write_text("loss_type: dr_grpo\n")
    result = run("audit", other, "--from", "trl")
    assert result.exit_code == 1 and "trap:" in result.stdout


def test_text_says_formula_place_units_and_recipe(run, clean):
    out = run("audit", clean, "--from", "trl").stdout
    for piece in ("loss = Σ_t", "[GT:2770-2787, U:1021]", "1.16.0", "responses (not prompts)", "[objective]"):
        assert piece in out


def test_json_is_strict_and_holds_the_whole_audit(run, clean):
    report = json.loads(run("audit", clean, "--from", "trl", "--json").stdout)
    assert report["objective"]["kl"]["coefficient"] == 0.04 and report["framework"]["version"] == "1.16.0"


def test_recipe_alone_is_toml(run, clean):
    import tomllib

    assert tomllib.loads(run("audit", clean, "--from", "trl", "--recipe").stdout)["objective"]["preset"] == "grpo"


def test_two_equal_configurations_exit_0_and_two_different_ones_exit_1_with_numbers(run, clean, tmp_path):
    assert run("audit", clean, "--from", "trl", "--against", clean).exit_code == 0
    script = tmp_path / "v.sh"
    script.write_text("python -m verl algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=8\n")
    result = run("audit", clean, "--from", "trl", "--against", f"verl:{script}")
    assert result.exit_code == 1 and "cosine" in result.stdout and "surrogate.dual" in result.stdout
    report = json.loads(run("audit", clean, "--from", "trl", "--against", f"verl:{script}", "--json").stdout)
    assert report["numbers"]["equal"] is False and len(report["numbers"]["responses"]) == 16


def test_against_a_critic_there_are_no_numbers_and_it_says_why(run, clean, tmp_path):
    script = tmp_path / "v.sh"
    script.write_text("python -m verl data.train_batch_size=8\n")
    result = run("audit", clean, "--from", "trl", "--against", f"verl:{script}")
    assert result.exit_code == 1 and "no numbers: one of the two" in result.stdout


def test_foreign_text_cannot_drive_the_terminal(run, tmp_path):
    path = tmp_path / "a.json"
    path.write_text(json.dumps({"\u001b[31mevil": 1, "beta": 0.04}))
    assert "\u001b" not in run("audit", path, "--from", "trl").stdout


def test_a_plan_prints_a_table_bars_and_reasons_and_the_same_as_json(run, counts):
    out = run("plan", counts, "--budget", "256").stdout
    assert "live prompts" in out and "█" in out and "take " in out
    report = json.loads(run("plan", counts, "--budget", "256", "--json").stdout)
    assert report["plan"]["recommended"]["group_size"] in (2, 4, 8, 16) and report["plan"]["budget"]["responses"] == 256


def test_a_plan_with_a_model_adds_its_cost_at_the_recommended_split(run, counts, tmp_path):
    shape = {
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "intermediate_size": 128,
        "vocab_size": 256,
    }
    (tmp_path / "config.json").write_text(json.dumps(shape))
    report = json.loads(
        run("plan", counts, "--model", tmp_path, "--machine", "2xh100", "--set", "steps=10", "--json").stdout
    )
    size, prompts = report["plan"]["recommended"]["group_size"], report["plan"]["recommended"]["prompts"]
    decode = next(p for p in report["cost"]["phases"] if p["name"] == "decode")
    assert decode["tokens"] == size * prompts * 256 and report["cost"]["fits"]
    assert report["cost"]["run_s"] == pytest.approx(10 * report["cost"]["step_s"])
    assert "a critic would add" in run("plan", "--model", tmp_path, "--machine", "h100").stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((), "give a run folder"), (("--budget", "4"), "give a run folder"), (("C", "--budget", "many"), "--budget"),
     (("C", "--set", "group_size=[4]"), "no int"), (("C", "--set", "group_sise=4"), "did you mean"),
     (("C", "--set", "group_sizes=[1]"), "at least 2"), (("--model", "C"), "num_attention_heads"),
     (("C", "--set", "objective=grop"), 'did you mean "grpo"')],
)  # fmt: skip
def test_a_question_that_cannot_be_answered_is_refused_with_what_to_write(run, counts, arguments, message):
    with pytest.raises(UsageError, match=message):
        run("plan", *(counts if a == "C" else a for a in arguments))


def test_both_rooms_are_imported_without_torch():
    code = (
        "import sys; import gropius.plan, gropius.plan.recorded, gropius.plan.question, gropius.audit, "
        "gropius.audit.against; bad = {'torch', 'transformers', 'vllm', 'ray'} & set(sys.modules); assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
