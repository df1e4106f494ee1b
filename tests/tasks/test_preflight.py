"""Laws of what is said about data before anything is trained on it (corpus rows D02, D03, D05)."""

from __future__ import annotations

from gropius.tasks.base import TaskSet
from gropius.tasks.preflight import Finding, overlong, preflight
from gropius.types import Task


def of(train: list[tuple[str, str | None]], held_out: list[tuple[str, str | None]] = ()) -> TaskSet:  # type: ignore[assignment]
    made = [Task(f"t{n}", prompt, answer) for n, (prompt, answer) in enumerate(train)]
    kept = [Task(f"h{n}", prompt, answer) for n, (prompt, answer) in enumerate(held_out)]
    return TaskSet("set", made, kept, None, None, ("exact",), None, (), "")


def said(tasks: TaskSet) -> dict[str, Finding]:
    return {found.name: found for found in preflight(tasks)}


def test_a_clean_set_gives_no_finding() -> None:
    assert preflight(of([("1-2", "-1"), ("1+2", "3"), ("12", "x")], [("2+1", "3")])) == []


def test_duplicates_are_a_note_and_two_answers_to_one_prompt_a_finding() -> None:
    found = said(of([("a", "1"), ("a", "1"), ("b", "1"), ("b", "2")]))
    assert found["duplicate rows"].severity == "note" and found["duplicate rows"].rows == ("t1",)
    assert found["several answers"].severity == "finding" and found["several answers"].rows == ("t2",)


def test_reference_programs_may_differ() -> None:
    assert [f.name for f in preflight(of([("b", "x=1"), ("b", "x = 1")]), programs=True)] == []


def test_near_duplicates_ignore_case_form_and_punctuation_but_no_operator() -> None:
    found = said(
        of(
            [
                ("What is Two?", "2"),
                ("what  is two", "2"),
                ("cafe\u0301", "c"),
                ("café", "c"),
                ("3<4", "y"),
                ("3>4", "n"),
            ]
        )
    )
    assert found["near duplicates"].count == 2


def test_held_out_prompts_that_are_trained_on_are_found_exactly_and_nearly() -> None:
    overlaps = preflight(of([("a b", "1"), ("c", "2")], [("a b", "1"), ("C.", "2"), ("d", "3")]))
    by_rows = {f.rows for f in overlaps if f.name == "train/held-out overlap"}
    assert by_rows == {("h0",), ("h1",)}


def test_a_gap_among_gold_answers_is_found_and_a_set_without_any_is_none() -> None:
    assert said(of([("a", "1"), ("b", None), ("c", " ")]))["no gold answer"].rows == ("t1", "t2")
    assert preflight(of([("a", None), ("b", None)])) == []


def test_rows_are_counted_in_full_and_shown_in_part() -> None:
    found = said(of([("a", "1")] * 50))["duplicate rows"]
    assert (found.count, len(found.rows)) == (49, 20)


def test_prompts_are_measured_with_room_for_a_reply() -> None:
    tasks = of([("aaaa", "1"), ("aa", "1")]).train
    found = overlong(tasks, lambda task: len(task.prompt), 5, 2)
    assert found[0].rows == ("t0",) and overlong(tasks, lambda task: len(task.prompt), 6, 2) == []
