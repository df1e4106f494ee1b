"""Logs of other trainers in the viewer: every page of an imported run answers, and what the log lacks is said."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import typer
from conftest import TOKEN
from starlette.testclient import TestClient
from typer.testing import CliRunner

from gropius.cli import report, show
from gropius.doctor.imported import as_run
from gropius.errors import RunFolderError
from gropius.records import RunReader
from gropius.viewer.library import Library
from gropius.viewer.server import application

LOGS = runpy.run_path(str(Path(__file__).parents[1] / "doctor" / "test_foreign.py"), run_name="logs")
STEPS, PROMPTS, SIBLINGS, reward_of, verl = (LOGS[n] for n in ("STEPS", "PROMPTS", "SIBLINGS", "reward_of", "verl"))
WRITERS = [LOGS[name] for name in ("trl", "verl", "prime", "traces", "openrlhf")]


def client_of(library: Library) -> TestClient:
    return TestClient(
        application(library, TOKEN, 0), base_url="http://127.0.0.1:1", headers={"authorization": f"Bearer {TOKEN}"}
    )


@pytest.mark.parametrize("write", WRITERS, ids=lambda f: f.__name__)
def test_every_page_of_an_imported_run_answers(write: Callable[[Path], None], tmp_path: Path) -> None:
    (tmp_path / "log").mkdir()
    write(tmp_path / "log")
    library = Library([tmp_path / "log"], tmp_path / "cache")
    (name,) = library.ids()
    library.index(name).wait()
    client = client_of(library)

    def get(path: str, **query: object) -> dict:  # type: ignore[type-arg]
        answer = client.get(f"/api/runs/{name}{path}", params=query)  # type: ignore[arg-type]
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    page = get("")
    assert page["steps"] == STEPS and page["rollout_steps"] == list(range(1, STEPS + 1)) and page["objective"] is None
    assert any("imported from" in told for told in page["notes"])
    assert any("not in this log: " in told and "tokens.policy" in told for told in page["notes"])
    assert get("/curves")["series"]["reward"]["steps"] == list(range(1, STEPS + 1))
    every = get("/groups")
    assert every["total"] == STEPS * PROMPTS and every["counts"]["all_failed"] == STEPS * (PROMPTS - 1)
    group = get("/groups", step=3)["rows"][0]
    detail = get(f"/steps/3/groups/{group['group_id']}")
    assert [r["reward"] for r in detail["responses"]] == [reward_of(3, 0, m) for m in range(SIBLINGS)]
    assert "answer 0 1 3" in detail["responses"][1]["text"] and detail["prompt"]
    place = f"/steps/3/groups/{group['group_id']}/responses/1"
    assert "answer 0 1 3" in get(place)["text"]
    assert get(f"{place}/tokens")["ids"] == [] and "missing" in get(f"{place}/arithmetic")
    assert get(f"/steps/3/groups/{group['group_id']}/difference", a=0, b=1)["runs"]
    assert get("/examine")["findings"][0]["name"]


def test_an_unchanged_log_is_imported_once_and_a_changed_one_again(tmp_path: Path) -> None:
    log, place = tmp_path / "log", tmp_path / "cache"
    log.mkdir()
    verl(log)
    first = as_run(log, place)
    made = (first / "resolved.json").stat().st_mtime_ns
    assert as_run(log, place) == first and (first / "resolved.json").stat().st_mtime_ns == made
    with (log / "10.jsonl").open("a") as file:
        file.write('{"input": "new", "output": "x", "score": 1.0, "step": 11}\n')
    second = as_run(log, place)
    assert second != first and RunReader(second).steps()[-1] == 11
    assert not list(place.glob("making-*"))


def test_a_log_that_grows_is_followed_under_the_same_address(tmp_path: Path) -> None:
    log, place = tmp_path / "log", tmp_path / "cache"
    log.mkdir()
    verl(log)
    library = Library([log], place)
    client = client_of(library)
    before = client.get("/api/runs/log").json()
    assert before["imported"] == "verl" and before["live"] is False
    row = '{"input": "new", "output": "x", "score": 1.0, "step": 11}'
    (log / "11.jsonl").write_text(f"{row}\n{row[:30]}")
    library.follow_now()
    after = client.get("/api/runs/log").json()
    assert after["rollout_steps"] == [*before["rollout_steps"], 11] and after["revision"] != before["revision"]
    assert client.get("/api/runs/log/groups", params={"step": 11}).json()["rows"][0]["size"] == 1
    (log / "11.jsonl").write_text(f"{row[:30]}\n{row}\n")
    library.follow_now()
    said = client.get("/api/runs/log").json()
    assert said["rollout_steps"] == after["rollout_steps"] and "shown as it was last read" in said["problems"][0]
    (log / "11.jsonl").write_text(f"{row}\n{row}\n")
    library.follow_now()
    assert client.get("/api/runs/log").json()["problems"] == []
    assert client.get("/api/runs/log/groups", params={"step": 11}).json()["rows"][0]["size"] == 2
    assert len(list((place / "imported").iterdir())) <= 2


@pytest.mark.parametrize("write", WRITERS, ids=lambda f: f.__name__)
def test_a_foreign_log_is_reported_and_shown_in_a_terminal(write: Callable[[Path], None], tmp_path: Path) -> None:
    log, page = tmp_path / "log", tmp_path / "page.html"
    log.mkdir()
    write(log)
    runner = CliRunner()
    assert runner.invoke(verb(report), [str(log), "--out", str(page)]).exit_code == 0
    document = page.read_text(encoding="utf-8")
    assert "imported from" in document and "not in this log: " in document and "answer 0" in document
    told = runner.invoke(verb(show), [str(log), "--group", "000003-0000"])
    assert told.exit_code == 0 and "answer 0 1 3" in told.output and "the folder names no objective" in told.output


def verb(module: ModuleType) -> typer.Typer:
    app = typer.Typer()
    app.command()(module.command)
    return app


def test_without_a_cache_the_import_goes_with_the_library(tmp_path: Path) -> None:
    verl(tmp_path)
    library = Library([tmp_path], None)
    store = library.store(library.ids()[0])
    assert store is not None and store.reader.folder.is_dir()
    folder = store.reader.folder
    del library, store
    import gc

    gc.collect()
    assert not folder.exists()


def test_what_is_no_log_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(RunFolderError, match="nor a log that is known"):
        Library([tmp_path])
    with pytest.raises(RunFolderError, match="nor a log that is known"):
        as_run(tmp_path, tmp_path / "cache")
