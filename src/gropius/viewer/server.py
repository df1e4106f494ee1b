"""The viewer's HTTP side: a page, its modules, and a JSON interface over run folders. No torch at import."""

from __future__ import annotations

import functools
import importlib.resources
import json
import re
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import BaseRoute, Route

from gropius import __version__
from gropius.errors import GropiusError, ObjectiveError, UsageError
from gropius.viewer import bench
from gropius.viewer.curves import run_head, run_page, series
from gropius.viewer.groups import Query, difference, group_detail, list_groups, same_task
from gropius.viewer.library import Library
from gropius.viewer.response import arithmetic, response_head, token_window
from gropius.viewer.security import App, Guard, TooLarge
from gropius.viewer.store import RunStore, strict

STATIC = Path(str(importlib.resources.files("gropius.viewer"))) / "static"
KINDS = {".js": "text/javascript", ".css": "text/css", ".html": "text/html", ".svg": "image/svg+xml"}

# Addresses that are pages; static/app.js has the same.
PAGES = (
    "/",
    "/compare",
    "/bench",
    "/bench/{name}",
    "/runs/{run}",
    "/runs/{run}/groups",
    "/runs/{run}/steps/{step:int}/groups/{group}",
    "/runs/{run}/steps/{step:int}/groups/{group}/responses/{member}",
)


def application(library: Library, token: str, port: int) -> App:
    """The guarded application. port: the one it will listen on, for the Host check."""
    app = Starlette(routes=_routes(Views(library)), exception_handlers={TooLarge: _too_large, GropiusError: _refused})
    return Guard(app, token, port)


def new_token() -> str:
    """256 random bits, safe in an address."""
    return secrets.token_urlsafe(32)


class Views:
    """One method a question the page asks. All answers are strict JSON."""

    def __init__(self, library: Library) -> None:
        self.library = library

    def about(self, request: Request) -> Any:
        """Version and runs."""
        heads = [run_head(store) for run_id in self.library.ids() if (store := self.library.store(run_id))]
        return {"version": __version__, "runs": heads, "chart_style_ids": _chart_style_ids()}

    def presets(self, request: Request) -> Any:
        """All presets."""
        return bench.presets()

    def run(self, request: Request) -> Any:
        """One run's page."""
        return self._with_store(request, run_page)

    def state(self, request: Request) -> Any:
        """Whether a run has something new."""
        return self._with_store(request, lambda s: {"revision": s.revision(), "live": s.reader.live})

    def examine(self, request: Request) -> Any:
        """What the doctor finds now."""
        return self._with_store(request, lambda s: {"findings": strict(s.examine())})

    def curves(self, request: Request) -> Any:
        """One run's series."""
        return self._with_store(request, lambda s: series(s, self.library.index(s.run_id)))

    def groups(self, request: Request) -> Any:
        """Groups of a step or a run."""
        given = request.query_params
        query = Query(
            step=_whole(given.get("step"), None, "step"),
            queue=given.get("queue", "all"),
            task=given.get("task", ""),
            text=given.get("text", ""),
            sort=given.get("sort", "order"),
            offset=_whole(given.get("offset"), 0, "offset") or 0,
            limit=_whole(given.get("limit"), 100, "limit") or 100,
            search_from=_whole(given.get("from"), None, "from"),
        )
        return self._with_store(request, lambda s: list_groups(s, self.library.index(s.run_id), query))

    def task(self, request: Request) -> Any:
        """The same task at every step."""
        key = request.query_params.get("key", "")
        return self._with_store(request, lambda s: same_task(self.library.index(s.run_id), key))

    def group(self, request: Request) -> Any:
        """One group."""
        return self._with_store(request, lambda s: group_detail(s, *_place(request)))

    def difference(self, request: Request) -> Any:
        """Two siblings."""
        a, b = (_whole(request.query_params.get(name), 0, name) or 0 for name in ("a", "b"))
        return self._with_store(request, lambda s: difference(s, *_place(request), (a, b)))

    def response(self, request: Request) -> Any:
        """One response without its tokens."""
        return self._with_store(request, lambda s: response_head(s, *_place(request), _member(request)))

    def tokens(self, request: Request) -> Any:
        """A window of its tokens."""
        start = _whole(request.query_params.get("start"), 0, "start") or 0
        return self._with_store(request, lambda s: token_window(s, *_place(request), _member(request), start))

    def arithmetic(self, request: Request) -> Any:
        """The loss of each of its tokens."""
        start = _whole(request.query_params.get("start"), 0, "start") or 0
        return self._with_store(request, lambda s: arithmetic(s, *_place(request), _member(request), start))

    def _with_store(self, request: Request, answer: Callable[[RunStore], Any]) -> Any:
        store = self.library.store(request.path_params["run"])
        return None if store is None else answer(store)


