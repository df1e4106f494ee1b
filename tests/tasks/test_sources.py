"""Laws of a person's own rows: recognised and said so, or refused by file, row and columns."""

from __future__ import annotations

import gzip
import json
import os
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pyarrow as arrow
import pytest
from pyarrow import parquet

from gropius.errors import DataError, UsageError
from gropius.tasks import load_tasks
from gropius.tasks.base import TaskSet
from gropius.tasks.files import read_rows
from gropius.tasks.shapes import after_hashes, last_boxed

DATA = Path(os.environ.get("GROPIUS_DATA", Path(__file__).parents[3] / "shared" / "data"))


def write(folder: Path, rows: list[Any], name: str = "rows.jsonl") -> str:
    (folder / name).write_bytes(b"".join(json.dumps(row).encode() + b"\n" for row in rows))
    return name


def load(folder: Path, source: str, held_out: int | None = 0, columns: Any = None, **options: Any) -> TaskSet:
    return load_tasks(source, options, 0, columns or {}, held_out, folder)


PLAIN = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(20)]


@pytest.mark.parametrize("kind", [".jsonl", ".json", ".csv", ".parquet", ".jsonl.gz", "wrapped.json"])
def test_every_file_kind_gives_the_same_tasks(tmp_path: Path, kind: str) -> None:
    file = tmp_path / f"rows{kind}"
    lines = "\n".join(json.dumps(row) for row in PLAIN)
    if kind == ".jsonl":
        file.write_text(lines)
    elif kind == ".jsonl.gz":
        file.write_bytes(gzip.compress(lines.encode()))
    elif kind == ".json":
        file.write_text(json.dumps(PLAIN))
    elif kind == "wrapped.json":
        file.write_text(json.dumps({"version": 1, "data": PLAIN}))
    elif kind == ".csv":
        file.write_text("prompt,answer\n" + "".join(f"{r['prompt']},{r['answer']}\n" for r in PLAIN))
    else:
        parquet.write_table(arrow.Table.from_pylist(PLAIN), file)
    tasks = load(tmp_path, file.name)
    assert [(t.prompt, t.answer) for t in tasks.train] == [(r["prompt"], r["answer"]) for r in PLAIN]
    assert "recognised as prompt and answer" in tasks.notes[0]


MESSAGES = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "2+2?"}]
SHAPES = {
    "TRL": {"prompt": MESSAGES, "solution": "4", "level": 2},
    "verl": {"data_source": "d", "prompt": MESSAGES, "reward_model": {"ground_truth": "4"}, "extra_info": {"i": 1}},
    "OpenRLHF": {"input": "2+2?", "label": "4"},
    "GSM8K": {"question": "2+2?", "answer": "2+2=<<2+2=4>>4\n#### 4"},
    "MATH": {"problem": "2+2?", "solution": "so \\boxed{4}"},
    "MBPP": {"text": "2+2?", "code": "4", "test_list": ["assert f() == 4"], "task_id": 1},
    "HumanEval": {"task_id": "h", "prompt": "2+2?", "entry_point": "f", "test": "t", "canonical_solution": "4"},
    "question and answer": {"question": "2+2?", "answer": "4"},
    "prompt and answer": {"prompt": "2+2?", "answer": 4},
}


@pytest.mark.parametrize("shape", sorted(SHAPES))
def test_shapes_of_the_field_are_recognised_and_said(tmp_path: Path, shape: str) -> None:
    row = SHAPES[shape]
    tasks = load(tmp_path, write(tmp_path, [row]))
    task = tasks.train[0]
    assert f"recognised as {shape} " in tasks.notes[0]
    assert task.answer == "4"
    assert "2+2?" in task.messages()[-1]["content"]
    prompt_column = next(c for c in ("question", "problem", "text", "input", "prompt") if c in row)
    assert dict(task.metadata) == {k: v for k, v in row.items() if k != prompt_column}


def test_columns_of_the_recipe_win(tmp_path: Path) -> None:
    name = write(tmp_path, [{"prompt": "wrong", "answer": "wrong", "q": "1+1=", "a": 2.0}])
    task = load(tmp_path, name, columns={"prompt": "q", "answer": "a"}).train[0]
    assert (task.prompt, task.answer) == ("1+1=", "2")
    with pytest.raises(DataError, match=r'no column "b" \(data.columns.answer\); found: prompt, answer, q, a'):
        load(tmp_path, name, columns={"answer": "b"})
    with pytest.raises(DataError, match=r"data\.columns\.promt"):
        load(tmp_path, name, columns={"promt": "q"})


