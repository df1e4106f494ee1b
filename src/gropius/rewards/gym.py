"""The scorers of `reasoning-gym` (extra `tasks`), which evaluate what a model wrote: one confined child an answer.

The child is forked from a pool worker: Landlock (no file can be written, only the Python installation read), seccomp
(no sockets, no signals), limits on memory and time. An answer that makes a scorer raise, hang or die is rejected; a
child that could not be confined is void. No torch.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from gropius.errors import RecipeError
from gropius.rewards.base import Reward
from gropius.sandbox.confine import ConfinementFailed, confine
from gropius.sandbox.seccomp import build_filter
from gropius.sandbox.tiers import LIBRARIES
from gropius.types import Episode, Outcome, rejected, scored, void

MOST_REPLY, MOST_ANSWER_BYTES = 20_000, 4096


def reasoning_gym(*, tag: str = "answer", partial: bool = False, wall_s: float = 5.0, memory_mb: int = 2048) -> Reward:
    """What the family's own scorer says of the answer, in 0..1.

    The answer is what stands in the last <tag>…</tag>, else the whole last reply. partial: the scorer's part credit
    (many families pay for an answer that merely contains the right one); else only full credit counts. wall_s,
    memory_mb: of scoring one answer. Raises RecipeError when the library is not installed.
    """
    try:
        importlib.import_module("reasoning_gym")
    except ModuleNotFoundError as missing:
        raise RecipeError(
            f'reward reasoning_gym needs the extra: pip install "gropius[tasks]" (no module {missing.name})'
        ) from None

    def _score(episode: Episode) -> Outcome:
        answer = answer_in(episode.last_reply, tag)
        if not answer:
            return rejected("no answer")
        if len(answer) > MOST_REPLY:
            return rejected(f"an answer of more than {MOST_REPLY} characters")
        try:
            data, item = _item(json.dumps(dict(episode.task.metadata), sort_keys=True))
        except (KeyError, TypeError, ValueError) as fault:
            return void(f"task {episode.task.key} is no reasoning-gym task: {fault}")
        said = apart(lambda: float(data.score_answer(answer=answer, entry=item)), wall_s, memory_mb)
        if "void" in said:
            return void(str(said["void"]))
        score = said.get("score")
        if not isinstance(score, float) or not math.isfinite(score):
            return rejected(str(said.get("failed", "the scorer gave no number")))
        if score >= 1.0:
            return scored(1.0)
        return scored(max(score, 0.0)) if partial and score > 0 else rejected("wrong")

    return _score


def answer_in(reply: str, tag: str) -> str:
    """The content of the last <tag>…</tag> of a reply, else the reply after its thinking, trimmed.

    >>> answer_in("so <answer> 42 </answer>.", "answer"), answer_in("<think>1</think> 42", "answer")
    ('42', '42')
    """
    before, closed, _ = reply.rpartition(f"</{tag}>")
    if closed:
        return before.rpartition(f"<{tag}>")[2].strip() if f"<{tag}>" in before else ""
    return reply.rpartition("</think>")[2].strip()


def apart(work: Callable[[], float], wall_s: float, memory_mb: int) -> Mapping[str, Any]:
    """Run `work` in a confined fork: {"score": number}, {"failed": why} (the answer's fault) or {"void": why}."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        _child(work, writing, wall_s, memory_mb)
    os.close(writing)
    data, until = b"", time.monotonic() + wall_s
    try:
        while len(data) < MOST_ANSWER_BYTES:
            left = until - time.monotonic()
            if left <= 0 or not select.select([reading], [], [], left)[0]:
                return {"failed": "time"}
            if not (more := os.read(reading, 4096)):
                break
            data += more
    finally:
        os.close(reading)
        os.kill(child, signal.SIGKILL)
        status = os.waitpid(child, 0)[1]
    try:
        said = json.loads(data)
    except ValueError:
        ended = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        return {
            "failed": f"crash: {signal.Signals(ended).name}" if ended and data == b"" else "the scorer gave no number"
        }
    return said if isinstance(said, dict) else {"failed": "the scorer gave no number"}


def _child(work: Callable[[], float], writing: int, wall_s: float, memory_mb: int) -> None:
    """Never returns."""
    try:
        try:
            _limit(wall_s, memory_mb)
            confine(_readable(), [], ["/dev/null", "/dev/urandom"], build_filter(own_pids=False))
        except (ConfinementFailed, OSError, ValueError) as fault:
            said: dict[str, Any] = {"void": f"the scorer cannot be confined here: {fault}"}
        else:
            said = _said(work)
        os.write(writing, json.dumps(said).encode())
    finally:
        os._exit(0)


def _said(work: Callable[[], float]) -> dict[str, Any]:
    try:
        return {"score": work()}
    except MemoryError:
        return {"failed": "memory"}
    except (Exception, SystemExit) as fault:  # the boundary: a scorer fed with what a model wrote
        return {"failed": f"error: {type(fault).__name__}"}


def _limit(wall_s: float, memory_mb: int) -> None:
    seconds = math.ceil(wall_s) + 1
    for what, value in (
        (resource.RLIMIT_AS, memory_mb << 20),
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(what, (value, value))


def _readable() -> list[str]:
    """The Python installation, its environment, and where the library lies; nothing of a home or of data."""
    library = sys.modules["reasoning_gym"].__file__ or ""
    places = [sys.base_prefix, sys.prefix, str(Path(library).parent.parent), str(Path(__file__).parents[1]), *LIBRARIES]
    return [os.path.realpath(place) for place in places if os.path.exists(place)]


@lru_cache(maxsize=64)
def _data(origin: str) -> Any:
    given = json.loads(origin)
    library = importlib.import_module("reasoning_gym")
    return library.create_dataset(given["family"], seed=given["seed"], size=given["size"], **given["parameters"])


@lru_cache(maxsize=4096)
def _item(metadata: str) -> tuple[Any, dict[str, Any]]:
    """(data set, item) that a task's metadata names, drawn again from its seed."""
    given = json.loads(metadata)
    data = _data(json.dumps({name: given[name] for name in ("family", "seed", "size", "parameters")}, sort_keys=True))
    return data, data[given["index"]]
