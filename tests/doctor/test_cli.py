"""`gropius doctor`: what is printed, as text and as JSON, and the exit code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gropius.cli.main import main


def write_log(folder: Path, right: float) -> None:
    for step in range(1, 11):
        rows = [
            {"input": f"question {p}", "output": f"answer {p} {m} {step} \x1b[31m", "score": right if m % 2 else 0.0,
             "step": step}
            for p in range(10) for m in range(4)
        ]  # fmt: skip
        (folder / f"{step}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def ran(words: list[str]) -> int:
    with pytest.raises(SystemExit) as ended:
        main(words)
    return int(ended.value.code or 0)


def test_a_finding_is_printed_with_cause_key_rows_and_exit_code_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_log(tmp_path, right=0.0)
    assert ran(["doctor", str(tmp_path)]) == 1
    told = capsys.readouterr().out
    for words in ("all_failed_groups (critical, since step 1)", "likely cause", "change sft.steps", "measured: share"):
        assert words in told
    assert "truncation: the log has no responses.truncated" in told
    assert "\x1b" not in told


def test_nothing_found_is_exit_code_0_and_json_names_what_was_passed_and_skipped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_log(tmp_path, right=1.0)
    assert ran(["doctor", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["findings"] == [] and "all_failed_groups" in found["passed"]
    assert {"name", "missing", "hint"} == set(found["skipped"][0])


def test_a_finding_of_json_has_what_the_viewer_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_log(tmp_path, right=0.0)
    ran(["doctor", str(tmp_path), "--json", "--only", "all_failed_groups"])
    (finding,) = json.loads(capsys.readouterr().out)["findings"]
    assert finding["name"] == "all_failed_groups" and finding["message"] and finding["change"] and finding["cause"]
    assert finding["evidence"][0]["group_id"] and finding["measured"]["low"] > 0.7


def test_an_unknown_diagnostic_is_refused_with_the_nearest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_log(tmp_path, right=1.0)
    assert ran(["doctor", str(tmp_path), "--only", "truncatoin"]) == 2
    assert 'did you mean "truncation"' in capsys.readouterr().err
