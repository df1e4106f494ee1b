"""What the pages are told of a recorded run: true to the folder, whole or said to be damaged, alive while written."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from conftest import TOKEN
from starlette.testclient import TestClient
from synthetic import HOSTILE, make_run, write_step

from gropius.errors import RunFolderError, UsageError
from gropius.objective.presets import resolve
from gropius.objective.spec import Baseline, Scale
from gropius.records import RunReader, RunWriter
from gropius.viewer.curves import series, thin
from gropius.viewer.groups import Query, list_groups
from gropius.viewer.index import RunIndex, step_groups
from gropius.viewer.library import Library
from gropius.viewer.server import application
from gropius.viewer.store import RunStore

STATIC = Path(__file__).parents[2] / "src" / "gropius" / "viewer" / "static"


def client_of(*folders: Path) -> TestClient:
    app = application(Library(folders), TOKEN, 0)
    return TestClient(app, base_url="http://127.0.0.1:1", headers={"authorization": f"Bearer {TOKEN}"})  # type: ignore[arg-type]


def get(client: TestClient, path: str, **query: Any) -> Any:
    answer = client.get(f"/api/{path}", params=query)
    assert answer.status_code == 200, answer.text
    return json.loads(answer.text, parse_constant=lambda name: pytest.fail(f"{name} in {path}"))


class TestRun:
    def test_a_run_says_what_it_optimises(self, client: TestClient) -> None:
        run = get(client, "runs/synthetic")
        assert run["formula"].startswith("loss = Σ_t") and run["objective"]["kl"]["coefficient"] == 0.04
        assert run["steps"] == 12 and run["live"] is False and run["findings"][0]["name"] == "dead_groups"

    def test_curves_hold_every_logged_value_and_say_which_are_not_finite(
        self, client: TestClient, run_folder: Path
    ) -> None:
        curves = get(client, "runs/synthetic/curves")["series"]
        logged = RunReader(run_folder).metrics_by_step()
        assert curves["reward"]["values"] == [logged[step]["reward"] for step in curves["reward"]["steps"]]
        assert curves["grad_norm"]["non_finite"] == [7] and 7 not in curves["grad_norm"]["steps"]
        assert curves["held_out/mean"]["steps"] == [5, 10]

    def test_the_band_of_the_reward_is_the_standard_error_over_groups(self, run_folder: Path) -> None:
        store = RunStore("a", run_folder)
        index = RunIndex(store, None)
        index.wait()
        found = series(store, index)["series"]
        table = step_groups(store, 3)
        assert table is not None
        means = table.column("mean").to_pylist()
        centre = sum(means) / len(means)
        error = math.sqrt(sum((m - centre) ** 2 for m in means) / (len(means) - 1) / len(means))
        at = found["reward/low"]["steps"].index(3)
        assert found["reward/high"]["values"][at] == pytest.approx(centre + 1.959963984540054 * error)
        assert found["reward/low"]["values"][at] == pytest.approx(centre - 1.959963984540054 * error)

    def test_a_run_without_stored_findings_is_examined_when_asked(self, tmp_path: Path, run_folder: Path) -> None:
        shutil.copytree(run_folder, tmp_path / "a")
        (tmp_path / "a" / "findings.json").unlink()
        client = client_of(tmp_path / "a")
        assert get(client, "runs/a")["findings"] == []
        found = get(client, "runs/a/examine")["findings"]
        assert {"name", "severity", "step", "message", "change", "evidence"} <= set(found[0])
        assert get(client, "runs/a")["findings"] == found and not (tmp_path / "a" / "findings.json").exists()

    def test_thinning_keeps_every_stretch_s_ends_and_extremes(self) -> None:
        points = [(i, math.sin(i / 7) + (5 if i == 7013 else 0)) for i in range(20_000)]
        kept = thin(points, 400)
        assert len(kept) <= 404 and kept[0] == points[0] and kept[-1] == points[-1]
        assert max(v for _, v in kept) == points[7013][1] and [s for s, _ in kept] == sorted(s for s, _ in kept)


class TestGroups:
    def test_a_row_is_the_group_as_recorded(self, client: TestClient, run_folder: Path) -> None:
        rows = get(client, "runs/synthetic/groups", step=5)["rows"]
        records = RunReader(run_folder).rollouts(5)
        assert [row["group_id"] for row in rows] == list(dict.fromkeys(r.group_id for r in records))
        for row in rows:
            own = [r for r in records if r.group_id == row["group_id"]]
            assert row["rewards"] == [r.reward for r in own] and row["tokens"] == [r.tokens for r in own]
            assert row["void"] == sum(r.status == "void" for r in own)
            assert row["duplicates"] == sum(r.duplicate for r in own)

    def test_queues_hold_what_they_name(self, run_folder: Path) -> None:
        store = RunStore("a", run_folder)
        index = RunIndex(store, None)
        index.wait()
        tests = {
            "all_failed": lambda r: r["state"] == "all_failed",
            "informative": lambda r: r["state"] == "informative",
            "void": lambda r: None in r["rewards"],
            "truncated": lambda r: r["truncated"] > 0,
            "duplicates": lambda r: r["duplicates"] > 0,
            "findings": lambda r: r["group_id"] in ("000003-0003", "000003-0005", "000004-0003"),
            "suspected": lambda r: r["group_id"] == "000003-0005",
        }
        every = list_groups(store, index, Query(limit=500))
        assert every["total"] == 12 * 8
        for queue, holds in tests.items():
            found = list_groups(store, index, Query(queue=queue, limit=500))
            expected = [r["group_id"] for r in every["rows"] if holds(r)]
            assert expected and [r["group_id"] for r in found["rows"]] == expected
            assert every["counts"][queue] == found["total"] == len(expected)

    def test_sorting_and_paging_lose_nothing(self, run_folder: Path) -> None:
        store = RunStore("a", run_folder)
        index = RunIndex(store, None)
        index.wait()
        pages = [
            list_groups(store, index, Query(sort="longest", offset=o, limit=20))["rows"] for o in range(0, 100, 20)
        ]
        rows = [row for page in pages for row in page]
        assert len({row["group_id"] for row in rows}) == 96
        assert [r["longest"] for r in rows] == sorted((r["longest"] for r in rows), reverse=True)

    def test_text_is_found_in_responses_whatever_its_case(self, client: TestClient) -> None:
        found = get(client, "runs/synthetic/groups", step=3, text="LET ME THINK")
        assert [row["group_id"] for row in found["rows"]] == ["000003-0004"]
        assert get(client, "runs/synthetic/groups", step=4, text="<SCRIPT>")["total"] == 1
        assert get(client, "runs/synthetic/groups", step=4, text="no such words")["total"] == 0

    def test_the_same_task_is_found_at_every_step(self, client: TestClient, run_folder: Path) -> None:
        store = RunStore("a", run_folder)
        RunIndex(store, None).wait()
        for _ in range(100):
            rows = get(client, "runs/synthetic/task", key="arithmetic/2")["rows"]
            if len(rows) == 12:
                break
        assert [row["step"] for row in rows] == list(range(1, 13))

    def test_an_unknown_queue_or_sort_is_refused_with_a_suggestion(self, client: TestClient) -> None:
        answer = client.get("/api/runs/synthetic/groups", params={"step": 1, "queue": "all_faild"})
        assert answer.status_code == 400 and "all_failed" in answer.json()["error"]
        assert client.get("/api/runs/synthetic/groups", params={"step": 1, "sort": "x"}).status_code == 400


class TestGroup:
    def test_the_replay_makes_the_recorded_advantages_again(self, client: TestClient) -> None:
        for index in range(8):
            found = get(client, f"runs/synthetic/steps/5/groups/000005-{index:04d}")
            replay = found["replay"]
            assert replay["agrees"] is True
            for response, advantage in zip(found["responses"], replay["advantage"], strict=True):
                if response["status"] == "void":
                    assert response["advantage"] is None
                else:
                    assert response["advantage"] == pytest.approx(advantage)

    def test_a_replay_that_cannot_agree_says_so(self, tmp_path: Path) -> None:
        make_run(tmp_path / "a", steps=1, objective=resolve("reinforce_pp")).close()
        found = get(client_of(tmp_path / "a"), "runs/a/steps/1/groups/000001-0000")
        assert found["replay"]["agrees"] is False

    def test_a_difference_gives_both_texts_back(self, client: TestClient) -> None:
        path = "runs/synthetic/steps/4/groups/000004-0001"
        texts = [r["text"] for r in get(client, path)["responses"]]
        for a, b in ((0, 7), (7, 0), (3, 3)):
            runs = get(client, f"{path}/difference", a=a, b=b)["runs"]
            assert "".join(run[1] for run in runs) == texts[a] and "".join(run[2] for run in runs) == texts[b]

    def test_foreign_text_is_data_and_nothing_else(self, client: TestClient) -> None:
        for step in range(1, 5):
            answer = client.get(f"/api/runs/synthetic/steps/{step}/groups/{step:06d}-0001")
            assert answer.headers["content-type"] == "application/json"
            assert answer.json()["responses"][7]["text"] == HOSTILE[step % 4]


class TestResponse:
    PATH = "runs/synthetic/steps/3/groups/000003-0000/responses/2"

    def test_contributions_add_up_to_the_logged_loss(self, client: TestClient) -> None:
        balance = get(client, self.PATH)["balance"]
        assert balance["gap"] == pytest.approx(0, abs=1e-12) and balance["updates"] == 1

    def test_a_gap_is_shown_and_not_hidden(self, tmp_path: Path) -> None:
        writer = make_run(tmp_path / "a", steps=1)
        writer.write_metrics(1, {"loss": 0.5})
        writer.close()
        balance = get(client_of(tmp_path / "a"), "runs/a/steps/1/groups/000001-0000/responses/0")["balance"]
        assert balance["gap"] == pytest.approx(balance["sum"] - 0.5)

    def test_the_arithmetic_is_that_of_the_record(self, client: TestClient, run_folder: Path) -> None:
        record = next(r for r in RunReader(run_folder).rollouts(3) if r.group_id == "000003-0000" and r.member == 2)
        made = get(client, f"{self.PATH}/arithmetic")
        assert made["gap"] < 1e-9
        assert made["sum"] == pytest.approx(float(record.contribution.sum()), abs=1e-9)  # type: ignore[union-attr]
        for t in range(len(record.response_ids)):
            ratio = math.exp(record.policy[t] - record.anchor[t])  # type: ignore[index]
            assert made["ratio"][t] == pytest.approx(ratio, rel=1e-6)
            assert made["clipped"][t] == (ratio > 1.2 if record.advantage > 0 else ratio < 0.8)  # type: ignore[operator]

    def test_token_texts_add_up_to_the_response(self, client: TestClient) -> None:
        window = get(client, f"{self.PATH}/tokens")
        text = get(client, self.PATH)["text"]
        assert "".join(window["texts"]) == text + "<eos>"
        assert window["columns"]["credit"][0] == pytest.approx(
            window["columns"]["advantage"][0] * window["columns"]["weight"][0]
        )

    def test_without_a_tokenizer_ids_are_shown_and_nothing_is_guessed(self, tmp_path: Path) -> None:
        make_run(tmp_path / "a", steps=1).close()
        (tmp_path / "a" / "tokenizer.json").unlink()
        client = client_of(tmp_path / "a")
        assert get(client, "runs/a/steps/1/groups/000001-0000/responses/0/tokens")["texts"] is None
        (tmp_path / "a" / "tokenizer.json").write_text("{damaged")
        assert get(client, "runs/a/steps/1/groups/000001-0000/responses/0/tokens")["texts"] is None

    def test_what_the_environment_wrote_is_told_apart_and_has_no_numbers(self, client: TestClient) -> None:
        path = "runs/synthetic/steps/3/groups/000003-0005/responses/7"
        head = get(client, path)
        assert [(s["start"], s["end"], s["role"]) for s in head["segments"]] == [
            (0, 3, "model"), (3, 7, "environment"), (7, head["ids"], "model"),
        ]  # fmt: skip
        assert head["tokens"] == head["ids"] - 4 and head["messages"][1]["tool_calls"]
        window = get(client, f"{path}/tokens")
        assert all(window["columns"][name][3:7] == [None] * 4 for name in ("advantage", "credit", "log_ratio"))
        made = get(client, f"{path}/arithmetic")
        assert made["contribution"][3:7] == made["gradient"][3:7] == [0.0] * 4 and made["gap"] < 1e-9

    @pytest.mark.parametrize("over", ["batch", "response"])
    def test_tokens_left_out_for_their_entropy_are_told_and_the_sum_closes(self, tmp_path: Path, over: str) -> None:
        objective = resolve("grpo", {"selection.entropy_top": 0.3, "selection.entropy_over": over})
        make_run(tmp_path / "a", steps=1, objective=objective).close()
        records = [r for r in RunReader(tmp_path / "a").rollouts(1) if r.advantage is not None]
        pool = np.concatenate([r.entropy for r in records])
        client, seen = client_of(tmp_path / "a"), 0
        for record in records[:12]:
            path = f"runs/a/steps/1/groups/{record.group_id}/responses/{record.member}/arithmetic"
            made = get(client, path)
            own = np.asarray(record.entropy, np.float64)
            expected = own >= np.quantile(np.asarray(pool if over == "batch" else own, np.float64), 0.7)
            assert made["kept"] == expected.tolist() and made["gap"] < 1e-9
            assert [k for k, c in zip(made["kept"], made["correction"], strict=True) if k != bool(c)] == []
            seen += int(not expected.all())
        assert seen

    def test_a_void_response_opens_and_has_no_arithmetic(self, client: TestClient) -> None:
        path = "runs/synthetic/steps/5/groups/000005-0002/responses/0"
        assert get(client, path)["status"] == "void"
        assert get(client, f"{path}/arithmetic") == {"missing": "advantage"}


class TestFolders:
    def test_a_damaged_step_is_said_and_the_others_are_shown(self, tmp_path: Path, run_folder: Path) -> None:
        folder = tmp_path / "synthetic"
        shutil.copytree(run_folder, folder)
        path = folder / "rollouts" / "step-000003.parquet"
        path.write_bytes(path.read_bytes()[:-200])
        (folder / "rollouts" / "step-000004.parquet").write_bytes(b"")
        with (folder / "metrics.jsonl").open("a") as file:
            file.write('{"step": 13, "rew')
        client = client_of(folder)
        assert get(client, "runs/synthetic/groups", step=3)["total"] == 0
        assert get(client, "runs/synthetic/groups", step=5)["total"] == 8
        assert client.get("/api/runs/synthetic/steps/3/groups/000003-0000").status_code == 404
        problems = " ".join(get(client, "runs/synthetic/curves")["problems"])
        assert "step-000003" in problems and "half-written" in problems and str(tmp_path) not in problems
        store = RunStore("a", folder)
        index = RunIndex(store, None)
        index.wait()
        assert index.groups().num_rows == 10 * 8 and index.progress() == (12, 12)

    def test_a_run_without_a_recipe_or_with_nothing_yet_opens(self, tmp_path: Path, run_folder: Path) -> None:
        shutil.copytree(run_folder, tmp_path / "bare")
        (tmp_path / "bare" / "resolved.json").unlink()
        (tmp_path / "empty").mkdir()
        (tmp_path / "empty" / "metrics.jsonl").touch()
        client = client_of(tmp_path)
        assert [run["id"] for run in get(client, "about")["runs"]] == ["bare", "empty"]
        assert get(client, "runs/bare")["formula"] is None
        assert get(client, "runs/bare/steps/3/groups/000003-0000")["replay"] is None
        assert get(client, "runs/bare/steps/3/groups/000003-0000/responses/0/arithmetic") == {"missing": "objective"}
        assert get(client, "runs/empty/groups")["total"] == 0 and get(client, "runs/empty")["steps"] == 0

    def test_a_run_being_written_is_followed(self, tmp_path: Path) -> None:
        objective = resolve("grpo")
        writer = make_run(tmp_path / "a", steps=2)
        client = client_of(tmp_path)
        before = get(client, "runs/a/state")
        assert before["live"] is True
        write_step(writer, objective, 3, (3, 8, 8))
        after = get(client, "runs/a/state")
        assert after["revision"] != before["revision"]
        assert get(client, "runs/a")["rollout_steps"] == [1, 2, 3]
        assert get(client, "runs/a/groups", step=3)["total"] == 8
        make_run(tmp_path / "b", steps=1).close()
        assert [run["id"] for run in get(client, "about")["runs"]] == ["a", "b"]
        writer.close()
        assert get(client, "runs/a/state")["live"] is False

    def test_what_was_half_written_is_no_longer_said_once_it_is_whole(self, tmp_path: Path) -> None:
        make_run(tmp_path / "a", steps=2).close()
        client, path = client_of(tmp_path / "a"), tmp_path / "a" / "metrics.jsonl"
        with path.open("a") as file:
            file.write('{"step": 3, "rew')
        assert "half-written" in get(client, "runs/a")["problems"][0]
        with path.open("a") as file:
            file.write('ard": 0.5}\n')
        assert get(client, "runs/a")["problems"] == [] and get(client, "runs/a")["steps"] == 3

    def test_a_saved_index_is_used_again_and_a_changed_step_is_read_anew(self, tmp_path: Path) -> None:
        folder, cache = tmp_path / "a", tmp_path / "cache"
        make_run(folder, steps=3).close()
        first = RunIndex(RunStore("a", folder), cache)
        first.wait()
        again = RunIndex(RunStore("a", folder), cache)
        assert again.progress() == (3, 3) and again.groups().equals(first.groups())
        shutil.copy(folder / "rollouts" / "step-000001.parquet", folder / "rollouts" / "step-000002.parquet")
        changed = RunIndex(RunStore("a", folder), cache)
        assert changed.progress() == (2, 3)
        next(cache.iterdir()).write_bytes(b"damaged")
        assert RunIndex(RunStore("a", folder), cache).progress() == (0, 3)
        assert not any(p.name.startswith(".") or "index" in p.name for p in folder.rglob("*"))

    def test_a_folder_that_is_no_run_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(RunFolderError, match="neither a run folder"):
            Library([tmp_path])
        with pytest.raises(UsageError):
            Library([tmp_path / "missing"])


class TestStrings:
    def test_every_choice_of_the_advantage_has_a_name(self) -> None:
        known = _entries("en")
        for baseline in get_args(Baseline):
            assert f"baseline.{baseline}" in known and f"baseline.{baseline}.name" in known
        for scale in get_args(Scale):
            assert f"scale.{scale}.name" in known and f"scale.of.{scale}" in known
        for key in re.findall(r"questions\(\[([^\]]+)\]", "".join(p.read_text() for p in STATIC.rglob("*.js"))):
            for name in re.findall(r'"(\w+)"', key):
                assert f"question.{name}" in known and f"question.{name}.answer" in known

    def test_both_languages_have_every_key_that_the_pages_use(self) -> None:
        keys = {name: set(_entries(name)) for name in ("en", "zh")}
        assert keys["en"] == keys["zh"]
        used = set()
        for path in STATIC.rglob("*.js"):
            used |= set(re.findall(r'\bt\("([^"]+)"', path.read_text(encoding="utf-8")))
        assert used and used <= keys["en"]

    def test_a_translation_has_the_same_holes(self) -> None:
        en, zh = _entries("en"), _entries("zh")
        for key, words in en.items():
            assert set(re.findall(r"\{\w+\}", words)) == set(re.findall(r"\{\w+\}", zh[key])), key

    def test_no_module_makes_markup_from_text(self) -> None:
        for path in STATIC.rglob("*.js"):
            source = path.read_text(encoding="utf-8")
            for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function"):
                assert word not in source, f"{path.name}: {word}"


def _entries(language: str) -> dict[str, str]:
    source = (STATIC / f"strings.{language}.js").read_text(encoding="utf-8")
    return dict(re.findall(r'"([\w./]*)": "((?:[^"\\]|\\.)*)"', source))


def test_a_wrong_answer_that_is_paid_is_suspected_in_a_finished_run_without_any_finding(tmp_path: Path) -> None:
    from dataclasses import replace

    from synthetic import group_records

    rows = group_records(1, 0, ["a", "b", "c"], [1.0, 0.0, 0.0]) + group_records(1, 1, ["a", "b", "c"], [1.0, 0.0, 0.0])
    rows = [replace(r, advantage=1.0 if r.reward else -0.5) for r in rows]
    rows[1] = replace(rows[1], reward=2.0, raw=0.0, advantage=1.4)
    with RunWriter.create(tmp_path / "run", {}) as writer:
        writer.write_rollouts(1, rows)
    store = RunStore("run", tmp_path / "run")
    index = RunIndex(store, None)
    index.wait()
    found = list_groups(store, index, Query(queue="suspected"))
    assert [row["group_id"] for row in found["rows"]] == ["000001-0000"] and found["counts"]["suspected"] == 1
