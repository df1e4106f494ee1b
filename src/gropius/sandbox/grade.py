"""A program and its tests → a grade. The program gets inputs; the right answers stay on this side."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from gropius.sandbox.base import (
    CRASH,
    ERROR,
    EXITED,
    LIMIT,
    MEMORY,
    MISSING,
    OUTPUT,
    PROTOCOL,
    WRONG,
    Grade,
    Limits,
    SandboxUnavailable,
)
from gropius.sandbox.questions import NotAQuestion, Question, as_check, questions_of
from gropius.sandbox.remote import RemoteSandbox, RemoteSession
from gropius.sandbox.session import ProgramFailed, Session, answer_failure
from gropius.sandbox.tiers import Sandbox
from gropius.sandbox.values import decode, to_source

AnySandbox = Sandbox | RemoteSandbox
AnySession = Session | RemoteSession
MAX_CALLS = 20_000


@dataclass(frozen=True)
class FunctionTests:
    """Tests of a function. entry: its name. tests: assertions, or source that defines `check(candidate)`.

    setup: source that belongs to the program's side (helpers the assertions mention). helpers: source that belongs to
    the tests' side, for tests that must run themselves. shown: the first so many tests stand in the prompt.
    """

    entry: str
    tests: tuple[str, ...]
    setup: str = ""
    helpers: str = ""
    shown: int = 0


@dataclass(frozen=True)
class InputTests:
    """Tests of a script. cases: (standard input, expected output), compared by lines without end blanks.

    shown: the first so many cases stand in the prompt.
    """

    cases: tuple[tuple[str, str], ...]
    shown: int = 0


def grade(sandbox: AnySandbox, program: str, tests: FunctionTests | InputTests, stop_at_first: bool = True) -> Grade:
    """Run `program` against `tests`. Never raises for what the program does; "unavailable" when isolation failed twice.

    stop_at_first: False counts every test (for partial credit).
    """
    for attempt in (1, 2):
        try:
            if isinstance(tests, InputTests):
                return _grade_inputs(sandbox, program, tests, stop_at_first)
            return _grade_function(sandbox, program, tests, stop_at_first)
        except SandboxUnavailable as problem:
            if attempt == 2:
                return Grade("unavailable", str(problem)[:500], tier=sandbox.tier)
    raise AssertionError("unreachable")


def grade_all(
    sandbox: AnySandbox, work: Sequence[tuple[str, FunctionTests | InputTests]], stop_at_first: bool = True
) -> list[Grade]:
    """Grade many programs, as many at once as the sandbox has slots."""
    with ThreadPoolExecutor(sandbox.slots) as threads:
        return list(threads.map(lambda pair: grade(sandbox, pair[0], pair[1], stop_at_first), work))


@dataclass
class _Tally:
    """Results so far, of tests of which the first `shown` stand in the prompt."""

    total: int
    shown: int
    passed: int = 0
    shown_passed: int = 0
    first: ProgramFailed | None = None

    def add(self, problem: ProgramFailed | None, shown: bool) -> None:
        self.passed += problem is None
        self.shown_passed += shown and problem is None
        self.first = self.first or problem

    def grade(self, sandbox: AnySandbox, session: AnySession) -> Grade:
        """What became of the program so far."""
        shown = self.shown_passed == self.shown if self.shown else None
        if self.first is None:
            return Grade("passed", "", self.passed, self.total, "", sandbox.tier, session.wall_s, shown)
        reason, detail = self.first.reason, self.first.detail
        return Grade("failed", reason, self.passed, self.total, detail, sandbox.tier, session.wall_s, shown)


def _grade_function(sandbox: AnySandbox, program: str, tests: FunctionTests, stop_at_first: bool) -> Grade:
    items = [(item, n < tests.shown) for n, test in enumerate(tests.tests) for item in _items(test, tests.entry)]
    tally = _Tally(len(items), sum(shown for _, shown in items))
    if not items:
        raise SandboxUnavailable("the tests ask nothing")
    with sandbox.session("function") as session:
        try:
            session.start(f"{tests.setup}\n{program}" if tests.setup else program)
            session.foresee([_callable(tests.entry), *(item.ask for item, _ in items if isinstance(item, Question))])
            _require(session, tests.entry)
        except ProgramFailed as problem:
            tally.first = problem
            return tally.grade(sandbox, session)
        for item, shown in items:
            found = _ask(session, item) if isinstance(item, Question) else _run_tests(sandbox, session, item, tests)
            tally.add(found, shown)
            if found is not None and (stop_at_first or _over(found)):
                break
        if tally.first is None:
            try:
                session.quiet()
            except ProgramFailed as problem:
                tally.first = problem
        return tally.grade(sandbox, session)


def _items(test: str, entry: str) -> list[Question] | list[str]:
    """The questions of a test, or the test itself where it must run."""
    try:
        return questions_of(test, entry)
    except NotAQuestion:
        return [test]


def _require(session: AnySession, entry: str) -> None:
    """The function under test must exist."""
    if decode(session.ask(_callable(entry)).get("value")) is not True:
        raise ProgramFailed(MISSING, entry)


def _callable(entry: str) -> str:
    return f"callable(globals().get({entry!r}))"


def _ask(session: AnySession, question: Question) -> ProgramFailed | None:
    try:
        answer = session.ask(question.ask)
        problem = answer_failure(answer)
        if problem is not None:
            return problem
        reason = question.judge(decode(answer.get("value")))
    except ProgramFailed as problem:
        return problem
    return ProgramFailed(reason, f"{question.ask[:200]}") if reason else None


def _over(problem: ProgramFailed) -> bool:
    """True when the program cannot be asked again."""
    return not (problem.reason.startswith((WRONG, ERROR)) or problem.reason in (MEMORY, LIMIT, "type"))


def _run_tests(sandbox: AnySandbox, session: AnySession, test: str, tests: FunctionTests) -> ProgramFailed | None:
    """Let tests run in a process of their own; their calls go to the program's session and back as plain values."""
    source = f"import math, sys\n{tests.helpers}\n{tests.entry} = candidate\n{as_check(test)}"
    limits = replace(session.limits, source_bytes=8 << 20, answer_bytes=64 << 20)
    with sandbox.judge(limits) as judge:
        try:
            judge.start(source)
            reply = judge.send("check(candidate)")
            for _ in range(MAX_CALLS):
                if "call" not in reply:
                    break
                answer = _forward(session, tests.entry, reply["call"])
                if isinstance(answer, ProgramFailed):
                    return answer
                reply = judge.send(answer)
        except ProgramFailed as problem:
            return problem if problem.reason == "time" else _tests_broken(problem)
    problem_found = answer_failure(reply)
    if problem_found is None:
        return None
    if problem_found.reason == f"{ERROR}: AssertionError":
        return ProgramFailed(WRONG, problem_found.detail)
    return problem_found


