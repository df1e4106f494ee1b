"""Logs of other trainers are read as they are; what they cannot support is skipped with the missing field's name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gropius.doctor import examine, read_log
from gropius.errors import RunFolderError

STEPS, PROMPTS, SIBLINGS = 10, 10, 4


def reward_of(step: int, prompt: int, member: int) -> float:
    """All fail but one prompt's: nine of ten groups are dead from the start."""
    return float(prompt == 0 and member % 2 == 0)


def rows() -> list[tuple[int, int, int]]:
    return [(s, p, m) for s in range(1, STEPS + 1) for p in range(PROMPTS) for m in range(SIBLINGS)]


def trl(folder: Path) -> None:
    (folder / "completions").mkdir()
    for step in range(1, STEPS + 1):
        own = [row for row in rows() if row[0] == step]
        table = {
            "step": [step] * len(own),
            "prompt": [[{"role": "user", "content": f"question {p}"}] for _, p, _ in own],
            "completion": [[{"role": "assistant", "content": f"answer {p} {m} {s}"}] for s, p, m in own],
            "accuracy": [reward_of(*row) for row in own],
            "format": [0.0 for _ in own],
            "advantage": [reward_of(*row) - 0.5 if row[1] == 0 else 0.0 for row in own],
        }
        pq.write_table(pa.table(table), folder / "completions" / f"completions_{step:05d}.parquet")
    history = [{"step": s, "reward": 0.1, "kl": 0.01, "grad_norm": 1.0, "entropy": 1.0} for s in range(1, STEPS + 1)]
    state = folder / "checkpoint-10"
    state.mkdir()
    (state / "trainer_state.json").write_text(json.dumps({"log_history": history, "global_step": STEPS}))


def verl(folder: Path) -> None:
    for step in range(1, STEPS + 1):
        own = sorted((row for row in rows() if row[0] == step), key=lambda row: row[2])  # siblings scattered
        lines = [
            {"input": f"question {p}", "output": f"answer {p} {m} {s}", "gts": "4", "score": reward_of(s, p, m),
             "step": s, "acc": reward_of(s, p, m), "pred": "4"}
            for s, p, m in own
        ]  # fmt: skip
        (folder / f"{step}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def prime(folder: Path) -> None:
    for step in range(1, STEPS + 1):
        place = folder / "rollouts" / f"step_{step}"
        place.mkdir(parents=True)
        lines = [
            {"example_id": p, "task": "sums", "prompt": [{"role": "user", "content": f"question {p}"}],
             "completion": [{"role": "assistant", "content": f"answer {p} {m} {s}"}], "reward": reward_of(s, p, m),
             "metrics": {"correct": reward_of(s, p, m), "length": 3.0}, "is_truncated": False,
             "usage": {"completion_tokens": 7}, "info": {"prime_rl": {"env_name": "sums"}}}
            for s, p, m in rows() if s == step
        ]  # fmt: skip
        (place / "train_rollouts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def traces(folder: Path) -> None:
    lines = []
    for s, p, m in rows():
        said = [{"role": "user", "content": "q"}, {"role": "assistant", "content": f"answer {p} {m} {s}"}]
        line = {"step": s, "task": {"idx": p}, "nodes": [{"message": message} for message in said]}
        lines.append(line | {"rewards": {"right": reward_of(s, p, m)}, "stop_condition": "agent_completed"})
    (folder / "traces.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def openrlhf(folder: Path) -> None:
    lines = [
        {"global_step": s, "prompt": f"question {p}", "response": f"answer {p} {m} {s}", "reward": [reward_of(s, p, m)],
         "label": "4", "response_length": 7, "truncated": 0}
        for s, p, m in rows()
    ]  # fmt: skip
    (folder / "rollouts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.parametrize("write", [trl, verl, prime, traces, openrlhf], ids=lambda f: f.__name__)
def test_groups_and_rewards_of_another_trainer_are_read_and_its_dead_groups_found(
    write: Callable[[Path], None], tmp_path: Path
) -> None:
    write(tmp_path)
    log = read_log(tmp_path)
    assert log.steps == list(range(1, STEPS + 1))
    assert [len(group.places) for group in log.groups] == [SIBLINGS] * (STEPS * PROMPTS)
    found = examine(log)
    assert "all_failed_groups" in [finding.name for finding in found.findings]
    assert next(f for f in found.findings if f.name == "all_failed_groups").measured.value == 0.9


@pytest.mark.parametrize(
    ("write", "name", "missing", "hint"),
    [
        (trl, "sampler_trainer_mismatch", "tokens.sampler", "no per-token"),
        (trl, "truncation", "responses.truncated", "clipped_ratio"),
        (verl, "entropy_collapse", "metrics.entropy", "logger"),
        (verl, "budget_waste", "responses.tokens", "decoded text"),
        (prime, "few_prompts_carry_signal", "responses.advantage", "advantage"),
        (openrlhf, "reward_hacking", "responses.raw", "accuracy"),
    ],
)
def test_what_a_log_cannot_support_is_skipped_with_the_missing_field_and_where_it_would_come_from(
    write: Callable[[Path], None], name: str, missing: str, hint: str, tmp_path: Path
) -> None:
    write(tmp_path)
    skipped = {s.name: s for s in examine(read_log(tmp_path)).skipped}
    assert missing in skipped[name].missing and hint in skipped[name].hint
    assert missing in str(skipped[name])


def test_siblings_scattered_over_the_file_are_one_group_in_verl(tmp_path: Path) -> None:
    verl(tmp_path)
    assert len({group.group_id for group in read_log(tmp_path).groups}) == PROMPTS


def test_a_dead_reward_function_of_trl_is_found_from_the_completions_alone(tmp_path: Path) -> None:
    trl(tmp_path)
    names = [finding.name for finding in examine(read_log(tmp_path)).findings]
    assert "dead_reward_part" in names


def test_nothing_known_a_damaged_line_and_a_wrong_name_are_refused_by_place(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="no such file"):
        read_log(tmp_path / "absent")
    with pytest.raises(RunFolderError, match=r"trainer_state\.json"):
        read_log(tmp_path)
    verl(tmp_path)
    (tmp_path / "3.jsonl").write_text('{"input": 1}\nnot json\n{}\n')
    with pytest.raises(RunFolderError, match=r"3\.jsonl:2"):
        read_log(tmp_path)
    with pytest.raises(RunFolderError, match='did you mean "verl"'):
        read_log(tmp_path, "ver1")
