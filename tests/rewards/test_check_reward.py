"""Laws of the trial of a reward: sound rewards pass it, and every known fault is found by name."""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gropius.cli.main import main
from gropius.rewards import load_scorer
from gropius.rewards.base import InProcessScorer, RewardPart, outcome_as_metric
from gropius.rewards.check import Plan, Report, Score, _of_time, check
from gropius.rewards.trials import TRIALS
from gropius.sandbox.tiers import probe
from gropius.tasks import load_tasks
from gropius.tasks.base import TaskSet
from gropius.types import Episode, Verdict, rejected, scored, void

HERE = Path(".")
DATA = Path(os.environ.get("GROPIUS_DATA", Path(__file__).parents[3] / "shared" / "data"))


def tasks(name: str = "times_table", **options: Any) -> TaskSet:
    return load_tasks(name, options, 0, {}, None, HERE)


def tried(*parts: RewardPart, on: TaskSet | None = None, count: int = 4) -> Report:
    scorer = InProcessScorer(parts)
    return asyncio.run(check(on or tasks(), scorer, parts, Plan(count, 2 * count)))


def names(report: Report, severity: str = "finding") -> set[str]:
    return {found.name for found in report.findings if found.severity == severity}


def right(episode: Episode) -> bool:
    return episode.last_reply.strip() == episode.task.answer


def mine(function: Callable[[Episode], Any], name: str = "mine", weight: float = 1.0, **fields: Any) -> RewardPart:
    return RewardPart(name, weight, function, outcome_as_metric, "episode", **fields)


SOUND = mine(lambda e: scored(1.0) if right(e) else rejected("wrong"))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("arithmetic", {"rows": [50, 10]}),
        ("arithmetic", {"rows": [50, 10], "style": "question"}),
        ("times_table", {}),
        ("countdown", {"rows": [20, 5]}),
        ("calculator", {"rows": [20, 5]}),
        ("guess_number", {"rows": [20, 5]}),
    ],
)
def test_the_tasks_that_are_shipped_pass_their_own_trial(name: str, options: dict[str, Any]) -> None:
    on = tasks(name, **options)
    scorer = load_scorer([{"name": reward} for reward in on.rewards], HERE)
    report = asyncio.run(check(on, scorer, scorer.parts, Plan(4, 12)))
    assert not report.failed, report.findings
    assert set(report.scores) >= {"gold", "empty", "echo", "lazy", "tower", "evaluation"}


