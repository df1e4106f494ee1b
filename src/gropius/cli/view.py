"""`gropius view [RUN…]`: the page on runs, and the workbench, on this machine only."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gropius.cli.output import print_text, say

if TYPE_CHECKING:
    from gropius.viewer.library import Library


def command(
    runs: Annotated[
        list[Path] | None, typer.Argument(metavar="[RUN…]", help="Run folders, or folders that hold some.")
    ] = None,
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Port on 127.0.0.1; 0 takes a free one.")] = 0,
    group: Annotated[
        str | None, typer.Option("--group", metavar="ID", help="Print the address of this group of the first run.")
    ] = None,
    cache: Annotated[bool, typer.Option(help="Keep indexes of large runs in the user's cache folder.")] = True,
    open_page: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
) -> None:
    """Show runs, their groups, siblings and tokens in a page; without a run, the workbench."""
    try:
        import uvicorn

        from gropius.viewer.server import application, new_token
    except ModuleNotFoundError as error:
        from gropius.errors import UsageError

        raise UsageError(f"the viewer needs {error.name}: pip install 'gropius[view]'") from error
    from gropius.viewer.library import Library

    library = Library(runs or [], _cache_folder() if cache else None)
    listener = _listen(port)
    token, chosen = new_token(), listener.getsockname()[1]
    address = f"http://127.0.0.1:{chosen}{_start(library, group)}?token={token}"
    print_text(address)
    sys.stdout.flush()
    say("Only this machine can open it, with this token. Ctrl-C ends it.")
    if open_page:
        import webbrowser

        webbrowser.open(address)
    config = uvicorn.Config(application(library, token, chosen), log_level="warning", server_header=False)
    uvicorn.Server(config).run(sockets=[listener])


def _start(library: Library, group: str | None) -> str:
    """The path to open: a group, the only run, the list of runs, or the workbench."""
    ids = library.ids()
    if group is not None:
        from gropius.errors import UsageError
        from gropius.viewer.report import find_group

        store = library.store(ids[0]) if ids else None
        if store is None:
            raise UsageError("--group needs a run: gropius view RUN --group ID")
        index = library.index(ids[0])
        index.wait()
        return f"/runs/{ids[0]}/steps/{find_group(store, index, group)['step']}/groups/{group}"
    if not ids:
        return "/bench/group"
    return f"/runs/{ids[0]}" if len(ids) == 1 else "/"


def _listen(port: int) -> socket.socket:
    from gropius.errors import UsageError

    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("127.0.0.1", port))
    except OSError as error:
        listener.close()
        raise UsageError(f"port {port} on 127.0.0.1 cannot be used: {error.strerror}; write --port 0") from error
    return listener


def _cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "gropius" / "view"
