"""Laws of the verbs that run: what they ask of the composition root, what they print, what they refuse."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import gropius.build
import gropius.survey
from gropius.cli.main import main
from gropius.cli.play import play
from gropius.recipe import resolve
from gropius.records import RunWriter
from gropius.records.intervals import Share
from gropius.tasks import load_tasks
from gropius.types import Verdict, scored

SHARE = Share(0.5, 0.4, 0.6, 100, 400)


class Found(SimpleNamespace):
    mean = passed = majority = SHARE
    k, mean_length_tokens = 1, 3.0

    def metrics(self) -> dict[str, float]:
        return {"held_out/mean": 0.5}


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as caught:
        main(words)
    out = capsys.readouterr()
    return caught.value.code if isinstance(caught.value.code, int) else 0, out.out, out.err


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "r.toml").write_text('[data]\nsource = "arithmetic"\n[train]\nsteps = 20\n')
    return tmp_path / "r.toml"


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """A composition root that notes what it was asked."""
    noted: list[tuple[str, Any]] = []

    def train(resolved: Any, progress: Any, team: Any) -> Path:
        noted.append(("train", resolved))
        progress.held_out("before", Found())
        progress.step(1, 1, {"reward": 0.5})
        progress.held_out("after", Found())
        return Path(resolved.folder)

    def evaluate(resolved: Any, progress: Any, model: Path | None) -> Found:
        noted.append(("evaluate", (resolved, model)))
        return Found()

    def resume(folder: Path, step: int | None, progress: Any, settings: list[str], team: Any) -> Path:
        noted.append(("resume", (folder, step, settings)))
        return folder

    for function in (train, evaluate, resume):
        home = gropius.build if hasattr(gropius.build, function.__name__) else gropius.survey
        monkeypatch.setattr(home, function.__name__, function)
    return noted


@pytest.fixture
def finished(recipe: Path) -> Path:
    """The folder of a run with checkpoints at steps 5 and 10."""
    resolved = resolve(recipe, ["checkpoint.every=5"])
    RunWriter.create(resolved.folder, resolved.as_dict()).close()
    for step in (5, 10, 15):
        folder = resolved.folder / "checkpoints" / f"step-{step:06d}"
        folder.mkdir()
        if step != 15:
            (folder / "COMPLETE").touch()
    return resolved.folder


class TestTrain:
    def test_it_prints_before_and_after_and_where_to_look(
        self, recipe: Path, calls: list[tuple[str, Any]], capsys: pytest.CaptureFixture[str]
    ) -> None:
        code, out, err = run(capsys, "train", "r.toml", "--set", "train.steps=3", "--name", "a", "--out", "o")
        assert code == 0 and [name for name, _ in calls] == ["train"]
        resolved = calls[0][1]
        assert resolved.train.steps == 3 and resolved.folder == Path("o/a")
        assert out.startswith("held-out before: mean@1 0.500 [0.400, 0.600]") and "held-out after" in out
        assert "run folder  o/a" in out and "step 1/1" in err and "step 1/1" not in out

    def test_a_name_that_looks_like_a_number_is_a_name(
        self, recipe: Path, calls: list[tuple[str, Any]], capsys: pytest.CaptureFixture[str]
    ) -> None:
        run(capsys, "train", "r.toml", "--name", "12")
        assert calls[0][1].name == "12"

    def test_a_taken_folder_is_refused_before_anything_is_loaded(
        self, finished: Path, calls: list[tuple[str, Any]], capsys: pytest.CaptureFixture[str]
    ) -> None:
        for verb in ("train", "sft"):
            code, _, err = run(capsys, verb, "r.toml", "--set", "sft.steps=1")
            assert code == 2 and f"gropius resume {finished}" in err and "--overwrite" in err and not calls

    def test_overwrite_deletes_the_run(
        self, finished: Path, calls: list[tuple[str, Any]], capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert run(capsys, "train", "r.toml", "--overwrite")[0] == 0
        assert not finished.exists() and [name for name, _ in calls] == ["train"]

    def test_overwrite_never_deletes_what_no_run_wrote(
        self, finished: Path, calls: list[tuple[str, Any]], capsys: pytest.CaptureFixture[str]
    ) -> None:
        before = sorted(finished.rglob("*"))
        (finished / "notes.txt").write_text("mine")
        code, _, err = run(capsys, "train", "r.toml", "--overwrite")
        assert code == 2 and "notes.txt" in err and {*before, finished / "notes.txt"} == set(finished.rglob("*"))
        (finished / "resolved.json").unlink()
        code, _, err = run(capsys, "train", "r.toml", "--overwrite")
        assert code == 2 and "holds no run, so it is not deleted" in err and (finished / "notes.txt").exists()

    def test_overwrite_leaves_a_run_in_use_alone(
        self, recipe: Path, calls: list[tuple[str, Any]], capsys: pytest.CaptureFixture[str]
    ) -> None:
        resolved = resolve(recipe)
        with RunWriter.create(resolved.folder, resolved.as_dict()):
            code, _, err = run(capsys, "train", "r.toml", "--overwrite")
        assert code == 2 and "in use by process" in err and (resolved.folder / "resolved.json").exists() and not calls


class TestEval:
    def test_a_recipe_is_measured_with_its_own_model(
        self, recipe: Path, calls: list[tuple[str, Any]], capsys: pytest.CaptureFixture[str]
    ) -> None:
        code, out, _ = run(capsys, "eval", "r.toml", "--set", "eval.samples=4")
        assert code == 0 and out.startswith("held-out r.toml: mean@1 0.500")
        resolved, model = calls[0][1]
        assert resolved.eval.samples == 4 and model is None

    def test_a_run_is_measured_at_its_last_complete_checkpoint(
        self, finished: Path, calls: list[tuple[str, Any]], capsys: pytest.CaptureFixture[str]
    ) -> None:
        code, out, _ = run(capsys, "eval", str(finished), "--set", "eval.samples=4", "--json")
        assert code == 0 and json.loads(out)["held_out/mean"] == 0.5
        resolved, model = calls[0][1]
        assert model == finished / "checkpoints" / "step-000010" / "model"
        assert resolved.eval.samples == 4 and resolved.train.steps == 20

    def test_a_setting_on_a_run_is_checked_like_any_other(
        self, finished: Path, calls: list[tuple[str, Any]], capsys: pytest.CaptureFixture[str]
    ) -> None:
        cases = {
            "eval.sample=4": 'did you mean "samples"',
            "train.final_ratio=0.5": "would do nothing",
            "objective.kl.coeff=1": "unknown key",
        }
        for setting, says in cases.items():
            code, _, err = run(capsys, "eval", str(finished), "--set", setting)
            assert code == 2 and says in err
        assert not calls

    def test_a_run_without_a_checkpoint_is_refused(
        self, recipe: Path, calls: list[tuple[str, Any]], capsys: pytest.CaptureFixture[str]
    ) -> None:
        resolved = resolve(recipe)
        RunWriter.create(resolved.folder, resolved.as_dict()).close()
        code, _, err = run(capsys, "eval", str(resolved.folder))
        assert code == 2 and "no complete checkpoint" in err


class TestResume:
    def test_it_hands_on_the_run_the_step_and_the_harmless_changes(
        self, finished: Path, calls: list[tuple[str, Any]], capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert run(capsys, "resume", str(finished))[0] == 0
        assert run(capsys, "resume", str(finished), "--step", "5", "--set", "train.steps=30")[0] == 0
        assert calls == [("resume", (finished, None, [])), ("resume", (finished, 5, ["train.steps=30"]))]

    def test_without_state_it_says_what_it_needs(self, recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
        resolved = resolve(recipe)
        RunWriter.create(resolved.folder, resolved.as_dict()).close()
        code, _, err = run(capsys, "resume", str(resolved.folder))
        assert code == 2 and "no complete checkpoint" in err and "--set checkpoint.every=10" in err
        code, _, err = run(capsys, "resume", "runs/none")
        assert code == 2 and "no such run folder" in err


class TestPlay:
    @staticmethod
    def replies(*texts: str) -> Any:
        iterator: Iterator[str] = iter(texts)
        return lambda: next(iterator)

    def test_a_single_turn_task_takes_one_reply(self) -> None:
        tasks = load_tasks("arithmetic", {}, 0, {}, None, Path())
        task = tasks.train[0]
        told: list[str] = []
        episode = play(task, tasks, self.replies("42"), told.append)
        assert episode.last_reply == "42" and episode.completion == "42" and len(told) == len(task.messages())

    def test_an_environment_is_played_to_its_end(self) -> None:
        tasks = load_tasks("guess_number", {}, 0, {}, None, Path())
        assert tasks.environment is not None
        told: list[str] = []
        episode = play(tasks.train[0], tasks, lambda: "-5", told.append)
        assert episode.finish_reason == "environment_end" and episode.outcome_step is not None
        assert episode.outcome_step.done and episode.outcome_step.raw == 0.0
        assert told[1:] == [f"user: {word}" for word in ["higher"] * (len(told) - 1)]

    def test_the_verb_prints_every_part_of_the_reward(
        self, recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        tasks = load_tasks("arithmetic", {}, 0, {}, None, Path())

        class Judge:
            async def score(self, episodes: Any) -> list[Verdict]:
                return [Verdict(scored(0.5), {"exact": scored(0.5, "close \x1b")}, 0.5) for _ in episodes]

        monkeypatch.setattr(gropius.build, "tasks", lambda resolved: tasks, raising=False)
        monkeypatch.setattr(gropius.build, "scorer", lambda resolved, tasks: Judge(), raising=False)
        monkeypatch.setattr("builtins.input", lambda prompt: "7")
        code, out, _ = run(capsys, "play", "r.toml")
        assert code == 0 and "reward 0.5 (scored)" in out and "  exact 0.5 (scored: close \\x1b)" in out
        assert f"the gold answer: {tasks.held_out[0].answer}" in out
        code, _, err = run(capsys, "play", "r.toml", "--task", "99999999")
        assert code == 2 and "write 0 to" in err

        def over(prompt: str) -> str:
            raise EOFError

        monkeypatch.setattr("builtins.input", over)
        assert run(capsys, "play", "r.toml")[0] == 130
