"""Laws of the pool of killable reward processes."""

from __future__ import annotations

import asyncio
import json
import os
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from gropius.errors import RewardError
from gropius.rewards.pool import PooledScorer
from gropius.types import Episode, Task, Turn, Verdict

FUNCTIONS = """
import os, random, signal, sys, threading, time
from pathlib import Path

def good(episode):
    return float(len(episode.completion))

def slow(episode):
    time.sleep(0.6)
    return 1.0

def hangs_on_x(episode):
    if "x" in episode.completion:
        Path(__file__).with_name("pid").write_text(str(os.getpid()))
        time.sleep(600)
    return 1.0

def hangs_in_a_loop(episode):
    while "x" in episode.completion:
        pass
    return 1.0

def misbehaves(episode):
    word = episode.completion
    if word == "exit": sys.exit(3)
    if word == "hard exit": os._exit(3)
    if word == "recursion": return misbehaves(episode)
    if word == "raise": raise ValueError("no")
    if word == "segfault": os.kill(os.getpid(), signal.SIGSEGV)
    if word == "interrupt": raise KeyboardInterrupt
    return 1.0

def pollutes(episode):
    os.chdir("/")
    random.seed(1)
    import numpy
    numpy.random.seed(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    episode.task.metadata["changed"] = True
    os.environ["GROPIUS_POLLUTED"] = "1"
    sys.setrecursionlimit(5000)
    print("this is not an answer")
    os.write(1, b'{"verdicts": []}\\n')
    return 1.0

def priority(episode):
    return float(os.nice(0))

def text(episode):
    return "1.0"

def not_finite(episode):
    return float("nan") if "x" in episode.completion else 1.0

def never(episode):
    raise ValueError("broken from the start")

def avoids(episode):
    from gropius.types import void
    if episode.completion == "x": return void("no gold")
    if episode.completion == "raise": raise ValueError("no")
    return 1.0

def hoards(episode):
    global held
    held = globals().get("held", []) + [open(os.devnull) for _ in range(50)]
    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
    with open(Path(__file__).with_name("open"), "a") as told:
        told.write(f"{len(os.listdir('/proc/self/fd'))} ")
    return 1.0

def leaks(episode):
    global kept
    kept = bytearray(300 << 20)
    return float(os.getpid())
"""


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Callable[..., PooledScorer]]:
    (tmp_path / "mine.py").write_text(textwrap.dedent(FUNCTIONS))
    made = []

    def make(name: str, **options: object) -> PooledScorer:
        settings = {"workers": 1, "deadline_s": 30.0, **options}
        made.append(PooledScorer([{"name": f"mine.py:{name}"}], tmp_path, **settings))
        return made[-1]

    yield make
    for scorer in made:
        scorer.close()


def episode(text: str, member: int = 0, group: str = "000001-0000") -> Episode:
    turn = Turn("model", np.zeros(1, np.int64), text)
    return Episode(Task("t", "q", "1234", {}), group, member, np.zeros(1, np.int64), (turn,), (), "stop")


def score(scorer: PooledScorer, *texts: str) -> list[Verdict]:
    return asyncio.run(scorer.score([episode(text, i) for i, text in enumerate(texts)]))


def values(verdicts: list[Verdict]) -> list[float | None]:
    return [v.outcome.value for v in verdicts]


def test_verdicts_come_back_in_the_order_of_the_episodes(pool) -> None:
    texts = ["a" * n for n in (5, 1, 4, 2, 3)]
    assert values(score(pool("good", workers=2), *texts)) == [5.0, 1.0, 4.0, 2.0, 3.0]


def test_the_deadline_starts_with_the_work_and_not_in_the_queue(pool) -> None:
    scorer = pool("slow", workers=1, deadline_s=2.4)  # F8: five jobs of 0.6 s wait for one worker, 3 s in all
    assert values(score(scorer, "a", "b", "c", "d", "e")) == [1.0] * 5
    assert scorer.counts.timeouts == 0


def test_a_hang_is_cut_off_at_the_deadline_and_leaves_no_process(pool, tmp_path: Path) -> None:
    scorer = pool("hangs_on_x", deadline_s=1.0)  # F13: the function would sleep for 600 s
    assert values(score(scorer, "a", "x", "b")) == [1.0, None, 1.0]
    assert not Path(f"/proc/{(tmp_path / 'pid').read_text()}").exists()
    assert (scorer.counts.timeouts, scorer.counts.started) == (1, 2)


