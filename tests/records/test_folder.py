"""Laws of the run folder: one owner, whole files or none, what is written is read back, damage is said and skipped."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from gropius.errors import RunFolderError, RunHalted
from gropius.records import ROLLOUT_SCHEMA, ResponseRecord, RunReader, RunWriter, schema, writer
from gropius.records.schema import GREEDY_MEMBER, TOKEN_LISTS, to_table

DOCUMENT = {"name": "a", "train": {"steps": 3}}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "runs" / "a"


def assert_equal(one: ResponseRecord, other: ResponseRecord) -> None:
    for field in fields(ResponseRecord):
        a, b = getattr(one, field.name), getattr(other, field.name)
        if isinstance(a, np.ndarray):
            np.testing.assert_array_equal(np.asarray(a, b.dtype), b, err_msg=field.name)
        elif isinstance(a, str):
            assert schema.clean_text(a) == b, field.name
        else:
            assert a == b, field.name


class TestRollouts:
    def test_record_and_parquet_have_the_same_columns(self) -> None:
        assert {field.name for field in fields(ResponseRecord)} == set(ROLLOUT_SCHEMA.names)

    def test_what_is_written_is_read_back(self, folder: Path, records: list[ResponseRecord]) -> None:
        with RunWriter.create(folder, DOCUMENT) as run:
            path = run.write_rollouts(1, records)
        assert path == folder / "rollouts" / "step-000001.parquet"
        reader = RunReader(folder)
        assert reader.steps() == [1] and not reader.problems
        back = reader.rollouts(1)
        assert len(back) == len(records) == 9
        for one, other in zip(records, back, strict=True):
            assert_equal(one, other)

    def test_facts_travel_with_the_tokens(self, records: list[ResponseRecord]) -> None:
        first = records[0]
        assert first.response_ids.tolist() == [1, 2, 3, 8, 8, 4] and first.response_text == "a bhigherc"
        assert first.loss_mask.tolist() == [True, True, True, False, False, True] and first.tokens == 4
        assert first.prompt_text == "<5 6>" and first.prompt_ids.tolist() == [5, 6]
        assert [record.duplicate for record in records[:4]] == [False, False, True, False]
        assert [record.truncated for record in records[:4]] == [False, True, False, False]
        assert records[3].status == "void" and records[3].reward is None
        assert records[3].reason == "the verifier crashed"
        assert records[-1].member == GREEDY_MEMBER and records[-1].skipped

    def test_a_lone_surrogate_is_replaced_not_fatal(self, folder: Path, records: list[ResponseRecord]) -> None:
        with RunWriter.create(folder, DOCUMENT) as run:
            run.write_rollouts(1, records)
        assert RunReader(folder).rollouts(1)[3].response_text == "\ufffd!"

    def test_without_token_lists_the_mask_and_the_ids_stay(self, records: list[ResponseRecord]) -> None:
        table = to_table(records, token_lists=False)
        assert all(table.column(name).null_count == len(records) for name in TOKEN_LISTS)
        assert table.column("loss_mask").null_count == 0

    def test_a_list_of_the_wrong_length_is_refused_naming_the_row(self, records: list[ResponseRecord]) -> None:
        object.__setattr__(records[1], "anchor", np.zeros(3))
        with pytest.raises(ValueError, match="group 000001-0000, member 1: anchor has 3 values for 2 ids"):
            to_table(records)

    def test_no_temporary_file_is_left_and_a_step_is_replaced(
        self, folder: Path, records: list[ResponseRecord]
    ) -> None:
        with RunWriter.create(folder, DOCUMENT) as run:
            run.write_rollouts(1, records)
            run.write_rollouts(1, records[:2])
        assert [entry.name for entry in (folder / "rollouts").iterdir()] == ["step-000001.parquet"]
        assert len(RunReader(folder).rollouts(1)) == 2

    def test_a_table_can_be_read_by_columns(self, folder: Path, records: list[ResponseRecord]) -> None:
        with RunWriter.create(folder, DOCUMENT) as run:
            run.write_rollouts(1, records)
        table = RunReader(folder).table(1, ["group_id", "reward"])
        assert table is not None and table.column_names == ["group_id", "reward"] and table.num_rows == 9

    def test_a_step_of_long_responses_lies_in_row_groups_that_are_read_apart_and_of_short_ones_in_one(
        self, folder: Path, records: list[ResponseRecord]
    ) -> None:
        long = np.zeros(60_000, np.int64)
        few = [dataclasses.replace(records[0], response_ids=long, loss_mask=np.ones(60_000, np.bool_),
                                   token_advantages=None, sampler=None, drawn=None, anchor=None, policy=None,
                                   reference=None, entropy=None, weight=None, contribution=None)]  # fmt: skip
        many = [dataclasses.replace(few[0], member=i) for i in range(130)]
        with RunWriter.create(folder, DOCUMENT) as run:
            sizes = [pq.ParquetFile(run.write_rollouts(step, rows)) for step, rows in ((1, many), (2, records))]
        assert [sizes[0].metadata.row_group(i).num_rows for i in range(3)] == [64, 64, 2]
        assert sizes[1].num_row_groups == 1
        assert [r.member for r in RunReader(folder).rollouts(1)] == list(range(130))


class TestMetricsFile:
    def test_of_named_metrics_only_those_are_kept_and_every_step_stays(self, folder: Path) -> None:
        with RunWriter.create(folder, {}) as writer:
            for step in (1, 2):
                writer.write_metrics(step, {"loss": 1.0 * step, "kl": float("nan")})
        assert RunReader(folder).metrics_by_step({"loss"}) == {1: {"loss": 1.0}, 2: {"loss": 2.0}}
        assert set(RunReader(folder).metrics_by_step()[2]) == {"step", "loss", "kl"}

    def test_rows_come_back_in_order_with_values_that_are_not_finite(self, folder: Path) -> None:
        with RunWriter.create(folder, DOCUMENT, fsync=True) as run:
            run.write_metrics(0, {"held_out/mean": 0.5})
            run.write_metrics(1, {"loss": float("nan"), "kl": float("-inf"), "reward": np.float64(0.25), "raw": None})
            run.write_metrics(1, {"held_out/mean": 0.75})
        for line in (folder / "metrics.jsonl").read_text().splitlines():
            json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
        reader = RunReader(folder)
        rows = reader.metrics()
        assert [row["step"] for row in rows] == [0, 1, 1] and rows[1]["reward"] == 0.25 and rows[1]["raw"] is None
        assert np.isnan(rows[1]["loss"]) and rows[1]["kl"] == -np.inf and "non_finite" not in rows[1]
        assert reader.metrics_by_step()[1]["held_out/mean"] == 0.75

    def test_a_half_written_last_line_is_skipped_and_said(self, folder: Path) -> None:
        with RunWriter.create(folder, DOCUMENT) as run:
            run.write_metrics(1, {"loss": 1.0})
        with (folder / "metrics.jsonl").open("a") as file:
            file.write('{"step": 2, "lo')
        reader = RunReader(folder)
        assert [row["step"] for row in reader.metrics()] == [1]
        assert len(reader.problems) == 1 and "metrics.jsonl:2" in reader.problems[0]

    def test_a_damaged_line_in_the_middle_is_skipped_and_said(self, folder: Path) -> None:
        RunWriter.create(folder, DOCUMENT).close()
        (folder / "metrics.jsonl").write_bytes(b'{"step": 1}\n\x00\xff\n[1]\n{"loss": 1}\n{"step": 2}\n')
        reader = RunReader(folder)
        assert [row["step"] for row in reader.metrics()] == [1, 2] and len(reader.problems) == 3

    def test_reopening_cuts_off_the_half_line_and_appends(self, folder: Path) -> None:
        with RunWriter.create(folder, DOCUMENT) as run:
            run.write_metrics(1, {"loss": 1.0})
        with (folder / "metrics.jsonl").open("a") as file:
            file.write('{"step": 2, "lo')
        with RunWriter.reopen(folder) as run:
            run.write_metrics(2, {"loss": 2.0})
        reader = RunReader(folder)
        assert [row["step"] for row in reader.metrics()] == [1, 2] and not reader.problems

    def test_a_full_disk_halts_and_leaves_no_half_line(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        with RunWriter.create(folder, DOCUMENT) as run:
            run.write_metrics(1, {"loss": 1.0})
            real = os.write
            monkeypatch.setattr(writer.os, "write", lambda fd, data: real(fd, data[: len(data) // 2]))
            with pytest.raises(RunHalted, match=r"metrics\.jsonl: cannot be written: No space left"):
                run.write_metrics(2, {"loss": 2.0})
            monkeypatch.undo()
            run.write_metrics(2, {"loss": 3.0})
        assert [row.get("loss") for row in RunReader(folder).metrics()] == [1.0, 3.0]

    def test_a_metric_is_a_number(self, folder: Path) -> None:
        with RunWriter.create(folder, DOCUMENT) as run, pytest.raises(TypeError, match="a metric is a number, got str"):
            run.write_metrics(1, {"loss": "low"})  # type: ignore[dict-item]


class TestTakenFolders:
    def test_a_finished_run_is_never_overwritten(self, folder: Path) -> None:
        RunWriter.create(folder, DOCUMENT).close()
        before = (folder / "resolved.json").read_bytes()
        with pytest.raises(RunFolderError, match=r"already holds a run; .*gropius resume .*--set name="):
            RunWriter.create(folder, {"name": "b"})
        assert (folder / "resolved.json").read_bytes() == before

    def test_a_folder_in_use_names_the_process(self, folder: Path) -> None:
        with RunWriter.create(folder, DOCUMENT):
            assert RunReader(folder).live
            for take in (lambda: RunWriter.create(folder, DOCUMENT), lambda: RunWriter.reopen(folder)):
                with pytest.raises(RunFolderError, match=rf"in use by process {os.getpid()} since \d{{4}}-"):
                    take()
        assert not RunReader(folder).live

    def test_the_lock_of_a_killed_process_is_free(self, folder: Path) -> None:
        program = (
            "import sys, time; from pathlib import Path; from gropius.records import RunWriter\n"
            "run = RunWriter.create(Path(sys.argv[1]), {}); print('ready', flush=True); time.sleep(600)"
        )
        child = subprocess.Popen([sys.executable, "-c", program, str(folder)], stdout=subprocess.PIPE)
        assert child.stdout is not None and child.stdout.readline() == b"ready\n"
        with pytest.raises(RunFolderError, match=f"in use by process {child.pid}"):
            RunWriter.reopen(folder)
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()
        RunWriter.reopen(folder).close()

    def test_a_foreign_folder_and_a_file_are_left_alone(self, folder: Path, tmp_path: Path) -> None:
        folder.mkdir(parents=True)
        (folder / "thesis.txt").write_text("mine")
        with pytest.raises(RunFolderError, match="holds no run"):
            RunWriter.create(folder, DOCUMENT)
        assert [entry.name for entry in folder.iterdir()] == ["thesis.txt"]
        with pytest.raises(RunFolderError, match="is a file"):
            RunWriter.create(folder / "thesis.txt", DOCUMENT)
        with pytest.raises(RunFolderError, match=r"no resolved\.json"):
            RunWriter.reopen(folder)

    def test_an_empty_folder_may_be_used(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        RunWriter.create(folder, DOCUMENT).close()
        assert RunReader(folder).resolved() == DOCUMENT

    @pytest.mark.skipif(os.geteuid() == 0, reason="root writes anywhere")
    def test_a_folder_that_is_read_only_is_refused(self, tmp_path: Path) -> None:
        tmp_path.chmod(0o500)
        with pytest.raises(RunFolderError, match="Permission denied"):
            RunWriter.create(tmp_path / "a", DOCUMENT)
        tmp_path.chmod(0o700)

    def test_a_recipe_that_is_not_finite_is_never_stored(self, folder: Path) -> None:
        with pytest.raises(ValueError, match="JSON compliant"):
            RunWriter.create(folder, {"x": float("inf")})
        RunWriter.create(folder, DOCUMENT).close()


class TestWholeFiles:
    def test_a_write_that_fails_leaves_the_old_file_and_no_other(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = tmp_path / "a.json"
        writer.write_whole(path, b"old")

        def full(descriptor: int) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(writer.os, "fsync", full)
        with pytest.raises(RunHalted, match=r"a\.json: cannot be written: No space left"):
            writer.write_whole(path, b"new")
        assert path.read_bytes() == b"old" and [entry.name for entry in tmp_path.iterdir()] == ["a.json"]


class TestDamage:
    def test_a_flipped_byte_or_a_truncated_rollout_file_is_said_and_skipped(
        self, folder: Path, records: list[ResponseRecord]
    ) -> None:
        with RunWriter.create(folder, DOCUMENT) as run:
            paths = [run.write_rollouts(step, records) for step in (1, 2, 3)]
        data = bytearray(paths[0].read_bytes())
        for place in range(len(data) // 4, len(data) // 4 + 64):  # one byte alone may fall in a header without a sum
            data[place] ^= 0xFF
        paths[0].write_bytes(data)
        paths[1].write_bytes(paths[1].read_bytes()[:-20])
        reader = RunReader(folder)
        assert reader.rollouts(1) == [] and reader.rollouts(2) == [] and len(reader.rollouts(3)) == 9
        assert reader.rollouts(4) == []
        assert ["damaged" in p for p in reader.problems] == [True, True, False]

    def test_no_flipped_byte_changes_what_is_read(self, folder: Path, records: list[ResponseRecord]) -> None:
        with RunWriter.create(folder, DOCUMENT) as run:
            path = run.write_rollouts(1, records)
        good = path.read_bytes()
        whole = RunReader(folder).table(1)
        assert whole is not None
        for position in range(8, len(good), 41):
            path.write_bytes(good[:position] + bytes([good[position] ^ 0x55]) + good[position + 1 :])
            reader = RunReader(folder)
            table = reader.table(1)
            assert reader.problems if table is None else table.to_pydict() == whole.to_pydict(), position

    def test_damaged_json_is_said(self, folder: Path) -> None:
        RunWriter.create(folder, DOCUMENT).close()
        (folder / "findings.json").write_text("[{")
        (folder / "resolved.json").write_text("{")
        reader = RunReader(folder)
        assert reader.findings() == [] and "findings.json" in reader.problems[0]
        with pytest.raises(RunFolderError, match="is damaged"):
            reader.resolved()

    def test_what_is_no_run_folder_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(RunFolderError, match="no such run folder"):
            RunReader(tmp_path / "none")
        with pytest.raises(RunFolderError, match=r"holds no resolved\.json"):
            RunReader(tmp_path)

    def test_only_complete_checkpoints_are_listed(self, folder: Path) -> None:
        RunWriter.create(folder, DOCUMENT).close()
        for step in (10, 20):
            (folder / "checkpoints" / f"step-{step:06d}").mkdir()
        (folder / "checkpoints" / "step-000010" / "COMPLETE").touch()
        assert RunReader(folder).checkpoints() == [10]

    def test_findings_are_replaced_whole(self, folder: Path) -> None:
        with RunWriter.create(folder, DOCUMENT) as run:
            run.write_findings([{"name": "a"}])
            run.write_findings([{"name": "b", "text": "\ud800"}])
        assert RunReader(folder).findings() == [{"name": "b", "text": "\ufffd"}]
