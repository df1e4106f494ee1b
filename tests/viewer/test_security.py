"""Who may ask: this machine, this page, with the token. Everything else is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import TOKEN
from starlette.testclient import TestClient

from gropius.viewer.library import Library
from gropius.viewer.security import LARGEST_BODY_BYTES
from gropius.viewer.server import application

BASE = "http://127.0.0.1:8000"
BEARER = {"authorization": f"Bearer {TOKEN}"}


@pytest.fixture
def stranger(run_folder: Path) -> TestClient:
    app = application(Library([run_folder]), TOKEN, 8000)
    return TestClient(app, base_url=BASE, follow_redirects=False)  # type: ignore[arg-type]


@pytest.mark.parametrize("path", ["/", "/api/about", "/static/app.js", "/vendor/plotly.js", "/runs/synthetic"])
def test_without_a_token_nothing_is_served(stranger: TestClient, path: str) -> None:
    answer = stranger.get(path)
    assert answer.status_code == 403 and "gropius view" in answer.text
    assert stranger.get(path, headers={"authorization": "Bearer wrong"}).status_code == 403
    assert stranger.get(path, headers={"cookie": "gropius_8000=wrong"}).status_code == 403
    assert stranger.get(path + "?token=").status_code == 403


def test_the_token_becomes_a_cookie_and_leaves_the_address(stranger: TestClient) -> None:
    answer = stranger.get(f"/runs/synthetic?shade=kl&token={TOKEN}")
    assert answer.status_code == 303
    assert answer.headers["location"] == "/runs/synthetic?shade=kl"
    cookie = answer.headers["set-cookie"]
    assert "HttpOnly" in cookie and "SameSite=Strict" in cookie
    assert stranger.get("/runs/synthetic", headers={"cookie": cookie.split(";")[0]}).status_code == 200


@pytest.mark.parametrize("path", ["//evil.example", "/\\evil.example", "///evil.example/x"])
def test_the_redirect_never_leaves_this_server(run_folder: Path, path: str) -> None:
    app = application(Library([run_folder]), TOKEN, 8000)
    location = _raw(app, path, f"token={TOKEN}")["location"]
    assert location.startswith("/") and not location.startswith(("//", "/\\"))


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8000", "127.0.0.1:9", "127.0.0.1", "0.0.0.0:8000", ""])
def test_a_foreign_host_is_refused(stranger: TestClient, host: str) -> None:
    assert stranger.get("/api/about", headers={**BEARER, "host": host}).status_code == 421


@pytest.mark.parametrize("host", ["127.0.0.1:8000", "localhost:8000", "[::1]:8000"])
def test_this_machine_is_answered_by_each_of_its_names(stranger: TestClient, host: str) -> None:
    assert stranger.get("/api/about", headers={**BEARER, "host": host}).status_code == 200


def test_a_foreign_page_is_refused(stranger: TestClient) -> None:
    for given in ({"origin": "http://evil.example"}, {"origin": "null"}, {"sec-fetch-site": "cross-site"},
                  {"sec-fetch-site": "same-site"}):  # fmt: skip
        assert stranger.get("/api/about", headers={**BEARER, **given}).status_code == 403
    assert stranger.get("/api/about", headers={**BEARER, "origin": BASE}).status_code == 200


@pytest.mark.parametrize(
    "path",
    [
        "/static/../server.py",
        "/static/%2e%2e/server.py",
        "/static/..%2fserver.py",
        "/static/....//server.py",
        "/static//etc/passwd",
        "/static/%2fetc%2fpasswd",
        "/api/runs/..%2f..%2fetc/state",
        "/api/runs/%2e%2e/curves",
        "/api/runs/synthetic%00/curves",
    ],
)
def test_a_path_out_of_the_served_files_is_refused(stranger: TestClient, path: str) -> None:
    answer = stranger.get(path, headers=BEARER)
    assert answer.status_code == 404
    assert "root:" not in answer.text and "import" not in answer.text


@pytest.mark.parametrize("group", ["..%2f..%2fresolved.json", "%2e%2e", "' OR 1=1", "*"])
def test_a_group_id_is_only_ever_compared(stranger: TestClient, group: str) -> None:
    assert stranger.get(f"/api/runs/synthetic/steps/3/groups/{group}", headers=BEARER).status_code == 404


def test_a_step_that_is_not_a_number_is_no_address(stranger: TestClient) -> None:
    for step in ("x", "-1", "1e3", "99999999999999999999"):
        assert stranger.get(f"/api/runs/synthetic/steps/{step}/groups/a", headers=BEARER).status_code in (400, 404)
    assert stranger.get("/api/runs/synthetic/groups?step=-1", headers=BEARER).status_code == 400


def test_an_oversized_request_is_refused(stranger: TestClient) -> None:
    large = b'{"rewards": [' + b"1," * LARGEST_BODY_BYTES + b"1]}"
    headers = {**BEARER, "content-type": "application/json"}
    assert stranger.post("/api/bench/group", content=large, headers=headers).status_code == 413
    without_length = (large[i : i + 65536] for i in range(0, len(large), 65536))
    assert stranger.post("/api/bench/group", content=without_length, headers=headers).status_code == 413
    assert stranger.get("/api/about?" + "a" * 5000, headers=BEARER).status_code == 414


def test_only_json_is_read_and_only_reading_methods_are_known(stranger: TestClient) -> None:
    assert stranger.post("/api/bench/group", content="rewards=1", headers=BEARER).status_code == 415
    headers = {**BEARER, "content-type": "application/json"}
    assert stranger.post("/api/bench/group", content="{", headers=headers).status_code == 400
    assert stranger.post("/api/bench/group", content="[" * 100_000, headers=headers).status_code == 400
    assert stranger.post("/api/bench/nothing", content="{}", headers=headers).status_code == 404
    for method in ("PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"):
        assert stranger.request(method, "/api/about", headers=BEARER).status_code == 405


def test_every_answer_carries_the_policy(stranger: TestClient) -> None:
    for path, headers in (("/", BEARER), ("/api/about", BEARER), ("/static/app.js", BEARER), ("/", {})):
        found = stranger.get(path, headers=headers).headers
        policy = found["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy and "http:" not in policy
        assert found["x-content-type-options"] == "nosniff"
        assert found["referrer-policy"] == "no-referrer"


def test_no_answer_names_where_the_runs_lie(stranger: TestClient, run_folder: Path) -> None:
    for path in (
        "/api/about",
        "/api/runs/synthetic",
        "/api/runs/synthetic/curves",
        "/api/runs/synthetic/groups?step=3",
    ):
        assert str(run_folder.parent) not in stranger.get(path, headers=BEARER).text


def _raw(app: object, path: str, query: str) -> dict[str, str]:
    """One request with the path as it stands, which a client would tidy."""
    import asyncio

    sent: list[dict[str, object]] = []

    async def receive() -> dict[str, object]:
        return {"type": "http.request", "body": b""}

    async def send(message: dict[str, object]) -> None:
        sent.append(message)

    scope = {
        "type": "http", "method": "GET", "path": path, "raw_path": path.encode(), "query_string": query.encode(),
        "headers": [(b"host", b"127.0.0.1:8000")],
    }  # fmt: skip
    asyncio.run(app(scope, receive, send))  # type: ignore[operator]
    return {name.decode(): value.decode() for name, value in sent[0]["headers"]}  # type: ignore[attr-defined]
