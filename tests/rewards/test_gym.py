"""Laws of scorers that evaluate what a model wrote: confined, bounded, one answer at a time."""

from __future__ import annotations

import asyncio
import os
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gropius.errors import DataError, RecipeError
from gropius.rewards import MixedScorer, load_scorer, open_scorer
from gropius.rewards.gym import answer_in
from gropius.sandbox.confine import landlock_version
from gropius.tasks import load_tasks
from gropius.types import Episode, Task, Turn

needs_landlock = pytest.mark.skipif(landlock_version() < 1, reason="this kernel has no Landlock")

# An imitation of the library with its worst habit: the scorer evaluates the answer.
LIBRARY = """
from types import SimpleNamespace
class Data:
    def __init__(self, seed, size, low=1): self.seed, self.size, self.low = seed, size, low
    def __getitem__(self, i):
        n = self.low + (i * 7 + self.seed) % 50
        return {"question": f"{n} + {n}?", "answer": str(2 * n), "metadata": {}}
    def score_answer(self, answer, entry):
        value = eval(answer)
        return 1.0 if value == int(entry["answer"]) else 0.3 if entry["answer"] in str(value) else 0.0
factory = SimpleNamespace(DATASETS={"sums": (Data, None)})
def create_dataset(name, seed, size, **options): return Data(seed, size, **options)
"""


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    package = tmp_path / "library" / "reasoning_gym"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(textwrap.dedent(LIBRARY))
    before = sys.modules.pop("reasoning_gym", None)
    monkeypatch.syspath_prepend(str(package.parent))
    yield tmp_path
    sys.modules.pop("reasoning_gym", None)
    if before is not None:
        sys.modules["reasoning_gym"] = before


def drawn(**options: Any) -> Any:
    return load_tasks("reasoning_gym", {"family": "sums", "rows": [6, 2], **options}, 3, {}, None, Path("."))


def episode(task: Task, reply: str) -> Episode:
    turn = Turn("model", np.zeros(1, np.int64), reply)
    return Episode(task, "000001-0000", 0, np.zeros(1, np.int64), (turn,), (), "stop")


def judged(task: Task, *replies: str, **options: Any) -> list[tuple[str, float | None, str]]:
    scorer = load_scorer([{"name": "reasoning_gym", "options": {"wall_s": 2.0, **options}}], Path("."))
    outcomes = [v.outcome for v in asyncio.run(scorer.score([episode(task, reply) for reply in replies]))]
    return [(o.status, o.value, o.reason.removeprefix("reasoning_gym: ")) for o in outcomes]


@needs_landlock
def test_gold_scores_and_everything_else_is_rejected_with_its_reason(library: Path) -> None:
    found = drawn()
    task = found.train[0]
    gold = found.solution(task)
    wrong = ("rejected", 0.0, "wrong")
    assert judged(task, gold, "<answer>0</answer>", "", f"<answer>{task.answer}0</answer>") == [
        ("scored", 1.0, ""), wrong, ("rejected", 0.0, "no answer"), wrong,
    ]  # fmt: skip
    assert judged(task, f"<answer>{task.answer}0</answer>", partial=True)[0][:2] == ("scored", 0.3)


@needs_landlock
def test_an_answer_that_is_a_program_reaches_nothing_and_ends_in_time(library: Path) -> None:
    task, canary = drawn().train[0], library / "canary"
    secret = library / "secret"
    secret.write_text("hidden")
    answers = [
        f"<answer>open({str(canary)!r}, 'w').write('x')</answer>",
        f"<answer>open({str(secret)!r}).read()</answer>",
        "<answer>__import__('socket').socket()</answer>",
        "<answer>bytearray(1 << 33)</answer>",
        "<answer>(lambda f: f(f))(lambda f: f(f))</answer>",
        "<answer>__import__('os').kill(__import__('os').getppid(), 9)</answer>",
        "<answer>[0 for _ in iter(int, 1)]</answer>",
    ]
    reasons = [reason for _, _, reason in judged(task, *answers)]
    assert reasons[:2] == ["error: PermissionError"] * 2 and reasons[3] == "memory"
    # how deep the interpreter gets before it gives up differs: what matters is that it gave up in the child
    assert reasons[4].startswith(("error: ", "crash", "memory")) and reasons[6] in ("time", "memory")
    assert not canary.exists()
    assert judged(task, f"<answer>{task.answer}</answer>")[0][0] == "scored"


@needs_landlock
def test_the_library_never_scores_in_the_trainers_process(library: Path) -> None:
    found = drawn(parameters={"low": 5})
    scorer = open_scorer([{"name": "reasoning_gym"}], Path("."))
    assert isinstance(scorer, MixedScorer)
    try:
        task = found.train[0]
        verdicts = asyncio.run(scorer.score([episode(task, f"<answer>{task.answer}</answer>")]))
        assert verdicts[0].outcome.value == 1.0 and verdicts[0].raw == 1.0
        pid = asyncio.run(scorer.score([episode(task, f"<answer>__import__('os').getpid() == {os.getpid()}</answer>")]))
        assert pid[0].outcome.status == "rejected"
    finally:
        scorer.close()


def test_an_unknown_family_or_a_missing_library_says_what_to_write(
    library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DataError, match='did you mean "sums"'):
        load_tasks("reasoning_gym", {"family": "sum"}, 0, {}, None, Path("."))
    with pytest.raises(DataError, match="parameters"):
        drawn(parameters={"hihg": 5})
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(DataError, match=r"gropius\[tasks\]"):
        drawn()
    with pytest.raises(RecipeError, match=r"gropius\[tasks\]"):
        load_scorer([{"name": "reasoning_gym"}], Path("."))


def test_the_same_seed_draws_the_same_tasks_and_halves_never_share_a_prompt(library: Path) -> None:
    one, other = drawn(), drawn()
    assert one.fingerprint == other.fingerprint
    assert not {t.prompt for t in one.train} & {t.prompt for t in one.held_out}


def test_an_answer_inside_thinking_that_never_ends_is_none() -> None:
    assert answer_in("<think><answer>42</answer>", "answer") == ""
    assert answer_in("<think>so</think><answer>42</answer>", "answer") == "42"
