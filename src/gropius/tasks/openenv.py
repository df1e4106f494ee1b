"""Environments behind an OpenEnv server (extra `openenv`): one task a seed, played over its own session. No torch."""

from __future__ import annotations

import importlib
import re
from collections.abc import Sequence
from contextlib import closing
from functools import partial

from gropius.envs.openenv import Client, OpenEnv, Server, asked, observed
from gropius.errors import DataError
from gropius.tasks.base import TaskSet, fingerprint, require_range, rows_pair
from gropius.types import Environment, Task

OLDEST, NEWEST = (0, 10), (0, 11)  # the client's interface that this was written against


def openenv(
    *,
    url: str,
    action: str,
    seed: int = 0,
    observation: str = "",
    rows: Sequence[int] = (64, 16),
    timeout_s: int = 60,
) -> TaskSet:
    """Tasks of an environment that follows its seed: task n is `reset(seed = seed + n)`.

    url: of the server. action: the field of its action that takes the model's reply. observation: the field of its
    observation that the model is shown; "" shows all of it as JSON. rows: train and held-out; every opening is asked
    for once, now. timeout_s: of one answer. Set rollout.max_turns to the longest episode. Raises DataError.
    """
    wanted, kept_out = rows_pair("openenv", rows)
    require_range("openenv: timeout_s", timeout_s, 1, 3600)
    if not url.startswith(("http://", "https://", "ws://", "wss://")):
        raise DataError(f'openenv: url = "{url}"; write http://… or https://…')
    server = Server(_connector(url, timeout_s), action, observation)
    tasks = []
    try:
        client = asked(server.connect)
        with closing(client):
            for number in range(seed, seed + wanted + kept_out):
                opening = observed(server, asked(partial(client.reset, seed=number)))
                if not opening.strip():
                    raise DataError(f"openenv {url}: seed {number} opens with an empty observation")
                tasks.append(Task(f"openenv:{number}", opening, None, {"url": url, "seed": number}))
    except RuntimeError as fault:
        raise DataError(f"openenv {url}: {fault}") from fault
    held_out, train = tuple(tasks[:kept_out]), tuple(tasks[kept_out:])

    def environment(task: Task) -> Environment:
        return OpenEnv(server, int(task.metadata["seed"]), str(task.prompt))

    return TaskSet(
        name="openenv",
        train=train,
        held_out=held_out,
        solution=None,
        environment=environment,
        rewards=("environment",),
        system_prompt=None,
        notes=(f"openenv {url}: {len(train)} train and {len(held_out)} held-out seeds, replies sent as {action}",),
        fingerprint=fingerprint(train, held_out),
    )


def _connector(url: str, timeout_s: int) -> Connector:
    try:
        library = importlib.import_module("openenv")
    except ModuleNotFoundError as missing:
        raise DataError(f'openenv needs the extra: pip install "gropius[openenv]" (no module {missing.name})') from None
    version = str(getattr(library, "__version__", "0"))
    found = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if not OLDEST <= found < NEWEST:
        raise DataError(
            f"openenv {version} is installed; this adapter knows {'.'.join(map(str, OLDEST))} up to, without, "
            f"{'.'.join(map(str, NEWEST))}"
        )
    return Connector(url, timeout_s)


class Connector:
    """Opens sessions."""

    def __init__(self, url: str, timeout_s: int) -> None:
        self.url, self.timeout_s = url, timeout_s

    def __call__(self) -> Client:
        """A session of its own at the server."""
        library = importlib.import_module("openenv")
        client: Client = library.GenericEnvClient(base_url=self.url, message_timeout_s=float(self.timeout_s)).sync()
        return client
