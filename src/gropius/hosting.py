"""A process that only draws: a copy of the model and an engine on it, behind a server. Its weights come by wire."""

from __future__ import annotations

import json
import os
import sys
import threading
from typing import Any

from gropius import build
from gropius.errors import GropiusError
from gropius.recipe import from_dict
from gropius.recipe.resolve import Resolved
from gropius.rollout.server import EngineServer, HeldWeights


class EngineHost:
    """The model and the engine of a recipe in this process. `server` says where it listens.

    Until the first hand-over its weights are those that the recipe begins with. device: "" is the recipe's.
    """

    def __init__(self, resolved: Resolved, secret: str, bind: str = "127.0.0.1", device: str = "") -> None:
        loaded = build.model(resolved, device=device)
        self.engine = build.engine(resolved, loaded)
        self.server = EngineServer(self.engine, secret, bind, weights=HeldWeights(loaded, self.engine))

    def describe(self) -> str:
        """What draws, in a line."""
        return self.engine.describe()

    def close(self) -> None:
        """Stop listening."""
        self.server.close()


def main() -> None:
    """The program of an engine process: `python -m gropius.hosting REPORT`, told what to do on its standard input.

    REPORT: a file descriptor, or a file, that is told the port, once, and closed.
    """
    told: dict[str, Any] = json.loads(sys.stdin.readline())
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    try:
        host = EngineHost(from_dict(told["recipe"]), told["secret"], told["bind"], told["device"])
    except GropiusError as error:
        print(error, flush=True)
        os._exit(error.exit_code)
    with open(int(sys.argv[1]) if sys.argv[1].isdecimal() else sys.argv[1], "w", encoding="utf-8") as report:
        json.dump({"port": host.server.port, "describes": host.describe()}, report)
    threading.Event().wait()


def _leave_with_parent() -> None:
    """Whoever started this closed its end, or is gone."""
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    main()
