"""Laws of what a run shows: one line a step, plain without a terminal, foreign text inert."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

import pytest

from gropius.cli.console import Console, budget_lines, clock, print_outcome, step_line
from gropius.records.intervals import Share

METRICS = {
    "reward": 0.53125,
    "loss": -0.0123,
    "grad_norm": 0.812,
    "tokens_per_s": 1234.5,
    "step_time": 2.0,
    "groups/count": 64,
    "groups/all_failed": 3 / 64,
    "groups/all_solved": 1 / 64,
}
SHARE = Share(0.5, 0.4, 0.6, 100, 400)
FOUND: Any = SimpleNamespace(mean=SHARE, passed=SHARE, majority=SHARE, k=4, mean_length_tokens=7.25)


def test_a_step_is_one_line_with_every_number_that_matters() -> None:
    line = step_line(7, 100, METRICS, 0.61, 186.0)
    assert line == (
        "step   7/100  reward 0.531  held-out 0.610  no signal in 3 failed + 1 solved of 64 groups  loss -0.0123  "
        "grad 0.812  1,234 tok/s  left 3:06"
    )


def test_the_last_summary_adds_up_what_sampling_cost() -> None:
    step = {
        "responses": 40, "tokens_sampled": 1000, "tokens_trained": 600, "tokens_dropped": 200, "tokens_aborted": 50,
        "groups/count": 10, "groups/informative": 0.6, "groups/all_failed": 0.3, "groups/all_solved": 0.1,
        "duplicates": 0.25, "groups_begun": 12, "responses_aborted": 8, "responses_resumed": 0, "responses_waiting": 0,
    }  # fmt: skip
    assert budget_lines([step, {"held_out/mean": 0.5}, step]) == [
        "tokens      2,000 sampled, 1,200 trained; thrown away: 400 of dropped groups, 100 aborted",
        "responses   80, 6.7 for each group that carries signal; 20 equal to an earlier sibling",
        "groups      12 of 20 carry signal (6 all failed, 2 all solved)",
        "cut         24 groups begun; 16 responses aborted, 0 gone on with in a later step",
    ]
    dead = step | {"groups/informative": 0.0, "responses_aborted": 0}
    assert "no group had signal" in budget_lines([dead])[1] and len(budget_lines([dead])) == 3
    assert budget_lines([{"held_out/mean": 0.5}]) == []


def test_a_number_that_was_not_measured_is_left_out() -> None:
    assert step_line(1, 2, {"reward": None, "loss": float("nan")}, None, None) == "step 1/2  loss +nan"


def test_without_a_terminal_lines_are_plain_and_complete() -> None:
    stream = io.StringIO()
    with Console(stream) as console:
        console.held_out("before", FOUND)
        console.step(1, 3, METRICS)
        console.step(2, 3, METRICS | {"step_time": 4.0, "held_out/mean": 0.75})
    lines = stream.getvalue().splitlines()
    assert lines[0] == (
        "held-out before: mean@4 0.500 [0.400, 0.600]  pass@4 0.500 [0.400, 0.600]  maj@4 0.500 [0.400, 0.600]  "
        "(100 tasks, 7.25 tokens)"
    )
    assert "held-out" not in lines[1] and lines[1].endswith("left 0:04")
    assert "held-out 0.750" in lines[2] and lines[2].endswith("left 0:03")
    assert "\x1b" not in stream.getvalue()


def test_on_a_terminal_a_bar_stands_under_the_same_lines() -> None:
    stream = io.StringIO()
    with Console(stream, live=True) as console:
        console.step(1, 2, METRICS)
        console.step(2, 2, METRICS)
    text = stream.getvalue()
    assert "step 1/2" in text and "step 2/2" in text and "2/2" in text


def test_foreign_text_is_inert_with_and_without_a_terminal() -> None:
    for live in (False, True):
        stream = io.StringIO()
        with Console(stream, live=live) as console:
            console.step(1, 2, METRICS)
            console.note("[bold]x[/bold] \x1b]0;t\x07")
        assert "[bold]x[/bold] \\x1b]0;t\\x07" in stream.getvalue()


def test_time_left_is_rounded_to_seconds() -> None:
    assert [clock(s) for s in (0, 59.4, 60, 3599.6)] == ["0:00", "0:59", "1:00", "1:00:00"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("out", "err", "told"), [(True, True, 0), (False, True, 1), (True, False, 1)])
def test_an_evaluation_that_a_terminal_has_shown_is_not_printed_again(
    out: bool, err: bool, told: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    stdout, stderr = (Terminal() if terminal else io.StringIO() for terminal in (out, err))
    console = Console(stderr, live=False)
    console.held_out("after", FOUND)
    monkeypatch.setattr("sys.stdout", stdout)
    print_outcome(console, "runs/a")
    assert stdout.getvalue().count("held-out after") == told and stderr.getvalue().count("held-out after") == 1
    assert "run folder  runs/a" in stdout.getvalue()
