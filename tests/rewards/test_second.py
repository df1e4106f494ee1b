"""Laws of the second opinion: beside the verdict and never in it, in a child that is killed, every answer judged."""

from __future__ import annotations

import asyncio
import os
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from gropius.errors import RecipeError
from gropius.rewards import MixedScorer, load_scorer, open_scorer
from gropius.sandbox.confine import landlock_version
from gropius.types import Episode, Task, Turn, Verdict

needs_landlock = pytest.mark.skipif(landlock_version() < 1, reason="this kernel has no Landlock")
BOTH = [{"name": "math", "options": {"second": "math-verify"}}]

# An imitation with the library's shape and the worst habit such a library can have: it evaluates the answer.
LIBRARY = """
import os
def parse(text, parsing_timeout=5):
    text = text.strip("$").removeprefix("\\\\boxed{").removesuffix("}")
    return [] if text == "unreadable" else [text]
def verify(gold, found, timeout_seconds=5):
    return eval(found[0], {"os": os, "open": open, "pid": os.getpid()}) == eval(gold[0])
"""


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    package = tmp_path / "library" / "math_verify"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(textwrap.dedent(LIBRARY))
    before = sys.modules.pop("math_verify", None)
    monkeypatch.syspath_prepend(str(package.parent))
    yield tmp_path
    sys.modules.pop("math_verify", None)
    if before is not None:
        sys.modules["math_verify"] = before


def episode(reply: str, answer: str | None) -> Episode:
    turn = Turn("model", np.zeros(1, np.int64), reply)
    return Episode(Task("t", "q", answer), "000001-0000", 0, np.zeros(1, np.int64), (turn,), (), "stop")


def judged(parts: list[dict], *pairs: tuple[str, str | None]) -> list[Verdict]:
    return asyncio.run(load_scorer(parts, Path(".")).score([episode(*pair) for pair in pairs]))


def opinion(verdict: Verdict) -> tuple[str, str]:
    part = verdict.parts["math_verify"]
    return part.status, part.reason


@needs_landlock
def test_both_opinions_are_recorded_and_ours_alone_decides(library: Path) -> None:
    agreed, more, less = judged(BOTH, ("42", "42"), ("6*7", "42"), ("42", "41+0"))
    assert (agreed.outcome.value, opinion(agreed)) == (1.0, ("scored", ""))
    assert (more.outcome.status, more.outcome.value, opinion(more)[0]) == ("rejected", 0.0, "scored")
    assert (less.outcome.status, opinion(less)) == ("rejected", ("rejected", "wrong"))
    assert more.raw == 0.0


@needs_landlock
def test_an_answer_that_is_a_program_reaches_nothing_and_is_cut_off(library: Path) -> None:
    canary = library / "canary"
    slow = [{"name": "math_verify", "options": {"wall_s": 1.0, "memory_mb": 512}}]
    verdicts = judged(
        slow,
        (f"open({str(canary)!r}, 'w')", "42"),
        ("[0 for _ in iter(int, 1)]", "42"),
        ("bytearray(1 << 34)", "42"),
        ("os._exit(0)", "42"),
        ("os.kill(os.getppid(), 9)", "42"),
        ("42", "42"),
    )
    reasons = [opinion(verdict)[1] for verdict in verdicts]
    assert reasons[0] == "error: PermissionError" and reasons[1] in ("time", "memory") and reasons[2] == "memory"
    assert reasons[3] == "the scorer gave no number" and reasons[4].startswith("error")
    assert verdicts[5].outcome.value == 1.0 and not canary.exists()


@needs_landlock
def test_it_never_judges_in_the_trainers_process(library: Path) -> None:
    scorer = open_scorer(BOTH, Path("."))
    assert isinstance(scorer, MixedScorer)
    try:
        verdict = asyncio.run(scorer.score([episode(f"pid == {os.getpid()}", "True")]))[0]
        assert opinion(verdict) == ("rejected", "wrong")
        assert "math_verify: weight 0" in "\n".join(scorer.describe())
    finally:
        scorer.close()


@needs_landlock
def test_gold_that_it_cannot_read_is_void_and_costs_nothing(library: Path) -> None:
    verdict = judged(BOTH, ("unreadable", "unreadable"))[0]
    assert opinion(verdict)[0] == "void" and verdict.outcome.value == 1.0


def test_a_second_opinion_that_does_not_exist_says_what_to_write(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RecipeError, match='second = "mathverify"; did you mean "math-verify"'):
        load_scorer([{"name": "math", "options": {"second": "mathverify"}}], Path("."))
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(RecipeError, match=r"gropius\[tasks\]"):
        load_scorer(BOTH, Path("."))


@needs_landlock
def test_the_real_library_agrees_on_everyday_answers_and_survives_hostile_ones() -> None:
    pytest.importorskip("math_verify", reason="the package math-verify is not installed")
    patient = [{"name": "math"}, {"name": "math_verify", "weight": 0.0, "options": {"wall_s": 60.0}}]
    for verdict in judged(patient, (r"\boxed{\frac{1}{2}}", "0.5"), (r"The answer is $42$.", "42")):
        assert opinion(verdict) == ("scored", "") and verdict.outcome.value == 1.0
    assert opinion(judged(patient, (r"\boxed{43}", "42"))[0]) == ("rejected", "wrong")
    for hostile in (r"\boxed{9^{9^{9^{9}}}-9^{9^{9^{9}}}+1}", r"\boxed{" + "{" * 3000 + "1" + "}" * 3000 + "}"):
        assert judged(BOTH, (hostile, "42"))[0].outcome.status == "rejected"