BROKEN = {
    b"": "the file is empty",
    b" \n\n": "the file is empty",
    b'{"prompt": "a"}\n{"prompt": }\n': r"rows.jsonl:2: broken JSON",
    b'{"prompt": "a"}\n{"prompt": "b': r"rows.jsonl:2: the last line is cut off",
    b'{"prompt": "a", "x": NaN}\n': r"rows.jsonl:1: NaN is not JSON",
    b'{"prompt": "a", "x": -Infinity}\n': r"rows.jsonl:1: -Infinity is not JSON",
    b'{"prompt": "a"}\n[1]\n': r"rows.jsonl:2: the row is a list",
    b'{"prompt": "a"}\n{"prompt": null}\n': r"rows.jsonl:2: the prompt \(prompt\) is null",
    b'{"prompt": "a"}\n{"prompt": " "}\n': r"rows.jsonl:2: the prompt \(prompt\) is empty",
    b'{"prompt": "a"}\n{"other": "b"}\n': r'rows.jsonl:2: no column "prompt" in this row; found: other',
    b'{"prompt": 3}\n': r"rows.jsonl:1: the prompt \(prompt\) is a int",
    b'{"promt": "a", "x": 1}\n': r"no prompt column; found: promt, x",
    b'{"prompt": "a"}\n{"prompt": "\xff"}\n': r"rows.jsonl:2: byte 0xff is not UTF-8",
    b'{"prompt": "a", "n": ' + b"9" * 5000 + b"}\n": r"rows.jsonl:1: JSON that cannot be read",
}


@pytest.mark.parametrize("content", list(BROKEN), ids=[words[:40] for words in BROKEN.values()])
def test_a_broken_row_is_refused_by_file_and_row(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "rows.jsonl").write_bytes(content)
    with pytest.raises(DataError, match=BROKEN[content]):
        load(tmp_path, "rows.jsonl")