def _routes(views: Views) -> list[BaseRoute]:
    group = "/api/runs/{run}/steps/{step:int}/groups/{group}"
    gets = {
        "/api/about": views.about,
        "/api/presets": views.presets,
        "/api/runs/{run}": views.run,
        "/api/runs/{run}/state": views.state,
        "/api/runs/{run}/examine": views.examine,
        "/api/runs/{run}/curves": views.curves,
        "/api/runs/{run}/groups": views.groups,
        "/api/runs/{run}/task": views.task,
        group: views.group,
        f"{group}/difference": views.difference,
        f"{group}/responses/{{member}}": views.response,
        f"{group}/responses/{{member}}/tokens": views.tokens,
        f"{group}/responses/{{member}}/arithmetic": views.arithmetic,
    }
    return [
        *[Route(path, _json(view), methods=["GET"]) for path, view in gets.items()],
        Route("/api/bench/{name}", _bench, methods=["POST"]),
        Route("/vendor/plotly.js", _plotly, methods=["GET"]),
        Route("/static/{name:path}", _static, methods=["GET"]),
        *[Route(path, _page, methods=["GET"]) for path in PAGES],
        Route("/{path:path}", _nothing, methods=["GET"]),
    ]


def _json(view: Callable[[Request], Any]) -> Callable[[Request], Any]:
    async def endpoint(request: Request) -> Response:
        answer = await run_in_threadpool(view, request)
        if answer is None:
            return JSONResponse({"error": "There is no such run, step, group or response."}, status_code=404)
        return JSONResponse(answer)

    return endpoint


async def _bench(request: Request) -> Response:
    bench_of = bench.BENCHES.get(request.path_params["name"])
    if bench_of is None:
        return JSONResponse({"error": "There is no such bench."}, status_code=404)
    if request.headers.get("content-type", "").split(";")[0] != "application/json":
        return JSONResponse({"error": "Send application/json."}, status_code=415)
    try:
        body = json.loads(await request.body())
    except (ValueError, RecursionError):
        raise UsageError("the request is not JSON") from None
    if not isinstance(body, dict):
        raise UsageError("the request is a JSON object")
    try:
        answer = await run_in_threadpool(bench_of, body)
        return JSONResponse(answer)
    except (OverflowError, ValueError) as error:
        raise ObjectiveError(f"the numbers leave the range of float64: {error}") from None


async def _nothing(request: Request) -> Response:
    return JSONResponse({"error": "There is no such address."}, status_code=404)


async def _page(request: Request) -> Response:
    return FileResponse(STATIC / "index.html", media_type="text/html")


async def _static(request: Request) -> Response:
    name = request.path_params["name"]
    files = {path.relative_to(STATIC).as_posix(): path for path in STATIC.rglob("*") if path.suffix in KINDS}
    path = files.get(name)
    if path is None:
        return JSONResponse({"error": "There is no such file."}, status_code=404)
    return FileResponse(path, media_type=KINDS[path.suffix], headers={"cache-control": "no-cache"})


def _chart_library() -> Path | None:
    try:
        return Path(str(importlib.resources.files("plotly"))) / "package_data" / "plotly.min.js"
    except ModuleNotFoundError:
        return None


@functools.cache
def _chart_style_ids() -> list[str]:
    """Ids of the style elements that the chart library writes unless they are there; our policy forbids them."""
    path = _chart_library()
    found = re.findall(r'getElementById\("([0-9a-f]{64})"\)', path.read_text(encoding="utf-8")) if path else []
    return ["plotly.js-style-global", *dict.fromkeys(found)]


async def _plotly(request: Request) -> Response:
    """The chart library as the plotly package ships it."""
    path = _chart_library()
    if path is None:
        return JSONResponse({"error": "Charts need plotly: pip install 'gropius[view]'."}, status_code=404)
    return FileResponse(path, media_type="text/javascript", headers={"cache-control": "private, max-age=86400"})


async def _too_large(request: Request, error: Exception) -> Response:
    return JSONResponse({"error": "The request is too large."}, status_code=413)


async def _refused(request: Request, error: Exception) -> Response:
    return JSONResponse({"error": str(error)}, status_code=400)


def _whole(text: str | None, default: int | None, name: str) -> int | None:
    if text is None or text == "":
        return default
    if not text.isdecimal() or len(text) > 9:
        raise UsageError(f"{name} = {text!r}: write a whole number")
    return int(text)


def _place(request: Request) -> tuple[int, str]:
    return request.path_params["step"], request.path_params["group"]


def _member(request: Request) -> int:
    text = request.path_params["member"]
    if text == "greedy":
        return -1
    return _whole(text, 0, "member") or 0
