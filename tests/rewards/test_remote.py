"""Laws of a reward behind HTTP, against a local server that fails on demand."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gropius.errors import RecipeError, RewardError
from gropius.rewards import load_scorer
from gropius.types import Episode, Task, Turn, Verdict


class Judge(ThreadingHTTPServer):
    """Answers what `script` says, the last entry for ever: a status, or a JSON value, or raw bytes."""

    script: list[Any]
    seen: list[Any]
    at_once = most_at_once = 0
    gate: threading.Barrier | None = None


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        server: Any = self.server
        with server.lock:
            server.at_once += 1
            server.most_at_once = max(server.most_at_once, server.at_once)
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if server.gate is not None:
            server.gate.wait(10)
        with server.lock:
            server.seen.append((body, dict(self.headers)))
            answer = server.script.pop(0) if len(server.script) > 1 else server.script[0]
            server.at_once -= 1
        status, data = (answer, b"") if isinstance(answer, int) else (200, answer)
        data = data if isinstance(data, bytes) else json.dumps(data).encode()
        self.send_response(status)
        if status == 302:
            self.send_header("Location", "http://127.0.0.1:1/")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def judge() -> Iterator[Judge]:
    server = Judge(("127.0.0.1", 0), Handler)
    server.script, server.seen, server.lock = [{"score": 0.5}], [], threading.Lock()
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def score(judge: Judge, count: int = 1, **options: Any) -> list[Verdict]:
    url = f"http://127.0.0.1:{judge.server_port}/score"
    scorer = load_scorer([{"name": "remote", "options": {"url": url, "backoff_s": 0.0, **options}}], Path("."))
    turn = Turn("model", np.zeros(2, np.int64), "it is <b>42</b>")
    rows = [
        Episode(Task("t", "q", "42", {"k": 1}), "000001-0000", i, np.zeros(1, np.int64), (turn,), (), "stop")
        for i in range(count)
    ]
    return asyncio.run(scorer.score(rows))


def test_the_service_sees_the_episode_and_its_number_is_the_score(judge: Judge) -> None:
    assert score(judge)[0].outcome.value == 0.5
    body = judge.seen[0][0]
    assert body["prompt"] == [{"role": "user", "content": "q"}]
    assert (body["reply"], body["answer"], body["metadata"]) == ("it is <b>42</b>", "42", {"k": 1})


def test_where_texts_are_sent_is_said_when_a_run_starts() -> None:
    scorer = load_scorer([{"name": "remote", "options": {"url": "http://127.0.0.1:9/judge"}}], Path("."))
    assert "from http://127.0.0.1:9/judge" in scorer.describe()[0]


def test_the_three_outcomes_come_over_the_wire(judge: Judge) -> None:
    judge.script = [{"status": "rejected", "reason": "rude"}, {"status": "void", "reason": "busy"}, {"score": 1}]
    outcomes = [v.outcome for v in score(judge, 3, concurrency=1)]
    assert [(o.status, o.value) for o in outcomes] == [("rejected", 0.0), ("void", None), ("scored", 1.0)]


def test_what_may_pass_is_tried_again_and_then_void(judge: Judge) -> None:
    judge.script = [503, 429, {"score": 1.0}]
    assert score(judge, retries=2)[0].outcome.value == 1.0
    judge.script, judge.seen = [500], []
    outcome = score(judge, retries=2)[0].outcome
    assert outcome.status == "void" and "after 3 attempts: status 500" in outcome.reason
    assert len(judge.seen) == 3


@pytest.mark.parametrize("status", [401, 404, 302])
def test_a_wrong_address_or_key_halts_at_once(judge: Judge, status: int) -> None:
    judge.script = [status]
    with pytest.raises(RewardError, match=f"status {status}"):
        score(judge)
    assert len(judge.seen) == 1


@pytest.mark.parametrize(
    "answer", [[1], {"score": "1"}, {"score": True}, {"score": None}, {"score": 1, "status": "ok"}]
)
def test_an_answer_of_another_form_halts(judge: Judge, answer: Any) -> None:
    judge.script = [answer]
    with pytest.raises(RewardError, match="the service answered"):
        score(judge)


def test_what_is_no_finite_number_or_no_json_is_void(judge: Judge) -> None:
    judge.script = [b'{"score": NaN}', b"<html>"]
    assert [v.outcome.status for v in score(judge, 2, retries=0, concurrency=1)] == ["void", "void"]


def test_no_more_than_concurrency_requests_are_in_flight(judge: Judge) -> None:
    judge.gate = threading.Barrier(3)  # opens only when three are in flight together
    assert [v.outcome.value for v in score(judge, 9, concurrency=3)] == [0.5] * 9
    assert judge.most_at_once == 3


def test_a_silent_service_is_void_after_its_time(judge: Judge) -> None:
    judge.gate = threading.Barrier(2)  # one request alone waits
    assert score(judge, timeout_s=0.2, retries=0)[0].outcome.status == "void"
    judge.gate.abort()


def test_the_token_comes_from_the_environment_and_is_sent_as_bearer(
    judge: Judge, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RecipeError, match="JUDGE_TOKEN"):
        score(judge, token_env="JUDGE_TOKEN")
    monkeypatch.setenv("JUDGE_TOKEN", "secret")
    score(judge, token_env="JUDGE_TOKEN")
    assert judge.seen[0][1]["Authorization"] == "Bearer secret"


@pytest.mark.parametrize("options", [{"url": "ftp://x"}, {"retries": -1}, {"concurrency": 0}, {"timeout_s": 0.0}])
def test_senseless_options_are_refused(judge: Judge, options: dict[str, Any]) -> None:
    with pytest.raises(RecipeError, match="reward remote"):
        score(judge, **options)
