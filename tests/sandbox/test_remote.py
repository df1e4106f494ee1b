"""Laws of programs run by a service: the same grades as here, retries, and void when the service fails."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from gropius.errors import RecipeError
from gropius.rewards import load_scorer
from gropius.rewards.isolation import isolation
from gropius.sandbox.base import Limits, SandboxUnavailable
from gropius.sandbox.grade import FunctionTests, InputTests, grade
from gropius.sandbox.remote import RemoteSandbox, Service, open_remote, service_of
from gropius.sandbox.tiers import probe

TESTS = FunctionTests("f", ("assert f(1) == 2", "assert f(41) == 42", "assert f(2) == 3"), shown=1)
HONEST = "def f(x):\n    return x + 1\n"
Answer = Callable[[dict[str, Any]], tuple[int, Any]]


def run_code(asked: dict[str, Any]) -> tuple[int, Any]:
    """What the service does: run the code as a script with its standard input, and say how it ended."""
    try:
        ended = subprocess.run(
            [sys.executable, "-S", "-c", asked["code"]],
            input=asked["stdin"].encode(),
            capture_output=True,
            timeout=asked["run_timeout"],
        )
    except subprocess.TimeoutExpired:
        return 200, {"status": "Failed", "message": "", "run_result": {"status": "TimeLimitExceeded"}}
    result = {
        "status": "Finished",
        "execution_time": 0.1,
        "return_code": ended.returncode,
        "stdout": ended.stdout.decode("utf-8", "replace"),
        "stderr": ended.stderr.decode("utf-8", "replace"),
    }
    return 200, {"status": "Failed" if ended.returncode else "Success", "message": "", "run_result": result}


class Imitation:
    """A local service; `plan` answers the first requests, `run_code` all others."""

    def __init__(self) -> None:
        self.plan: list[Answer] = []
        self.asked: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.asked.append(asked | {"path": self.path})
                outer.headers.append(dict(self.headers))
                status, answer = (outer.plan.pop(0) if outer.plan else run_code)(asked)
                data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.handle_error = lambda *_: None  # a client that gave up is no fault of this test
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()


@pytest.fixture
def service() -> Iterator[Imitation]:
    imitation = Imitation()
    yield imitation
    imitation.server.shutdown()
    imitation.server.server_close()


def sandbox(service: Imitation, **options: Any) -> RemoteSandbox:
    limits = Limits(wall_s=options.pop("wall_s", 20.0))
    return RemoteSandbox(Service(service.url, backoff_s=0.0, **options), limits, slots=2)


def test_a_program_is_graded_in_one_request_that_holds_no_right_answer(service: Imitation) -> None:
    result = grade(sandbox(service), HONEST, FunctionTests("f", ("assert f(1) == 271828",)))
    assert (result.status, result.reason, result.tier) == ("failed", "wrong", f"remote {service.url}")
    assert len(service.asked) == 1
    asked = service.asked[0]
    assert (asked["path"], asked["language"], asked["run_timeout"]) == ("/run_code", "python", 20.0)
    assert "271828" not in json.dumps(asked)


@pytest.mark.parametrize(
    ("program", "reason", "passed"),
    [
        (HONEST, "", 3),
        ("def f(x):\n    return 2\n", "wrong", 1),
        ("def g(x): return 1", "function missing", 0),
        ("def f(:", "syntax", 0),
        ("x = '\ud800'", "syntax", 0),
        ("import sys\nsys.exit(0)", "exited early", 0),
        ("import os\ndef f(x): os._exit(0)", "exited early", 0),
        ("import os\nos._exit(0)", "exited early", 0),
        ("def f(x): raise ValueError", "error: ValueError", 0),
        ("import os, signal\ndef f(x): os.kill(os.getpid(), signal.SIGSEGV)", "crash: SIGSEGV", 0),
        ("class E(int):\n    __eq__ = lambda *_: True\n    __hash__ = int.__hash__\ndef f(x): return E()", "type", 0),
        ("print('{\"i\":0}')\ndef f(x): return x", "wrong", 0),
        ("import os\ndef f(x):\n    for fd in range(3, 20):\n        try: os.write(fd, b'{\"i\":7}\\n')\n"
         "        except OSError: pass\n    return x + 1", "protocol", 0),
        ("x = 1\n" * 200_000, "limit", 0),
    ],
)  # fmt: skip
def test_grades_are_those_of_a_process_here(service: Imitation, program: str, reason: str, passed: int) -> None:
    result = grade(sandbox(service), program, TESTS)
    assert (result.reason, result.passed, result.total) == (reason, passed, 3)
    assert result.shown is (passed > 0)


def test_an_endless_program_is_out_of_time(service: Imitation) -> None:
    assert grade(sandbox(service, wall_s=1.0), "def f(x):\n    while True: pass", TESTS).reason == "time"


def test_scripts_are_judged_by_what_they_print(service: Imitation) -> None:
    tests = InputTests((("1 2\n", "3\n"), ("ä 1\n", "ä1\n")))
    assert (
        grade(sandbox(service), "a, b = input().split()\nprint(int(a) + int(b) if a < 'a' else a + b)", tests).passed
        == 2
    )
    assert grade(sandbox(service), "print(3)", tests).reason == "wrong"
    assert len(service.asked) == 2


@pytest.mark.skipif(bool(probe("bubblewrap")) and bool(probe("landlock")), reason="tests cannot be isolated here")
def test_tests_that_run_themselves_run_here_and_ask_there(service: Imitation) -> None:
    tests = FunctionTests("f", ("def check(c):\n    for n in range(3):\n        assert c(n) == n + 1",))
    assert grade(sandbox(service), HONEST, tests).status == "passed"
    assert grade(sandbox(service), "def f(x): return 0", tests).reason == "wrong"
    assert not any("check" in asked["stdin"] for asked in service.asked)


def test_failures_that_may_pass_are_tried_again_and_then_the_sandbox_is_unavailable(service: Imitation) -> None:
    service.plan = [
        lambda _: (503, {}),
        lambda _: (200, {"status": "SandboxError", "message": "busy"}),
        lambda _: (200, b"no"),
    ]
    assert grade(sandbox(service), HONEST, TESTS).status == "passed"
    assert len(service.asked) == 4
    service.plan = [lambda _: (500, {})] * 8
    result = grade(sandbox(service), HONEST, TESTS)
    assert (result.status, "status 500" in result.reason, len(service.asked)) == ("unavailable", True, 12)
    service.plan = [lambda _: (403, {})] * 2
    assert grade(sandbox(service), HONEST, TESTS).status == "unavailable"
    assert len(service.asked) == 14


def test_a_service_that_is_not_there_or_runs_nothing_is_refused_before_a_run(service: Imitation) -> None:
    assert open_remote(Service(service.url)).tier == f"remote {service.url}"
    nothing = (200, {"status": "Success", "message": "", "run_result": {"status": "Finished", "stdout": ""}})
    service.plan = [lambda _: nothing] * 4
    with pytest.raises(SandboxUnavailable, match="did not start"):
        open_remote(Service(service.url))
    service.server.shutdown()
    service.server.server_close()
    with pytest.raises(SandboxUnavailable, match="did not run a program"):
        open_remote(Service(service.url, retries=0))


def test_a_run_is_stamped_with_the_service_and_the_token_goes_into_the_header_alone(
    service: Imitation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SANDBOX_TOKEN", "secret")
    part = {"name": "code", "options": {"remote": {"url": service.url, "token_env": "SANDBOX_TOKEN"}}}
    stamp = isolation([part])
    assert stamp == {"minimum": f"remote {service.url}", "tier": f"remote {service.url}", "unsafe": False}
    assert service.headers[0]["Authorization"] == "Bearer secret" and "secret" not in json.dumps(service.asked)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (7, "remote is no address"),
        ("localhost:8080", "write http://"),
        ({"url": "http://x", "retry": 1}, 'did you mean "retries"'),
        ({"url": "http://x", "retries": -1}, "retries"),
        ({"url": "http://x", "backoff_s": "1"}, "backoff_s"),
        ({"url": "http://x", "token_env": "NO_SUCH_TOKEN"}, "NO_SUCH_TOKEN"),
    ],
)
def test_a_wrong_service_says_what_to_write(given: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        service_of(given)
    with pytest.raises(RecipeError, match=words):
        load_scorer([{"name": "code", "options": {"remote": given}}], Path("."))