def _tests_broken(problem: ProgramFailed) -> ProgramFailed:
    """The tests' own process died although only plain values went into it: our fault."""
    raise SandboxUnavailable(f"the tests do not run: {problem.reason} {problem.detail}") from problem


def _forward(session: AnySession, entry: str, call: Any) -> str | ProgramFailed:
    """One call of the tests, answered by the program; a Python literal for the tests' side."""
    args, kwargs = decode(call)
    named = [f"{name}={to_source(value)}" for name, value in kwargs.items()]
    try:
        answer = session.ask(f"{entry}({', '.join([*map(to_source, args), *named])})")
        return answer_failure(answer) or to_source(decode(answer.get("value")))
    except ProgramFailed as problem:
        return problem


def _grade_inputs(sandbox: AnySandbox, program: str, tests: InputTests, stop_at_first: bool) -> Grade:
    tally = _Tally(len(tests.cases), tests.shown)
    with sandbox.session("stdin") as session:
        try:
            session.start(program)
            session.foresee([given for given, _ in tests.cases])
            for n, (given, expected) in enumerate(tests.cases):
                problem = _judge_output(session.ask(given), expected)
                tally.add(problem, n < tests.shown)
                if problem is not None and stop_at_first:
                    break
            session.quiet()
        except ProgramFailed as problem:
            tally.first = tally.first or problem
        return tally.grade(sandbox, session)


def _judge_output(answer: dict[str, Any], expected: str) -> ProgramFailed | None:
    text, code, size = answer.get("out"), answer.get("code"), answer.get("size")
    if not isinstance(text, str) or not isinstance(code, int) or not isinstance(size, int):
        return ProgramFailed(PROTOCOL, str(answer)[:200])
    if size > 4 << 20:
        return ProgramFailed(OUTPUT, "the program printed too much")
    if code < 0:
        return _by_signal(-code)
    if _lines(text) == _lines(expected):
        return None
    named = {67: ProgramFailed(MEMORY), 68: ProgramFailed(LIMIT), 1: ProgramFailed(f"{ERROR}: exit code 1")}
    if code in named:
        return named[code]
    return ProgramFailed(EXITED if not text.strip() else WRONG, text[:200])


def _by_signal(number: int) -> ProgramFailed:
    import signal

    names = {int(s): s.name for s in signal.Signals}
    if names.get(number) == "SIGXCPU":
        return ProgramFailed("time", "processor time")
    return ProgramFailed(f"{CRASH}: {names.get(number, number)}")


def _lines(text: str) -> list[str]:
    """Lines without blanks at their ends and without empty lines at the end."""
    lines = [line.rstrip() for line in text.replace("\r\n", "\n").split("\n")]
    while lines and not lines[-1]:
        lines.pop()
    return lines


__all__ = ["FunctionTests", "InputTests", "Limits", "grade", "grade_all"]
