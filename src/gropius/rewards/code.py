"""The reward for programs: take the code out of a reply, run it against the task's tests in the sandbox.

A task's tests come from its metadata (or from `answer` as JSON), in one of these shapes:

    {"entry_point": "f", "test": "def check(candidate): …", "prompt": "def f(…):"}    HumanEval
    {"test_list": ["assert f(1) == 2", …], "test_setup_code": ""}                      MBPP
    {"inputs": ["1 2\\n"], "outputs": ["3\\n"]}  or  {"cases": [{"input", "output"}]}   standard input and output
"""

from __future__ import annotations

import ast
import builtins
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from gropius.records.metrics import SHOWN_ONLY
from gropius.rewards.answers.extract import without_thinking
from gropius.sandbox.base import Grade, Limits, SandboxUnavailable, Tier
from gropius.sandbox.grade import FunctionTests, InputTests, grade
from gropius.sandbox.questions import NotAQuestion, as_check, questions_of
from gropius.sandbox.remote import RemoteSandbox, Service, open_remote
from gropius.sandbox.tiers import Sandbox, open_sandbox
from gropius.types import Episode, Outcome, Task, rejected, scored, void

NO_CODE = "no code block"
SEVERAL_BLOCKS = "several code blocks"
ONLY_THINKING = "no code outside the thinking"
OTHER_LANGUAGE = "code in another language"
UNCLOSED = "the code block is not closed"
FLAKY = "flaky"

_FENCE = re.compile(r"^[ \t]{0,3}(`{3,}|~{3,})[ \t]*([^\n`]*)$", re.M)
_CODE_LINE = re.compile(
    r"(?:async\s+def|def|class|import|from|for|while|with|if)\s+\w|@\w|#|try:|print\("
    r"|[A-Za-z_][\w, ]*\s*=[^=]|\"{3}|'{3}"
)
_CODE_WORD = re.compile(r"^[ \t]*(?:async\s+def|def|class|import|from)\s+\w|\bprint\(|\binput\(", re.M)
_PYTHON = {"", "python", "py", "python3", "py3", "code", "text", "plaintext"}


