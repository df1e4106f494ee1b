"""Programs run by a service elsewhere, behind the same interface: SandboxFusion's `POST /run_code`.

One request is one run: the driver as `code`, and program and questions as its standard input. What comes back on
standard output are the driver's answers, which are read as those of a process here: the service knows inputs only, the
right answers stay on this side. Questions known in advance travel together (`foresee`); any other takes a request of
its own, in a fresh process. Tests that must run themselves run in a sandbox of this machine and ask from there.

Failures that may pass (connection, time, 408, 425, 429, 5xx, SandboxError) are tried again with growing pauses; after
the last the sandbox is unavailable, which is void, never 0.
"""

from __future__ import annotations

import json
import os
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import BoundedSemaphore
from typing import Any

from gropius.errors import did_you_mean
from gropius.sandbox.base import CRASH, EXITED, OUTPUT, PROTOCOL, SYNTAX, TIME, Limits, SandboxUnavailable
from gropius.sandbox.session import Mode, ProgramFailed, Session, failure_of_start, frame, object_of
from gropius.sandbox.tiers import open_sandbox

TRANSIENT = (408, 425, 429, 500, 502, 503, 504)
MOST_TEXT_BYTES = 1 << 20  # of the answer around the program's own
QUEUE_S = 30.0  # a request may wait at the service before its program starts


@dataclass(frozen=True)
class Service:
    """Where and how to ask. url: up to the path, without `/run_code`. token: bearer token, never stored or shown.

    retries: further attempts after a failure that may pass, waiting backoff_s, then twice that, and so on.
    """

    url: str
    token: str = ""
    retries: int = 3
    backoff_s: float = 0.5


@dataclass
class RemoteSandbox:
    """Slots at a service. Thread-safe; `session` blocks while all slots are busy."""

    service: Service
    limits: Limits = field(default_factory=Limits)
    slots: int = 8
    _free: BoundedSemaphore = field(init=False)

    def __post_init__(self) -> None:
        self._free = BoundedSemaphore(self.slots)

    @property
    def tier(self) -> str:
        """What runs are stamped with."""
        return f"remote {self.service.url}"

    @contextmanager
    def session(self, mode: Mode, limits: Limits | None = None) -> Iterator[RemoteSession]:
        """A program at the service, not yet sent."""
        with self._free:
            yield RemoteSession(self.service, limits or self.limits, mode)

    def judge(self, limits: Limits) -> AbstractContextManager[Session]:
        """A process of this machine for tests that run themselves: they are ours, and know the right answers."""
        return open_sandbox("landlock", self.limits).judge(limits)


def open_remote(service: Service, limits: Limits | None = None, slots: int = 8) -> RemoteSandbox:
    """A sandbox at a service that answers. Raises SandboxUnavailable where it does not run a first small program."""
    sandbox = RemoteSandbox(service, limits or Limits(), slots)
    try:
        with sandbox.session("function") as session:
            session.start("def f():\n    return 6 * 7\n")
            answer = session.ask("f()")
    except ProgramFailed as problem:
        raise SandboxUnavailable(f"the service at {service.url} runs no programs: {problem.reason}") from problem
    if answer.get("value") != ["i", "42"]:
        raise SandboxUnavailable(f"the service at {service.url} answered 6 · 7 with {str(answer)[:100]}")
    return sandbox