USER, ASSISTANT = {"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}
BAD_MESSAGES: list[tuple[list[Any], str]] = [
    ([], "empty list"),
    ([{"role": "system", "content": "s"}], "ends with system"),
    ([USER, ASSISTANT], "ends with assistant"),
    ([USER, USER], "message 2: user after user"),
    ([ASSISTANT, USER], "message 1: assistant at the start"),
    ([USER, {"role": "system", "content": "s"}], "message 2: system after user"),
    ([{"role": "usr", "content": "u"}], 'unknown role "usr"; did you mean "user"'),
    ([{"role": "user", "content": [{"type": "text", "text": "u"}]}], "message 1: content is a list"),
    ([{"role": "user", "content": None}], "message 1: content is null"),
    (["hello"], "message 1 is no message"),
]


@pytest.mark.parametrize(("messages", "words"), BAD_MESSAGES)
def test_messages_no_template_takes_are_refused_with_the_row(tmp_path: Path, messages: list[Any], words: str) -> None:
    name = write(tmp_path, [{"prompt": [USER]}, {"prompt": messages}])
    with pytest.raises(DataError, match=f"rows.jsonl:2: .*{words}"):
        load(tmp_path, name)


def test_csv_with_only_a_header_or_too_many_cells_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("prompt,answer\n")
    with pytest.raises(DataError, match=r"only a header \(prompt, answer\)"):
        load(tmp_path, "a.csv")
    (tmp_path / "b.csv").write_text("prompt,answer\nx,1\ny,2,3\n")
    with pytest.raises(DataError, match=r"b\.csv:3: more cells"):
        load(tmp_path, "b.csv")


def test_byte_order_mark_crlf_and_odd_line_separators_load(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes('\ufeff{"prompt": "a\u2028b"}\r\n\r\n{"prompt": "c"}\r\n'.encode())
    assert [t.prompt for t in load(tmp_path, "a.jsonl").train] == ["a\u2028b", "c"]
    (tmp_path / "a.csv").write_bytes('\ufeffprompt,answer\r\n"x\r\ny",1\r\n'.encode())
    assert load(tmp_path, "a.csv").train[0].prompt == "x\r\ny"


def test_lone_surrogates_are_replaced_and_counted(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(
        '{"prompt": "a\\ud800b", "answer": "1", "more": ["\\udfff"]}\n{"prompt": "\\ud83d\\ude00"}\n'
    )
    tasks = load(tmp_path, "a.jsonl")
    assert [t.prompt for t in tasks.train] == ["a\ufffdb", "😀"]
    assert any("lone surrogates replaced in 2 texts" in note for note in tasks.notes)
    json.dumps(tasks.train[0].metadata, ensure_ascii=False).encode("utf-8")


def test_equal_rows_are_kept_as_tasks_of_their_own_and_reported(tmp_path: Path) -> None:
    tasks = load(tmp_path, write(tmp_path, [PLAIN[0], PLAIN[0], PLAIN[1]]))
    assert [t.key for t in tasks.train] == ["rows.jsonl:1", "rows.jsonl:2", "rows.jsonl:3"]
    assert any("1 rows repeat" in note for note in tasks.notes)


def test_a_split_keeps_equal_prompts_on_one_side(tmp_path: Path) -> None:
    tasks = load(tmp_path, write(tmp_path, PLAIN * 3), held_out=21)
    assert len(tasks.held_out) == 21
    assert not {t.prompt for t in tasks.train} & {t.prompt for t in tasks.held_out}
    assert not any("warning" in note for note in tasks.notes)


def test_overlap_with_given_held_out_rows_is_reported(tmp_path: Path) -> None:
    write(tmp_path, PLAIN[:10], "train.jsonl")
    write(tmp_path, PLAIN[8:12], "test.jsonl")
    tasks = load(tmp_path, ".", held_out=None)
    assert (len(tasks.train), len(tasks.held_out)) == (10, 4)
    assert "warning: 2 of 4 held-out prompts also stand in the training rows" in tasks.notes


def test_held_out_file_of_the_same_name_keeps_its_keys_apart(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    write(tmp_path / "other", PLAIN[5:9])
    tasks = load(tmp_path, write(tmp_path, PLAIN[:5]), held_out=None, held_out_path="other/rows.jsonl")
    assert (len(tasks.train), len(tasks.held_out)) == (5, 4)


def test_rows_can_be_filtered_but_not_all_away(tmp_path: Path) -> None:
    rows = [{**row, "level": n % 4} for n, row in enumerate(PLAIN)]
    name = write(tmp_path, rows)
    assert {t.metadata["level"] for t in load(tmp_path, name, where={"level": [1, 2]}).train} == {1, 2}
    with pytest.raises(DataError, match="empty after filtering"):
        load(tmp_path, name, where={"level": 9})
    with pytest.raises(DataError, match='no column "lvl"'):
        load(tmp_path, name, where={"lvl": 9})


def test_nothing_left_to_train_on_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nothing is left"):
        load(tmp_path, write(tmp_path, PLAIN), held_out=20)


def test_a_function_may_return_rows_tasks_or_a_task_set(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from gropius.types import Task\n"
        "from gropius.tasks.arithmetic import arithmetic\n"
        "def rows(seed, count=3):\n    return [{'prompt': f'{seed}:{n}', 'answer': n} for n in range(count)]\n"
        "def tasks():\n    return (Task(str(n), f'{n}', '1') for n in range(4))\n"
        "def a_set(seed):\n    return arithmetic(seed=seed, rows=(7, 2))\n"
        "def text():\n    return 'rows'\n"
        "def none():\n    return []\n"
        "def bad():\n    raise KeyError('x')\n"
        "def late():\n    yield {'prompt': 'a'}\n    raise OSError('disk')\n"
    )
    assert [t.prompt for t in load(tmp_path, "mine:rows", count=2).train] == ["0:0", "0:1"]
    assert len(load(tmp_path, "mine.py:tasks", held_out=1).train) == 3
    assert len(load(tmp_path, "mine:a_set").train) == 7
    for name, words in {
        "text": "returned a str",
        "none": "no rows",
        "bad": "raised KeyError",
        "late": "raised OSError: disk",
        "nope": "did you mean",
    }.items():
        with pytest.raises(DataError, match=words):
            load(tmp_path, f"mine:{name}")
    with pytest.raises(DataError, match="no module nowhere"):
        load(tmp_path, "nowhere:f")
    with pytest.raises(DataError, match="unexpected keyword"):
        load(tmp_path, "mine:tasks", colour=1)


@pytest.mark.parametrize(
    ("source", "options", "words"),
    [
        ("arithmatic", {}, 'did you mean "arithmetic"'),
        ("rows.jsonl", {}, "no such file"),
        ("rows.txt", {}, "no such task set"),
        ("arithmetic", {"digit": 2}, 'unknown option "digit"; did you mean "digits"'),
        ("arithmetic", {"digits": "2"}, "write a value of type int"),
        ("arithmetic", {"digits": True}, "is a bool"),
        ("gsm8k", {}, "option path is missing"),
    ],
)
def test_a_wrong_source_or_option_says_what_to_write(
    tmp_path: Path, source: str, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        load(tmp_path, source, held_out=None, **options)


def test_columns_on_a_named_set_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no effect"):
        load(tmp_path, "times_table", columns={"prompt": "x"})


def test_held_out_of_the_recipe_reaches_every_named_set(tmp_path: Path) -> None:
    for name in ("arithmetic", "times_table", "guess_number"):
        assert len(load(tmp_path, name, held_out=7).held_out) == 7


def test_hub_ids_without_the_extra_name_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"gropius\[data\]"):
        load(tmp_path, "owner/name")


def test_gsm8k_gold_and_solution(tmp_path: Path) -> None:
    write(tmp_path, [{"question": "q", "answer": "5*200=<<5*200=1000>>1000 eggs\n#### 1,000"}] * 2, "train.jsonl")
    write(tmp_path, [{"question": "r", "answer": "#### -3"}], "test.jsonl")
    tasks = load(tmp_path, "gsm8k", held_out=None, path=".")
    assert tasks.train[0].answer == "1000"
    assert tasks.held_out[0].answer == "-3"
    assert tasks.demonstration(tasks.train[0])[0]["content"] == "5*200=1000 eggs\n#### 1,000"
    write(tmp_path, [{"question": "q", "answer": "no gold"}], "train.jsonl")
    with pytest.raises(DataError, match=r"train\.jsonl:1: no ####"):
        load(tmp_path, "gsm8k", path=".")


def test_gold_readers() -> None:
    assert after_hashes("no mark") is None
    assert last_boxed("\\boxed{1} then \\boxed{\\frac{1}{2}}") == "\\frac{1}{2}"
    assert last_boxed("\\boxed{1") is None


@pytest.mark.skipif(not (DATA / "gsm8k").is_dir(), reason="GROPIUS_DATA holds no gsm8k folder")
def test_the_real_gsm8k_reads_whole() -> None:
    tasks = load(DATA, "gsm8k", held_out=None, path="gsm8k")
    assert (len(tasks.train), len(tasks.held_out)) == (7473, 1319)
    assert all(task.answer and "," not in task.answer for task in (*tasks.train, *tasks.held_out))
    assert not any("warning" in note for note in tasks.notes)


@pytest.mark.skipif(not (DATA / "mbpp").is_dir(), reason="GROPIUS_DATA holds no mbpp folder")
@pytest.mark.parametrize(
    ("file", "shape", "count"),
    [
        ("mbpp/mbpp.jsonl", "MBPP", 974),
        ("humaneval/HumanEval.jsonl.gz", "HumanEval", 164),
        ("math500/test.jsonl", "MATH", 500),
    ],
)
def test_the_real_sets_are_recognised(file: str, shape: str, count: int) -> None:
    tasks = load(DATA, file)
    assert f"{count} rows, recognised as {shape}" in tasks.notes[0]
    assert all(task.answer for task in tasks.train)


def test_json_lines_and_parquet_are_read_no_further_than_asked(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "a", "answer": "1"}\n{"prompt": "b", "answer": "2"}\n{broken\n')
    assert [row.values["prompt"] for row in read_rows(file, 2).rows] == ["a", "b"]
    with pytest.raises(DataError, match=r"rows\.jsonl:3"):
        read_rows(file)
    (tmp_path / "unseen.jsonl").write_text('{"prompt": "c", "answer": "3"}\n')
    options = {"limit": 2, "held_out_path": "unseen.jsonl"}
    found = load_tasks("rows.jsonl", options, 0, {}, None, tmp_path)
    assert [task.prompt for task in found.train] == ["a", "b"]


def test_a_large_file_is_never_held_as_a_whole(tmp_path: Path) -> None:
    line = '{"prompt": "' + "x" * 100_000 + '", "answer": "1"}\n'
    file = tmp_path / "large.jsonl"
    with file.open("w") as stream:
        for _ in range(200):  # 20 MB
            stream.write(line)
    tracemalloc.start()
    try:
        rows = read_rows(file, 5)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(rows.rows) == 5 and peak < 4 << 20