class NoCode(Exception):
    """A reply without one usable program; `reason` says why."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True)
class Place:
    """Where programs run. minimum: the weakest isolation of this machine that may be used ("bubblewrap", "landlock", or
    "none", which is unsafe). slots: programs at once; 0 is twice the processors, or 8 at a service. remote: a service
    that runs them instead of this machine.
    """

    minimum: Tier = "landlock"
    slots: int = 0
    remote: Service | None = None


def code(
    place: Place = Place(),
    wall_s: float = 10.0,
    memory_mb: int = 512,
    partial: bool = False,
    repeats: int = 1,
) -> Callable[[Episode], Outcome]:
    """A reward: 1 when the reply's program passes every test of the task, else rejected with the reason.

    place: where programs run; where it is missing the outcome is void, never 0. wall_s: time limit of one program.
    memory_mb: of each of its processes. partial: the share of tests passed instead of all or nothing. repeats: run the
    program so often; when the results differ it is rejected as flaky (clock, random numbers).
    """
    limits = Limits(wall_s=wall_s, memory_bytes=memory_mb << 20)

    def reward(episode: Episode) -> Outcome:
        """One episode: its tests, its program, the sandbox."""
        try:
            tests = read_tests(episode.task)
        except ValueError as problem:
            return void(f"task {episode.task.key}: {problem}")
        try:
            program = extract_code(episode.last_reply)
        except NoCode as problem:
            return rejected(problem.reason)
        try:
            sandbox = _shared_sandbox(place, limits)
        except SandboxUnavailable as problem:
            return void(str(problem))
        prompt = episode.task.metadata.get("prompt")
        if isinstance(tests, FunctionTests) and isinstance(prompt, str):
            program = with_prompt(program, prompt, tests.entry)
        results = [grade(sandbox, program, tests, stop_at_first=not partial) for _ in range(max(1, repeats))]
        unavailable = next((result for result in results if result.status == "unavailable"), None)
        if unavailable is None and len({(result.status, result.passed) for result in results}) > 1:
            return rejected(FLAKY)
        return outcome_of(unavailable or results[0], partial)

    return reward


def outcome_of(result: Grade, partial: bool = False) -> Outcome:
    """A grade as an outcome: unavailable is void, failed is rejected, or a share of the tests when `partial`.

    The reason of a program that passes the tests shown in its prompt and fails a hidden one says so at its end.
    """
    if result.status == "unavailable":
        return void(result.reason)
    if result.status == "passed":
        return scored(1.0)
    reason = f"{result.reason}{SHOWN_ONLY}" if result.shown else result.reason
    if partial and result.passed and result.total:
        return scored(result.passed / result.total, reason)
    return rejected(reason)


def extract_code(reply: str) -> str:
    """The program of a reply: its one Python code block, or the whole reply when it is Python without any fence.

    Several Python blocks are one program only when exactly one of them defines something and the others are examples
    of use; otherwise the reply is ambiguous. Raises NoCode.

    >>> extract_code("Here:\\n```python\\ndef f(): return 1\\n```")
    'def f(): return 1\\n'
    """
    text = without_thinking(reply)
    if not text.strip():
        raise NoCode(ONLY_THINKING if "```" in reply or reply.strip() else NO_CODE)
    blocks = _blocks(text)
    python = [body for language, body in blocks if language in _PYTHON and body.strip()]
    if not blocks:
        if _looks_like_python(text):
            return text.strip("\n") + "\n"
        raise NoCode(NO_CODE)
    if not python:
        raise NoCode(OTHER_LANGUAGE if any(body.strip() for _, body in blocks) else NO_CODE)
    distinct = list(dict.fromkeys(python))
    if len(distinct) > 1:
        defining = [body for body in distinct if re.search(r"^[ \t]*(?:async\s+)?(?:def|class)\s", body, re.M)]
        if len(defining) != 1:
            raise NoCode(SEVERAL_BLOCKS)
        distinct = defining
    return distinct[0]


def with_prompt(program: str, prompt: str, entry: str) -> str:
    """A completion that continues the prompt's function gets the prompt in front; a whole program gets its imports.

    >>> print(with_prompt("    return a + b", "def add(a, b):\\n", "add"))
    def add(a, b):
        return a + b
    """
    if re.search(rf"^(?:async\s+)?def\s+{re.escape(entry)}\b", program, re.M):
        before = prompt.split(f"def {entry}", 1)[0]
        return f"{before}\n{program}" if before.strip() else program
    if program.lstrip("\r\n")[:1] in (" ", "\t"):
        return prompt + program
    return program


def read_tests(task: Task) -> FunctionTests | InputTests:
    """The tests of a task, those that stand in its prompt first.

    Raises ValueError when there are none, saying what was looked for, or when one of them checks nothing.
    """
    tests = _read_tests(task)
    prompt = "\n".join(message["content"] for message in task.messages())
    if isinstance(tests, InputTests):
        shown = [_is_shown_case(case, prompt) for case in tests.cases]
        cases = tuple(case for _, case in sorted(zip(shown, tests.cases, strict=True), key=lambda pair: not pair[0]))
        return InputTests(cases, sum(shown))
    for test in tests.tests:
        _require_checks(test, tests.entry)
    ordered = sorted(tests.tests, key=lambda test: test.strip() not in prompt)
    return replace(tests, tests=tuple(ordered), shown=sum(test.strip() in prompt for test in ordered))


def _is_shown_case(case: tuple[str, str], prompt: str) -> bool:
    """True when input and output both stand in the prompt as lines of their own."""
    lines = "\n" + "\n".join(line.strip() for line in prompt.splitlines()) + "\n"
    return all(
        "\n" + "\n".join(line.strip() for line in text.strip().splitlines()) + "\n" in lines
        for text in case
        if text.strip()
    ) and any(text.strip() for text in case)


@lru_cache(maxsize=4096)
def _require_checks(test: str, entry: str) -> None:
    """A test that can be asked or run and that checks something. Raises ValueError."""
    try:
        questions_of(test, entry)
    except NotAQuestion:
        try:
            as_check(test)
        except (SyntaxError, RecursionError) as problem:
            raise ValueError(f"a test is not Python: {problem}") from problem


def _read_tests(task: Task) -> FunctionTests | InputTests:
    found: Mapping[str, Any] = task.metadata
    if not _has_tests(found) and task.answer:
        try:
            parsed = json.loads(task.answer)
        except ValueError:
            parsed = {"test": task.answer} if "assert" in task.answer else {}
        found = {**task.metadata, **parsed} if isinstance(parsed, dict) else task.metadata
    if "test_list" in found or "tests" in found:
        asserts = _texts(found.get("test_list", found.get("tests")))
        entry = str(found.get("entry_point") or _called(asserts))
        return FunctionTests(entry, tuple(asserts), str(found.get("test_setup_code") or ""))
    if isinstance(found.get("test"), str):
        test = str(found["test"])
        entry = str(found.get("entry_point") or _called([test]))
        prompt = found.get("prompt")
        helpers = f"{prompt}    pass\n" if isinstance(prompt, str) and _parses(f"{prompt}    pass\n") else ""
        return FunctionTests(entry, (test,), helpers=helpers)
    if "inputs" in found and "outputs" in found:
        given, expected = _texts(found["inputs"]), _texts(found["outputs"])
        if len(given) != len(expected) or not given:
            raise ValueError(f"{len(given)} inputs and {len(expected)} outputs; give as many of both, at least one")
        return InputTests(tuple(zip(given, expected, strict=True)))
    if isinstance(found.get("cases"), Sequence) and found["cases"]:
        return InputTests(tuple((str(case["input"]), str(case["output"])) for case in found["cases"]))
    raise ValueError("no tests: give test_list, or test and entry_point, or inputs and outputs, in its metadata")


def _has_tests(found: Mapping[str, Any]) -> bool:
    return any(name in found for name in ("test_list", "tests", "test", "inputs", "cases"))


def _texts(value: Any) -> list[str]:
    items = [value] if isinstance(value, str) else list(value or [])
    if not items or not all(isinstance(item, str) for item in items):
        raise ValueError("tests must be a non-empty list of texts")
    return items


def _called(asserts: Sequence[str]) -> str:
    """The function that the assertions are about: the first called name, one that Python does not have if possible."""
    called: list[str] = []
    for text in asserts:
        try:
            tree = ast.parse(text)
        except SyntaxError as problem:
            raise ValueError(f"a test is not Python: {problem}") from problem
        nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        called += [node.func.id for node in nodes if isinstance(node.func, ast.Name)]
    if not called:
        raise ValueError("no test calls a function; give entry_point")
    return next((name for name in called if not hasattr(builtins, name)), called[0])


def _blocks(text: str) -> list[tuple[str, str]]:
    """(language, body) of every fenced block."""
    out, opened = [], None
    for match in _FENCE.finditer(text):
        mark, rest = match.group(1), match.group(2).strip()
        if opened is None:
            opened = (mark, rest.split()[0].lower().strip("{}.") if rest else "", match.end() + 1)
        elif mark[0] == opened[0][0] and len(mark) >= len(opened[0]) and not rest:
            out.append((opened[1], text[opened[2] : match.start()]))
            opened = None
    if opened is not None:
        raise NoCode(UNCLOSED)
    return out


def _looks_like_python(text: str) -> bool:
    """True for a reply that is bare Python: its first line opens like code and it defines, imports, prints or reads.

    Only patterns: a model's text is not given to the compiler in this process (the sandbox does that).
    """
    lines = text.strip().splitlines()
    return bool(lines and _CODE_LINE.match(lines[0]) and _CODE_WORD.search(text))


def _parses(text: str) -> bool:
    """True for source of the data set that compiles."""
    try:
        ast.parse(text)
    except (SyntaxError, ValueError):
        return False
    return True


@lru_cache(maxsize=8)
def _shared_sandbox(place: Place, limits: Limits) -> Sandbox | RemoteSandbox:
    """One sandbox for all rewards with the same limits, so that its slots bound what runs at once."""
    if place.remote is not None:
        return open_remote(place.remote, limits, place.slots or 8)
    return open_sandbox(place.minimum, limits, place.slots)
