"""Laws of the adapters for tasks of other libraries, on imitations of their interfaces."""

from __future__ import annotations

import asyncio
import gc
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gropius.errors import DataError, RecipeError, SafetyRefusal
from gropius.recipe import refuse_user_code, resolve
from gropius.rewards import load_scorer, open_scorer
from gropius.tasks import load_tasks
from gropius.tasks.base import TaskSet
from gropius.types import Episode, Task, Turn

# The part of the interface of verifiers 0.4 that is used, in its shape.
VERIFIERS = {
    "verifiers/__init__.py": '__version__ = "0.4.0"\n',
    "verifiers/v1/__init__.py": """
        from types import SimpleNamespace
        class Task:
            NEEDS_CONTAINER = False
            config = None
            def __init__(self, data): self.data = data
            async def setup(self, trace, runtime): pass
            async def finalize(self, trace, runtime): pass
            @classmethod
            def toolsets(cls, config): return []
        def made(**fields): return SimpleNamespace(**fields)
        SystemMessage = UserMessage = AssistantMessage = MessageNode = AgentInfo = AgentConfig = TraceTask = made
        class Trace:
            def __init__(self, **fields):
                vars(self).update(fields)
                self.rewards = {}
    """,
    "verifiers/v1/utils/__init__.py": "",
    "verifiers/v1/utils/loaders.py": """
        import importlib
        def taskset_config_type(name): return importlib.import_module(name).Config
        def load_taskset(config): return importlib.import_module(config.id).load(config)
    """,
    "doubles.py": """
        import os
        from types import SimpleNamespace
        import verifiers.v1 as vf
        class Config:
            def __init__(self, id, count=8, kind="plain"): self.id, self.count, self.kind = id, count, kind
        class Doubles(vf.Task):
            def hooks(self, attr): return [self.right] if attr == "reward" else []
            def right(self, trace): pass
            async def score(self, trace):
                said = trace.nodes[-1].message.content
                if said == "crash": raise ValueError("broken")
                right, short = float(said == self.data.answer), float(len(said) < 3)
                trace.rewards = {"right": SimpleNamespace(score=right, weight=1.0),
                                 "short": SimpleNamespace(score=short, weight=0.5) if said != "none" else None}
        class Boxed(Doubles):
            NEEDS_CONTAINER = True
        class Prepared(Doubles):
            async def setup(self, trace, runtime): pass
        class Tooled(Doubles):
            @classmethod
            def toolsets(cls, config): return ["a tool"]
        class Running(Doubles):
            def right(self, trace, runtime): pass
        class Data(SimpleNamespace):
            def model_dump(self, **_): return {"prompt": str(self.prompt)}
        def load(config):
            kinds = {"boxed": Boxed, "tooled": Tooled, "running": Running, "prepared": Prepared}
            kind = kinds.get(config.kind, Doubles)
            for n in range(config.count):
                system = "Add." if n == 1 else None
                yield kind(Data(prompt=f"{n}+{n}?", system_prompt=system, image=None, answer=str(2 * n)))
    """,
}


@pytest.fixture
def verifiers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    ours = [name for name in sys.modules if name.partition(".")[0] in ("verifiers", "doubles")]
    kept = {name: sys.modules.pop(name) for name in ours}
    for name, text in VERIFIERS.items():
        file = tmp_path / "library" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(textwrap.dedent(text))
    monkeypatch.syspath_prepend(str(tmp_path / "library"))
    yield tmp_path / "library"
    for name in [name for name in sys.modules if name.partition(".")[0] in ("verifiers", "doubles")]:
        del sys.modules[name]
    sys.modules.update(kept)


def drawn(**options: Any) -> TaskSet:
    return load_tasks("verifiers", {"taskset": "doubles", "rows": [5, 2], **options}, 0, {}, None, Path("."))


def episode(task: Task, reply: str) -> Episode:
    turn = Turn("model", np.zeros(1, np.int64), reply)
    return Episode(task, "000001-0000", 0, np.zeros(1, np.int64), (turn,), (), "stop")


def test_tasks_of_a_taskset_keep_their_order_and_halves(verifiers: Path) -> None:
    found = drawn()
    assert [task.prompt for task in found.train] == [f"{n}+{n}?" for n in range(2, 7)]
    assert found.held_out[1].messages()[0] == {"role": "system", "content": "Add."}
    assert drawn().fingerprint == found.fingerprint != drawn(rows=[4, 2]).fingerprint
    short = drawn(config={"count": 3})
    assert (len(short.train), len(short.held_out)) == (2, 1)


def test_a_reply_is_worth_what_the_tasks_own_rewards_say_in_a_pool_worker(verifiers: Path) -> None:
    task = drawn().train[0]
    scorer = open_scorer([{"name": "verifiers"}], Path("."))
    try:
        replies = ("4", "5", "a long one", "none", "crash")
        verdicts = asyncio.run(scorer.score([episode(task, reply) for reply in replies]))
        assert "in 2 processes" in "\n".join(scorer.describe())
    finally:
        scorer.close()
    assert [v.outcome.value for v in verdicts] == [1.5, 0.5, 0.0, None, None]
    assert "no score from short" in verdicts[3].outcome.reason and "broken" in verdicts[4].outcome.reason


@pytest.mark.parametrize(
    ("kind", "words"),
    [("boxed", "a container"), ("tooled", "tools"), ("running", "a runtime for its rewards"), ("prepared", "a setup")],
)
def test_a_task_that_needs_more_than_a_reply_is_refused(verifiers: Path, kind: str, words: str) -> None:
    with pytest.raises(DataError, match=f"doubles, task 0: needs {words}"):
        drawn(config={"kind": kind})


