"""Laws of the command line: instant, one clear message for a person's mistake, the right exit code, data on stdout."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gropius.cli import main as program
from gropius.cli.main import VERBS
from gropius.errors import Interrupted, RewardError, SafetyRefusal, UsageError

HEAVY = (
    "torch",
    "transformers",
    "pyarrow",
    "pydantic",
    "numpy",
    "datasets",
    "peft",
    "vllm",
    "ray",
    "rich",
    "asyncio",
    "gropius.recipe",
)


def gropius(*words: str, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gropius", *words]
    env = {**os.environ, "GROPIUS_DEBUG": "", **environment}
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=env, check=False, encoding="utf-8")


def exit_code(*words: str) -> int:
    with pytest.raises(SystemExit) as caught:
        program.main(words)
    code = caught.value.code
    return code if isinstance(code, int) else 0


def test_help_and_version_import_nothing_heavy() -> None:
    script = (
        "import sys\nfrom gropius.cli.main import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit:\n    pass\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)"
    )
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert found.stderr.strip() == "[]" and "Exit codes" in found.stdout


@pytest.mark.parametrize("verb", [v for v, file in VERBS.items() if importlib.util.find_spec(f"gropius.cli.{file}")])
def test_every_verb_that_is_there_has_a_help(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(verb, "--help") == 0
    assert "Usage: gropius " + verb in capsys.readouterr().out


def test_every_file_of_the_command_line_is_a_verb_or_known() -> None:
    folder = Path(program.__file__).parent
    files = {path.stem for path in folder.glob("*.py")}
    known = {"__init__", "main", "options", "pass_rates", "ranks", "cluster", "plan_cluster"}
    known |= {"output", "console", "target", "docs"}
    assert files - known <= set(VERBS.values())


class TestErrors:
    def test_a_refusal_is_one_message_without_traceback(self, tmp_path: Path) -> None:
        (tmp_path / "r.toml").write_text('[data]\nsource = "arithmetic"\n[train]\nlr = 1\n')
        found = gropius("resolve", "r.toml", cwd=tmp_path)
        assert found.returncode == 2 and found.stdout == ""
        assert found.stderr.startswith("gropius: r.toml:4: train.lr: ") and "Traceback" not in found.stderr
        assert found.stderr.count("\n") == 1

    def test_debug_shows_the_traceback(self, tmp_path: Path) -> None:
        for found in (
            gropius("resolve", "none.toml", "--debug", cwd=tmp_path),
            gropius("resolve", "none.toml", cwd=tmp_path, GROPIUS_DEBUG="1"),
        ):
            assert "Traceback" in found.stderr and "RecipeError" in found.stderr

    def test_several_faults_are_counted_and_listed(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        path = tmp_path / "r.toml"
        path.write_text('[data]\nsource = "arithmetic"\n[train]\nlr = 1\nsteps = 0\n')
        assert exit_code("resolve", str(path)) == 2
        lines = capsys.readouterr().err.splitlines()
        assert lines[0] == "gropius: 2 faults" and len(lines) == 3

    @pytest.mark.parametrize(
        ("error", "code"),
        [
            (UsageError("x"), 2),
            (RewardError("x"), 1),
            (SafetyRefusal("x"), 3),
            (Interrupted("x"), 130),
            (KeyboardInterrupt(), 130),
        ],
    )
    def test_each_error_has_its_exit_code(
        self, error: BaseException, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        from gropius.cli import env

        def fail(as_json: bool = False) -> None:
            raise error

        monkeypatch.setattr(env, "command", fail)
        assert exit_code("env") == code
        assert capsys.readouterr().err == f"gropius: {str(error) or 'interrupted'}\n"

    def test_a_fault_of_ours_is_not_hidden(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from gropius.cli import env

        def fail(as_json: bool = False) -> None:
            raise ZeroDivisionError

        monkeypatch.setattr(env, "command", fail)
        with pytest.raises(ZeroDivisionError):
            program.main(["env"])

    def test_an_unknown_verb_or_option_is_usage(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert exit_code("frobnicate") == 2 and exit_code("presets", "--frob") == 2
        assert "Traceback" not in capsys.readouterr().err

    def test_a_message_cannot_drive_the_terminal(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        from gropius.cli import env

        def fail(as_json: bool = False) -> None:
            raise UsageError("bad \x1b]0;title\x07 \x9b31m \u202e text")

        monkeypatch.setattr(env, "command", fail)
        assert exit_code("env") == 2
        assert capsys.readouterr().err == "gropius: bad \\x1b]0;title\\x07 \\x9b31m \\u202e text\n"


def test_output_that_the_terminal_cannot_encode_is_escaped_not_fatal() -> None:
    found = gropius("presets", "grpo", PYTHONIOENCODING="ascii")
    assert found.returncode == 0 and "\\u2212min(r_t" in found.stdout


class TestEnv:
    def test_it_names_versions_devices_and_memory(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert exit_code("env", "--json") == 0
        report = json.loads(capsys.readouterr().out)
        assert report["packages"]["torch"] and report["memory"].keys() == {
            "total_bytes",
            "available_bytes",
            "limit_bytes",
        }
        assert isinstance(report["devices"], list) and report["torch_threads"] >= 1
        assert exit_code("env") == 0
        assert "torch " in capsys.readouterr().out

    def test_no_secret_of_the_environment_is_printed(self) -> None:
        found = gropius("env", "--json", HF_TOKEN="hf_abcdefgh", WANDB_API_KEY="abcdefgh")
        assert found.returncode == 0 and "abcdefgh" not in found.stdout + found.stderr
