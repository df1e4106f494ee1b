"""What `explain` refuses on the command line: damaged records, options that would do nothing, keys that stand twice."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gropius.cli.main import main


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["explain", *words])
    assert ended.value.code == 2
    return capsys.readouterr().err


def test_a_key_that_stands_twice_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "b.json"
    path.write_text('{"groups": [{"id": "q", "responses": [{"reward": 1, "length": 1, "reward": 0}]}]}')
    assert "'reward' stands twice" in refusal(capsys, str(path))


def test_a_run_is_explained_by_its_own_objective(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "leave --objective and --set out" in refusal(capsys, str(tmp_path), "--objective", "dapo")


def test_a_step_belongs_to_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--step N goes with a run folder" in refusal(capsys, "--rewards", "1,0", "--step", "3")


def test_a_damaged_rollout_file_is_refused_and_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from gropius.recipe import resolve

    resolved = resolve({"data": {"source": "arithmetic"}}, [f'out="{tmp_path}"', 'name="r"'])
    (tmp_path / "r" / "rollouts").mkdir(parents=True)
    (tmp_path / "r" / "resolved.json").write_text(json.dumps(resolved.as_dict()))
    (tmp_path / "r" / "rollouts" / "step-000001.parquet").write_bytes(b"PAR1 torn")
    assert "step-000001.parquet: damaged" in refusal(capsys, str(tmp_path / "r"))


def test_what_adds_exactly_nothing_is_one_line_and_no_zero_has_a_sign(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def response(reward: float, length: int) -> dict[str, object]:
        return {"reward": reward, "length": length, "policy": [-0.5] * length}

    path = tmp_path / "b.json"
    dead = {"id": "dead", "responses": [response(0, 30), response(0, 40)]}
    live = {"id": "live", "responses": [response(1, 2), response(0, 3), response(0.5, 50)]}
    path.write_text(json.dumps({"groups": [dead, live]}))
    with pytest.raises(SystemExit) as ended:
        main(["explain", str(path), "--preset", "dr_grpo", "--set", "objective.aggregate.length=8"])
    out = capsys.readouterr().out
    assert ended.value.code == 0 and "all 2 responses are skipped: each of their 70 tokens adds exactly 0" in out
    rows = out.split("group live")[1].splitlines()
    assert [row.split()[:3] for row in rows if "skipped" in row] == [["2", "skipped", "0-49"]]
    assert sum(row.startswith(("0 ", "1 ")) for row in rows) == 5 and " -0 " not in out and "-0\n" not in out