@pytest.mark.skipif(all(probe(t) for t in ("bubblewrap", "landlock")), reason="this machine isolates no programs")
def test_programs_that_end_or_fool_their_grader_are_tried(tmp_path: Path) -> None:
    rows = [
        {
            "prompt": f"Write f that adds {n}.",
            "test_list": [f"assert f(1) == {n + 1}"],
            "code": f"def f(x): return x+{n}",
        }
        for n in range(4)
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    on = load_tasks(str(file), {}, 0, {}, 1, HERE)
    scorer = load_scorer([{"name": "code"}], HERE)
    report = asyncio.run(check(on, scorer, scorer.parts, Plan(2, 4)))
    assert not report.failed, report.findings
    assert {"early exit", "polite exit", "always equal", "hedge"} <= set(report.scores)


def test_a_sound_reward_passes_and_the_table_has_a_line_for_every_policy() -> None:
    report = tried(SOUND)
    assert not report.failed
    assert set(report.scores) <= set(TRIALS)
    assert json.loads(json.dumps(report.as_dict()))["policies"]["gold"]["full"] == report.gold >= 8


FAULTS: dict[str, tuple[Callable[[Episode], Any], str]] = {
    "contains the answer": (lambda e: float((e.task.answer or "") in e.last_reply), "hedge scores full"),
    "contains the answer, denied": (lambda e: float((e.task.answer or "") in e.last_reply), "denial scores full"),
    "pays everyone": (lambda e: 1.0, "empty scores full"),
    "is constant": (lambda e: 1.0, "mine is constant"),
    "pays nobody": (lambda e: rejected("no"), "gold is not full"),
    "voids gold": (lambda e: void("no gold") if right(e) else rejected("wrong"), "gold cannot be judged"),
    "voids noise": (lambda e: scored(1.0) if right(e) else void("hm"), "empty cannot be judged"),
    "raises at noise": (lambda e: 1.0 if right(e) else int("x"), "lazy cannot be judged"),
    "never applies": (lambda e: None, "mine never applies"),
    "is too long for its range": (lambda e: 2.0 if right(e) else 0.0, "broken contract"),
    "is no number": (lambda e: "1.0", "broken contract"),
}  # fmt: skip


@pytest.mark.parametrize("fault", sorted(FAULTS))
def test_every_fault_is_found_by_name(fault: str) -> None:
    function, name = FAULTS[fault]
    report = tried(mine(function, low=0.0, high=1.0))
    assert name in names(report), report.findings
    assert report.failed


def test_an_answer_that_takes_long_is_a_finding_unless_gold_takes_as_long() -> None:
    def timed(slow: float, gold: float) -> list[str]:
        task = tasks().train[0]
        row = (task, Verdict(rejected("wrong")))
        scores = Score(TRIALS["tower"], [row] * 4, slow * 4), Score(TRIALS["gold"], [row] * 4, gold * 4)
        return [found.severity for found in _of_time("tower", *scores)]

    assert (timed(0.9, 0.01), timed(1.2, 0.01), timed(2.0, 1.5)) == ([], ["finding"], ["note"])


def test_chance_and_state_are_found() -> None:
    draw = random.Random(0)
    assert "not deterministic" in names(tried(mine(lambda e: float(right(e)) * draw.random())))
    seen: list[str] = []

    def once(episode: Episode) -> float:
        seen.append(episode.last_reply)
        return float(right(episode) and seen.count(episode.last_reply) < 3)

    assert "not deterministic" in names(tried(mine(once)))


def test_a_reward_that_evaluates_answers_is_caught_in_the_act() -> None:
    def evaluates(episode: Episode) -> float:
        try:
            return float(eval(episode.last_reply, {}) == int(episode.task.answer or "0"))
        except (SyntaxError, NameError, TypeError, ValueError, MemoryError):
            return 0.0

    on = tasks()
    safe = {name: trial for name, trial in TRIALS.items() if name not in ("tower", "nested")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gropius.rewards.check.TRIALS", safe)  # `9**9**9` would hang this very process
        assert "evaluates answers" in names(tried(mine(evaluates), on=on))


def test_pay_for_form_alone_and_a_dominating_part_are_found() -> None:
    form = mine(lambda e: 1.0 if e.last_reply.strip() else 0.0, "form", 2.0)
    report = tried(SOUND, form)
    assert "lazy is paid" in names(report)
    loud = mine(lambda e: float(len(e.last_reply)), "loud", 1.0)
    assert "loud dominates" in names(tried(SOUND, loud), "note")


def test_the_verb_exits_by_what_it_found(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("def f(episode):\n    return float(episode.task.answer in episode.last_reply)\n")

    def run(*words: str) -> tuple[int, str]:
        with pytest.raises(SystemExit) as caught:
            main(["check-reward", *words])
        return int(caught.value.code or 0), capsys.readouterr().out

    (tmp_path / "r.toml").write_text('[data]\nsource = "times_table"\n[[reward]]\nname = "mine.py:f"\n')
    code, out = run("r.toml", "--tasks", "2", "--json", "--trust-code")
    report = json.loads(out)
    assert code == 1 and report["failed"] and "hedge scores full" in {f["name"] for f in report["findings"]}
    code, out = run("times_table", "--tasks", "2")
    assert code == 0 and "nothing was found" in out and "gives the gold answer" in out
    assert run("r.toml", "--tasks", "2")[0] == 3  # code that was not trusted


@pytest.mark.skipif(not DATA.is_dir(), reason="no data sets here (GROPIUS_DATA)")
@pytest.mark.skipif(all(probe(t) for t in ("bubblewrap", "landlock")), reason="this machine isolates no programs")
def test_reference_programs_that_fail_their_own_tests_are_listed_by_row() -> None:
    file = str(DATA / "mbpp" / "mbpp.jsonl")
    on = load_tasks(file, {"where": {"task_id": [1, 2, 367, 927]}}, 0, {}, 1, HERE)
    scorer = load_scorer([{"name": "code"}], HERE)
    report = asyncio.run(check(on, scorer, scorer.parts, Plan(1, 0)))
    found = next(found for found in report.findings if found.name == "gold is not full")
    assert sorted(found.rows) == ["mbpp.jsonl:367", "mbpp.jsonl:927"]