def test_a_missing_or_unknown_library_and_a_wrong_taskset_say_what_to_write(
    verifiers: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DataError, match="verifiers nope: cannot be opened: ModuleNotFoundError"):
        drawn(taskset="nope")
    with pytest.raises(DataError, match="cuont"):
        drawn(config={"cuont": 3})
    with pytest.raises(DataError, match="no tasks"):
        drawn(config={"count": 0})
    drawn()
    monkeypatch.setattr(sys.modules["verifiers"], "__version__", "0.1.14")
    with pytest.raises(DataError, match=r"verifiers 0\.1\.14 is installed; this adapter knows 0\.4"):
        drawn()
    monkeypatch.setitem(sys.modules, "verifiers", None)
    with pytest.raises(DataError, match=r"gropius\[verifiers\]"):
        drawn()
    with pytest.raises(RecipeError, match=r"gropius\[verifiers\]"):
        load_scorer([{"name": "verifiers"}], Path("."))


def test_a_taskset_is_code_that_a_person_has_to_trust(tmp_path: Path) -> None:
    recipe = {"name": "r", "out": str(tmp_path), "data": {"source": "verifiers", "options": {"taskset": "doubles"}}}
    with pytest.raises(SafetyRefusal, match="doubles"):
        refuse_user_code(resolve(recipe, []), trusted=False)


# The part of the interface of openenv 0.10 that is used, with a game behind it.
OPENENV = """
__version__ = "0.10.0"
from types import SimpleNamespace
opened = []
class Game:
    def __init__(self): self.closed, self.resets, self.left = False, 0, 0
    def reset(self, seed):
        self.seed, self.left, self.resets = seed, 2, self.resets + 1
        return SimpleNamespace(observation={"text": f"game {seed}"}, reward=None, done=False)
    def step(self, action):
        if action["message"] == "break": raise ConnectionError("gone")
        self.left -= 1
        won = action["message"] == str(self.seed)
        reward = float("nan") if action["message"] == "nan" else float(won)
        said = {"text": "right" if won else "wrong"}
        return SimpleNamespace(observation=said, reward=reward, done=won or not self.left)
    def close(self): self.closed = True
class GenericEnvClient:
    def __init__(self, base_url, message_timeout_s):
        if "refused" in base_url: raise ConnectionError("refused")
    def sync(self):
        opened.append(Game())
        return opened[-1]
"""


@pytest.fixture
def openenv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., TaskSet]]:
    kept = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == "openenv"}
    (tmp_path / "openenv.py").write_text(OPENENV)
    monkeypatch.syspath_prepend(str(tmp_path))

    def load(**options: Any) -> TaskSet:
        given = {"url": "http://here:1", "action": "message", "observation": "text", "rows": [3, 2], **options}
        return load_tasks("openenv", given, 7, {}, None, Path("."))

    yield load
    sys.modules.pop("openenv", None)
    sys.modules.update(kept)


def test_a_seed_is_a_task_and_every_episode_has_a_session_of_its_own(openenv: Callable[..., TaskSet]) -> None:
    found = openenv()
    assert [task.prompt for task in (*found.held_out, *found.train)] == [f"game {seed}" for seed in range(7, 12)]
    games = sys.modules["openenv"].opened
    assert len(games) == 1 and games[0].closed
    task = found.train[0]
    one, other = found.environment(task), found.environment(task)
    assert one.start() == other.start() == task.messages()
    won = one.step(str(task.metadata["seed"]))
    assert (won.done, won.raw, won.parts) == (True, 1.0, {"openenv": 1.0}) and games[1].closed
    first, last = other.step("x"), other.step("x")
    assert (first.done, first.messages[0]["content"], last.done, last.raw) == (False, "wrong", True, 0.0)
    with pytest.raises(RuntimeError, match="single-use"):
        one.start()


def test_what_goes_wrong_at_the_server_voids_the_episode_and_closes_its_session(
    openenv: Callable[..., TaskSet],
) -> None:
    found, games = openenv(), sys.modules["openenv"].opened
    for reply, words in (("break", "ConnectionError: gone"), ("nan", "the reward nan")):
        environment = found.environment(found.train[0])
        environment.start()
        with pytest.raises(RuntimeError, match=words):
            environment.step(reply)
        del environment
        gc.collect()
        assert games[-1].closed
    moved = found.environment(Task("t", "another opening", None, {"seed": 9}))
    with pytest.raises(RuntimeError, match="opens seed 9 differently"):
        moved.start()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"url": "here:1"}, "write http"),
        ({"url": "http://refused:1"}, "ConnectionError: refused"),
        ({"observation": "txt"}, 'no field "txt"; found: text'),
        ({"timeout_s": 0}, "timeout_s"),
    ],
)
def test_a_wrong_server_says_what_to_write(
    openenv: Callable[..., TaskSet], options: dict[str, Any], words: str
) -> None:
    with pytest.raises(DataError, match=words):
        openenv(**options)


def test_another_version_or_none_is_refused(openenv: Callable[..., TaskSet], monkeypatch: pytest.MonkeyPatch) -> None:
    openenv()
    monkeypatch.setattr(sys.modules["openenv"], "__version__", "0.3.0")
    with pytest.raises(DataError, match=r"openenv 0\.3\.0 is installed; this adapter knows 0\.10"):
        openenv()
    monkeypatch.setitem(sys.modules, "openenv", None)
    with pytest.raises(DataError, match=r"gropius\[openenv\]"):
        openenv()