def test_a_loop_that_never_yields_is_cut_off_too_and_the_function_is_named(pool) -> None:
    verdicts = score(pool("hangs_in_a_loop", deadline_s=1.0), "a", "x")
    assert verdicts[1].outcome.status == "void"
    assert "hangs_in_a_loop" in verdicts[1].outcome.reason


@pytest.mark.parametrize("word", ["exit", "hard exit", "recursion", "raise", "segfault", "interrupt"])
def test_whatever_ends_a_function_stays_in_its_process_and_voids_one_episode(pool, word: str) -> None:
    scorer = pool("misbehaves")
    verdicts = score(scorer, "fine", word, "fine")
    assert values(verdicts) == [1.0, None, 1.0]
    assert "misbehaves" in verdicts[1].outcome.reason


def test_what_a_function_does_to_its_process_stays_there(pool) -> None:
    before = os.getcwd(), np.random.get_state()[1].tolist(), os.environ.get("GROPIUS_POLLUTED")
    subject = episode("a")
    verdicts = asyncio.run(pool("pollutes").score([subject]))
    assert values(verdicts) == [1.0]
    assert (os.getcwd(), np.random.get_state()[1].tolist(), os.environ.get("GROPIUS_POLLUTED")) == before
    assert subject.task.metadata == {}


def test_workers_run_at_the_lowest_priority(pool) -> None:
    assert values(score(pool("priority"), "a")) == [19.0]


def test_a_wrong_return_type_halts_and_names_the_function(pool) -> None:
    with pytest.raises(RewardError, match=r"text.*str"):
        score(pool("text"), "a")


def test_a_value_that_is_not_finite_is_void(pool) -> None:
    assert values(score(pool("not_finite"), "a", "x")) == [1.0, None]


def test_a_function_that_never_works_halts(pool) -> None:
    with pytest.raises(RewardError, match="broken from the start"):
        score(pool("never"), "a", "b")


def test_a_void_that_a_function_gives_is_an_answer_and_no_lost_call(pool) -> None:
    scorer = pool("avoids")
    assert values(score(scorer, *(["x"] * 70))) == [None] * 70
    counts = scorer.counts
    assert (counts.voids, counts.faults, counts.lost(), counts.calls) == (70, 0, 0, 70)
    assert values(score(scorer, "fine", "raise")) == [1.0, None]
    assert (counts.voids, counts.faults) == (70, 1)


def test_faults_go_on_being_counted_after_a_pause(pool) -> None:
    before, after = pool("avoids"), pool("avoids")
    assert values(score(before, "fine", *(["raise"] * 40))) == [1.0, *[None] * 40]
    after.remember(json.loads(json.dumps(before.memory())))
    with pytest.raises(RewardError, match="every one of 24"):
        score(after, *(["raise"] * 24))
    assert after.counts.faults == 64


def test_a_missing_function_halts_by_name(pool) -> None:
    with pytest.raises(RewardError, match="no_such_function"):
        score(pool("no_such_function"), "a")


def test_a_worker_that_holds_too_much_memory_is_replaced(pool) -> None:
    scorer = pool("leaks", memory_bytes=250 << 20)
    assert len(set(values(score(scorer, "a", "b", "c")))) == 3


def test_what_a_function_leaves_open_ends_with_its_worker(pool, tmp_path: Path) -> None:
    scorer = pool("hoards", recycle_calls=5)
    assert values(score(scorer, *"abcdefghijkl")) == [1.0] * 12
    assert scorer.counts.started == 3
    opened = [int(n) for n in (tmp_path / "open").read_text().split()]
    assert max(opened) <= 5 * 50 + 40 and len(opened) == 12


def test_a_pool_serves_one_event_loop_after_another(pool) -> None:
    scorer = pool("good")
    assert [values(score(scorer, "ab")), values(score(scorer, "abc"))] == [[2.0], [3.0]]
    assert scorer.counts.started == 1


def test_siblings_stay_together_when_the_unit_is_a_group(pool) -> None:
    scorer = pool("good", unit="group", workers=2)
    episodes = [episode("a" * n, n, f"000001-000{n % 2}") for n in range(1, 5)]
    assert values(asyncio.run(scorer.score(episodes))) == [1.0, 2.0, 3.0, 4.0]
    assert scorer.counts.calls == 2


def test_a_hostile_answer_gets_a_verdict_and_the_pool_stays_usable(tmp_path: Path) -> None:
    scorer = PooledScorer([{"name": "math"}], tmp_path, workers=1)
    try:
        verdicts = score(scorer, "9**9**9", r"\boxed{9^{9^{9^{9}}}}", "a")
        assert [v.outcome.status for v in verdicts] == ["rejected"] * 3
    finally:
        scorer.close()