@dataclass
class RemoteSession:
    """One program. The interface of `session.Session`, as far as grading needs it."""

    service: Service
    limits: Limits
    mode: Mode
    wall_s: float = 0.0
    printed_tail: bytes = b""
    _source: str = ""
    _answers: dict[str, list[dict[str, Any] | ProgramFailed]] = field(default_factory=dict)

    def start(self, source: str) -> None:
        """Take the program. It is sent with its first questions. Raises ProgramFailed when it cannot be sent."""
        try:
            size = len(source.encode("utf-8"))
        except UnicodeEncodeError as problem:
            raise ProgramFailed(SYNTAX, str(problem)[:300]) from None
        if size > self.limits.source_bytes:
            raise ProgramFailed("limit", f"the program has {size} bytes, {self.limits.source_bytes} are allowed")
        self._source = source

    def foresee(self, questions: Sequence[str]) -> None:
        """Ask these in one run, in this order; `ask` hands the answers out. Raises as `ask` where the program fails."""
        for question, answer in zip(questions, self._run(questions), strict=True):
            self._answers.setdefault(question, []).append(answer)

    def ask(self, question: str) -> dict[str, Any]:
        """The answer to one question. Raises ProgramFailed; SandboxUnavailable is our fault, or the service's."""
        kept = self._answers.get(question)
        answer = kept.pop(0) if kept else self._run([question])[0]
        if isinstance(answer, ProgramFailed):
            raise answer
        return answer

    def quiet(self) -> None:
        """Answers nobody asked for were refused when they came."""

    def _run(self, questions: Sequence[str]) -> list[dict[str, Any] | ProgramFailed]:
        frames = [repr(self._settings()), self._source, *questions]
        given = b"".join(frame(text.encode("utf-8")) for text in frames).decode("utf-8")
        began = time.monotonic()
        result = self._asked(
            {
                "code": (Path(__file__).parent / "driver.py").read_text(encoding="utf-8"),
                "language": "python",
                "stdin": given,
                "compile_timeout": self.limits.wall_s,
                "run_timeout": self.limits.wall_s,
                "files": {},
                "fetch_files": [],
            }
        )
        self.wall_s += float(result.get("execution_time") or time.monotonic() - began)
        self.printed_tail = str(result.get("stderr") or "")[-2000:].encode("utf-8", "replace")
        return self._read(result, len(questions))

    def _read(self, result: dict[str, Any], count: int) -> list[dict[str, Any] | ProgramFailed]:
        """One answer a question; those that never came carry the reason."""
        printed = result.get("stdout")
        lines = (printed if isinstance(printed, str) else "").encode("utf-8", "replace").split(b"\n")
        if sum(map(len, lines)) > self.limits.answer_bytes:
            raise ProgramFailed(OUTPUT, "the answers are too long")
        found = [object_of(line) for line in lines if line]
        if not found and result.get("status") == "TimeLimitExceeded":
            raise ProgramFailed(TIME)  # what it said before is not sent
        if not found or "hello" not in found[0]:
            raise SandboxUnavailable(f"the program at {self.service.url} did not start: {str(result)[:300]}")
        if len(found) == 1:
            raise _end_of(result)
        failure_of_start(found[1], "ready")
        answers: list[dict[str, Any] | ProgramFailed] = list(found[2:])
        if len(answers) > count or any(
            "exited" not in answer and answer.get("i") != place for place, answer in enumerate(found[2:])
        ):
            raise ProgramFailed(PROTOCOL, str(found[-1])[:200])
        answers = [ProgramFailed(EXITED) if "exited" in answer else answer for answer in found[2:]]
        missing = count - len(answers)
        return answers + [_end_of(result)] * missing if missing else answers

    def _settings(self) -> dict[str, object]:
        limits = self.limits
        return {
            "mode": self.mode,
            "uid": 0,
            "memory_bytes": limits.memory_bytes,
            "cpu_s": int(limits.cpu_s or limits.wall_s) + 1,
            "file_bytes": limits.file_bytes,
            "processes": 0,  # the service's own user runs other programs beside this one
        }

    def _asked(self, body: dict[str, Any]) -> dict[str, Any]:
        """The result of the run, after as many attempts as are allowed."""
        problem = ""
        for attempt in range(self.service.retries + 1):
            if attempt:
                time.sleep(self.service.backoff_s * 2 ** (attempt - 1))
            try:
                answer = self._post(body)
                result = answer.get("run_result")
                if answer.get("status") in ("Success", "Failed") and isinstance(result, dict):
                    return result
                problem = f"status {str(answer.get('status'))[:40]}: {str(answer.get('message'))[:200]}"
            except urllib.error.HTTPError as fault:  # the boundary: somebody else's server
                problem = f"status {fault.code}"
                fault.close()
                if fault.code not in TRANSIENT:
                    break
            except (OSError, ValueError) as fault:  # the boundary: connection, time, text that is no JSON object
                problem = f"{type(fault).__name__}: {fault}"
        raise SandboxUnavailable(f"the sandbox at {self.service.url} did not run a program: {problem}"[:500])

    def _post(self, body: dict[str, Any]) -> dict[str, Any]:
        headers = {"Content-Type": "application/json"}
        if self.service.token:
            headers["Authorization"] = f"Bearer {self.service.token}"
        address = self.service.url.rstrip("/") + "/run_code"
        request = urllib.request.Request(address, json.dumps(body).encode(), headers, method="POST")
        most = self.limits.answer_bytes + self.limits.output_bytes + MOST_TEXT_BYTES
        opener = urllib.request.build_opener(_NoRedirect())
        with opener.open(request, timeout=self.limits.wall_s + QUEUE_S) as response:
            data = response.read(most + 1)
        if len(data) > most:
            raise ProgramFailed(OUTPUT, "the program printed too much")
        answer = json.loads(data)
        if not isinstance(answer, dict):
            raise ValueError(f"answered a {type(answer).__name__}")
        return answer


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any, **__: Any) -> None:
        """A redirect would carry the token elsewhere."""
        return


def _end_of(result: dict[str, Any]) -> ProgramFailed:
    """Why a run ended before its last answer."""
    if result.get("status") == "TimeLimitExceeded":
        return ProgramFailed(TIME)
    code = result.get("return_code")
    number = 0 if not isinstance(code, int) else -code if code < 0 else code - 128 if code > 128 else 0
    names = {int(one): one.name for one in signal.Signals}
    if names.get(number) == "SIGXCPU":
        return ProgramFailed(TIME, "processor time")
    return ProgramFailed(f"{CRASH}: {names[number]}" if number in names else EXITED)


def service_of(given: object) -> Service:
    """A service as a recipe names it: its address, or a table {url, token_env, retries, backoff_s}.

    Raises ValueError for a wrong address, an unknown key or a token that is not there.
    """
    table = {"url": given} if isinstance(given, str) else given
    keys = ("url", "token_env", "retries", "backoff_s")
    if not isinstance(table, Mapping) or not isinstance(table.get("url"), str):
        raise ValueError('remote is no address; write "http://…", or a table with url')
    if unknown := [key for key in table if key not in keys]:
        raise ValueError(f"remote: unknown key {unknown[0]}; {did_you_mean(str(unknown[0]), keys)}")
    url, name = str(table["url"]), str(table.get("token_env", ""))
    if not url.startswith(("http://", "https://")):
        raise ValueError(f'remote: url = "{url}"; write http://… or https://…')
    retries, backoff_s = table.get("retries", 3), table.get("backoff_s", 0.5)
    if isinstance(retries, bool) or not isinstance(retries, int) or retries < 0:
        raise ValueError(f"remote: retries = {retries!r}; write a whole number from 0")
    if isinstance(backoff_s, bool) or not isinstance(backoff_s, (int, float)) or backoff_s < 0:
        raise ValueError(f"remote: backoff_s = {backoff_s!r}; write seconds from 0")
    token = os.environ.get(name, "") if name else ""
    if name and not token:
        raise ValueError(f"remote: the environment variable {name} (token_env) is not set")
    return Service(url.rstrip("/"), token, retries, float(backoff_s))
